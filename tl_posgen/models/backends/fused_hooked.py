"""Fused attention in a HookedTransformer: its own steps from queries, keys and values to z, replaced on the object."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from tl_posgen.models.backends.fused_bridge import replaced
from tl_posgen.models.backends.sites import is_hooked
from tl_posgen.models.layers.fused import Attention, Mask, finish_of
from tl_posgen.models.layers.geometry import LayerGeometry


@contextmanager
def fused_hooked(
    model: Any, geometries: Mapping[int, LayerGeometry], attention_of: Callable[[int], Attention]
) -> Iterator[None]:
    """While the block runs, the attention of every layer of these geometries is computed by `attention_of(layer)`."""
    with ExitStack() as stack:
        for layer, geometry in geometries.items():
            attn = model.blocks[layer].attn
            steps = Steps(attn, attention_of(layer), geometry)
            for name in ("calculate_attention_scores", "apply_causal_mask", "calculate_z_scores"):
                stack.enter_context(replaced(attn, name, getattr(steps, name)))
            stack.callback(steps.forget)
        yield


class Steps:
    """Steps of one attention module, in the order in which it calls them."""

    def __init__(self, attn: Any, attention: Attention, geometry: LayerGeometry):
        self.attn, self.attention, self.geometry = attn, attention, geometry
        self.given: dict[str, Any] = {}  # q, k and the mask, until the values come
        self.formed: dict[str, Any] | None = None  # the layer's scores, where hooks see or edit them

    def run_own(self, name: str, *args: Any) -> Tensor:
        return getattr(type(self.attn), name)(self.attn, *args)

    def forget(self) -> None:
        """Drop what a pass that a hook ended left behind."""
        if self.formed is not None and "handle" in self.formed:
            self.formed["handle"].remove()
        self.given, self.formed = {}, None

    def calculate_attention_scores(self, q: Tensor, k: Tensor) -> Tensor:
        self.forget()
        self.given = {"q": q.transpose(1, 2), "k": k.transpose(1, 2)}
        self.formed = {} if is_hooked(self.attn) else None
        if self.formed is not None:
            return self.run_own("calculate_attention_scores", q, k)
        return q.new_zeros(1, self.geometry.n_heads, 1, 1)  # stands for the scores until the values come

    def apply_causal_mask(self, scores: Tensor, offset: int = 0, attention_mask: Tensor | None = None) -> Tensor:
        window = self.attn.cfg.window_size if self.attn.attn_type == "local" else None
        n, padding = self.given["q"].shape[2], attention_mask
        padding = None if padding is None or bool(padding.all()) else padding.bool()
        self.given["mask"] = Mask.of_window(n, window, padding, before=offset, device=self.given["q"].device)
        if self.formed is None:
            return scores
        handle = self.attn.hook_attn_scores.register_forward_hook(self.see_scores)
        self.formed["handle"] = handle
        return self.run_own("apply_causal_mask", scores, offset, attention_mask)

    def see_scores(self, _point: Any, _args: tuple, scores: Tensor) -> None:
        assert self.formed is not None
        self.formed["scores"] = scores
        self.formed.pop("handle").remove()

    def calculate_z_scores(self, v: Tensor, pattern: Tensor) -> Tensor:
        given, self.given = self.given, {}
        sinks = self.attn.sinks if self.attn.cfg.use_attention_sinks else None
        given |= {
            "v": v.transpose(1, 2),
            "scale": self.geometry.scale,
            "finish": finish_of(self.geometry),
            "sinks": sinks,
        }
        if self.formed is None:
            return self.attn.hook_z(self.attention(**given).transpose(1, 2))
        z = self.run_own("calculate_z_scores", v, pattern)
        self.attention(**given, z=z.transpose(1, 2), scores=self.formed["scores"], pattern=pattern)
        return z

"""A session with a model: its origin, the geometry of its layers, its backend, and what an analysis chose for it."""

import os
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tl_posgen.arithmetic import summable
from tl_posgen.errors import InputError, NothingToMeasureError, UnsupportedModelError, is_non_negative
from tl_posgen.models.backends.backend import Backend, Origin
from tl_posgen.models.backends.bridge import Bridge
from tl_posgen.models.backends.hooked import Hooked
from tl_posgen.models.geometry.probe import Probed, ProbedOrReason, probe_layers
from tl_posgen.models.layers.geometry import ContextLimit
from tl_posgen.models.layers.projections import Projections, projections_of
from tl_posgen.models.model import Model

UNPADDED = "unpadded"  # owner of passes that this package makes over prompts of one length for whoever asks
KINDS: dict[str, type[Backend]] = {"HookedTransformer": Hooked, "TransformerBridge": Bridge}


@dataclass
class _Streamed:
    """Streaming of a model: the `Stream` that stands in for its attention, while it does; why none can ("" if one can,
    None before that was tried)."""

    by: Any = None
    refusal: str | None = None


@dataclass(frozen=True)
class Choices:
    """What an analysis chose for all passes of a model.

    Attributes:
        streaming: whether captured passes are streamed (True), are not (False), or are if they are long (None).
        matrices: how many [head, query, key] matrices of a layer are held by what is measured, however it is run.
        metric: in the place of the loss; None for the loss itself.
        one_by_one: whether a forward pass is of one prompt, whatever runs the model.
        first: id of the token that the user put in front of every prompt, in the place of the tokenizer's BOS.
    """

    streaming: bool | None = None
    matrices: int = 0
    metric: Any = None
    one_by_one: bool = False
    first: int | None = None


@dataclass
class _Memory:
    """Everything found out about a model, and chosen for it.

    It is an attribute of the model, and not of a session, because one model has many sessions: every public function
    that is given the model makes one, hooks and measures inside an analysis too. What the outer one has proved and
    chosen (how passes are run, the metric, who owns them) holds for them all, and ends with the user's object. A copy
    of the model begins with its origin alone.
    """

    origin: Origin
    dtype: torch.dtype | None = None
    layers: tuple[ProbedOrReason, ...] = ()
    difference: str | None = None  # from the plain Hugging Face model
    cached: tuple[torch.dtype, str] | None = None  # the dtype, and how a step with a KV cache differs in it
    lock: Any = field(default_factory=threading.RLock)
    owner: Any = None  # whose passes these are: None for the user's
    streamed: _Streamed = field(default_factory=_Streamed)
    spans: dict[int, list[slice]] = field(default_factory=dict)
    positions: Tensor | None = None
    choices: Choices = Choices()

    def __deepcopy__(self, _: Any) -> "_Memory":
        return _Memory(self.origin)

    def __reduce__(self) -> tuple[type, tuple[Origin]]:  # a lock is not pickled
        return _Memory, (self.origin,)


MEMORY = "_tl_posgen_memory"  # the attribute of a model


@dataclass(frozen=True)
class Session:
    """Model of TransformerLens with its origin, its proved geometry, its context limit and its backend.

    Made by `session_of`, once by each public function that takes a model, and handed down. What is found out is an
    attribute of the user's object, and lives as long.
    """

    model: Model
    backend: Backend
    _memory: _Memory = field(repr=False)

    @property
    def device(self) -> torch.device:
        """The device of the first weights, which takes the token ids."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.model.parameters()).dtype

    @property
    def origin(self) -> Origin:
        return self._memory.origin

    @property
    def label(self) -> str:
        """The model's name as pictures and tables show it: what it is called, else `file`."""
        return self.origin.called or self.file

    @property
    def file(self) -> str:
        """What the model was loaded from: its name, or the last part of a directory or file."""
        if self.origin.directory is None:  # of a copy of a transformers model, perhaps a directory all the same
            is_path = os.path.isabs(self.origin.name)
            return Path(self.origin.name).name if is_path else self.origin.name
        name, quantised = self.origin.directory.name.removesuffix(".gguf"), self.origin.dequantised_from
        return name if quantised is None else f"{name} (dequantised from {quantised})"

    @property
    def encoding(self) -> str:
        """The encodings of the layers ("rotary", "alibi", "absolute", "none"), joined by ", "; "" if unknown."""
        encodings = [layer.geometry.encoding for layer in self.layers() if isinstance(layer, Probed)]
        return ", ".join(dict.fromkeys(encodings))

    def remember_origin(self, origin: Origin, *, proved: bool = False) -> None:
        """Remember where the model came from; with `proved`, that it need not be compared with the plain model, as its
        original was: joint matrices, which only the plain model reads, may not follow those that were edited."""
        self._memory.origin = origin
        self._memory.difference = "" if proved else self._memory.difference

    @property
    def streamed(self) -> _Streamed:
        return self._memory.streamed

    @property
    def spans(self) -> dict[int, list[slice]]:
        """The text of every prompt, by layer whose scores hooks edit: as found before the first edit of this pass, as
        keys that an edit hides look like padding."""
        return self._memory.spans

    @property
    def positions(self) -> Tensor | None:
        """Where the tokens of a text stand in the scores that hooks make; None at 0, 1, 2, .."""
        return self._memory.positions

    @contextmanager
    def placing(self, positions: Tensor) -> Iterator[None]:
        """While the block runs, token t of every text stands at positions[t] in the scores that hooks make."""
        before, self._memory.positions = self._memory.positions, positions
        try:
            yield
        finally:
            self._memory.positions = before

    @property
    def choices(self) -> Choices:
        return self._memory.choices

    @contextmanager
    def choosing(self, choices: Choices) -> Iterator[None]:
        """While the block runs, these choices hold for every pass of the model."""
        before, self._memory.choices = self._memory.choices, choices
        try:
            yield
        finally:
            self._memory.choices = before

    @property
    def limit(self) -> ContextLimit:
        return self.backend.limit()

    def require_length(self, n: int) -> None:
        """Refuse prompts longer than the model can take."""
        most, why, _ = limit = self.limit
        if most is not None and n > most:
            raise InputError(f"prompts of {n} tokens are too long: this model takes {most}, {why}; {limit.remedy}")

    def require_distance(self, name: str, value: Any) -> None:
        """Refuse a value that is not a distance, or for which the model's frequencies are not fixed."""
        if not is_non_negative(value):
            raise InputError(f"{name} {value!r}: distances must be numbers, 0 or more, and finite")
        limit, why, _ = self.limit
        if limit is not None and value >= limit and "frequencies" in why:
            raise InputError(
                f"{name} {value}: this model's frequencies are fixed below distance {limit} only, as {why}"
            )

    def require_evaluation(self) -> None:
        """Refuse active dropout and autocast (InputError) and quantised weights (UnsupportedModelError). Any
        floating-point dtype of two bytes or more is taken."""
        for name, module in self.model.named_modules():
            shares = {key: value for key, value in vars(module).items() if key.endswith("dropout")}
            if isinstance(module, torch.nn.modules.dropout._DropoutNd):
                shares["p"] = module.p
            if module.training and any(isinstance(share, float) and share > 0 for share in shares.values()):
                dropout = f"dropout in {name or type(module).__name__}"
                raise InputError(f"the model is in training mode and {dropout} is active; call model.eval() first")
            if ".quantized." in f"{type(module).__module__}.":
                raise UnsupportedModelError(f"{name} is quantised; load the model in float32, float16 or bfloat16")
        for name, weight in self.model.named_parameters():
            if type(weight.detach()) is not torch.Tensor or not weight.is_floating_point() or weight.element_size() < 2:
                plain = type(weight.detach()) is torch.Tensor
                kind = str(weight.dtype).removeprefix("torch.") if plain else type(weight.detach()).__name__
                raise UnsupportedModelError(
                    f"{name} is quantised ({kind}); load the model in float32, float16 or bfloat16"
                )
        if torch.is_autocast_enabled(next(self.model.parameters()).device.type):
            raise InputError(
                "autocast is on, so the model computes in another dtype than its weights have; leave its block"
            )

    @property
    def owner(self) -> Any:
        """Owner of the forward passes that are running; None for the user's."""
        return self._memory.owner

    @contextmanager
    def exclusive(self, owner: Any) -> Iterator[None]:
        """While the block runs, no other thread may measure this model, as its hooks are one list, and forward passes
        are those of `owner`."""
        if not self._memory.lock.acquire(blocking=False):
            raise InputError("this model is being measured in another thread; give each thread its own model object")
        before, self._memory.owner = self._memory.owner, owner
        try:
            yield
        finally:
            self._memory.owner = before
            self._memory.lock.release()

    @contextmanager
    def under(self, hooks: Sequence[tuple[Any, Any]]) -> Iterator[None]:
        """While the block runs, hooks are at work, as in `model.hooks(fwd_hooks=hooks)`, where a bridge works all of
        its hook points out anew for every hook: as long as a short pass."""
        model: Any = self.model
        points, touched = model.hook_dict if hooks else {}, list[Any]()
        model.context_level += 1
        level = model.context_level
        try:
            for where, hook in hooks:
                is_chosen = where.__eq__ if isinstance(where, str) else where
                chosen = [point for name, point in points.items() if is_chosen(name)]
                if isinstance(where, str):
                    if not chosen:
                        raise InputError(f"no hook point {where!r}; model.hook_dict lists them")
                    refuse = model.check_hooks_to_add  # points that are switched off; a bridge of 3.9 takes the name
                    refuse(*((where,) if len(signature(refuse).parameters) == 1 else (chosen[0], where, hook)))
                for point in {id(point): point for point in chosen}.values():
                    point.add_hook(hook, level=level)
                    touched.append(point)
            yield
        finally:
            for point in touched:
                point.remove_hooks(level=level)
            model.context_level -= 1

    def layers(self, *, again: bool = False) -> tuple[ProbedOrReason, ...]:
        """Return every layer as the probe found it, supported or not; probed once, and again for another dtype."""
        dtype = self.dtype
        if again or self._memory.dtype != dtype:
            self.require_evaluation()
            if self.owner == "probe":
                raise InputError(
                    "a hook of this model uses it while the model is looked at for the first time; call "
                    "tl_posgen.check(model) before the hook is added"
                )
            self._memory.streamed.refusal = self._memory.cached = None
            by = self.streamed.by
            with self.exclusive("probe"), nullcontext() if by is None else by.paused():
                if reason := self.difference(again=again or self._memory.dtype is not None):
                    self._memory.layers = (UnsupportedModelError(reason),) * self.model.cfg.n_layers
                else:
                    self._memory.layers = probe_layers(self.model, self.backend)
            self._memory.dtype = dtype
        return self._memory.layers

    @property
    def n_heads(self) -> tuple[int, ...]:
        """How many heads each layer has, as proved; of one that cannot be described what the config says."""
        n = self.model.cfg.n_heads
        return tuple(layer.geometry.n_heads if isinstance(layer, Probed) else n for layer in self.layers())

    def difference(self, *, again: bool = False) -> str:
        """Say how a bridge's logits differ from the plain Hugging Face model's; "" if they do not, or there is none."""
        if again or self._memory.difference is None:
            self._memory.difference = self.backend.difference(self.origin)
        return self._memory.difference

    def cached_difference(self) -> str:
        """Say how a step with the model's KV cache differs from one without; "" if it does not. Proved once, and again
        for another dtype."""
        self.require_evaluation()
        if self._memory.cached is None or self._memory.cached[0] != self.dtype:
            by = self.streamed.by
            with self.exclusive("cache"), nullcontext() if by is None else by.paused():
                self._memory.cached = self.dtype, self.backend.cached_difference()
        return self._memory.cached[1]

    @property
    def needs_streaming(self) -> bool:
        """Tell whether scores of some layer show only while attention is streamed."""
        return any(isinstance(layer, Probed) and layer.left_to_hf for layer in self.layers())

    def require_shown(self, probed: Probed) -> None:
        """Refuse a layer whose hooks carry softmax's output instead of scores while its attention is not streamed."""
        if probed.left_to_hf and self.streamed.by is None:
            raise UnsupportedModelError(
                f"layer {probed.geometry.layer}: TransformerBridge leaves its attention to Hugging Face, so its scores "
                "show, and can be edited, only in passes inside `with tl_posgen.streaming(model):`"
            )

    def layer(self, index: int) -> Probed:
        """Return one layer; UnsupportedModelError where its scores cannot be recomputed from its q and k."""
        probed = self.layers()[index]
        if isinstance(probed, UnsupportedModelError):
            raise UnsupportedModelError(*probed.args)
        return probed

    def attention(self, layer: int) -> Any:
        """Return the attention module of a layer."""
        return self.backend.model.blocks[layer].attn

    def sinks(self, layer: int) -> Tensor | None:
        """Return the logits that join the softmax of each head of a layer and carry no value (GPT-OSS); None where it
        holds none."""
        sinks = self.backend.sinks(layer)
        return None if sinks is None else sinks.detach()

    @property
    def embedding(self) -> Any:
        """The module that every forward pass hands the token ids to."""
        return self.backend.model.embed

    def projections(self, layer: int) -> Projections:
        """Return W_Q and W_K of one layer with their biases, and what follows them; see `projections_of`."""
        geometry, attention = self.layer(layer).geometry, self.attention(layer)
        read = self.backend.reader(layer, norms=geometry.qk_norm)

        def finish(part: str, x: Tensor) -> Tensor:
            return summable(read(part, x.transpose(0, 1)[None].to(attention.W_Q.device))[0])

        return projections_of(attention, geometry, finish)

    def biased(self) -> set[str]:
        """Return the sides, of "q" and "k", that have biases in any layer."""
        return {side for layer in range(self.model.cfg.n_layers) for side in self.projections(layer).biased}

    def require_biases(self) -> None:
        """Refuse a model without biases of queries or keys, and one where they are no summand of what enters RoPE."""
        if not self.biased():
            raise NothingToMeasureError("no layer of this model has biases of queries or keys (none, or all are zero)")
        for layer in range(self.model.cfg.n_layers):
            if (projections := self.projections(layer)).biased and not projections.is_affine:
                raise UnsupportedModelError(
                    f"layer {layer}: a norm or clipping follows the biases of its queries and keys, so they are no "
                    "summand of what enters RoPE"
                )

    def require_rope(self, measure: str, layers: Collection[int] = ()) -> None:
        """Refuse a model none of whose layers rotates, or chosen layers none of which does; layers that are not
        understood are refused when they run."""
        encoding = self.encoding
        if encoding and "rotary" not in encoding:
            raise UnsupportedModelError(
                f"no layer of this model has RoPE (its positions: {encoding}), so it has no planes; leave {measure} "
                "out (three_axis and variance work)"
            )
        probed = [self.layers()[layer] for layer in layers]
        if probed and not any(isinstance(probe, Exception) or probe.geometry.rope.rotary_dim for probe in probed):
            raise UnsupportedModelError(
                f"layers {', '.join(map(str, layers))}: none of them has RoPE, so there are no planes; choose "
                f"other layers, or leave {measure} out"
            )

    def require_relative_positions(self, measure: str) -> None:
        """Refuse a model whose positions are embeddings."""
        if self.encoding == "absolute":
            raise UnsupportedModelError(
                "positions of this model are embeddings added to the residual stream, so its scores know no distance "
                f"and there is none beyond its training length; {measure} needs rotary positions or ALiBi"
            )


_OF_TRANSFORMERS = "; of this model of transformers a copy: tl_posgen.training.snapshot(model, tokenizer)"


def session_of(model: Model | Session) -> Session:
    """Return the session of a model, with everything that is known of it; a session as it is.

    Raises:
        InputError: it is not a model of TransformerLens, or some of its weights are on the device meta.

    Example:
        >>> from tl_posgen import load_model
        >>> session = session_of(load_model("mini", backend="bridge"))
        >>> session.origin.name, session.backend.name, session.layer(0).geometry.encoding
        ('mini', 'bridge', 'rotary')
    """
    if isinstance(model, Session):
        return model
    kind = next((KINDS[cls.__name__] for cls in type(model).__mro__ if cls.__name__ in KINDS), None)
    if kind is None:
        raise InputError(
            f"{type(model).__name__} is not a model of TransformerLens; give a HookedTransformer, a TransformerBridge, "
            "or a name or directory for tl_posgen.load_model"
            + (_OF_TRANSFORMERS if isinstance(model, torch.nn.Module) and hasattr(model, "save_pretrained") else "")
        )
    memory = vars(model).get(MEMORY)
    tensors = chain(model.named_parameters(), model.named_buffers() if memory is None else ())
    if name := next((name for name, tensor in tensors if tensor.is_meta), None):
        raise InputError(
            f"{name} is on the device meta, which holds no numbers (offloaded by accelerate, or not loaded); load the "
            "whole model onto devices that hold it, such as load_model(..., device='cpu')"
        )
    if memory is None:
        memory = vars(model)[MEMORY] = _Memory(Origin(str(model.cfg.model_name), kind.name))
    return Session(model, kind(model), memory)

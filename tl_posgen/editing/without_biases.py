"""Queries and keys without their biases."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from jaxtyping import Float
from torch import Tensor

from tl_posgen.editing.printed_hooks import HookList, printing_call
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.model import Model
from tl_posgen.models.same_logits import without_hooks
from tl_posgen.models.selection import Layers
from tl_posgen.models.session import Session, session_of

_SIDES = ("q", "k")


@printing_call
def without_biases(model: Model | Session, of: Sequence[str] = _SIDES, *, layers: Layers = None) -> HookList:
    """q_i <- q_i - b_q and k_j <- k_j - b_k before RoPE: scores as if these biases were zero.

    The biases are proved first, by one short pass, to be what is added to x W_Q and x W_K. They are taken off where
    queries and keys are hooked, of every key head once; weights stay as they are. In half precision what is taken off
    is off by the rounding of what it was added to.

    Args:
        of: ("q", "k"), or one of them.
        layers: chosen layers; all if left out. Those without such biases are not changed.

    Returns:
        Hooks for `model.hooks(fwd_hooks=...)` or `run_with_hooks`, alone or joined to others; give them before hooks
        that replace scores. They also work with a KV cache that is filled under them, and with streaming.

    Raises:
        InputError: other sides, a layer that does not exist.
        UnsupportedModelError: a model without such biases (in the chosen layers), or with a norm or clipping behind
            them; queries and keys that are not made by W_Q and W_K from one input.

    Source: ours.

    Example:
        >>> from tl_posgen import load_model
        >>> try:
        ...     without_biases(load_model("mini"))
        ... except UnsupportedModelError as refusal:
        ...     print(refusal)
        no layer of this model has biases of queries or keys (none, or all are zero)
    """
    if not isinstance(of, Sequence) or not of or not set(of) <= set(_SIDES):
        raise InputError(f'without_biases: of={of!r}: give "q", "k", or both')
    session, biases = session_of(model), dict[str, tuple[Tensor, int]]()
    session.require_biases()

    def keep(capture: LayerCapture) -> None:
        """Take biases of a layer, proved."""
        projections, geometry = capture.projections, capture.geometry
        assert projections is not None
        for side in set(projections.biased).intersection(of):
            bias: Any = getattr(projections, f"b_{side}")
            biases[session.layer(capture.layer).names[side]] = bias, geometry.d_head

    with session.exclusive("biases"), without_hooks(session.model):
        run_capture(session, session.backend.some_tokens(), keep, {"inputs"}, layers)
    if not biases:
        raise UnsupportedModelError(f"no bias of {' or '.join(of)} in the layers {layers}; choose others")

    def take_off(bias: Float[Tensor, "head d_head"], d_head: int, x: Tensor, hook: object) -> Tensor:
        of_heads = x.flatten(2).unflatten(-1, (-1, d_head))
        copies = bias.repeat_interleave(of_heads.shape[2] // len(bias), 0)  # where keys are repeated before their hook
        return (of_heads - copies.to(of_heads)).reshape(x.shape)

    return [(name, partial(take_off, *bias_and_width)) for name, bias_and_width in biases.items()]

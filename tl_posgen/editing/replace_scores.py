"""Score replacement: scores computed from a layer's q, k and geometry, written over the model's own scores."""

from tl_posgen.editing.layer_edit import LayerEdit, TextEnds
from tl_posgen.editing.printed_hooks import HookList, printing_call
from tl_posgen.editing.score_functions import RowByRow, ScoresOf
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.model import Model
from tl_posgen.models.selection import Heads, Layers, select_heads
from tl_posgen.models.session import Session, session_of


@printing_call
def replace_scores(
    model: Model | Session,
    scores_of: ScoresOf,
    layers: Layers = None,
    heads: Heads = None,
    *,
    needs_positions: bool = False,
) -> HookList:
    """score_ij <- scores_of(capture)_ij for the chosen heads and layers, wherever key j is visible to query i.

    Args:
        scores_of: function of a layer's capture (q and k before RoPE, after qk-norm, as these hooks find them: give
            hooks that change q or k before these; geometry) that returns scores [head, query, key] of the heads in
            `capture.heads`, where -inf hides a visible key; or booleans, False for keys to hide from the scores that
            the model has. Entries outside the causal mask are ignored: they keep the model's mask value. It is called
            once per layer and prompt; a `RowByRow` with a KV cache once per layer and forward pass, and for every block
            of rows where attention is streamed.
        layers, heads: chosen layers and heads; all if left out. Heads are "L3H1", "3.1" or (3, 1), several in a list,
            or a frame with the columns layer and head, as `Report.heads` returns.
        needs_positions: refuse layers whose positions are added to the residual stream: their scores do not depend on
            a distance.

    Returns:
        [(hook_name, fn), ...] for `model.hooks(fwd_hooks=...)` or `run_with_hooks`, alone or joined to other hooks.
        Nothing is changed in place, gradients flow, and hooks for different heads can be combined.

    Raises:
        InputError: a layer or head that does not exist; later, in the forward pass: a KV cache with a scores_of that is
            not a `RowByRow`, or a cache that was filled without these hooks; scores of the pass that q and k do not
            give at positions 0, 1, .. (a hook before these edits them, the model is given `position_ids`, or it has
            changed);
            new scores of a head for which hooks of this package before these made new scores in the same pass.
        UnsupportedModelError: a chosen layer whose scores cannot be recomputed from q and k; later, in the forward
            pass: a layer whose attention TransformerBridge leaves to Hugging Face, outside of `tl_posgen.streaming`; a
            pass of one token, or with a KV cache, by a model that computes something else with its cache.

    Example:
        >>> import torch
        >>> from tl_posgen import load_model
        >>> model, tokens = load_model("mini"), torch.arange(12)[None]
        >>> same = model.run_with_hooks(tokens, fwd_hooks=replace_scores(model, lambda capture: capture.scores()))
        >>> torch.allclose(same, model(tokens), atol=1e-4)
        True
    """
    if not callable(scores_of):
        raise InputError(f"scores_of is a {type(scores_of).__name__}: give a function of a LayerCapture")
    session = session_of(model)
    ends = (
        None if isinstance(scores_of, RowByRow) else TextEnds(session)
    )  # row by row padding at the end changes nothing
    hooks: HookList = [] if ends is None else [("hook_embed", ends.keep)]
    cache_fault = session.cached_difference()  # proved here, as no pass may run inside another
    for index, picked in select_heads(session, layers, heads).items():
        probed = session.layer(index)
        if needs_positions and probed.geometry.encoding == "absolute":
            raise UnsupportedModelError(
                f"layer {index}: positions are embeddings added to the residual stream, so its scores have no distance "
                "to change; choose a model with rotary positions or ALiBi"
            )
        hooks += LayerEdit(session, probed, scores_of, picked, cache_fault, ends).hooks()
    return hooks

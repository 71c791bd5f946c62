"""One layer's scores replaced in a pass: its q and k are kept, its own scores proved, new ones written over them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
from jaxtyping import Float, Real
from torch import Tensor
from torch.nn.functional import pad

from tl_posgen.editing.printed_hooks import HookList
from tl_posgen.editing.score_functions import OWN_SCORES, FrozenBeyond, RowByRow, ScoresOf
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.capture.padding import NO_PADDING, WITHOUT_CACHE, pad_token, spans_of_scores, text_of_pass
from tl_posgen.models.geometry.probe import Probed
from tl_posgen.models.geometry.proof import is_masked, layer_capture, verify_capture
from tl_posgen.models.layers.capture import QUERIES_AND_KEYS, EditedCapture, LayerCapture
from tl_posgen.models.layers.fused import Mask
from tl_posgen.models.selection import head_name
from tl_posgen.models.session import Session


class TextEnds:
    """Embeddings of the last token of every prompt of the pass that begins, which show padding behind texts.

    lm-evaluation-harness, say, pads with token 0 and gives no mask: to scores that are made of whole prompts it would
    be text.
    """

    def __init__(self, session: Session):
        self.session = session
        self.last: Float[Tensor, "batch 1 d_model"] | None = None

    def keep(self, embedded: Tensor, hook: object) -> None:
        self.last = embedded[:, -1:].detach() if self.session.owner is None else None  # ours have no padding

    def require_text(self) -> None:
        """Refuse prompts some of which, and not all, end with the padding token or token 0."""
        last, self.last = self.last, None
        if last is None or len(last) < 2:
            return
        pad, _ = pad_token(self.session.model.tokenizer)
        embeddings: Tensor = self.session.backend.model.W_E
        pads = embeddings[[0] if pad is None else [0, pad]].to(last)
        ends = (torch.cosine_similarity(last, pads[None], dim=-1) > 1 - 1e-5).any(1)  # some models scale embeddings
        if 0 < (n := int(ends.sum())) < len(ends):  # padding leaves the longest as it is
            raise InputError(
                f"prompt {int(ends.nonzero()[0])}: {n} of {len(ends)} prompts end with what may be padding, which no "
                "mask tells from text, and these scores are made of whole prompts; give an attention_mask, or run "
                "prompts one at a time (batch_size=1)"
            )


class LayerEdit:
    """Edit of one layer's scores: hooks that keep q and k, then replace the scores.

    With `RowByRow`, `past` holds the keys of earlier passes, and where each prompt begins (-1 if it ends before them).
    """

    def __init__(
        self,
        session: Session,
        probed: Probed,
        scores_of: ScoresOf,
        heads: Sequence[int],
        cache_fault: str,
        ends: TextEnds | None,
    ):
        self.session, self.probed, self.scores_of, self.heads, self.ends = session, probed, scores_of, heads, ends
        self.parts: dict[str, Tensor] = {}
        self.earlier: list[LayerEdit | None] = []  # see `_earlier`, in this pass
        self.unedited: Float[Tensor, "batch head row key"] | None = None  # scores that others have not edited yet
        self.seeing: Any = None  # the handle of the hook that sees these
        self.past: tuple[Tensor, list[int]] | None = None
        self.cache_fault = cache_fault
        self.makes_scores = False  # in this pass, where scores_of does not only hide keys
        self.call = ""  # that made the hooks, as they are printed

    def hooks(self) -> HookList:
        names = self.probed.names
        return [*((names[part], partial(self.keep, part)) for part in ("q", "k")), (names["attn_scores"], self.edit)]

    def keep(self, part: str, value: Tensor, hook: object) -> None:
        layer, by = self.probed.geometry.layer, self.session.streamed.by
        self.session.require_length(value.shape[1])
        self.session.spans.pop(layer, None)  # of an earlier pass
        self.makes_scores = False
        self.parts[part] = self.probed.read(part, value)
        if part == "q":
            self._see_before_others()
        if isinstance(self.scores_of, RowByRow) and by is not None and not by.listeners:  # which are shown the scores
            by.row_edits[layer][self] = None

    def edit(self, attn_scores: Tensor, hook: object) -> Tensor:
        layer, by = self.probed.geometry.layer, self.session.streamed.by
        if by is not None and not by.is_hooked(layer):
            return attn_scores  # rows are edited as they are formed
        self.session.require_shown(self.probed)
        self._require_parts()
        (n_queries, n_keys), dtype = attn_scores.shape[-2:], self.parts["q"].dtype

        def spans_of_first_edit() -> list[slice]:
            if layer not in self.session.spans:
                self.session.spans[layer] = spans_of_scores(self.probed.geometry, attn_scores, dtype)
            return self.session.spans[layer]

        return self._rows_of_pass(n_queries, n_keys, spans_of_first_edit)(attn_scores, n_keys)

    def frozen(self, mask: Mask) -> FrozenBeyond | None:
        """Return what a streamed pass of whole prompts does by itself: planes frozen in all heads of the layer."""
        geometry, scores_of = self.probed.geometry, getattr(self.scores_of, "scores_of", None)
        if not isinstance(scores_of, FrozenBeyond) or len(self.heads) < geometry.n_heads:
            return None
        if geometry.distance_bias(0) is not None or self.session.positions is not None:
            return None
        return scores_of if mask.padding is None or scores_of.sees is None else None  # it counts from a text's start

    def _earlier(self) -> list["LayerEdit | None"]:
        """Return the hooks on this layer's scores that run before this edit: the edit that each belongs to, or None for
        any other function."""
        handles = {handle.hook.id: handle for handle in self._point.fwd_hooks}
        hooks = [getattr(handles.get(number), "user_hook", None) for number in self._point._forward_hooks]
        hooks = [hook for hook in hooks if getattr(hook, "__func__", None) is not LayerEdit._see]
        owners = [getattr(hook, "__self__", None) for hook in hooks]
        edits = [owner if isinstance(owner, LayerEdit) else None for owner in owners]
        return edits[: edits.index(self)] if self in edits else []

    @property
    def _point(self) -> Any:
        return self.session.attention(self.probed.geometry.layer).hook_attn_scores

    def _see_before_others(self) -> None:
        """See the scores of the pass before any function that is hooked before this edit, which may change them."""
        self._stop_seeing()  # where the last pass ended in an error
        self.unedited = None
        if None in self._earlier():  # captures among them, which move behind the edits as the scores come
            handle = next(x for x in self._point.fwd_hooks if getattr(x.user_hook, "__self__", None) is self)
            self._point.add_hook(self._see, prepend=True, is_permanent=handle.is_permanent, level=handle.context_level)
            self.seeing = self._point.fwd_hooks[0]

    def _see(self, attn_scores: Tensor, hook: object) -> None:
        self.unedited = attn_scores.detach().clone()  # others may write into them
        self._stop_seeing()

    def _stop_seeing(self) -> None:
        if self.seeing is not None:
            self.seeing.hook.remove()
            self._point.fwd_hooks = [handle for handle in self._point.fwd_hooks if handle is not self.seeing]
            self.seeing = None

    def _shared_heads(self, earlier: "LayerEdit") -> set[int]:
        return {*earlier.heads} & {*self.heads}

    def _has_other_hooks_on_queries_or_keys(self) -> bool:
        """Tell whether functions besides edits are hooked where queries and keys pass."""
        attention = self.session.attention(self.probed.geometry.layer)
        points = [getattr(attention, f"hook_{name}", None) for name in QUERIES_AND_KEYS]
        handles = [handle for point in points for handle in getattr(point, "fwd_hooks", ())]
        hooks = [getattr(handle, "user_hook", None) for handle in handles]
        owners = [getattr(getattr(hook, "func", hook), "__self__", None) for hook in hooks]
        return any(not isinstance(owner, LayerEdit) for owner in owners)

    def require_first(self) -> None:
        """Refuse new scores of heads for which an edit before this one in the pass made new scores, or hid keys of what
        another function may have edited: they would undo it."""
        for earlier in self.earlier:
            if earlier is not None and None in self.earlier and self._shared_heads(earlier):
                head = head_name(self.probed.geometry.layer, min(self._shared_heads(earlier)))
                raise InputError(
                    f"{head}: another function is hooked on the scores before {self}, beside {earlier}, and new scores "
                    "would undo what it does; give it behind these hooks"
                )
            if earlier is not None and earlier.makes_scores and self._shared_heads(earlier):
                head = head_name(self.probed.geometry.layer, min(self._shared_heads(earlier)))
                raise InputError(
                    f"{head}: {earlier} makes new scores, and {self} after it would undo them; give one of them, each "
                    "its own heads, or as the second a RowByRow(.., with_own=True), which is given those of the first"
                )

    def _require_parts(self) -> None:
        """Refuse a pass in which this edit has used up its q and k before."""
        if "q" not in self.parts:
            raise InputError(f"layer {self.probed.geometry.layer}: these hooks were added twice, {self}; add them once")

    def __str__(self) -> str:
        return self.call or _name_of(self.scores_of)

    def of_rows(self, mask: Mask, n_queries: int, n_keys: int) -> "_PassEdit":
        """Return the edit of blocks of rows of a streamed pass."""
        spans_of = partial(text_of_pass, mask, len(self.parts["q"]), n_keys, None, NO_PADDING)
        return self._rows_of_pass(n_queries, n_keys, spans_of)

    def _rows_of_pass(self, n_queries: int, n_keys: int, spans_of: Callable[[], list[slice]]) -> "_PassEdit":
        """Take q and k of one pass, keys of earlier ones where it sees them too, and the text of every prompt."""
        self._require_parts()
        q, k, geometry = self.parts.pop("q"), self.parts.pop("k"), self.probed.geometry
        cached, by_row = n_queries != n_keys, isinstance(self.scores_of, RowByRow)
        seen = f"layer {geometry.layer}: {n_queries} queries see {n_keys} keys"
        if self.cache_fault and (cached or n_keys == 1):  # a faulty cache may show a step its own key alone
            raise UnsupportedModelError(
                f"{seen}, and this model's KV cache is not to be trusted: {self.cache_fault}; {WITHOUT_CACHE}, and "
                "from two tokens on"
            )
        if cached:
            seen += ", so a KV cache is in use"
            if not by_row:
                raise InputError(f"{seen}, and these scores are made of whole prompts; {WITHOUT_CACHE}")
            past, starts = self.past or (k[:, :, :0], [0] * len(k))
            k = torch.cat([past, k], 2) if past.shape[:2] == k.shape[:2] else k
            if k.shape[2] != n_keys and (geometry.window is None or k.shape[2] < n_keys):
                raise InputError(
                    f"{seen}, and these hooks saw {k.shape[2]} of them; let every pass that fills it run under them, "
                    f"or {WITHOUT_CACHE}"
                )
            if min(starts) < 0:
                raise InputError(
                    f"{seen} behind prompts that are padded at their end; {WITHOUT_CACHE}, or pad at the start"
                )
            spans = [slice(start, k.shape[2]) for start in starts]
        else:
            spans = spans_of()
            if self.ends is not None and all(span == slice(0, n_keys) for span in spans):
                self.ends.require_text()
        if by_row:
            self.past = k.detach(), [span.start if span.stop == k.shape[2] else -1 for span in spans]
        sinks = self.session.sinks(geometry.layer)
        captures = [
            layer_capture(
                geometry,
                {"q": q[row] if cached else q[row, :, span], "k": k[row, :, span]},
                self.heads,
                (),
                row,
                None,
                sinks=sinks,
            )
            for row, span in enumerate(spans)
        ]
        positions = self.session.positions
        if positions is not None and (cached or any(span.stop - span.start > len(positions) for span in spans)):
            raise InputError(
                f"{seen}, and {len(positions)} tokens stand at other positions; give prompts of no more tokens, "
                "without a cache"
            )
        self.earlier = self._earlier()
        narrow = geometry.window is not None and geometry.window < n_keys
        compared = "every row" if narrow or self._has_other_hooks_on_queries_or_keys() else "last row"
        if any(edit is not None and self._shared_heads(edit) for edit in self.earlier):
            compared = None
        unedited, self.unedited = self.unedited if None in self.earlier else None, None
        return _PassEdit(self, spans, captures, k.shape[2] - n_keys, cached, q.dtype, compared, unedited, positions)


@dataclass(frozen=True)
class _PassEdit:
    """Edit of one layer's scores in one pass, whole or a block of rows at a time.

    Attributes:
        spans: text of every prompt among all keys, those of earlier passes included.
        captures: of these texts; with a KV cache, q of the last tokens only.
        before: how many of all keys the model's cache has dropped.
        dtype: the model's.
        compared: which of the pass's scores are compared with those of q and k: every row where other functions may
            have changed a query or a key, or where a window hides from the last one where tokens stand; none where an
            edit before this one is of the same heads.
        unedited: the scores of the pass before other functions that are hooked before this edit; None without. New
            scores would undo what these do.
        positions: where the tokens of every text stand in the new scores; 0, 1, .. if None.
    """

    edit: LayerEdit
    spans: list[slice]
    captures: list[LayerCapture]
    before: int
    cached: bool
    dtype: torch.dtype
    compared: Literal["last row", "every row"] | None
    unedited: Float[Tensor, "batch head row key"] | None
    positions: Real[Tensor, " pos"] | None = None

    def __call__(
        self, own_scores: Float[Tensor, "batch head row key"], stop: int
    ) -> Float[Tensor, "batch head row key"]:
        """Return the scores of some queries, the last of which has its own key at stop - 1, new in the chosen heads
        where a key is visible.

        Args:
            own_scores: the pass's, over the last of the keys before `stop`.
        """
        scores_of, (n_rows, n_keys) = self.edit.scores_of, own_scores.shape[-2:]
        stop += self.before
        start = stop - n_rows
        edited = self._of_all_keys(own_scores, stop).clone()
        unedited = edited if self.unedited is None else self._of_all_keys(self.unedited, stop)
        for prompt, (span, full_capture) in enumerate(zip(self.spans, self.captures, strict=True)):
            first, last = max(span.start, start), min(span.stop, stop)
            if first >= last:
                continue  # padding
            rows, keys = slice(first - start, last - start), slice(span.start, last)
            begin = span.stop - full_capture.q.shape[1]
            capture, of_all_heads = full_capture.of_rows(first - begin, last - begin), edited[prompt, :, rows, keys]
            own_capture, old = capture, of_all_heads[list(capture.heads)]
            given = unedited[prompt, :, rows, keys]
            if self.cached or self.compared == "every row":
                self.prove(capture, given)
            elif self.compared == "last row" and last == span.stop:
                self.prove(full_capture.of_rows(last - begin - 1, last - begin), given[:, -1:])
            if self.positions is not None:
                capture = capture.at(self.positions[: capture.length])
            new = scores_of(capture, old) if isinstance(scores_of, RowByRow) else scores_of(capture)
            keeps_old = getattr(new, "dtype", None) == torch.bool or getattr(scores_of, "with_own", False)
            if self.compared and self.unedited is not None and not keeps_old:  # which would undo what others did
                self.prove(own_capture, of_all_heads)
            if not isinstance(new, Tensor) or new.shape != old.shape:
                given = list(new.shape) if isinstance(new, Tensor) else f"a {type(new).__name__}"
                raise InputError(
                    f"layer {capture.layer}: the new scores are {given}, and a tensor {list(old.shape)} "
                    "[head, query, key] is needed"
                )
            if new.dtype != torch.bool:
                if not (isinstance(scores_of, RowByRow) and scores_of.with_own):
                    self.edit.require_first()
                self.edit.makes_scores = self.edit.makes_scores or scores_of is not OWN_SCORES
            visible = ~is_masked(old, self.dtype)
            if self.positions is not None:
                near = capture.geometry.sees(capture.query_positions[:, None] - capture.positions)
                new = new & near if new.dtype == torch.bool else new.masked_fill(~near, -torch.inf)
            if new.dtype != torch.bool and (wrong := ~(new < torch.inf) & visible.to(new.device)).any():
                head, row, key = wrong.nonzero()[0].tolist()
                raise InputError(
                    f"{head_name(capture.layer, capture.heads[head])}: {_name_of(scores_of)} gives the new score "
                    f"{new[head, row, key].item()} of query {int(capture.query_positions[row])} and key {key}; let it "
                    "give finite numbers, or -inf to hide a key"
                )
            edited[prompt, list(capture.heads), rows, keys] = (
                old.masked_fill(visible & ~new.to(old.device), -torch.inf)
                if new.dtype == torch.bool
                else torch.where(visible, new.to(old), old)
            )
        return edited[..., -n_keys:]

    @staticmethod
    def _of_all_keys(scores: Float[Tensor, "batch head row key"], n: int) -> Float[Tensor, "batch head row all_keys"]:
        """Return scores over n keys, -inf at those that the model's cache has dropped."""
        return pad(scores, (n - scores.shape[-1], 0), value=-torch.inf) if scores.shape[-1] < n else scores

    @torch.no_grad()
    def prove_last_row(self, scores_of_rows: Callable[[int, int], Float[Tensor, "batch head row key"]]) -> None:
        """Prove the last query of every prompt, for a pass that replaces scores without calling this edit; within a
        window also queries that see across every place before it."""
        window = self.edit.probed.geometry.window
        step = max(1, (window or max(span.stop for span in self.spans) + 1) - 1)
        rows_at = cache(lambda row: scores_of_rows(row, row + 1))  # of all prompts
        for prompt, (span, full_capture) in enumerate(zip(self.spans, self.captures, strict=True)):
            for row in range(span.stop - 1, span.start - 1, -step):
                at = row - span.start
                scores = rows_at(row)[prompt, :, :, span.start : row + 1]
                self.prove(full_capture.of_rows(at, at + 1), scores)

    def prove(self, capture: LayerCapture, own_scores: Float[Tensor, "head row key"]) -> None:
        """Refuse scores of the pass that q and k do not give by the geometry that these hooks know."""
        used = verify_capture(capture, own_scores, None, self.dtype)
        if not isinstance(used, EditedCapture):
            return
        if self.cached:  # stored keys that do not give the last query's scores
            raise InputError(
                f"{used.why} With a KV cache, also: one that other passes filled than these hooks saw; {WITHOUT_CACHE}"
            )
        raise InputError(
            f"{used.why} These hooks make scores of q and k at positions 0, 1, ..: give hooks that change q or k before"
            " them, hooks that change scores behind them, positions by tl_posgen.hooks.tokens_at and not as "
            "position_ids, and make them anew where the model has changed"
        )


def _name_of(scores_of: Any) -> str:
    """Return the name of the function that gives new scores."""
    if isinstance(scores_of, RowByRow):
        return _name_of(scores_of.scores_of)
    return (
        _name_of(scores_of.func)
        if isinstance(scores_of, partial)
        else getattr(scores_of, "__name__", type(scores_of).__name__)
    )

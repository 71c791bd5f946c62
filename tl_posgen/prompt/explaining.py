"""Explaining a head's attention from one token: the row of its scores as a sum over terms, planes and sources."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.arithmetic import double, full_precision
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.geometry.proof import allowed_error, tolerance
from tl_posgen.models.layers.capture import LayerCapture, finished_scores
from tl_posgen.models.layers.geometry import LayerGeometry, soft_capped
from tl_posgen.models.loading.load import open_model
from tl_posgen.models.selection import head_name, one_head
from tl_posgen.models.session import Session, session_of
from tl_posgen.models.tokens import token_strings
from tl_posgen.prompt.explanation import ALIBI, Deletion, Explanation
from tl_posgen.prompt.numbers import TERMS, source_terms
from tl_posgen.prompt.score_split import note_of, one_prompt
from tl_posgen.residual.reference import LayerReference, Reference, given_reference
from tl_posgen.residual.residual_sources import Side, SourceReader, frozen_layer, source_vectors

REST, REFERENCE_MEAN = "rest", "reference mean"
Parts = Mapping[str, Tensor]


@dataclass(frozen=True)
class _Asked:
    """One explanation that is asked for, checked before any forward pass."""

    session: Session
    layer: int
    head: int
    query: int
    against: int | None
    side: Side

    @property
    def geometry(self) -> LayerGeometry:
        return self.session.layer(self.layer).geometry

    @property
    def keys(self) -> range:
        """The keys that the query sees."""
        window = self.geometry.window
        return range(0 if window is None else max(0, self.query - window + 1), self.query + 1)


@full_precision()
def explain(
    model: Any,
    prompt: Any,
    layer: int | None = None,
    head: Any = None,
    query: int = -1,
    against: int | None = None,
    *,
    parts: Parts | None = None,
    rest: bool = False,
    reference: Any = None,
    other: Any = None,
    side: Side = "key",
) -> Explanation:
    r"""W_ij - W_ij' of one query i and every key j it sees, an exact sum over terms x RoPE planes x sources of the key.

    Terms are those of `split`: position, key, query_key, interaction. Sources are what the embedding, learned
    positions, earlier heads and MLPs, and biases wrote into the residual stream, norms frozen as they were in this
    pass: k_j is their sum, and so is the mean key of the reference, each by its own mean.

    Args:
        model: a model, or its name or directory.
        prompt: one text, or token ids.
        layer, head: one head; head="3.1" or "L3H1" alone names it too.
        query: index of the token that attends; negative ones count from the end.
        against: the key j' whose score is taken away. If left out, the mean of the row under its own attention: softmax
            sees differences within a row only.
        parts: instead of the sources, parts of the residual stream at the layer's input, name -> [pos, d_model], such
            as features of a sparse autoencoder, its bias and its error.
        rest: name what `parts` leave of the residual stream "rest"; without it they must add up to it.
        reference: as in `split`; the bundled book if left out, never the prompt itself.
        other: another prompt of as many tokens: its explanation is taken away, so that what is left makes the
            difference.
        side: whose sources: those of the "key" or of the "query".

    Returns:
        An `Explanation`. Where nothing rotates, position and interaction are zero and its `note` says so.

    Raises:
        InputError: a query outside the prompt, a key beyond the query or invisible to it, parts of another shape or
            that do not add up, prompts of two lengths.
        UnsupportedModelError: a layer whose scores cannot be recomputed, or whose keys cannot be traced to what earlier
            layers wrote; where only the latter is so, `parts` and `rest` still work.

    Source: ours; frozen norms and an exact sum over sources are usual in direct attribution.

    Example:
        >>> import tl_posgen
        >>> found = explain("mini", "Down, down, down. Would the fall never end?", head="3.1", against=1)
        >>> found.frame(by=("term", "source")).columns.tolist()
        ['key', 'token', 'term', 'source', 'contribution']
    """
    session = session_of(open_model(model))
    index, picked = one_head(session.model, layer, head)
    tokens = one_prompt(session, prompt)
    asked = _asked(session, index, picked, query, against, side, len(tokens))
    another = None if other is None else one_prompt(session, other)
    if another is not None and len(another) != len(tokens):
        raise InputError(f"other: {len(another)} tokens, and the prompt has {len(tokens)}; give as many")
    if another is not None and parts is not None:
        raise InputError("parts are of one prompt; leave other= out, and compare two explanations by `minus`")
    if parts is not None:
        _check_parts(parts, len(tokens), session.model.cfg.d_model)
    means = given_reference(session.model, reference, [index], sources=parts is None)
    found = _explanation_of(asked, tokens, means, parts, rest)
    return found if another is None else found.minus(_explanation_of(asked, another, means, None, rest))


def _asked(session: Session, layer: int, head: int, query: int, against: int | None, side: Side, n: int) -> _Asked:
    """Return what is asked for, with indices from the start."""
    if side not in ("key", "query"):
        raise InputError(f"side {side!r}: choose key or query")
    places = {"query": query, "against": against}
    for name, at in places.items():
        if at is None and name == "against":
            continue
        if not isinstance(at, int | np.integer) or isinstance(at, bool) or not -n <= at < n:
            raise InputError(f"{name} {at!r} is outside the prompt of {n} tokens; give 0 to {n - 1}, or -{n} to -1")
        places[name] = int(at) % n
    asked = _Asked(session, layer, head, places["query"], places["against"], side)
    if asked.against is not None and asked.against not in asked.keys:
        raise InputError(
            f"against {asked.against}: query {asked.query} sees keys {asked.keys[0]} to {asked.keys[-1]} only; "
            "choose one of them"
        )
    return asked


def _check_parts(parts: Any, n: int, d_model: int) -> None:
    """Refuse parts that are no tensors [pos, d_model] by name."""
    if not isinstance(parts, Mapping) or not parts:
        raise InputError("parts: give name -> tensor [pos, d_model], one at least")
    for name, part in parts.items():
        if not isinstance(part, Tensor) or tuple(part.shape) != (n, d_model):
            shape = list(part.shape) if isinstance(part, Tensor) else type(part).__name__
            raise InputError(f"part {name!r}: {shape}; the residual stream of this prompt is {[n, d_model]}")
        if part.is_meta or part.layout != torch.strided or part.is_complex() or not bool(part.isfinite().all()):
            raise InputError(f"part {name!r}: give finite real numbers in a dense tensor")
    if REST in parts or REFERENCE_MEAN in parts:
        raise InputError(f"parts: {REST!r} and {REFERENCE_MEAN!r} are names of what is left; choose others")


def _explanation_of(
    asked: _Asked, tokens: Int[Tensor, " pos"], reference: Reference, parts: Parts | None, rest: bool
) -> Explanation:
    """Return the explanation of one prompt, from one forward pass."""
    session, place = asked.session, [(asked.layer, asked.head)]
    reading, captures = SourceReader(session, asked.layer if parts is None else 0), list[LayerCapture]()
    with reading.attached():
        run_capture(session, tokens[None], captures.append, {"resid", "inputs", "attn_scores"}, heads=place)
    capture, geometry = captures[0], asked.geometry
    q, k = capture.q[0], capture.k[0]  # an edited capture refuses here
    assert capture.resid is not None
    resid = capture.resid.to(k.device)  # of the layer before, where layers are spread over devices
    if parts is None:
        written = reading.sources(asked.layer, resid)
        names, values = written.names, written.values
    else:
        names, values = _with_rest(parts, resid, rest, session.dtype)
    frozen = frozen_layer(session, capture, asked.side).of_head(asked.head)
    names, vectors = source_vectors(frozen, names, values, k if asked.side == "key" else q, session.dtype)
    means = reference.of_layer(geometry)
    names, vectors, source_means = _with_means(names, vectors, means, asked, own=parts is None)
    keys, mean_key = torch.as_tensor(asked.keys, device=k.device), means.mean_key[asked.head]
    if asked.side == "key":
        sides = q[None, asked.query], means.mean_query[None, asked.head], vectors[:, keys], source_means
    else:
        sides = vectors[:, asked.query], source_means, k[None, keys], mean_key[None]
    of_q, mean_q, of_k, mean_k, turn, away = (
        x.to(k.device) for x in (*sides, means.mean_turn[asked.head], asked.query - keys)
    )
    terms = source_terms(of_q, mean_q, of_k, mean_k, turn, away, geometry.rope, geometry.scale)
    return _labelled(asked, capture, reference, terms, names)


def _with_rest(
    parts: Parts, residual: Float[Tensor, "pos d_model"], rest: bool, dtype: torch.dtype
) -> tuple[tuple[str, ...], Float[Tensor, "part pos d_model"]]:
    """Return the user's parts of the residual stream, and what they leave of it, where that is asked for."""
    values = torch.stack([double(part.detach()).to(residual.device) for part in parts.values()])
    left = double(residual) - values.sum(0)
    if rest:
        return (*parts, REST), torch.cat([values, left[None]])
    off, reach = float(left.abs().max()), float(residual.abs().max())
    if not off <= tolerance(dtype) * reach:
        raise InputError(
            f"parts: they do not add up to the residual stream at the layer's input: off by {off:.2g} where it reaches "
            f"{reach:.2g}; give rest=True, which names what they leave {REST!r}"
        )
    return tuple(parts), values


def _with_means(
    names: tuple[str, ...],
    vectors: Float[Tensor, "source pos d_head"],
    means: LayerReference,
    asked: _Asked,
    *,
    own: bool,
) -> tuple[tuple[str, ...], Float[Tensor, "all_source pos d_head"], Float[Tensor, "all_source d_head"]]:
    """Return the sources with the mean of each over the reference.

    Of the user's parts, and of a reference without sources, no means are known: the mean query or key is then a source
    of its own, which is taken from all tokens alike.
    """
    whole = (means.mean_key if asked.side == "key" else means.mean_query)[asked.head].to(vectors.device)
    known = dict(zip(means.sources.get(asked.side, ()), means.source_means.get(asked.side, ()), strict=True))
    if own and known:
        missing = [name for name in known if name not in names]  # zero in this prompt, and not in the reference
        names = (*names, *missing)
        vectors = torch.cat([vectors, vectors.new_zeros(len(missing), *vectors.shape[1:])])
        zero = torch.zeros_like(whole)
        found = [known[name][asked.head].to(vectors.device) if name in known else zero for name in names]
        return names, vectors, torch.stack(found)
    of_each = torch.cat([vectors.new_zeros(len(names), len(whole)), whole[None]])
    return (*names, REFERENCE_MEAN), torch.cat([vectors, torch.zeros_like(vectors[:1])]), of_each


def _labelled(
    asked: _Asked,
    capture: LayerCapture,
    reference: Reference,
    terms: Float[Tensor, "term key plane source"],
    names: tuple[str, ...],
) -> Explanation:
    """Return the terms less their baseline, with labels; UnsupportedModelError where they are not the pass's scores."""
    session, geometry = asked.session, asked.geometry
    keys = torch.as_tensor(asked.keys, device=capture.device)
    assert capture.attn_scores is not None
    used = double(capture.attn_scores[0, asked.query, keys])
    total = terms.sum((0, 2, 3))
    alibi = torch.zeros_like(total)
    if geometry.alibi_slopes is not None:
        nothing = torch.zeros(1, capture.length, capture.length, dtype=torch.get_default_dtype())
        alibi = double(finished_scores(nothing, geometry, [asked.head])[0, asked.query]).to(keys.device)[keys]
    off = (soft_capped((total + alibi)[None, None], geometry.soft_cap)[0, 0] - used).abs()
    rounding = allowed_error(capture.rotated_q, capture.rotated_k, geometry, session.dtype)[0, asked.query, keys]
    if not bool((off <= rounding).all()):
        raise UnsupportedModelError(
            f"the terms of {head_name(asked.layer, asked.head)} add up to other scores than the pass used, off by "
            f"{float(off.max()):.2g}; load the model in float32 if it is in half precision"
        )
    attention = used.softmax(-1)
    weights = attention if asked.against is None else double(keys == asked.against)
    contribution = terms - torch.einsum("k,tkps->tps", weights, terms)[:, None]
    score = total + alibi
    data = {"contribution": (("term", "key", "plane", "source"), contribution.cpu().numpy())}
    data |= {"score": ("key", (score - weights @ score).cpu().numpy()), "attention": ("key", attention.cpu().numpy())}
    if geometry.alibi_slopes is not None:
        data[ALIBI] = ("key", (alibi - weights @ alibi).cpu().numpy())
    n_rotary = len(geometry.rope.inv_freq)
    planes = [*range(n_rotary), *([-1] if terms.shape[2] > n_rotary else [])]
    assert capture.tokens is not None
    words = token_strings(session, capture.tokens)
    coordinates = {
        "term": list(TERMS),
        "key": list(asked.keys),
        "plane": planes,
        "source": np.array(names, dtype=object),
    }
    coordinates["token"] = ("key", np.array([words[key] for key in asked.keys], dtype=object))
    against = "the row's mean under its own attention" if asked.against is None else words[asked.against]
    attrs = {"model": session.label, "layer": asked.layer, "head": asked.head, "query": asked.query}
    attrs |= {"query_token": words[asked.query], "against": against, "against_key": asked.against, "side": asked.side}
    attrs |= {"prompt": "".join(words), "reference": reference.label, "note": note_of(capture)}
    dataset = xr.Dataset(data, coordinates, attrs | {"largest_difference": float(off.max())})
    deletion = Deletion(session, capture.tokens, asked.layer, asked.head, asked.query)
    return Explanation(dataset, deletion)

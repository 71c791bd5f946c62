"""Explaining a head's attention from one token: the row of its scores as a sum over terms, planes and sources."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_posgen.arithmetic import double, full_precision
from tl_posgen.core.options import require
from tl_posgen.editing.given import added_hooks
from tl_posgen.errors import InputError
from tl_posgen.models.geometry.proof import allowed_error, tolerance
from tl_posgen.models.loading.load import AnyModel, open_session
from tl_posgen.models.provenance import provenance_of
from tl_posgen.models.selection import head_name, one_head
from tl_posgen.models.tokens import name_of_text, token_strings
from tl_posgen.prompt.explanation import Explanation, Row, explanation_of
from tl_posgen.prompt.explanation_figures import ALIBI
from tl_posgen.prompt.numbers import TERMS, source_terms
from tl_posgen.prompt.score_split import note_of, one_prompt, proved
from tl_posgen.residual.numbers import SourceSums
from tl_posgen.residual.reference import Reference, given_reference
from tl_posgen.residual.residual_sources import ResidualSources, Side, SourceVectors, read_prompts

REST, REFERENCE_MEAN = "rest", "reference mean"
Parts = Mapping[str, Tensor]


@full_precision()
def explain(
    model: AnyModel,
    prompt: Any,
    layer: int | None = None,
    head: Any = None,
    query: int = -1,
    against: int | None = None,
    *,
    key: int | None = None,
    parts: Parts | None = None,
    rest: bool = False,
    reference: Any = None,
    other: Any = None,
    side: Literal["key", "query"] = "key",
) -> Explanation:
    r"""W_ij - W_ij' of one query i and every key j it sees, an exact sum over terms x RoPE planes x sources of the key.

    Terms are those of `split`: position, key_part, query_key, interaction. Sources are what the embedding, learned
    positions, earlier heads and MLPs, and biases wrote into the residual stream, norms frozen as they were in this
    pass: k_j is their sum, and so is the mean key of the reference, each by its own mean.

    Args:
        model: a model, or its name or directory.
        prompt: one text, or token ids.
        layer, head: one head; head="3.1" or "L3H1" alone names it too.
        query: index of the token that attends; negative ones count from the end.
        against: the key j' whose score is taken away, as softmax sees differences within a row only. If left out, the
            mean score of the other keys, each counted once: a mean under the head's own attention would be the score of
            the key itself where the head is sure.
        key: the key whose sources and planes are drawn and printed; the one of most attention if left out.
        parts: instead of the sources, parts of the residual stream at the layer's input, name -> [pos, d_model], such
            as features of a sparse autoencoder, its bias and its error. Of a key, position is made by the mean key of
            the reference, so parts have none of it; side="query" has what they make of position, too.
        rest: name what `parts` leave of the residual stream "rest"; without it they must add up to it.
        reference: as in `split`; the bundled book if left out, never the prompt itself.
        other: another prompt of as many tokens: its explanation is taken away, so that what is left makes the
            difference.
        side: whose sources: those of the "key" or of the "query".

    Returns:
        An `Explanation`. Where nothing rotates, position and interaction are zero and its `findings()` say so.

    Raises:
        InputError: a query outside the prompt, a key that it does not see, parts of another shape or
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
    session = open_session(model)
    index, picked = one_head(session, layer, head)
    tokens = one_prompt(session, prompt)
    n, d_model = len(tokens), session.model.cfg.d_model
    if side not in ("key", "query"):
        raise InputError(f"side {side!r}: choose key or query")
    keys = {name: at for name, at in {"against": against, "key": key}.items() if at is not None}
    for name, at in {"query": query, **keys}.items():
        if not isinstance(at, int | np.integer) or isinstance(at, bool) or not -n <= at < n:
            raise InputError(f"{name} {at!r} is outside the prompt of {n} tokens; give 0 to {n - 1}, or -{n} to -1")
    row = Row(session, tokens, index, picked, int(query) % n)
    keys = {name: int(at) % n for name, at in keys.items()}
    for name, at in keys.items():
        if at not in row.keys:
            seen = f"query {row.query} sees keys {row.keys[0]} to {row.keys[-1]} only"
            raise InputError(f"{name} {at}: {seen}; choose one of them")
    against, key = keys.get("against"), keys.get("key")
    another = None if other is None else one_prompt(session, other)
    if another is not None and len(another) != n:
        raise InputError(f"other= has {len(another)} tokens, and the prompt {n}; give as many")
    if another is not None and parts is not None:
        raise InputError("parts are of one prompt; leave other= out, and compare two explanations by `minus`")
    if parts is not None and (not isinstance(parts, Mapping) or not parts):
        raise InputError("parts: give name -> tensor [pos, d_model], one at least")
    require("rest", rest, bool)
    if rest and parts is None:
        raise InputError("rest=True names what parts leave; give parts, or leave rest out")
    for name, part in (parts or {}).items():
        if not isinstance(name, str):
            raise InputError(f"parts: {name!r} is no name; give strings")
        if not isinstance(part, Tensor) or tuple(part.shape) != (n, d_model):
            shape = list(part.shape) if isinstance(part, Tensor) else type(part).__name__
            raise InputError(f"part {name!r}: {shape}; the residual stream of this prompt is {[n, d_model]}")
        if part.is_meta or part.layout != torch.strided or part.is_complex() or not bool(part.isfinite().all()):
            raise InputError(f"part {name!r}: give finite real numbers in a dense tensor")
        if name in (REST, REFERENCE_MEAN):
            raise InputError(f"parts: {REST!r} and {REFERENCE_MEAN!r} are names of what is left; choose others")
    means = given_reference(session, reference, [index], sources=parts is None)
    letter: Side = "k" if side == "key" else "q"
    hooks = added_hooks(session)
    of_model = {"weights": means.weights} | ({"added_hooks": hooks} if hooks else {})

    def explained(given: Any, ids: Int[Tensor, " pos"]) -> Explanation:
        of_prompt = replace(row, tokens=ids)
        data = _terms_of_row(of_prompt, against, letter, means, parts, rest)
        data = data if key is None else data.assign_attrs(key=key)
        provenance = provenance_of(session, [ids], weights=False) | of_model | {"text": name_of_text(given)}
        return explanation_of(data, provenance | data.attrs, of_prompt)

    explanation = explained(prompt, tokens)
    return explanation if another is None else explanation.minus(explained(other, another))


def _terms_of_row(
    row: Row, against: int | None, side: Side, reference: Reference, parts: Parts | None, rest: bool
) -> xr.Dataset:
    """Return the terms of one prompt's scores, from one forward pass; UnsupportedModelError where they are not the
    pass's scores."""
    session, head, dtype = row.session, row.head, row.session.dtype
    needs = {"resid", "inputs", "attn_scores"}
    ((capture, reader),) = read_prompts(session, [row.tokens], needs=needs, heads=[(row.layer, head)])
    q, k = capture.q[0], capture.k[0]  # an edited capture refuses here
    assert capture.resid is not None
    assert capture.attn_scores is not None
    if parts is None:
        written = reader.of_capture(capture)
    else:
        residual = double(capture.resid.to(capture.device))
        values = torch.stack([double(part.detach()).to(residual.device) for part in parts.values()])
        left, reach = residual - values.sum(0), float(residual.abs().max())
        if not rest and not float(left.abs().max()) <= tolerance(dtype) * reach:
            raise InputError(
                "parts: they do not add up to the residual stream at the layer's input: off by "
                f"{float(left.abs().max()):.2g} where it reaches {reach:.2g}; give rest=True, which names what they "
                f"leave {REST!r}"
            )
        names, values = ((*parts, REST), torch.cat([values, left[None]])) if rest else (tuple(parts), values)
        written = ResidualSources(names, values, residual)
    by_source = SourceVectors.of_capture(session, capture, written, side)
    names, vectors = by_source.names, by_source.vectors()[:, 0]
    geometry, means = capture.geometry, reference.of_layer(capture.layer)
    of_heads = (means.mean_query, means.mean_key, means.mean_turn)
    mean_query, mean_key, turn = (x[head].to(k.device) for x in of_heads)
    sums = means.sources.get(side) if parts is None else None
    if sums is not None:  # one that is zero in one text may be there in the other
        of_prompt = SourceSums(1, names, vectors)
        names = tuple(dict.fromkeys((*names, *sums.names)))
        vectors, source_means = of_prompt.of_names(names), (sums.of_names(names)[:, head] / sums.n).to(k.device)
    else:  # the mean is a source of its own, which is taken from all tokens alike
        mean = mean_key if side == "k" else mean_query
        source_means = torch.cat([vectors.new_zeros(len(names), len(mean)), mean[None]])
        names, vectors = (*names, REFERENCE_MEAN), torch.cat([vectors, torch.zeros_like(vectors[:1])])
    keys = torch.as_tensor(row.keys, device=k.device)
    if side == "k":
        queries_and_keys = q[None, row.query], mean_query[None], vectors[:, keys], source_means
    else:
        queries_and_keys = vectors[:, row.query], source_means, k[None, keys], mean_key[None]
    terms = source_terms(*queries_and_keys, turn, row.query - keys, geometry.rope, geometry.scale)
    used, total = double(capture.attn_scores[0, row.query, keys]), terms.sum((0, 2, 3))
    bias = geometry.distance_bias(double(row.query - keys), [head])
    alibi = torch.zeros_like(total) if bias is None else bias[0].to(total)
    off = (geometry.finish(total[None, None], double(row.query - keys)[None], [head])[0, 0] - used).abs()
    rounding = allowed_error(capture.rotated_q, capture.rotated_k, geometry, dtype)[0, row.query, keys]
    largest_difference = proved(off, rounding, head_name(row.layer, head))
    baseline = keys == (-1 if against is None else against)
    contribution = _less_baseline(terms.movedim(1, 0), baseline).movedim(0, 1)
    data: dict[str, Any] = {"contribution": (("term", "key", "plane", "source"), contribution.cpu().numpy())}
    data["score"] = "key", _less_baseline(total + alibi, baseline).cpu().numpy()
    data["attention"] = "key", capture.attention(used[None, None])[0, 0].cpu().numpy()
    if bias is not None:
        data[ALIBI] = "key", _less_baseline(alibi, baseline).cpu().numpy()
    strings, n_rotary = token_strings(session, row.tokens), len(geometry.rope.inv_freq)
    coordinates = {
        "term": list(TERMS),
        "key": list(row.keys),
        "plane": [*range(n_rotary), *([-1] if terms.shape[2] > n_rotary else [])],
        "source": np.array(names, dtype=object),
        "token": ("key", np.array([strings[key] for key in row.keys], dtype=object)),
    }
    attrs = {"model": session.label, "layer": row.layer, "head": head, "query": row.query}
    attrs |= {} if against is None else {"against_key": against}
    attrs["against"] = "the mean of the other keys" if against is None else strings[against]
    attrs |= {} if parts is None else {"parts": ", ".join(parts)}
    attrs |= {"query_token": strings[row.query], "side": {"q": "query", "k": "key"}[side], "prompt": "".join(strings)}
    notes = [note_of(capture)] if note_of(capture) else []
    if parts is not None and side == "k":
        notes.append('position is of the mean key, and of none of the parts; side="query" gives what they make of it')
    attrs |= {"reference": reference.label, "note": "; ".join(notes), "largest_difference": largest_difference}
    return xr.Dataset(data, coordinates, attrs)


def _less_baseline(x: Float[Tensor, "key *rest"], is_baseline: Bool[Tensor, " key"]) -> Float[Tensor, "key *rest"]:
    """Return x_j less that of the one key of the baseline; without one, less the mean over the other keys."""
    if bool(is_baseline.any()):
        return x - x[is_baseline]
    return x - (x.sum(0) - x) / (len(x) - 1) if len(x) > 1 else torch.zeros_like(x)

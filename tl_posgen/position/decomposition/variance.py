"""The variance decomposition: how much of each head's scores is query, key, distance, and interaction."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double, elements_at_once, row_ranges
from tl_posgen.core.formatting import counted, in_brackets
from tl_posgen.core.measure import HEAD, TOKENS, Measure, Variable
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.options import Distances
from tl_posgen.core.sums import Sums
from tl_posgen.errors import InputError
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.models.selection import head_name
from tl_posgen.models.session import Session
from tl_posgen.position.decomposition.numbers.token_places import (
    BY_KEY,
    PLACES,
    PLACES_ALONE,
    PlaceSums,
    shares_by_place,
)
from tl_posgen.position.decomposition.numbers.variance_shares import (
    COMPONENTS,
    PARTS,
    DistanceWeights,
    TripleMoments,
    VarianceShares,
    variance_shares,
)
from tl_posgen.position.decomposition.variance_figures import draw_atlas, draw_places
from tl_posgen.report.head_figures import head_map
from tl_posgen.report.kinds import lines

_DIMS = ("tokens", *HEAD)
_OF_VISIBLE = "as a share of what softmax can see (q left out)"
_OF_W = "of Var w over all (query, key, distance); q: query, k: key, d: distance, qk: only both together; they sum to 1"
_BEST = "corr of w with the best position + content, f(q, d) + g(q, k)"
_OF_SIZE = "standard deviation between keys and distances of one query: of w, and of its parts"
SIZES = ("scores", *PARTS)
_AT_ONCE = 2**20  # scores in memory
_FEWEST_PROMPTS = 8  # for shares by place
_WHOSE_PLACE = "what takes the place of the query, the key, both or none; not bounded by 0; they sum to `share`"
_NO_SINKS = "by the scores; NaN where what joins a layer's softmax is not known"
_NO_TURN = "nothing rotates, so"


def _of_distance_and_key(numbers: Numbers) -> xr.DataArray:
    """sqrt((k + d) / (1 - q)): the correlation of what softmax sees of w with the best a(d) + c(k)."""
    return (
        numbers.array("share", part=["k", "d"]).sum("part", skipna=False) / (1 - numbers.array("share", part="q"))
    ) ** 0.5


@dataclass(frozen=True)
class Variance(Measure):
    r"""Var w = shares of q, k, d, qk, qd, kd, qkd, over all (query, key, distance); r = sqrt(1 - (kd + qkd) / (1 - q)).

    How close are scores to position + content, if every query meets every key at every distance, first token left out?
    Given are the shares of position, of content and of what needs both (interaction) in how the scores of one query
    differ, the correlation with the best such sum, and their sizes in logits. With few prompts a mean holds more
    chance, which counts as position: compare reports of equal numbers of prompts only, as the null models here are.

    w(q_i, k_j, d) is the score that query i would give key j at distance d. The seven shares sum to 1. Softmax does not
    see q, the mean of a query's scores, so `position` = d + qd, `content` = k + qk and `interaction` = kd + qkd are
    shares of what is left without it. A head is f(q, d) + g(q, k) exactly where interaction is zero, and `additive_r` =
    sqrt(1 - interaction) is the correlation with the best such sum, an upper end of all of them.

    `additive_r_of_scores` = sqrt(1 - kd - qkd) is that of all scores, with each query's own term q: the quantity that
    the paper's 0.959 is of, "an approximation of the arithmetic sum" of both, as far as its abstract says; its
    estimator is not public. Both agree where q is small. Where biases make q large (Qwen2.5: more than half of the
    variance in 50 of 336 heads), r over all scores is near 1 whatever softmax sees.

    Numbers are those without the first token, as query and as key, unless tokens="all" is asked for. `first_token`, the
    attention that it takes, is of the queries behind it, without its own row, which `slash` has. Moments add up exactly
    over any number of prompts; memory does not grow.

    A soft cap is not part of w: the decomposition is of the scores before it. ALiBi is, as part of d.

    With absolute=True each share of queries or keys is split by what comes from the token's place: position that RoPE
    did not put there, but learned positions or earlier layers did. With y a key (or query) less the mean of its prompt,
    G = mean_t E y_t E y_t^H is the covariance that prompts share at a position, and H - G, with H the covariance, that
    of what tokens are. G is unbiased, so shares by place may fall below 0 by chance; tokens shuffled within their
    prompts give 0. `absolute` is the part of content and interaction that comes from the key's place. Openings that
    texts share look like position: cut prompts from different places.

    Args:
        n_distances: distances 0 .. n_distances - 1; the longest prompt's length if left out.
        weights: of distances: "uniform", or "causal" (as often as they occur in a text that long).
        absolute: whether to split shares by where tokens stand; 8 prompts of one length at least, better 16.

    Raises:
        InputError: absolute=True and fewer than 8 prompts, or prompts of different lengths.

    Source: functional ANOVA (Hoeffding 1948, Sobol 1993); closed form for attention scores, shares by place: ours.

    Example:
        >>> result = Variance()("mini", "Down, down, down.", nulls=0)
        >>> bool((abs(result.trained["share"].sum("part") - 1) < 1e-6).all())
        True
    """

    n_distances: Distances | None = None
    weights: DistanceWeights = "uniform"
    absolute: bool = False

    usual_prompts = 16
    n_headlines = 2
    question = "How much is position, how much is content, how much is neither?"
    variables = {
        "additive_r": Variable.share(
            "additive r",
            f"{_BEST}, of what softmax can see: sqrt(position + content)",
            _DIMS,
            "additive_r",
            judged=True,
        ),
        "position": Variable.share("position", f"d + qd, {_OF_VISIBLE}", _DIMS, "position_share", ranked=True),
        "absolute": Variable(
            "share of the key's place",
            description=f"part of k + qk + kd + qkd, {_OF_VISIBLE}",
            dims=_DIMS,
            headline="absolute_share",
            short="place",
            interval=True,
        ),
        "places_alone": Variable(
            "share of places alone",
            description=f"what places of query and key determine, {_OF_VISIBLE}",
            dims=_DIMS,
            interval=True,
        ),
        "content": Variable.share("content", f"k + qk, {_OF_VISIBLE}", _DIMS, "content_share"),
        "interaction": Variable.share(
            "interaction", f"kd + qkd, {_OF_VISIBLE}", _DIMS, "interaction_share", ranked=True
        ),
        "additive_r_of_scores": Variable.share(
            "additive r, all scores", f"{_BEST}, with each query's own term: sqrt(1 - kd - qkd)", _DIMS
        ),
        "size": Variable("size", "logits", _OF_SIZE, (*_DIMS, "of"), "size", "size", interval=True),
        "share": Variable.share("share of the variance", _OF_W, (*_DIMS, "part")),
        "mean_energy": Variable.share(
            "energy share of the mean", "|E x|^2 / E|x|^2 of queries or keys x", ("tokens", "side", *HEAD)
        ),
        "first_token": Variable.share(
            "attention to the first token",
            f"E_i S_i0 over queries i > 0; {_NO_SINKS}",
            HEAD,
            "first_token_attention",
            "first token",
        ),
        "by_place": Variable(
            "share by place", "", f"of `share`, {_WHOSE_PLACE}", (*_DIMS, "part", "place"), interval=True
        ),
    }
    figures = {
        "places": draw_places,
        "atlas": draw_atlas,
        "depth": lines(
            {
                "correlation": [("additive r", "additive_r"), ("distance alone + key alone", _of_distance_and_key)],
                "size, logits": [(of, "size", {"of": of}) for of in SIZES],
                "share of what softmax sees": [(part, part) for part in PARTS],
            },
            title="Position + content by layer",
            subtitle="over all (query, key, distance), first token left out",
        ),
        "map": head_map(
            "additive_r",
            *PARTS,
            title="Position + content",
            subtitle="shares of the variance that softmax can see; additive r: the correlation of it with the best "
            "f(query, distance) + g(query, key), sqrt(position + content); first token left out",
        ),
    }
    caveats = {
        "absolute": f"{_NO_TURN} d, qd, kd and qkd are zero by construction: position is inside q and k, and the seven "
        "shares cannot tell it from content; those by place can (absolute=True).",
        "alibi": f"{_NO_TURN} qd, kd and qkd are zero by construction, and so is the interaction; position is the "
        "slope alone, beside what content moves.",
        "none": f"{_NO_TURN} d, qd, kd and qkd are zero by construction; shares by place are not (absolute=True).",
    }
    without_meaning = frozenset({"absolute", "none"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.absolute:  # shares by place have a meaning everywhere
            object.__setattr__(self, "without_meaning", frozenset())

    def labels(self) -> Mapping[str, Sequence[Any]]:
        return {"part": COMPONENTS, "place": list(PLACES), "of": SIZES}

    def kinds(self, data: xr.Dataset) -> Sequence[str]:
        return [kind for kind in self.figures if kind != "places" or "by_place" in data]

    def prepare(self, session: Session, tokens: Sequence[Tensor]) -> "Variance":
        if self.absolute and len(tokens) < _FEWEST_PROMPTS:
            raise InputError(
                f"variance: absolute=True compares prompts: {_FEWEST_PROMPTS} at least, not {len(tokens)}; give "
                f"n_prompts={self.usual_prompts}"
            )
        if self.absolute and len({len(prompt) for prompt in tokens}) > 1:
            raise InputError("variance: absolute=True compares prompts of one length; give length= to cut all alike")
        return self

    def usual(self) -> Mapping[str, Any]:
        return {"tokens": TOKENS[1], "of": "scores"}

    def of_layer(self, layer: LayerCapture) -> Mapping[str, Any]:
        moments = layer.shared(triple_moments_of)
        attention = {"first_token": layer.shared(first_token_attention)}
        places = {
            f"places of {side}": PlaceSums(1, x.clone(), [getattr(triples, side).about_mean for triples in moments])
            for side, x in (("q", layer.q), ("k", layer.k))
            if self.absolute
        }
        return dict(zip(TOKENS, moments, strict=True)) | places | attention

    def of_sums(self, sums: Sums) -> xr.Dataset:
        n, layer_values = self.n_distances or max(sums.lengths.values()), {}
        for layer, (geometry, heads) in sums.layers.items():
            values = []
            for first, tokens in enumerate(TOKENS):
                moments = sums.by_layer(tokens)[layer]
                shares = shares_of(moments, geometry, heads, n, self.weights)
                visible = shares.within_rows
                sizes = [visible.total, *(visible.total * visible.share(*components) for components in PARTS.values())]
                alone = torch.nan if geometry.window == 1 else 1.0  # where each token sees itself alone
                of_tokens = {part: alone * visible.share(*components) for part, components in PARTS.items()}
                of_tokens |= {"share": shares.shares, "additive_r": alone * visible.additive_r}
                of_tokens["additive_r_of_scores"] = shares.additive_r
                of_tokens["mean_energy"] = torch.stack([moments.q.mean_energy, moments.k.mean_energy])
                of_tokens["size"] = alone * torch.stack(sizes, -1).clamp(min=0).sqrt()
                if self.absolute:
                    places = {side: sums.by_layer(f"places of {side}")[layer] for side in "qk"}
                    shared = {side: of_side.shared(geometry.rope, first) for side, of_side in places.items()}
                    arguments = (geometry.rope, geometry.scale, geometry.reach(n), self.weights)
                    of_tokens["by_place"] = shares_by_place(shares, moments, shared, *arguments)
                values.append(of_tokens)
            if sums.by_layer(TOKENS[1])[layer].q.n < 2:  # of one token nothing varies
                values = [{name: torch.full_like(x, torch.nan) for name, x in arrays.items()} for arrays in values]
            layer_values[layer] = tuple(values)
        data = sums.variables_of(layer_values).assign(first_token=sums.mean("first_token"))
        if self.absolute:  # shares of what softmax can see: those that take the key's place, and of places alone
            by_place = data["by_place"]
            visible = (1 - data["share"].sel(part="q", drop=True)).where(data["position"].notnull())
            by_key = by_place.sel(BY_KEY).sum(("part", "place"), skipna=False)
            alone: Any = sum(by_place.sel(part=part, place=at, drop=True) for part, at in PLACES_ALONE.items())
            data = data.assign(absolute=by_key / visible, places_alone=alone / visible)[list(self.variables)]
        why, narrow = "", [str(layer) for layer, (geometry, _) in sorted(sums.layers.items()) if geometry.window == 1]
        if max(moments.q.n for moments in sums.by_layer(TOKENS[1]).values()) < 2:
            why = "one token besides the first says nothing of what varies; give longer prompts"
        elif narrow:
            why = f"in layer {', '.join(narrow)} a token sees itself alone, so softmax sees nothing vary"
        return data.assign_attrs(n_distances=n, not_defined=why)

    def findings(self, numbers: Numbers) -> list[str]:
        texts = []
        if "absolute" in numbers:  # how much of content and interaction takes the key's place
            seen, most = 1 - numbers.array("share", part="q"), numbers.extreme("absolute")
            at = {part: {"part": list(PARTS[part]), "place": BY_KEY["place"]} for part in ("content", "interaction")}
            arrays = {part: numbers.array("by_place", **labels).sum(["part", "place"]) for part, labels in at.items()}
            shares = ", ".join(f"{numbers.number(array / seen):.1%} in {part}" for part, array in arrays.items())
            of_most = numbers("absolute", layer=most.layer, head=most.head) if most.number else most.number
            texts.append(
                f"Of the score variance that softmax can see, where the key stands makes {numbers('absolute'):.1%}, "
                "which "
                f"RoPE did not put there: {shares}. Most: {head_name(most.layer, most.head)}, {of_most:.1%}."
            )
        if not texts or any(numbers(part).value for part in ("position", "interaction")):  # else zero by construction
            n = counted(int(numbers.data["additive_r"].sel(tokens="without first").notnull().sum()), "head")
            size, shares = numbers("size"), ", ".join(f"{part} {numbers(part):.0%}" for part in PARTS)
            of_query = numbers.data["share"].sel(tokens="without first", part="q")
            texts += [
                f"Softmax sees how the scores of one query differ: by a standard deviation of {size.with_interval:.2f} "
                f"logits{size.null_in_brackets:.2f}, mean over {n}, first token left out. Of this variance, where "
                f"every query meets every key at every distance: {shares}, which needs both at once. Most position: "
                f"{numbers.extreme('position'):.3f}; most interaction: {numbers.extreme('interaction'):.3f}.",
                "So what softmax sees correlates with the best position + content, f(query, distance) + g(query, key), "
                f"at additive r = {numbers('additive_r'):.3f}{numbers.layers_not_above('additive_r')}. With each "
                "query's own "
                f"term, which softmax cannot see, r = {numbers('additive_r_of_scores'):.3f}; this term is more than "
                "half "
                f"of the variance in {int((of_query > 0.5).sum())} of {n}.",
            ]
        if first := numbers("first_token"):
            half = numbers.number((numbers.array("first_token") > 0.5).sum(HEAD))
            n = counted(int(numbers.data["first_token"].notnull().sum()), "head")
            texts.append(
                f"The first token takes {first:.0%} of the attention of the queries behind it, mean over {n}, and more "
                f"than half in {half.plain:.0f}{in_brackets(half.null_range)}."
            )
        return texts + ([f"Not defined: {numbers.attrs['not_defined']}."] if numbers.attrs["not_defined"] else [])


def triple_moments_of(layer: LayerCapture) -> list[TripleMoments]:
    """Return the moments of q and k of all tokens, and without the first, as `TOKENS` has them; ask for them by
    `layer.shared`."""
    return TripleMoments.with_and_without_first(layer.q, layer.k, layer.geometry.rope)


def first_token_attention(layer: LayerCapture) -> Float[Tensor, " head"]:
    """E_i S_i0: the attention that the first token takes by the layer's scores, mean over the queries behind it,
    whatever hooks make of patterns; no [query, key] matrix is formed. NaN of one token alone, and where sinks join the
    softmax and are not known."""
    n, shares = layer.length, []
    if n < 2 or (layer.geometry.sinks and layer.sinks is None):
        return torch.full((len(layer.heads),), torch.nan)
    for start, stop in row_ranges(n, len(layer.heads) * n, elements_at_once(layer.device, _AT_ONCE)):
        shares.append(_first_share(layer.score_rows(start, stop), layer.sinks))
    return double(torch.cat(shares, -1)[:, 1:]).mean(-1)


def _first_share(scores: Float[Tensor, "head row key"], sinks: Tensor | None) -> Float[Tensor, "head row"]:
    """Return the share of the first key in the softmax of each row, which sinks join."""
    normalisers = scores.logsumexp(-1)
    if sinks is not None:
        normalisers = normalisers.logaddexp(sinks.to(scores)[:, None])
    return (scores[..., 0] - normalisers).exp()


def shares_of(
    moments: TripleMoments, geometry: LayerGeometry, heads: Sequence[int], n: int, weights: DistanceWeights
) -> VarianceShares:
    """Return the decomposition of a layer's heads over n distances, at most those in its window; ALiBi joins d."""
    n = geometry.reach(n)
    bias = geometry.distance_bias(torch.arange(n, dtype=DOUBLE, device=moments.q.mean.device), heads)
    return variance_shares(moments, geometry.rope, geometry.scale, n, weights=weights, bias=bias)

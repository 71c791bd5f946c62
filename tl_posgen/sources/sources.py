"""Sources: who writes the position, the content and the interaction of every head's scores."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
import torch
import xarray as xr
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double
from tl_posgen.core.feed import on_host
from tl_posgen.core.measure import HEAD, TOKENS, Measure, Variable
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import Numbers, mean_of
from tl_posgen.core.options import Distances, Each
from tl_posgen.core.run import Run
from tl_posgen.core.sums import PromptGroups, Sums, total
from tl_posgen.errors import InputError
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.session import Session
from tl_posgen.position.decomposition.numbers.variance_shares import (
    NOTHING,
    DistanceWeights,
    Spread,
    turning,
    weighted_spread,
)
from tl_posgen.position.decomposition.variance import triple_moments_of
from tl_posgen.report.kinds import heat_maps
from tl_posgen.residual.numbers import REST, SourceSums, sorted_sources
from tl_posgen.residual.residual_sources import By, Side, SourceVectors, read_prompts
from tl_posgen.rope.planes import SecondMoments
from tl_posgen.rope.rotation import rotate
from tl_posgen.slash.dominance import statistics_from_qk
from tl_posgen.sources.numbers import TERMS, source_form, source_weights
from tl_posgen.stats.correlations import spearman

TermName = Literal["position", "content", "interaction", "key"]
_SIDE_WORDS = {"k": "keys", "q": "queries"}
WORDS = {"position": "position", "content": "content", "interaction": "the interaction", "key": "the key part"}
DIMS = ("tokens", "side", "term", *HEAD)
_OF_SOURCE = (*HEAD, "source")
_PREDICTORS = {"position share": "share", "energy of the constant": "constant_energy"}  # of the fall -> its variable
UNTOUCHED = "untouched"
MOST_LAYERS, MOST_SOURCES = 8, 3  # that a sentence names; that a row of the table has
NO_TURN = "nothing rotates, so position and interaction are zero by construction and have no sources; content has."


@dataclass(frozen=True)
class Sources(Measure):
    r"""share_s = E[w_s w] / E w^2: w the position part of a score, w_s what source s of its key (or query) gives of it.

    Which upstream component writes the position part of each head's scores? The residual stream is a sum of what the
    embedding, earlier attention and earlier MLPs wrote; with every norm frozen, so are keys and queries. Shares sum to
    1. Sources that cancel have negative ones, so the sum of absolute shares stands beside them.

    k_j = sum_s k_{s,j}, exactly: RMSNorm, LayerNorm and qk-norm are frozen at their divisor in this pass, and biases
    are sources of their own. Expectations are over every query, key and distance, as in `variance`, first token left
    out unless tokens="all" is asked for. Parts of w_qkd = s Re sum_m z^q_m conj(z^k_m) u_m(d), with kbar and ubar the
    means and v = u - ubar: position, of kbar and v; content, of k - kbar and ubar; interaction, of k - kbar and v; key,
    of E q, k - kbar and ubar. Their E w^2 is the variance that `variance` gives d + qd, k + qk, kd + qkd, and k.

    Position on the key side needs the mean of each source alone, from one pass; what needs second moments takes a
    second pass, and intervals of its shares hold the weights of all prompts fixed. One hop only: the first MLP may
    stand for the embedding. Averages over tokens are nearly constant without training too: compare with random init.

    check=True takes the constant E k_s of each source from the captured keys of a prompt, as the other prompts have it,
    and correlates the relative fall of each head's slash score over all heads and sources with the position share, and
    with |E k_s|^2.

    Args:
        terms: the parts whose sources are asked for.
        sides: "k", sources of keys; "q", of queries.
        by: whether all heads of a layer are one source, or each head.
        n_distances: distances 0 .. n_distances - 1; the longest prompt's length if left out.
        weights: of distances: "uniform", or "causal" (as often as they occur in a text that long).
        check: whether to remove the constant of each source from the keys and correlate the fall of slash scores.

    Raises:
        InputError: a check of one prompt, or without position and keys.
        UnsupportedModelError: a model whose queries or keys cannot be traced to what earlier layers wrote.

    Source: ours; direct contributions to a head's input through frozen norms are common, their shares of position are
    not.

    Example:
        >>> data = Sources()("mini", "Down, down, down.", nulls=0).sel(tokens="without first", side="k")
        >>> bool((abs(data["share"].sum("source") - 1) < 1e-6).all())
        True
    """

    terms: Annotated[Sequence[TermName], Each()] = ("position",)
    sides: Annotated[Sequence[Side], Each()] = ("k",)
    by: By = "layer"
    n_distances: Distances | None = None
    weights: DistanceWeights = "uniform"
    check: bool = False

    question = "Who writes the position?"
    variables = {
        "top_share": Variable(
            "largest share of a source",
            description="max_s share_s",
            dims=DIMS,
            headline="source_share",
            short="src",
            interval=True,
        ),
        "top_source": Variable("source of the largest share", "", "its name", DIMS),
        "share": Variable(
            "share of the source", "", "E[w_s w] / E w^2; they sum to 1", (*DIMS, "source"), interval=True
        ),
        "mean_square": Variable("E w^2", "logits^2", "of the part of the score that the term is", DIMS),
        "fall": Variable(
            "fall of the slash score",
            description="1 - score without the source's constant in the keys / score",
            dims=_OF_SOURCE,
            interval=True,
            bounds=(-np.inf, 1),
        ),
        "constant_energy": Variable("energy of the constant", "", "|E k_s|^2", _OF_SOURCE),
        "rho": Variable.correlation(
            "Spearman's rho with the fall", "over all heads and sources of layers with several sources", ("predictor",)
        ),
    }
    figures = {
        "layers": heat_maps(
            "share",
            "layer",
            "source",
            title="Sources, mean over heads",
            subtitle="shares sum to 1 along a row; negative where a source works against the others",
            limits=(-1.0, 1.0),
        ),
    }
    whole_rows = True
    caveats = dict.fromkeys(("absolute", "alibi", "none"), NO_TURN)

    def labels(self) -> Mapping[str, Sequence[Any]]:
        return {"side": list(self.sides), "term": list(self.terms), "predictor": list(_PREDICTORS)}

    def usual(self) -> Mapping[str, Any]:
        return {"tokens": TOKENS[1], "side": self.sides[0], "term": self.terms[0]}

    def prepare(self, session: Session, tokens: Sequence[Tensor]) -> "Sources":
        if self.check and ("position" not in self.terms or "k" not in self.sides):
            raise InputError('sources: check=True needs "position" in terms and "k" in sides; add them')
        if self.check and len(tokens) < 2:
            raise InputError("sources: check=True takes constants from the other prompts: give two at least")
        return self

    @property
    def places(self) -> list[tuple[Side, TermName]]:
        """Side and term of every share."""
        return list(product(self.sides, self.terms))

    @property
    def products(self) -> list[tuple[Side, TermName]]:
        """Side and term of the shares that need more than means of sources: products of every token with fixed weights,
        from a second pass."""
        return [(side, term) for side, term in self.places if TERMS[term][side] != "mean"]

    def of_model(self, run: Run) -> xr.Dataset:
        groups, key_sums = PromptGroups(self, grouped=run.init is None), dict[tuple[int, int], SourceSums]()

        def add(capture: LayerCapture, values: Mapping[str, Any]) -> Mapping[str, Any]:
            values = on_host(values)
            groups.sums_of(capture.prompt).add_layer(capture, values)
            return values

        for capture, reader in read_prompts(run.session, run.rows, self.by, **run.where):
            written = reader.of_capture(capture)
            by_tokens = zip(TOKENS, capture.shared(triple_moments_of), strict=True)
            summands: dict[str, Any] = {f"moments {tokens}": moments for tokens, moments in by_tokens}
            for side in self.sides:
                vectors = SourceVectors.of_capture(run.session, capture, written, side)
                behind_first = vectors.sums(REST)
                summands[f"{side} {TOKENS[0]}"] = vectors.sums(slice(0, 1)) + behind_first
                summands[f"{side} {TOKENS[1]}"] = behind_first
            values = add(capture, summands)
            if self.check:
                key_sums[capture.prompt, capture.layer] = values[f"k {TOKENS[1]}"]
        totals, again = total(groups.parts), self.check or self.products
        for capture, reader in read_prompts(run.session, run.rows, self.by, **run.where) if again else ():
            written, rope, summands = reader.of_capture(capture), capture.geometry.rope, {}
            by_side = {side: SourceVectors.of_capture(run.session, capture, written, side) for side in self.sides}
            for (tokens, part), (side, term) in product(zip(TOKENS, (slice(None), REST), strict=True), self.products):
                # <x_s, g> summed over tokens, x_s what a source gives, or its deviation from the mean over all prompts
                x, kind, distance = by_side[side].whole, TERMS[term], self.distance(totals, capture.layer, tokens)
                moments, sums = (totals.by_layer(f"{name} {tokens}")[capture.layer] for name in ("moments", side))
                means, centred = sums.means.to(x.device), kind[side] == "rest"
                form = source_form(kind, side, moments, distance)
                form = SecondMoments(form.plain.to(x.device), form.conjugate.to(x.device))
                g = source_weights(form, x - means.sum(0)[:, None] if centred else x, rope)
                products = by_side[side].products(g, part)
                of_means = SourceSums(0, sums.names, -(means * g[:, part].sum(1)).sum(-1))
                summands[f"{side} {term} {tokens}"] = products + of_means if centred else products
            if self.check:  # slash scores [head, distance] untouched, and without the constant that others give
                others = totals.by_layer(f"k {TOKENS[1]}")[capture.layer] - key_sums[capture.prompt, capture.layer]
                scores = [statistics_from_qk(capture, capture.rotated_q, capture.rotated_k).score[0]]
                for constant in others.means:
                    keys = rotate(capture.k - constant[:, None].to(capture.k), capture.positions, rope)
                    scores.append(statistics_from_qk(capture, capture.rotated_q, keys).score[0])
                near = torch.stack(scores)[..., : max(1, min(map(len, run.rows)) // 2)]
                summands["slash"] = SourceSums(1, (UNTOUCHED, *others.names), double(near))
            add(capture, summands)
        return groups.dataset()

    def distance(self, sums: Sums, layer: int, tokens: str) -> Spread:
        """Return the spread of u(d) over the distances of the prompts of these sums, as in `variance`."""
        (geometry, _), moments = sums.layers[layer], sums.by_layer(f"moments {tokens}")[layer]
        n = self.n_distances or max(sums.lengths.values())
        return weighted_spread(*turning(moments, geometry.rope, geometry.reach(n), self.weights))

    def of_sums(self, sums: Sums) -> xr.Dataset:
        last_first = (
            source_sums
            for side in self.sides
            for source_sums in reversed(sums.by_layer(f"{side} {TOKENS[1]}").values())
        )
        sources = sorted_sources(name for source_sums in last_first for name in source_sums.names)
        shape = (len(TOKENS), len(self.sides), len(self.terms))
        arrays: dict[str, dict[int, Any]] = {"share": {}, "mean_square": {}}
        for layer, (geometry, heads) in sums.layers.items():
            share = torch.full((*shape, len(heads), len(sources)), torch.nan, dtype=DOUBLE)
            squares = share[..., 0].clone()
            for row, tokens in enumerate(TOKENS):
                moments, distance = sums.by_layer(f"moments {tokens}")[layer], self.distance(sums, layer, tokens)
                energies = [x.mean.abs().square().sum(-1) + x.energy.sum(-1) for x in (moments.q, moments.k)]
                for place, (side, term) in zip(np.ndindex(shape[1:]), self.places, strict=True):
                    if TERMS[term]["d"] == "rest" and not geometry.rope.rotary_dim:
                        continue  # zero by construction
                    of_side: SourceSums = sums.by_layer(f"{side} {tokens}")[layer]
                    if (side, term) in self.products:
                        values = sums.by_layer(f"{side} {term} {tokens}")[layer].of_names(of_side.names) / of_side.n
                    else:  # of the mean alone, <xbar_s, g>
                        form, means = source_form(TERMS[term], side, moments, distance), of_side.means
                        values = (means * source_weights(form, means.sum(0)[:, None], geometry.rope)[:, 0]).sum(-1)
                    size = values.sum(0)
                    divisor = size.masked_fill(size <= NOTHING * energies[0] * energies[1], torch.nan)  # else rounding
                    columns = [sources.index(name) for name in of_side.names]
                    share[row][place][:, columns] = (values / divisor).mT
                    squares[row][place] = geometry.scale**2 * size
            arrays["share"][layer], arrays["mean_square"][layer] = share.numpy(), squares.numpy()
        data = xr.Dataset({name: sums.over_layers(name, values) for name, values in arrays.items()})
        share = data["share"].assign_coords(source=np.array(sources, object))
        data = data.drop_vars("source").assign(share=share)
        data["top_share"] = share.max("source")
        names = share["source"].values[share.fillna(-np.inf).argmax("source").values]
        data["top_source"] = data["top_share"].copy(data=np.where(data["top_share"].notnull(), names, ""))
        if self.check:
            data = data.merge(_checked(sums, share.sel(tokens=TOKENS[1], side="k", term="position", drop=True)))
        return data[[name for name in self.variables if name in data]]

    def findings(self, numbers: Numbers) -> list[str]:
        lines = []
        layers = [layer for layer in numbers.data["layer"].values if layer > 0] or list(numbers.data["layer"].values)
        for side, term in self.places:
            tops = [(layer, top[0]) for layer in layers if (top := top_of(numbers, side, term, layer, 1))]
            if not tops:
                lines.append(
                    f"No head's scores have {WORDS[term]} that a source could write through {_SIDE_WORDS[side]}."
                )
                continue
            places = np.unique(np.linspace(0, len(tops) - 1, MOST_LAYERS).round().astype(int))
            chosen = [tops[place] for place in places]
            largest = "; ".join(f"layer {layer}: {name} {share.with_interval:.0%}" for layer, (name, share) in chosen)
            of_inits = (
                [(layer, top_of(numbers.of_inits, side, term, layer, 1)) for layer, _ in chosen]
                if numbers.inits
                else []
            )
            phrases = [f"layer {layer}: {top[0][0]} {top[0][1].plain:.0%}" for layer, top in of_inits if top]
            null = f" (random init, its own largest: {'; '.join(phrases)})" if phrases else ""
            absolute = self.absolute(numbers, side=side, term=term, layer=[layer for layer, _ in tops])
            lines += [
                f"Who writes {WORDS[term]} through {_SIDE_WORDS[side]}, the source with the largest mean share over "
                f"the heads of a layer: {largest}{null}.",
                f"Shares add up to 1, and without their signs to {absolute:.2f}: above 1, sources cancel.",
            ]
        if "rho" in numbers:
            phrases = ", ".join(f"{name} {numbers('rho', predictor=name):.2f}" for name in _PREDICTORS)
            lines.append(f"Rank correlation with the fall of the slash score without a source's constant: {phrases}.")
        return lines

    def absolute(self, numbers: Numbers, **labels: Any) -> Number:
        """Return the mean over heads of sum_s |share_s|: 1 where nothing cancels."""
        return numbers.number(abs(numbers.array("share", **labels)).sum("source", min_count=1), (1, np.inf))

    def table(self, numbers: Numbers) -> pd.DataFrame:
        """Return a row for each layer, side and term with its largest sources and their mean shares over heads."""
        rows = []
        for (side, term), layer in product(self.places, numbers.data["layer"].values):
            top = [f"{name} {number.plain:.2f}" for name, number in top_of(numbers, side, term, layer, MOST_SOURCES)]
            cells = {"side": side, "term": term, "layer": int(layer), "largest shares": ", ".join(top) or "none"}
            absolute = self.absolute(numbers, side=side, term=term, layer=layer)
            rows.append({**cells, "sum of |shares|": f"{absolute.plain:.2f}"})
        return pd.DataFrame(rows)


def top_of(numbers: Numbers, side: str, term: str, layer: Any, most: int) -> list[tuple[str, Number]]:
    """Return the sources with the largest mean share over the heads of a layer, and these means."""
    share = mean_of(numbers.of_side(numbers.array("share", side=side, term=term, layer=layer)))
    names = share.mean("head").to_series().dropna().nlargest(most).index
    return [(str(name), numbers("share", side=side, term=term, layer=layer, source=name)) for name in names]


def _checked(sums: Sums, share: xr.DataArray) -> xr.Dataset:
    """Return the fall of the slash score of every head and source at the head's best distance D < N/2, what may predict
    it, and how well it does.

    Args:
        share: [layer, head, source] of position, keys.
    """
    datasets = []
    for layer, scores in sums.by_layer("slash").items():
        constants = sums.by_layer(f"k {TOKENS[1]}")[layer]
        untouched, *without_sources = scores.of_names([UNTOUCHED, *constants.names]) / scores.n
        best = untouched.argmax(-1, keepdim=True)
        at_best = torch.stack(without_sources).gather(-1, best.expand(len(without_sources), -1, -1))[..., 0]
        fall, energy = 1 - at_best / untouched.gather(-1, best)[:, 0], constants.means.square().sum(-1)
        arrays = {"fall": (("source", "head"), fall.numpy()), "constant_energy": (("source", "head"), energy.numpy())}
        labels = {"layer": layer, "head": sums.layers[layer][1], "source": list(constants.names)}
        datasets.append(xr.Dataset(arrays, labels))
    data = sums.join_layers(datasets).reindex(source=share["source"]).transpose(*_OF_SOURCE)
    columns = [share, data["constant_energy"], data["fall"].where(share.notnull().sum("source") > 1)]
    *predictors, fall = torch.from_numpy(np.stack([column.transpose(*_OF_SOURCE).values.ravel() for column in columns]))
    pairs = [torch.stack([predictor, fall]) for predictor in predictors]
    rho = [float(spearman(*pair[:, pair.isfinite().all(0)])) for pair in pairs]
    return data.assign(rho=xr.DataArray(rho, {"predictor": list(_PREDICTORS)}))

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

from tl_posgen.core.host_copies import HostCopies
from tl_posgen.core.measure import HEAD, TOKENS, Measure, Variable
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import Numbers, mean_of
from tl_posgen.core.options import Distances, Each
from tl_posgen.core.run import Run
from tl_posgen.core.sums import PromptGroups, Sums, total
from tl_posgen.errors import InputError
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.selection import select_heads
from tl_posgen.position.decomposition.numbers.variance_shares import DistanceWeights
from tl_posgen.residual.residual_sources import By, ResidualSources
from tl_posgen.sources.constants import (
    CHECKED,
    CURVES,
    OF_MEAN_TOKEN,
    PREDICTORS,
    MeanToken,
    checked,
    strongest_pairs,
    without_constants,
)
from tl_posgen.sources.figures import draw_check, draw_curves, draw_graph, draw_heads, draw_layers
from tl_posgen.sources.source_sums import (
    SIDE_WORDS,
    Factors,
    Letter,
    SourcedSide,
    SourceSums,
    TermName,
    all_sources,
    folded,
    products_of,
    read_prompts,
    share_of,
    sums_of,
    takes_products,
)

WORDS = {"position": "position", "content": "content", "interaction": "the interaction", "key": "the key part"}
DIMS = ("tokens", "side", "term", *HEAD)
MOST_LAYERS, MOST_SOURCES = 8, 3  # that a sentence names; that a row of the table has
NO_TURN = "nothing rotates, so position and interaction are zero by construction and have no sources; content has."


@dataclass(frozen=True)
class Sources(Measure):
    r"""share_s = E[w_s w] / E w^2: w the position part of a score, w_s what source s of its key (or query) gives of it.

    Which upstream component writes the position part of each head's scores: the residual stream is a sum of what the
    embedding, earlier attention and earlier MLPs wrote, and with every norm frozen so are keys and queries. Shares
    sum to 1; sources that cancel have negative ones, so the sum of absolute shares stands beside them.

    k_j = sum_s k_{s,j}, exactly: RMSNorm, LayerNorm and qk-norm are frozen at their divisor in this pass, and biases
    are sources of their own. Expectations are over every query, key and distance, as in `variance`, first token left
    out unless tokens="all" is asked for. Parts of w_qkd = s Re sum_m z^q_m conj(z^k_m) u_m(d), with kbar and ubar the
    means and v = u - ubar: position, of kbar and v; content, of k - kbar and ubar; interaction, of k - kbar and v; key,
    of E q, k - kbar and ubar. Their E w^2 is the variance that `variance` gives d + qd, k + qk, kd + qkd, and k.

    A prompt in which every token is the mean token (the mean embedding, first token left out) shows how much of a
    constant needs tokens that vary: the cosine of E x_s with what s writes there. With both sides, curves of the
    strongest pairs of a query source and a key source are kept, a_st(d), which add up to the curve of mean query and
    mean key. Heads chosen with heads=report.heads("slash") are those of the graph.

    Position on the key side needs the mean of each source alone, from one pass; what needs second moments takes a
    second pass, and intervals of its shares hold the weights of all prompts fixed. One hop only: the first MLP may
    stand for the embedding, which fold=["mlp0"] makes one source with it. Averages over tokens are nearly constant
    without training too: compare with random init.

    check=True takes the constant E k_s of each source from the captured keys of a prompt, as the other prompts have it,
    and correlates the relative fall of each head's slash score over all heads and sources with the position share, with
    |E k_s|^2 and with E|k_s|^2.

    Args:
        terms: of which parts.
        sides: "k", sources of keys; "q", of queries.
        by: whether all heads of a layer are one source, or each head.
        fold: "mlp0": the embedding and the first MLP are one source.
        n_distances: distances 0 .. n_distances - 1; the longest prompt's length if left out.
        weights: of distances: "uniform", or "causal" (as often as they occur in a text that long).
        check: whether to remove the constant of each source from the keys and correlate the fall of slash scores.

    Raises:
        InputError: a check of one prompt, or without position and keys.
        UnsupportedModelError: a model whose queries or keys cannot be traced to what earlier layers wrote.

    Source: ours; direct contributions to a head's input through frozen norms are common, their shares of position are
    not.

    Example:
        >>> data = Sources()("mini", "Down, down, down.", null_seeds=()).sel(tokens="without first", side="k")
        >>> bool((abs(data["share"].sum("source") - 1) < 1e-6).all())
        True
    """

    terms: Annotated[Sequence[TermName], Each()] = ("position",)
    sides: Annotated[Sequence[Letter], Each()] = ("k",)
    by: By = "layer"
    fold: Annotated[Sequence[Literal["mlp0"]], Each(0)] = ()
    n_distances: Distances | None = None
    weights: DistanceWeights = "uniform"
    check: bool = False

    question = "Who writes the position?"
    variables = {
        "top_share": Variable(
            *("largest share of a source", "", "max_s share_s", DIMS, "source_share", "src"), interval=True
        ),
        "top_source": Variable("source of the largest share", "", "its name", DIMS),
        "share": Variable(
            "share of the source", "", "E[w_s w] / E w^2; they sum to 1", (*DIMS, "source"), interval=True
        ),
        "absolute": Variable(
            *("sum of absolute shares", "", "sum_s |share_s|: 1 where nothing cancels", DIMS),
            interval=True,
            bounds=(1, np.inf),
        ),
        "of_mean_token": OF_MEAN_TOKEN,
        **CURVES,
        "mean_square": Variable("E w^2", "logits^2", "of the part of the score that the term is", DIMS),
        **CHECKED,
    }
    figures = {
        "layers": draw_layers,
        "heads": draw_heads,
        "graph": draw_graph,
        "curves": draw_curves,
        "check": draw_check,
    }
    by_head = frozenset({"heads"})
    whole_rows = True
    caveats = dict.fromkeys(("absolute", "alibi", "none"), NO_TURN)

    def labels(self) -> Mapping[str, Sequence[Any]]:
        return {"side": list(self.sides), "term": list(self.terms), "predictor": list(PREDICTORS)}

    def usual(self) -> Mapping[str, Any]:
        return {"tokens": TOKENS[1], "side": self.sides[0], "term": self.terms[0]}

    def kinds(self, data: xr.Dataset) -> Sequence[str]:
        needed = {"check": "fall", "curves": "curve"}
        return [kind for kind in self.figures if needed.get(kind, "share") in data]

    def prepare(self, model: Any, tokens: Sequence[Tensor]) -> "Sources":
        if self.check and ("position" not in self.terms or "k" not in self.sides):
            raise InputError('sources: check=True needs "position" in terms and "k" in sides; add them')
        if self.check and len(tokens) < 2:
            raise InputError("sources: check=True takes constants from the other prompts: give two at least")
        return self

    @property
    def places(self) -> list[tuple[Letter, TermName]]:
        """Side and term of every share."""
        return [(side, term) for side in self.sides for term in self.terms]

    @property
    def folded(self) -> Mapping[str, str]:
        """Source -> the name of those that it is one with."""
        return dict.fromkeys(("embed", "L0 MLP", "L0 MLP bias"), "embed + L0 MLP") if self.fold else {}

    # The passes

    @property
    def reads_twice(self) -> bool:
        """Whether a second pass of the prompts is needed."""
        return self.check or any(takes_products(*place) for place in self.places)

    def passes(self, run: Run) -> int:
        return len(run.rows) * (1 + self.reads_twice) + 1

    def of_model(self, run: Run) -> xr.Dataset:
        groups, own = PromptGroups(self, grouped=run.init is None), dict[tuple[int, int], SourceSums]()
        mean_token, layers = MeanToken(), select_heads(run.model, **run.where)
        for capture, written in read_prompts(run, self.by):
            if capture.layer == min(layers):
                mean_token.add(written)
            written = folded(written, self.folded)
            values = self.add(groups, capture, sums_of(run.session, capture, written, self.sides))
            if self.check:
                own[capture.prompt, capture.layer] = values[f"k {TOKENS[1]}"]
        whole = total(groups.parts)
        for capture, written in read_prompts(run, self.by) if self.reads_twice else ():
            written = folded(written, self.folded)
            found = self.products(run, capture, written, whole)
            if self.check:
                rest = whole.by_layer(f"k {TOKENS[1]}")[capture.layer] - own[capture.prompt, capture.layer]
                found |= without_constants(run, capture, written, rest)
            self.add(groups, capture, found)
        data = groups.dataset()
        every = data["source"].values.tolist()
        data["of_mean_token"] = mean_token.cosines_of(run, whole, self.sides, self.by, self.folded, every)
        return data.assign(strongest_pairs(whole, self.n_distances, self.weights) if len(self.sides) > 1 else {})

    def add(self, groups: PromptGroups, capture: LayerCapture, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add values of one layer of one prompt; return them on the host."""
        copies = HostCopies.start(capture, {self.name: values}).arrived()
        groups.sums_of(capture.prompt).add_layer(copies.place, copies.values[self.name])
        return copies.values[self.name]

    def products(self, run: Run, capture: LayerCapture, written: ResidualSources, whole: Sums) -> dict[str, Any]:
        """Return what the terms take of one layer of one prompt beyond means of sources."""
        found = {}
        every = {tokens: self.factors(whole, capture.layer, tokens) for tokens in TOKENS}
        for side in self.sides:
            sourced = SourcedSide.of_capture(run.session, capture, written, side)
            for term, tokens in product(self.terms, TOKENS):
                if takes_products(side, term):
                    sums = whole.by_layer(f"{side} {tokens}")[capture.layer]
                    one = products_of(sourced, side, term, tokens, every[tokens], sums)
                    found[f"{side} {term} {tokens}"] = one
        return found

    def factors(self, sums: Sums, layer: int, tokens: str) -> Factors:
        return Factors.of_layer(sums, layer, tokens, self.n_distances, self.weights)

    # The dataset

    def finish(self, sums: Sums) -> xr.Dataset:
        every, shape = all_sources(sums, self.sides), (len(TOKENS), len(self.sides), len(self.terms))
        found: dict[str, dict[int, Any]] = {"share": {}, "mean_square": {}}
        for layer in sums.layers:
            cells = []
            for tokens in TOKENS:
                factors = self.factors(sums, layer, tokens)
                cells += [share_of(sums, layer, *place, tokens, factors, every) for place in self.places]
            for name, values in zip(found, zip(*cells, strict=True), strict=True):
                found[name][layer] = torch.stack(values).unflatten(0, shape).numpy()
        data = xr.Dataset({name: sums.over_layers(name, values) for name, values in found.items()})
        share = data["share"].assign_coords(source=np.array(every, object))
        data = data.drop_vars("source").assign(share=share, absolute=abs(share).sum("source", min_count=1))
        data["top_share"] = share.max("source")
        names = share["source"].values[share.fillna(-np.inf).argmax("source").values]
        data["top_source"] = data["top_share"].copy(data=np.where(data["top_share"].notnull(), names, ""))
        if self.check:
            data = data.merge(checked(sums, share.sel(tokens=TOKENS[1], side="k", term="position", drop=True)))
        return data[[name for name in self.variables if name in data]]

    # Words

    def findings(self, own: Numbers) -> list[str]:
        lines = []
        layers = [layer for layer in own.data["layer"].values if layer > 0] or list(own.data["layer"].values)
        for side, term in self.places:
            tops = [(layer, of[0]) for layer in layers if (of := top_of(own, side, term, layer, 1))]
            if not tops:
                lines.append(
                    f"No head's scores have {WORDS[term]} that a source could write through {SIDE_WORDS[side]}."
                )
                continue
            places = np.unique(np.linspace(0, len(tops) - 1, MOST_LAYERS).round().astype(int))
            shown = [tops[place] for place in places]
            words = "; ".join(f"layer {layer}: {name} {share.with_interval:.0%}" for layer, (name, share) in shown)
            null = ""
            if own.inits:
                of_inits = [(layer, top_of(own.of_inits, side, term, layer, 1)) for layer, _ in shown]
                parts = [f"layer {layer}: {of[0][0]} {of[0][1].plain:.0%}" for layer, of in of_inits if of]
                null = f" (random init, its own largest: {'; '.join(parts)})" if parts else ""
            absolute = own("absolute", side=side, term=term, layer=[layer for layer, _ in tops])
            most = own.extreme("absolute", side=side, term=term)
            lines += [
                f"Who writes {WORDS[term]} through {SIDE_WORDS[side]}, the source with the largest mean share over the "
                f"heads of a layer: {words}{null}.",
                f"Shares add up to 1, and without their signs to {absolute:.2f}: above 1, sources cancel; most in "
                f"{most:.2f}.",
            ]
            if term == "position":
                cosines = {
                    f"layer {layer}: {name}": own("of_mean_token", side=side, layer=layer, source=name)
                    for layer, (name, _) in shown
                }
                lines.append(
                    "What these sources write where every token is the mean token has, with what they write on average,"
                    f" a cosine of {'; '.join(f'{name} {one:.2f}' for name, one in cosines.items())}. At 1 it needs no "
                    "variety of tokens."
                )
        if "rho" in own:
            parts = ", ".join(f"{name} {own('rho', predictor=name):.2f}" for name in PREDICTORS)
            lines.append(f"Rank correlation with the fall of the slash score without a source's constant: {parts}.")
        return lines

    def table(self, own: Numbers) -> pd.DataFrame:
        """Return a row for each layer, side and term with its largest sources and their mean shares over heads."""
        rows = []
        for side, term in self.places:
            for layer in own.data["layer"].values:
                largest = [
                    f"{name} {number.plain:.2f}" for name, number in top_of(own, side, term, layer, MOST_SOURCES)
                ]
                absolute = own("absolute", side=side, term=term, layer=layer)
                cells = {"layer": int(layer), "largest shares": ", ".join(largest) or "none"}
                rows.append({"side": side, "term": term, **cells, "sum of |shares|": f"{absolute.plain:.2f}"})
        return pd.DataFrame(rows)


def top_of(own: Numbers, side: str, term: str, layer: Any, most: int) -> list[tuple[str, Number]]:
    """Return the sources with the largest mean share over the heads of a layer, and these means."""
    share = mean_of(own.of_side(own.array("share", side=side, term=term, layer=layer)))
    names = share.mean("head").to_series().dropna().nlargest(most).index
    return [(str(name), own("share", side=side, term=term, layer=layer, source=name)) for name in names]

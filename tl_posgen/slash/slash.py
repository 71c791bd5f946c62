"""Slash scores: how much attention each head pays at every distance, and how near rank one its Q and K are."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import torch
import xarray as xr

from tl_posgen.core.formatting import counted, in_brackets
from tl_posgen.core.measure import HEAD, Variable
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.options import Threshold
from tl_posgen.core.result import Result
from tl_posgen.core.sums import Sums
from tl_posgen.models.layers.capture import EditedCapture, LayerCapture
from tl_posgen.report.figures import line
from tl_posgen.report.head_figures import head_map, layer_curves
from tl_posgen.rope.spectra import first_share
from tl_posgen.slash.dominance import (
    PER_HEAD,
    Dominance,
    at_best,
    spectra_of,
    statistics_of,
    thresholds,
    where_measured,
)
from tl_posgen.slash.numbers.slash_scores import LONG_KAPPA, long_distances


def _uniform(data: xr.Dataset, layer: Any) -> list[go.Scatter]:
    scores = data["uniform"].sel(tokens="all", layer=layer).values
    return [line(data["distance"].values + 1, scores, "uniform attention", "black", dash="dot", width=1.2)]


@dataclass(frozen=True)
class Slash(Dominance):
    r"""SlashScore(D) = E_P[1/(N-D) sum_{i>=D} S_{i,i-D}], S the attention pattern, for every head and distance D.

    The slash score is the mean attention along the D-th sub-diagonal, that is, to the token D back; D = 1 is the
    previous token. That of uniform attention over the visible keys is drawn beside it, and the table of slash-dominant
    heads has the ratio of the two. A head is slash-dominant at D when its score reaches kappa; where uniform attention
    reaches kappa itself, as in short prompts, when it reaches twice that.

    Highest scores are over D < N/2, as the last D are means over few queries. Without the first token its column is
    removed and the rows are renormalised; its own row, which has no key left, does not count. `first_token`, the
    attention that it takes, has that row; the one of `variance` is of the queries behind it. Spectra are of Q and K
    before RoPE, after qk-norm. Everything is the mean over prompts.

    Args:
        kappa: slash score that makes a head dominant at one of `distances`; twice uniform attention's where that
            reaches kappa.
        distances: where to look; those that no prompt reaches are left out.
        kappa_long: the same for the long distances, D = 50 .. N/2.

    Raises:
        InputError: no prompt reaches any of the distances.

    Source: slash score and dominance: Cheng et al. 2026 (arXiv 2601.08297), also on the authors' public page,
    fengzhuo.notion.site; the default kappa and distances, the comparison with uniform attention, which their dominance
    does not ask for, and the variants without the first token are ours.

    Example:
        >>> score = Slash(kappa=0.2)("mini", "Down, down, down.", nulls=0).sel(tokens="all")["score"]
        >>> score.dims, bool((score.sel(distance=0) > 0).all())
        (('layer', 'head', 'distance'), True)
    """

    kappa_long: Threshold = LONG_KAPPA

    question = "Which heads attend at a fixed distance?"
    needs = frozenset({"pattern"})
    variables = {
        "score": Variable("slash score by distance", "", "1/(N-D) sum_{i>=D} S_{i,i-D}", (*PER_HEAD, "distance")),
        "uniform": Variable("slash score of uniform attention", dims=("tokens", "layer", "distance")),
        "attention_distance": Variable(
            "attention distance", "tokens", "E_i sum_j S_ij (i - j)", PER_HEAD, interval=True
        ),
        "entropy": Variable("entropy of attention", "nats", "E_i of - sum_j S_ij log S_ij", PER_HEAD, interval=True),
        "first_token": Variable.share(
            "attention to the first token, its own too", "E_i S_i0 over all queries, the first itself too"
        ),
        "slash_score": Variable.share(
            "slash score", "highest over D < N/2", headline="slash_score", short="slash", shown_with="slash_distance"
        ),
        "slash_distance": Variable(
            "slash distance", "tokens", "D of slash_score", headline="slash_distance", short="D", whole=True
        ),
        "best_uniform": Variable.share("slash score of uniform attention", "at the best distance", compared=False),
        "dominant": Variable(
            "slash-dominant",
            "",
            "score >= kappa, or twice uniform attention, at this distance",
            (*HEAD, "short_distance"),
        ),
        "n_long": Variable(
            "long dominant distances",
            description="how many D of 50 .. N/2 reach kappa_long, or twice uniform attention",
            dims=PER_HEAD,
        ),
        "r1": Variable.share("r1 of Q and K", "s_1^2 / sum s^2 before RoPE", ("side", *HEAD)),
    }
    figures = {
        "map": head_map(
            "slash_score",
            title="Slash scores",
            subtitle="slash score: mean attention along the D-th sub-diagonal; highest over D below half the prompt",
            limits=None,
        ),
        "profiles": partial(
            layer_curves,
            measure="score",
            along="distance",
            title="Slash score by distance",
            subtitle="mean attention paid D tokens back, D below half the prompt; dotted: uniform attention",
            y_title="slash score",
            log_x=True,
            more_curves=_uniform,
        ),
        "first token": head_map("first_token", title="Attention to the first token", limits=None),
        "distance": head_map(
            "attention_distance",
            ("attention_distance", {"tokens": "without first"}),
            title="Attention distance",
            subtitle="mean distance of the attended keys, in tokens",
        ),
    }
    all_reached = False
    curves = ("score",)
    by_head = frozenset({"profiles"})
    caveats = {
        "absolute": "slash scores are of the attention itself and mean the same; but a fixed distance has to come from "
        "position vectors in q and k, so nearly rank-one Q and K are not what makes a slash.",
        "alibi": "slash scores are of the attention itself and mean the same; but steep slopes alone pay near tokens "
        "much attention, so compare with random init rather than with uniform attention.",
        "none": "slash scores are of the attention itself and mean the same; rank-one Q and K cannot make one.",
    }

    def of_layer(self, layer: LayerCapture) -> Mapping[str, Any]:
        values = {**vars(layer.shared(statistics_of))}
        if not isinstance(layer, EditedCapture):  # under edited scores, queries and keys explain nothing of them
            values["r1"] = torch.stack(
                [first_share(spectrum.values) for spectrum in layer.shared(spectra_of, 0).values()]
            )
        return values

    def of_sums(self, sums: Sums) -> xr.Dataset:
        data = sums.means()
        score, uniform = (data[name].sel(tokens="all", drop=True) for name in ("score", "uniform"))
        long = data.sel(distance=list(long_distances(score.sizes["distance"])))
        data = data.assign(at_best(score, uniform)).assign(dominant=self.dominant_at(score, uniform))
        n_long = (long["score"] >= thresholds(self.kappa_long, long["uniform"])).sum("distance")
        data["n_long"] = where_measured(n_long.transpose(*PER_HEAD), data["score"])
        return data

    def leading_table(self, report: Mapping[str, Result]) -> pd.DataFrame:
        from tl_posgen.slash.slash_heads import slash_heads  # which finds heads by this measure

        return slash_heads(report)

    def findings(self, numbers: Numbers) -> list[str]:
        n = numbers.number(numbers.array("dominant").any("short_distance").sum(HEAD))
        n_all, distances = int(numbers.data["slash_score"].notnull().sum()), numbers.data["short_distance"].values
        reached = numbers.data["uniform"].sel(tokens="all", distance=distances, drop=True) >= self.kappa
        sentence = ""
        if (at := distances[reached.any("layer").values]).size:
            where = "" if reached.all("layer").sel(distance=at).all() else " in some layers"
            sentence = (
                f" At D = {', '.join(map(str, at))} uniform attention itself reaches kappa{where}, as queries see few "
                "keys: there a head is slash-dominant at twice its score."
            )
        return [
            f"Slash-dominant at any of the distances {', '.join(map(str, distances))}, with kappa = {self.kappa:g}: "
            f"{n.plain:.0f} of {counted(n_all, 'head')}{in_brackets(n.null_range)}. Strongest at D below half the "
            f"prompt: {numbers.extreme('slash_score'):.3f}; at the previous token: "
            f"{numbers.extreme('score', distance=1):.3f}." + sentence
        ]

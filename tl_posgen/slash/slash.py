"""Slash scores: how much attention each head pays at every distance, and how near rank one its Q and K are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from tl_posgen.analysis import Prompts, analyze
from tl_posgen.collector import Collector, Variable
from tl_posgen.errors import InputError
from tl_posgen.measure import Measure, TokenView
from tl_posgen.models import open_model, to_prompts
from tl_posgen.models.layers.capture import EditedCapture, LayerCapture
from tl_posgen.report.circuits import CROP, attention_maps
from tl_posgen.report.figures import head_map, layer_curves, line
from tl_posgen.report.sentences import at_head, head_reference, null_of
from tl_posgen.rope.spectra import spectrum
from tl_posgen.slash.dominance import Dominance, check_any_reached, check_kappa, dominant_at
from tl_posgen.slash.layer_means import (
    EXAMPLES,
    at_distance,
    best_distance,
    by_head,
    cropped,
    examples,
    means_over_prompts,
    of_head,
    statistics_of,
    strongest,
    where_measured,
    with_and_without,
)
from tl_posgen.slash.slash_scores import LONG_KAPPA, SHORT_DISTANCES, SHORT_KAPPA, long_distances
from tl_posgen.summary import Summary

N_EXAMPLES = 3


@dataclass(frozen=True)
class Slash(Dominance):
    r"""SlashScore(D) = E_P[1/(N-D) sum_{i>=D} S_{i,i-D}], S the attention pattern, for every head and distance D.

    A head is slash-dominant at D when its score reaches kappa. Highest scores are over D < N/2, as the last D are means
    over few queries. `*_without_first_token`: the first token's column removed and the rows renormalised. Spectra are
    of Q and K before RoPE, after qk-norm. Everything is the mean over prompts.

    Args:
        kappa: slash score that makes a head dominant at one of `distances`.
        distances: where to look; those that no prompt reaches are left out.
        kappa_long: the same for the long distances, D = 50 .. N/2.

    Raises:
        InputError: kappa or kappa_long outside (0, 1], no distance, a negative one, or none that a prompt reaches.

    Source: slash score and dominance: Cheng et al. 2026 (arXiv 2601.08297); the default kappa and distances, the
    comparison with uniform attention and the variants without the first token are ours.

    Example:
        >>> import tl_posgen
        >>> report = tl_posgen.analyze("mini", "Down, down, down.", measures=[Slash(kappa=0.2)], null_seeds=())
        >>> scores = report["slash"].dataset["score"]
        >>> scores.dims, bool((scores.sel(distance=0) > 0).all())
        (('layer', 'head', 'distance'), True)
    """

    kappa_long: float = LONG_KAPPA

    def check(self) -> None:
        super().check()
        check_kappa(self.kappa_long)


class SlashCollector(Collector):
    options: Slash

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._patterns: dict[tuple[int, int], np.ndarray] = {}
        self._first_prompt: np.ndarray | None = None

    def update(self, layer: LayerCapture) -> None:
        self.add(layer, **by_head(layer.once(statistics_of)))
        if not isinstance(layer, EditedCapture):  # under edited scores, queries and keys explain nothing of them
            q, k = spectrum(layer.q), spectrum(layer.k)
            self.add(layer, r1_q=q.r1, r1_k=k.r1, rank95_q=q.rank, rank95_k=k.rank)
        if layer.prompt == 0 and layer.tokens is not None:
            self._first_prompt = layer.tokens[:CROP].cpu().numpy()
            self._patterns |= cropped(layer)

    def joined(self, other: Any) -> Any:
        both = super().joined(other)
        both._patterns = self._patterns | other._patterns
        both._first_prompt = other._first_prompt if self._first_prompt is None else self._first_prompt
        return both

    def dataset(self) -> xr.Dataset:
        data = means_over_prompts(self.rows)
        score, place = data["score"], best_distance(data["score"])
        long = score.sel(distance=list(long_distances(score.sizes["distance"])))
        data["dominant"] = dominant_at(score, self.options).rename(distance="short_distance")
        data["n_dominant"] = where_measured(data["dominant"].sum("short_distance"), score)
        data["n_long"] = where_measured((long >= self.options.kappa_long).sum("distance"), score)
        data["best_distance"], data["best_score"] = place, at_distance(score, place)
        data["best_ratio"] = data["best_score"] / at_distance(data["uniform"], place)
        data["previous_token"] = score.reindex(distance=[1]).isel(distance=0, drop=True)
        if self._first_prompt is not None:
            data = data.assign(example_patterns(data["best_score"], self._patterns, self._first_prompt))
        return data.assign_attrs(kappa=self.options.kappa, kappa_long=self.options.kappa_long)


def example_patterns(
    score: xr.DataArray, patterns: Mapping[tuple[int, int], np.ndarray], tokens: np.ndarray
) -> dict[str, Any]:
    """The patterns of the strongest heads on the first prompt, cropped, with the tokens they are over."""
    places = strongest(score, N_EXAMPLES)
    return {
        "pattern": (("example", "query", "key"), np.stack([patterns[place] for place in places])),
        "token": ("key", tokens, {"holds": "token ids"}),
        "example_layer": ("example", [layer for layer, _ in places]),
        "example_head": ("example", [head for _, head in places]),
    }


# What is shown


def summarise(data: xr.Dataset) -> Summary:
    head = head_reference(data, "best_score") or ""
    return {
        "kappa": float(data.attrs["kappa"]),
        "distances": [int(distance) for distance in data["short_distance"].values],
        "n_heads": int(data["best_score"].notnull().sum()),
        "n_dominant": int(data["dominant"].any("short_distance").sum()),
        "n_dominant_at": [int(count) for count in data["dominant"].sum(("layer", "head"))],
        "strongest_head": head,
        "strongest": float(data["best_score"].max()),
        "strongest_distance": int(of_head(data, head)["best_distance"]),
        "previous_token_head": head_reference(data, "previous_token"),
        "previous_token": float(data["previous_token"].max()),
    }


def findings(own: Summary, null: Any) -> list[str]:
    reach = ", ".join(map(str, own["distances"]))
    return [
        f"{own['n_dominant']} of {own['n_heads']} heads ({null_of(null, 'n_dominant', '.3g')}) are slash-dominant at "
        f"one of the distances {reach}, with kappa = {own['kappa']:g}. Strongest at D below half the prompt: "
        f"{at_head(own['strongest_head'], own['strongest'])}; at the previous token: "
        f"{at_head(own['previous_token_head'], own['previous_token'])}."
    ]


def profiles(result: Any) -> go.Figure:
    def uniform(data: xr.Dataset, layer: Any) -> list[go.Scatter]:
        scores = data["uniform"].sel(layer=layer).values
        return [line(data["distance"].values + 1, scores, "uniform attention", "black", dash="dot", width=1.2)]

    return layer_curves(
        result,
        "score",
        "distance",
        title="Slash score by distance",
        subtitle="mean attention paid D tokens back, D below half the prompt; dotted: uniform attention",
        y_title="slash score",
        log_x=True,
        beside=uniform,
    )


def labels(data: xr.Dataset) -> list[str]:
    """Which head each example is, with its score."""
    return [
        f"layer {int(one['layer'])}, head {int(one['head'])}: slash score {float(one['best_score']):.3f} at D = "
        f"{int(one['best_distance'])}"
        for one in examples(data)
    ]


def show(data: xr.Dataset, example: int) -> Any:
    pattern = data["pattern"].isel(example=[example]).transpose("example", "query", "key").values
    return attention_maps(pattern, list(data["token_text"].values), ["attention"])


VARIABLES = {
    **with_and_without(
        {
            "score": Variable(
                "slash score", description="1/(N-D) sum_{i>=D} S_{i,i-D}", dims=("layer", "head", "distance")
            ),
            "uniform": Variable("slash score of uniform attention", dims=("layer", "distance")),
            "attention_distance": Variable("attention distance", "tokens", "E_i sum_j S_ij (i - j)", interval=True),
            "entropy": Variable("entropy of attention", "nats", "E_i of - sum_j S_ij log S_ij", interval=True),
            "relative_entropy": Variable(
                "relative entropy", "", "each query's entropy over log(keys it sees)", interval=True, bounds=(0.0, 1.0)
            ),
        }
    ),
    "first_token": Variable("attention to the first token", description="E_i S_i0", interval=True, bounds=(0.0, 1.0)),
    "best_score": Variable(
        "highest slash score",
        description="over D < N/2",
        headline="slash_score",
        short="slash",
        interval=True,
        bounds=(0.0, 1.0),
    ),
    "best_distance": Variable(
        "its distance", "tokens", "the D of the highest slash score", headline="slash_distance", short="D"
    ),
    "best_ratio": Variable(
        "highest slash score over uniform", description="best_score / uniform at best_distance", interval=True
    ),
    "previous_token": Variable(
        "previous token, D = 1",
        description="slash score at D = 1",
        headline="slash_previous_token",
        short="D=1",
        interval=True,
        bounds=(0.0, 1.0),
    ),
    "dominant": Variable(
        "slash-dominant", description="score >= kappa at this distance", dims=("layer", "head", "short_distance")
    ),
    "n_dominant": Variable("dominant distances", description="how many of the short distances reach kappa"),
    "n_long": Variable("long dominant distances", description="how many D of 50 .. N/2 reach kappa_long"),
    **{
        f"r1_{side}": Variable(
            f"r1 of {side.upper()}", "", "s_1^2 / sum s^2 before RoPE", interval=True, bounds=(0.0, 1.0)
        )
        for side in "qk"
    },
    **{
        f"rank95_{side}": Variable(f"rank of {side.upper()} at 95%", "", "how many s^2 make 95% of their sum")
        for side in "qk"
    },
    "pattern": Variable("attention of the strongest heads", dims=("example", "query", "key")),
    "token": Variable("token ids of the first prompt", dims=("key",)),
    **EXAMPLES,
}

MEASURE = Measure(
    name="slash",
    question="Which heads attend at a fixed distance?",
    explanation=(
        "Slash score: mean attention along the D-th sub-diagonal, beside that of uniform attention over the visible "
        "keys. A head is slash-dominant at D when its score reaches kappa; D = 1 is the previous token."
    ),
    source="Cheng et al. 2026 (arXiv 2601.08297); uniform attention beside it, default kappa and distances: ours",
    options=Slash,
    collector=SlashCollector,
    needs=frozenset({"pattern"}),
    check_prompts=check_any_reached,
    variables=VARIABLES,
    summarise=summarise,
    findings=findings,
    curves=("score",),
    by_head=frozenset({"profiles"}),
    figures={
        "map": head_map(
            "best_score",
            "previous_token",
            "first_token",
            title="Slash scores",
            subtitle="slash score: mean attention along the D-th sub-diagonal; highest over D below half the prompt",
        ),
        "profiles": profiles,
        "distance": head_map(
            "attention_distance",
            "attention_distance_without_first_token",
            title="Attention distance",
            subtitle="mean distance of the attended keys, in tokens",
            limits=None,
        ),
    },
    tokens=TokenView(labels, show),
    caveats={
        "absolute": "slash scores are of the attention itself and mean the same; but a fixed distance has to come from "
        "position vectors in q and k, so nearly rank-one Q and K are not what makes a slash.",
        "alibi": "slash scores are of the attention itself and mean the same; but steep slopes alone pay near tokens "
        "much attention, so compare with random init rather than with uniform attention.",
        "none": "slash scores are of the attention itself and mean the same; rank-one Q and K cannot make one.",
    },
)


def find_slash_heads(
    model: Any,
    prompts: Prompts,
    *,
    kappa: float = SHORT_KAPPA,
    distances: Sequence[int] = tuple(SHORT_DISTANCES),
    layers: Sequence[int] | None = None,
    heads: Any = None,
    length: int | None = None,
    n_prompts: int | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    r"""All (head, D) with SlashScore(D) = E_P[1/(N-D) sum_{i>=D} S_{i,i-D}] >= kappa, strongest first.

    Args:
        model, prompts, layers, heads, length, n_prompts, progress: as in `analyze`.
        kappa: the score that makes a head slash-dominant, in (0, 1].
        distances: D to look at: 0 is the token itself, 1 the previous one.

    Returns:
        A row per find: layer, head, distance, score, and ratio, the score over that of uniform causal attention. Other
        measures and interventions take it as `heads=`.

    Raises:
        InputError: unusable prompts, kappa outside (0, 1], or a distance that no prompt reaches.

    Source: the definition is Cheng et al. 2026 (arXiv 2601.08297); the default kappa and distances are ours.

    Example:
        >>> import tl_posgen
        >>> heads = tl_posgen.find_slash_heads("mini", "Down, down, down. Would the fall never end?", kappa=0.2)
        >>> heads.columns.tolist(), bool(heads["score"].is_monotonic_decreasing)
        (['layer', 'head', 'distance', 'score', 'ratio'], True)
    """
    options, model = Slash(kappa=kappa, distances=distances), open_model(model)
    tokens = to_prompts(model, prompts, length=length, n_prompts=n_prompts)
    if max(distances) >= (longest := max(len(prompt) for prompt in tokens)):
        raise InputError(f"distance {max(distances)}: the longest prompt has {longest} tokens; give longer prompts")
    where: dict[str, Any] = {"layers": layers, "heads": heads, "length": length, "n_prompts": n_prompts}
    data = analyze(model, prompts, measures=options, **where, null_seeds=(), progress=progress)["slash"].dataset
    found = data[["score"]].assign(ratio=data["score"] / data["uniform"]).sel(distance=sorted(set(distances)))
    table = found.to_dataframe(dim_order=["layer", "head", "distance"]).reset_index()
    table = table[table["score"] >= kappa].sort_values("score", ascending=False, kind="stable")
    return pd.DataFrame(table[["layer", "head", "distance", "score", "ratio"]]).reset_index(drop=True)

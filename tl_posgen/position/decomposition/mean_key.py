"""The mean-key split: how far each head's scores are f(q, i - j) + g(q, k) at a dummy distance."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import xarray as xr

from tl_posgen.collector import Collector, Variable
from tl_posgen.errors import InputError
from tl_posgen.measure import Measure
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.options import Options
from tl_posgen.position.decomposition.mean_key_split import mean_key_r
from tl_posgen.position.decomposition.three_axis import moments_of
from tl_posgen.position.first_token import WITHOUT_FIRST_TOKEN
from tl_posgen.report.figures import head_map, layer_curves
from tl_posgen.report.sentences import beside, means
from tl_posgen.summary import Summary

BY_DISTANCE = ("r", "r_within_rows", "r_without_first_token", "r_within_rows_without_first_token")


@dataclass(frozen=True)
class MeanKey(Options):
    r"""corr(W, f + g), f_ij = s <R_i q_i, R_j kbar>, g_ij = s <R_d0 q_i, k_j - kbar>, kbar the head's mean key.

    W are the scores, s the attention scale, R_i RoPE at position i. A soft cap and ALiBi are not part of W here.
    Everything is the mean over prompts.

    Args:
        d0: the headline dummy distance, in tokens.
        distances: further dummy distances.

    Raises:
        InputError: a distance below 0.

    Source: reconstructed from the public code of the first author of Han & Ji 2025 (arXiv 2503.13305), which uses
    d0 = 1000.

    Example:
        >>> from tl_posgen.position.decomposition import mean_key
        >>> mean_key("mini", "Down, down, down.", d0=8, null_seeds=()).dataset["d0"].values.tolist()
        [0, 8, 64, 1000]
    """

    d0: int | float = 1000
    distances: Sequence[int | float] = (0, 64, 1000)

    def check(self) -> None:
        if wrong := [distance for distance in (self.d0, *self.distances) if not 0 <= distance < float("inf")]:
            raise InputError(f"mean_key: distance {wrong[0]!r}: give tokens, 0 or more")

    @property
    def all_distances(self) -> list[int | float]:
        return sorted({self.d0, *self.distances})


class MeanKeyCollector(Collector):
    options: MeanKey

    def update(self, layer: LayerCapture) -> None:
        geometry = layer.geometry
        fit = mean_key_r(
            *(layer.q, layer.k, geometry.rope, geometry.scale, self.options.all_distances),
            window=geometry.window,
            rotated=(layer.rotated_q, layer.rotated_k),
            scores=layer.once(moments_of) if geometry.bilinear else None,
        )
        assert fit.without_first_token
        for suffix, one in (("", fit), (WITHOUT_FIRST_TOKEN, fit.without_first_token)):
            self.add(layer, **{f"r{suffix}": one.r.mT, f"r_within_rows{suffix}": one.r_within_rows.mT})

    def dataset(self) -> xr.Dataset:
        d0 = self.options.d0
        distances = np.array(self.options.all_distances)
        curves = {name: self.rows.array(name, "d0").mean("prompt").assign_coords(d0=distances) for name in BY_DISTANCE}
        data = {f"mean_key_{name}": curve.sel(d0=d0, drop=True) for name, curve in curves.items()}
        data |= {f"{name}_by_distance": curves[name] for name in ("r", "r_within_rows")}
        return xr.Dataset(data).assign_attrs(d0=d0)


# What is shown


def summarise(data: xr.Dataset) -> Summary:
    return {"d0": float(data.attrs["d0"]), **means(data, *(f"mean_key_{name}" for name in BY_DISTANCE))}


def findings(own: Summary, null: Any) -> list[str]:
    r = beside(own, null, "mean_key_r")
    return [f"The mean-key split at dummy distance {own['d0']:g} correlates with the scores at {r}."]


HEAD = ("layer", "head")
WITHOUT = "the first token left out, as query, as key and of the mean key"
WITHIN = "the mean of each row removed: all that softmax sees"
VARIABLES = {
    "mean_key_r": Variable(
        "r of the mean-key split", "", "corr of W and f + g, at d0", HEAD, "mean_key_r", "r-mk", True, (-1.0, 1.0)
    ),
    "mean_key_r_within_rows": Variable("mean-key r within rows", description=WITHIN, interval=True, bounds=(-1.0, 1.0)),
    "mean_key_r_without_first_token": Variable(
        "mean-key r, first token out", description=WITHOUT, interval=True, bounds=(-1.0, 1.0)
    ),
    "mean_key_r_within_rows_without_first_token": Variable(
        "mean-key r within rows, first token out", "", WITHOUT, interval=True, bounds=(-1.0, 1.0)
    ),
    "r_by_distance": Variable("mean-key r", "", "by dummy distance", (*HEAD, "d0")),
    "r_within_rows_by_distance": Variable("mean-key r within rows", "", WITHIN, (*HEAD, "d0")),
}
EXACT = "nothing rotates, so f + g is the score itself and r = 1 by construction. This measure does not carry over."

MEASURE = Measure(
    name="mean_key",
    question="Does one mean key carry the position part?",
    explanation=(
        "The head's mean key stands in for every key in the position part; the rest is read at one dummy distance. Our "
        "reconstruction of the two-axis split."
    ),
    source="reconstructed from the public code of the first author of Han & Ji 2025 (arXiv 2503.13305)",
    options=MeanKey,
    collector=MeanKeyCollector,
    variables=VARIABLES,
    summarise=summarise,
    findings=findings,
    curves=("r_by_distance",),
    by_head=frozenset({"curves"}),
    no_tokens=(
        "its r is over all tokens; "
        "measures='split_examples' shows the distance pattern and the content pattern of a head"
    ),
    figures={
        "map": head_map(
            *("mean_key_r", "mean_key_r_without_first_token"),
            title="Mean-key split",
            subtitle="f + g with the head's mean key and dummy distance d0 = {d0:g} (our reconstruction)",
        ),
        "curves": partial(
            layer_curves,
            measure="r_by_distance",
            along="d0",
            title="Mean-key split by dummy distance",
            subtitle="correlation of the scores with f(q, i-j) + g(q, k); one line a head",
            y_title="r",
            log_x=True,
            share=1.0,
        ),
    },
    caveats={"absolute": EXACT, "alibi": EXACT.replace("itself", "without its slope"), "none": EXACT},
    without_meaning=frozenset({"absolute", "alibi", "none"}),
)

"""Controlled distance: what each head's scores, and the loss, become when pairs see another distance than theirs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
import xarray as xr
from jaxtyping import Float, Real
from torch import Tensor
from tqdm.auto import tqdm

from tl_posgen.collector import Collector, Variable
from tl_posgen.errors import InputError
from tl_posgen.measure import Measure, Request
from tl_posgen.models.capture import LayerCapture
from tl_posgen.models.capturing import run_capture
from tl_posgen.models.loss import prompts_of_one_length, token_losses
from tl_posgen.models.model import Model
from tl_posgen.options import Options
from tl_posgen.position.decomposition.three_axis import fit_capture
from tl_posgen.position.distance.distance_table import key_agreement, table_energies
from tl_posgen.position.distance.hooks import at_dummy_distance, require_distances
from tl_posgen.procedure import Job
from tl_posgen.report.figures import COLOURS, Panels, head_map, layer_curves, line, model_label, sides, thinned
from tl_posgen.report.sentences import at_head, beside, extremes, means, said
from tl_posgen.result import Result
from tl_posgen.rope.planes import turning_factors
from tl_posgen.rope.rotation import complex_planes
from tl_posgen.summary import Summary

DUMMY_DISTANCES = (0, 64, 256, 1000, 2048)
LIMITS = (1, 2, 4, 8, 16, 32, 64, 128)
SHARES = ("additive_r", "distance_share", "key_share", "interaction_share")


@dataclass(frozen=True)
class DummyDistance(Options):
    r"""M_dj = scale <R_d q, R_0 k_j>: each query against each key at every distance. How additive is it in d and j?

    Shares are of M's variance over the distances 0 .. length - 1, energies summed over queries. Then the running model
    sees every pair at one distance d0, or no distance beyond a limit; `layers` and `heads` choose which heads do.

    Args:
        distances: dummy distances d0 of the key agreement and of the intervention; the first is the reference.
        limits: "frozen beyond" interventions: distances above see the limit.

    Raises:
        InputError: unusable prompts; no distance or limit, one twice, or a negative one.
        UnsupportedModelError: models whose scores know no distance.

    Source: the claim (the key part stays, the distance part shifts) is of Han & Ji 2025 (arXiv 2503.13305); tables,
    measures and curves are our reconstruction.

    Example:
        >>> from tl_posgen.position.distance import dummy_distance
        >>> cut = {"length": 24, "n_prompts": 1, "null_seeds": (), "progress": False}
        >>> text = "Down, down, down. Would the fall never come to an end? I wonder how many miles I've fallen."
        >>> found = dummy_distance("mini", text, distances=(0, 64), limits=(8,), **cut)
        >>> found.dataset["key_agreement"].dims, bool((found.dataset["key_agreement"].sel(d0=0).round(6) == 1).all())
        (('layer', 'head', 'd0'), True)
    """

    distances: Sequence[int | float] = DUMMY_DISTANCES
    limits: Sequence[int | float] = LIMITS

    def check(self) -> None:
        for name, values in (("distances", self.distances), ("limits", self.limits)):
            if not all(0 <= value < math.inf for value in values):
                raise InputError(f"dummy_distance: {name}={list(values)}: distances must be 0 or more, and finite")
            if not len(values) or len(set(values)) < len(values):
                raise InputError(f"dummy_distance: {name}={list(values)}: give one at least, and each once")


def run(model: Model, prompts: Any, request: Request, job: Job) -> Result:
    options = request.options
    assert isinstance(options, DummyDistance)
    where: dict[str, Any] = {"layers": job.layers, "heads": job.heads}
    distances, limits = (np.asarray(values).tolist() for values in (options.distances, options.limits))
    edits = [{"distance": d0, **where} for d0 in distances] + [{"beyond": limit, **where} for limit in limits]
    for edit in edits:
        at_dummy_distance(model, **edit)  # what this model cannot do is refused here, before work starts
    tokens = prompts_of_one_length(model, prompts, job.length, job.n_prompts)
    d0s = torch.tensor(distances, dtype=torch.float64)

    def of_model(other: Model, label: str, after: Any) -> xr.Dataset:
        heads = Collector(variables=VARIABLES)

        def take(number: int, capture: LayerCapture) -> None:
            capture.prompt = number
            heads.add(capture, **head_measures(capture, d0s))

        bar = tqdm(tokens, desc=f"dummy distance, {label}", unit="prompt", disable=not job.progress)
        for number, prompt in enumerate(bar):
            run_capture(other, prompt[None], partial(take, number), **where)
        data = heads.dataset().assign_coords(d0=distances, limit=limits)
        data = data.merge(curve_comparison(data["curve_intervention"], data["curve_fit"]))
        losses = [float(token_losses(other, tokens, at_dummy_distance(other, **edit)).mean()) for edit in edits]
        data["loss"] = float(token_losses(other, tokens).mean())
        data["loss_at"], data["loss_beyond"] = ("d0", losses[: len(distances)]), ("limit", losses[len(distances) :])
        every = job.layers is None and job.heads is None
        return data.assign_attrs(model=label, gauge="flat_keys", heads="all heads" if every else "the chosen heads")

    return job.result(request, model, list(tokens), of_model)


def head_measures(capture: LayerCapture, d0s: Real[Tensor, " d0"]) -> dict[str, Tensor]:
    """One layer of one prompt."""
    geometry, q, k = capture.geometry, capture.q, capture.k
    energies = table_energies(q, k, geometry.rope, geometry.scale, capture.positions).mean(-1)
    of_distance, of_key, of_both = energies / energies.sum(0)
    fit, _ = capture.once(fit_capture)
    agreement = key_agreement(q, k, geometry.rope, d0s, reference=float(d0s[0]))
    return {
        "additive_r": (1 - of_both).clamp(min=0).sqrt(),
        "distance_share": of_distance,
        "key_share": of_key,
        "interaction_share": of_both,
        "key_agreement": agreement.mean(1),
        "curve_intervention": curve_under_intervention(capture),
        "curve_fit": fit.a,
    }


def curve_under_intervention(capture: LayerCapture) -> Float[Tensor, "head distance"]:
    """Mean over j <= i of scale <R_d q_i, R_0 k_j> - slope d for d = 0 .. n - 1: one product of cumulative sums."""
    geometry = capture.geometry
    zq, zk = (complex_planes(x.double(), geometry.rope) for x in (capture.q, capture.k))
    n = zq.shape[1]
    pairs = (zq * zk.cumsum(1).conj()).sum(1) / (n * (n + 1) / 2)
    turn = turning_factors(capture.positions, geometry.rope, capture.q.shape[-1])
    curve = geometry.scale * (pairs @ turn.to(pairs).mT).real
    if geometry.alibi_slopes is not None:
        curve = curve - geometry.alibi_slopes.to(curve)[list(capture.heads), None] * capture.positions
    return curve


def curve_comparison(one: xr.DataArray, other: xr.DataArray) -> xr.Dataset:
    """Slopes of two curves, and the correlation of what is left of them without their slopes."""
    t = one["distance"] - one["distance"].mean()
    slopes = [(curve * t).mean("distance") / (t * t).mean("distance") for curve in (one, other)]
    rests = [curve - slope * t for curve, slope in zip((one, other), slopes, strict=True)]
    return xr.Dataset(
        {"slope_intervention": slopes[0], "slope_fit": slopes[1], "curve_r": xr.corr(*rests, dim="distance")}
    )


# What is shown


def summarise(data: xr.Dataset) -> Summary:
    """`agreement_at_<d0>` is the mean over heads of the key part's correlation with that at `reference`; `agreement` is
    its mean over the other distances and `agreement_lowest` its minimum, None where there is no other."""
    reference, *others = data["d0"].values.tolist()
    agreement = data["key_agreement"].sel(d0=others).mean(("layer", "head"))
    best = int(data["loss_at"].values.argmin())
    shares = extremes(data, "interaction_share")
    return {
        **means(data, *SHARES),
        **{key: shares[key] for key in ("interaction_share_highest_head", "interaction_share_highest")},
        "reference": reference,
        "distances": others,
        **{f"agreement_at_{d0:g}": float(agreement.sel(d0=d0)) for d0 in others},
        "agreement": float(agreement.mean()) if others else None,
        "agreement_lowest": float(agreement.min()) if others else None,
        "loss": float(data["loss"]),
        "loss_best": float(data["loss_at"][best]),
        "best_distance": data["d0"].values[best].item(),
        "loss_frozen": float(data["loss_beyond"][0]),
        "frozen_beyond": data["limit"].values[0].item(),
        "heads": str(data.attrs["heads"]),
    }


def findings(own: Summary, null: Any) -> list[str]:
    lines = [
        f"Distance part and key part together correlate with the table at {beside(own, null, 'additive_r')}. Of its "
        f"variance the distance takes {beside(own, null, 'distance_share', '.0%')}, the key alone "
        f"{beside(own, null, 'key_share', '.0%')}, both together {beside(own, null, 'interaction_share', '.0%')}, most "
        f"in {at_head(own['interaction_share_highest_head'], own['interaction_share_highest'])}."
    ]
    if own["distances"]:
        each = ", ".join(f"{beside(own, null, f'agreement_at_{d0:g}', '.2f')} at {d0:g}" for d0 in own["distances"])
        lines.append(
            f"The key part's correlation with the one at distance {own['reference']:g} is {each}, mean over heads; "
            f"over these distances {beside(own, null, 'agreement', '.2f')} in the mean and "
            f"{beside(own, null, 'agreement_lowest', '.2f')} at the lowest."
        )
    where = "" if own["heads"] == "all heads" else f" in {own['heads']}"
    return [
        *lines,
        f"The model's loss of {beside(own, null, 'loss')} becomes {own['loss_best']:.3f} at best with every "
        f"pair{where} at one distance ({own['best_distance']:g}), and {own['loss_frozen']:.3f} with distances above "
        f"{own['frozen_beyond']:g} seen as {own['frozen_beyond']:g}.",
    ]


def table(data: xr.Dataset) -> pd.DataFrame:
    """One row per dummy distance, then one per limit: agreement of the key part over heads, and the loss."""
    heads, (d0s, limits) = ("layer", "head"), (data[name].values for name in ("d0", "limit"))
    agreement = (data["key_agreement"].mean(heads).values, data["key_agreement"].min(heads).values)
    mean, least = ([*(said(one, ".3f") for one in values), *[""] * len(limits)] for values in agreement)
    pairs = [f"every pair at {d0:g}" for d0 in d0s] + [f"beyond {limit:g} as at {limit:g}" for limit in limits]
    loss = np.concatenate([data["loss_at"].values, data["loss_beyond"].values])
    columns = {"pairs": pairs, "key_agreement": mean, "lowest_head": least, "loss": loss}
    return pd.DataFrame(columns | {"rise": loss - float(data["loss"])})


def agreement(result: Any) -> go.Figure:
    """Whether the key part stays: its correlation with that at the reference, by distance, a line a head."""
    subtitle = f"correlation over keys with the key part at d0 = {result.summary['reference']:g}"
    words: dict[str, Any] = {"title": "Does the key part stay?", "subtitle": subtitle, "y_title": "correlation"}
    return layer_curves(result, "key_agreement", "d0", log_x=True, share=1.0, **words).update_traces(
        mode="lines+markers"
    )


def curves(result: Any) -> go.Figure:
    """The distance curve of the intervention beside the fitted one, a panel a layer and a colour a head."""
    layers, data = result.dataset["layer"].values, thinned(result.dataset, share=1.0)
    panels = Panels([f"layer {layer}" for layer in layers], row_height=250)
    for panel, layer in enumerate(layers):
        for number, head in enumerate(data["head"].values):
            for name, dash in (("curve_intervention", "solid"), ("curve_fit", "dot")):
                curve, colour = data[name].sel(layer=layer, head=head), COLOURS[number % len(COLOURS)]
                level = float(result.dataset[name].sel(layer=layer, head=head).mean())
                x, y = curve["distance"].values + 1, curve.values - level
                panels.add(panel, line(x, y, f"head {head}", colour, dash=dash, width=1.5))
    panels.axes("distance + 1", "score less its mean", log_x=True)
    subtitle = "solid: every pair put at d, which fixes the slope; dotted: a of the fit, its slope a convention"
    return panels.finish(f"Score by distance · {model_label(result.dataset)}", subtitle)


def loss(result: Any) -> go.Figure:
    """The model's loss with every pair at one distance, and with distances frozen beyond a limit."""
    panels = Panels(["every pair at d0", "distances frozen beyond the limit"], columns=2, row_height=280)
    for side, data, colour in sides(result):
        for panel, (name, along) in enumerate((("loss_at", "d0"), ("loss_beyond", "limit"))):
            panels.add(panel, line(data[along].values + 1, data[name].values, side, colour, mode="lines+markers"))
            untouched: Any = {"row": 1, "col": panel + 1, "line_dash": "dot", "line_color": colour}
            panels.figure.add_hline(y=float(data["loss"]), **untouched)
    panels.axes(y="loss, nats per token", log_x=True)
    panels.figure.update_xaxes(title_text="d0 + 1", col=1).update_xaxes(title_text="limit + 1", col=2)
    subtitle = f"{result.summary['heads']} edited; dotted: the untouched model"
    return panels.finish(f"Loss at dummy distances · {model_label(result.dataset)}", subtitle)


CURVE = ("layer", "head", "distance")
AGREEMENT = "corr over keys of the key part at d0 with that at the first d0"
VARIABLES = {
    "additive_r": Variable("additive r", description="corr of M with its best additive fit, sqrt(1 - distance × key)"),
    "distance_share": Variable("distance", description="share of M's variance"),
    "key_share": Variable("key", description="share of M's variance"),
    "interaction_share": Variable("distance × key", description="share of M's variance that neither explains alone"),
    "slope_intervention": Variable("slope under intervention", "logits per token", "least squares of its curve"),
    "slope_fit": Variable("slope of the fit", "logits per token", "least squares of a; a convention of the gauge"),
    "curve_r": Variable("agreement of the curves", description="correlation of the two curves without their slopes"),
    "curve_intervention": Variable("score by distance", "logits", "mean score of visible pairs, all put at d", CURVE),
    "curve_fit": Variable("a of the three-axis fit", "logits", "its slope is a convention of the gauge", CURVE),
    "key_agreement": Variable("agreement of the key part", "", AGREEMENT, ("layer", "head", "d0")),
    "loss": Variable("loss", "nats", "untouched", ()),
    "loss_at": Variable("loss at d0", "nats", "with every pair at d0", ("d0",)),
    "loss_beyond": Variable("loss beyond the limit", "nats", "with distances above the limit seen as it", ("limit",)),
}

MEASURE = Measure(
    name="dummy_distance",
    question="Does the key part stay when the distance changes?",
    explanation=(
        "Each query meets each key at every distance d, and the table is split into a distance part, a key part and "
        "what takes both, distance × key (not the interaction of the variance decomposition, which is over all queries "
        "at once). Then the running model sees every pair at one distance, or no distance beyond a limit."
    ),
    source="reconstruction, after the controlled-distance claim of Han & Ji 2025 (arXiv 2503.13305)",
    options=DummyDistance,
    procedure=run,
    requires=partial(require_distances, "dummy_distance"),
    matrices=7,
    variables=VARIABLES,
    summarise=summarise,
    findings=findings,
    figures={
        "map": head_map(
            *SHARES[1:],
            title="Dummy-distance tables",
            subtitle="each query against each key at every distance: shares of the table's variance",
        ),
        "agreement": agreement,
        "curves": curves,
        "loss": loss,
    },
    table=table,
    caveats={
        "alibi": "nothing rotates, and the table leaves the slope out, so it is the same at every distance: additive r "
        "and the key part's agreement are 1 by construction. The curves and the losses have the slope.",
        "none": "nothing rotates, so the table is the same at every distance: additive r and the key part's agreement "
        "are 1 by construction, and no dummy distance changes the loss.",
    },
)

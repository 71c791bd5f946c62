"""Controlled distance: what each head's scores, and the loss, become when pairs see another distance than theirs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Real
from torch import Tensor

from tl_posgen.collector import Collector, Variable
from tl_posgen.errors import InputError
from tl_posgen.measure import Measure, Request
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.loss import prompts_of_one_length, token_losses
from tl_posgen.models.model import Model
from tl_posgen.options import Options
from tl_posgen.position.decomposition.three_axis import fit_capture
from tl_posgen.position.distance.curves import curve_comparison, curve_under_intervention
from tl_posgen.position.distance.distance_table import key_agreement, table_energies
from tl_posgen.position.distance.dummy_distance_figures import agreement, curves, loss, refits
from tl_posgen.position.distance.hooks import at_dummy_distance, require_distances, training_length
from tl_posgen.position.distance.key_part import refit_r
from tl_posgen.position.distance.table_examples import TABLE, table_examples, tables
from tl_posgen.position.first_token import VARIANTS, without_first_token
from tl_posgen.position.first_token import WITHOUT_FIRST_TOKEN as OUT
from tl_posgen.procedure import Job
from tl_posgen.report.figures import head_map
from tl_posgen.report.intervals import mean_and_ends, with_ends
from tl_posgen.report.sentences import at_head, beside, extremes, means, null_of, said, with_interval
from tl_posgen.result import Result
from tl_posgen.summary import Summary

LIMITS = (1, 2, 4, 8, 16, 32, 64, 128)
SHARES = ("distance_share", "key_share", "interaction_share")


@dataclass(frozen=True)
class DummyDistance(Options):
    r"""M_dj = scale <R_d q, R_0 k_j>: each query against each key at every distance. How additive is it in d and j,
    and does the key part stay?

    Shares are of M's variance over the distances 0 .. length - 1, none beyond the training length (cfg.n_ctx) or the
    layer's window; energies are summed over queries. `key_part_r` = sqrt(key / (key + distance x key)) is the
    correlation of M with its key part where each distance's mean is taken away. Then the running model sees every pair
    at one distance d0, or no distance beyond a limit; `layers` and `heads` choose which heads do.

    Args:
        distances: dummy distances d0 of the agreement, of the fits made again and of the intervention. Left out: 0 and
            the powers of two below the training length.
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
        >>> found = dummy_distance("mini", text, distances=(0, 64), limits=(8,), **cut).dataset["key_agreement"]
        >>> found.dims, bool((found.sel(d0=64, other_d0=64).round(6) == 1).all())
        (('layer', 'head', 'd0', 'other_d0'), True)
    """

    distances: Sequence[int | float] | None = None
    limits: Sequence[int | float] = LIMITS

    def check(self) -> None:
        for name, values in (("distances", self.distances), ("limits", self.limits)):
            if values is None:
                continue
            if not all(0 <= value < math.inf for value in values):
                raise InputError(f"dummy_distance: {name}={list(values)}: distances must be 0 or more, and finite")
            if not len(values) or len(set(values)) < len(values):
                raise InputError(f"dummy_distance: {name}={list(values)}: give one at least, and each once")


def run(model: Model, prompts: Any, request: Request, job: Job) -> Result:
    options = request.options
    assert isinstance(options, DummyDistance)
    where: dict[str, Any] = {"layers": job.layers, "heads": job.heads}
    trained = training_length(model)
    usual = [0, *(2**power for power in range((trained - 1).bit_length()))]
    asked = (usual if options.distances is None else options.distances, options.limits)
    distances, limits = (np.asarray(values).tolist() for values in asked)
    edits = [{"distance": d0, **where} for d0 in distances] + [{"beyond": limit, **where} for limit in limits]
    for edit in edits:
        at_dummy_distance(model, **edit)  # what this model cannot do is refused here, before work starts
    tokens = prompts_of_one_length(model, prompts, job.length, job.n_prompts)
    d0s = torch.tensor(distances, dtype=torch.float64)
    job.plan(len(tokens) * (2 + len(edits)) + 1)

    def of_model(other: Model, label: str, after: Any) -> xr.Dataset:
        heads = Collector(variables=VARIABLES)

        def take(number: int, capture: LayerCapture) -> None:
            capture.prompt = number
            heads.add(capture, **head_measures(capture, d0s, trained))

        for number, prompt in enumerate(tokens):
            run_capture(other, prompt[None], partial(take, number), **where)
        data = heads.dataset().merge(over_heads(heads))
        data = data.assign_coords(d0=distances, other_d0=distances, limit=limits)
        data = data.merge(curve_comparison(data["curve_intervention"], data["curve_fit"]))
        data = data.merge(table_examples(other, tokens[0], data[f"key_part_r{OUT}"], trained))
        losses = [float(token_losses(other, tokens, at_dummy_distance(other, **edit)).mean()) for edit in edits]
        data["loss"] = float(token_losses(other, tokens).mean())
        data["loss_at"], data["loss_beyond"] = ("d0", losses[: len(distances)]), ("limit", losses[len(distances) :])
        every = job.layers is None and job.heads is None
        told = {"training_length": trained, "heads": "all heads" if every else "the chosen heads"}
        return data.assign_attrs(model=label, gauge="flat_keys", **told)

    return job.result(request, model, list(tokens), of_model)


def head_measures(capture: LayerCapture, d0s: Real[Tensor, " d0"], trained: int) -> dict[str, Tensor]:
    """One layer of one prompt; NaN at distances that its window hides."""
    geometry = capture.geometry
    hidden = (d0s >= (geometry.window or math.inf)).to(capture.q.device)
    distances = capture.positions[: min(trained, geometry.window or trained)]
    found = {"curve_intervention": curve_under_intervention(capture), "curve_fit": capture.once(fit_capture)[0].a}
    for first, (out, refit) in enumerate(zip(VARIANTS, refit_r(capture, d0s), strict=True)):
        q, k = capture.q[:, first:], capture.k[:, first:]
        energies = table_energies(q, k, geometry.rope, geometry.scale, distances).mean(-1)
        of_distance, of_key, of_both = energies / energies.sum(0)
        both_seen = key_agreement(q, k, geometry.rope, d0s).masked_fill(hidden | hidden[:, None], torch.nan)
        found |= {
            f"additive_r{out}": (1 - of_both).clamp(min=0).sqrt(),
            f"key_part_r{out}": (of_key / (of_key + of_both)).sqrt(),
            f"distance_share{out}": of_distance,
            f"key_share{out}": of_key,
            f"interaction_share{out}": of_both,
            f"key_agreement{out}": both_seen,
            f"refit_r{out}": refit.masked_fill(hidden, torch.nan),
        }
    return found


def over_heads(heads: Collector) -> xr.Dataset:
    """Means over heads, with their intervals over prompts."""
    data = {}
    for name, declared in OVER_HEADS.items():
        values = heads.rows.array(name, *declared.dims[2:]).mean(("layer", "head")).values
        data |= mean_and_ends(f"mean_{name}", values, declared.dims[2:], (-1.0, 1.0))  # all are correlations
    return xr.Dataset(data)


# What is shown


def summarise(data: xr.Dataset) -> Summary:
    """`agreement_at_<d0>` and `refit_r` are lists over `distances`, means over heads; `agreement` is the mean over
    pairs of different distances, `agreement_lowest` the least: first token left out, None of a single distance."""
    d0s = data["d0"].values.tolist()
    matrix = data[f"mean_key_agreement{OUT}"]
    apart = matrix.where(~np.eye(len(d0s), dtype=bool))
    lowest = apart.stack(pair=("d0", "other_d0")).dropna("pair")
    best = int(data["loss_at"].values.argmin())
    shares = extremes(data, f"key_part_r{OUT}")
    ends = {f"{name}{end}": float(data[f"mean_{name}{end}"]) for name in OF_TABLE for end in ("", "_low", "_high")}
    refit = [f"refit_r{out}{end}" for out in VARIANTS for end in ("", "_low", "_high")]
    return {
        **ends,
        **means(data, *SHARES, *(f"{name}{OUT}" for name in SHARES)),
        **shares,
        "training_length": int(data.attrs["training_length"]),
        "distances": d0s,
        **{f"agreement_at_{d0:g}": matrix.sel(d0=d0).values.tolist() for d0 in d0s},
        "agreement": float(apart.mean()) if lowest.size else None,
        "agreement_lowest": float(lowest.min()) if lowest.size else None,
        "agreement_lowest_pair": sorted(lowest["pair"].values[lowest.values.argmin()]) if lowest.size else None,
        **{name: data[f"mean_{name}"].values.tolist() for name in refit},
        "loss": float(data["loss"]),
        "loss_best": float(data["loss_at"][best]),
        "best_distance": data["d0"].values[best].item(),
        "loss_frozen": float(data["loss_beyond"][0]),
        "frozen_beyond": data["limit"].values[0].item(),
        "heads": str(data.attrs["heads"]),
    }


def findings(own: Summary, null: Any) -> list[str]:
    refits = zip(own["distances"], own[f"refit_r{OUT}"], (null or own)[f"refit_r{OUT}"], strict=True)
    each = [
        said(r, ".2f") + ("" if null is None else f" ({said(random, '.2f')})") + f" at {d0:g}"
        for d0, r, random in refits
    ]
    lines = [
        f"First token left out, distance part and key part together correlate with the table at "
        f"{beside(own, null, f'additive_r{OUT}')}; with it {beside(own, null, 'additive_r')}. Of its variance the "
        f"distance takes {beside(own, null, f'distance_share{OUT}', '.0%')}, the key alone "
        f"{beside(own, null, f'key_share{OUT}', '.0%')}, and neither "
        f"explains {beside(own, null, f'interaction_share{OUT}', '.0%')}.",
        f"Where each distance's mean is taken away the key part correlates with the table at "
        f"{with_interval(own, f'key_part_r{OUT}')} ({null_of(null, f'key_part_r{OUT}')}), most in "
        f"{at_head(own[f'key_part_r{OUT}_highest_head'], own[f'key_part_r{OUT}_highest'])}, least in "
        f"{at_head(own[f'key_part_r{OUT}_lowest_head'], own[f'key_part_r{OUT}_lowest'])}.",
        "The key part c, fitted again with every pair at one distance, correlates with c at the true distances "
        f"{'' if null is None else '(random init) '}at {', '.join(each)}; linear trends left out.",
    ]
    if own["agreement"] is not None:
        near, far = own["agreement_lowest_pair"]
        lines.append(
            f"The key parts at two of these distances correlate at {beside(own, null, 'agreement', '.2f')} in the mean "
            f"over pairs, and at {said(own['agreement_lowest'], '.2f')} at the lowest, {near:g} against {far:g}."
        )
    where = "" if own["heads"] == "all heads" else f" in {own['heads']}"
    return [
        *lines,
        f"The model's loss of {beside(own, null, 'loss')} becomes {own['loss_best']:.3f} at best with every "
        f"pair{where} at one distance ({own['best_distance']:g}), and {own['loss_frozen']:.3f} with distances above "
        f"{own['frozen_beyond']:g} seen as {own['frozen_beyond']:g}.",
    ]


def table(data: xr.Dataset) -> pd.DataFrame:
    """One row per dummy distance, then one per limit: the key part fitted again, mean over heads, and the loss."""
    (d0s, limits), rest = (data[name].values for name in ("d0", "limit")), [""] * data.sizes["limit"]
    refit = {f"refit_r{end}": data[f"mean_refit_r{OUT}{end}"].values for end in ("", "_low", "_high")}
    pairs = [f"every pair at {d0:g}" for d0 in d0s] + [f"beyond {limit:g} as at {limit:g}" for limit in limits]
    loss = np.concatenate([data["loss_at"].values, data["loss_beyond"].values])
    columns = {name: [*(said(one, ".3f") for one in values), *rest] for name, values in refit.items()}
    return pd.DataFrame({"pairs": pairs, **columns, "loss": loss, "rise": loss - float(data["loss"])})


HEAD, CURVE, PAIR = ("layer", "head"), ("layer", "head", "distance"), ("layer", "head", "d0", "other_d0")
KEY_PART = "corr of M with its key part, each distance's mean removed, sqrt(key / (key + distance × key))"
AGREEMENT = "corr over keys of M at d0 with M at the other, mean over queries"
REFIT = "corr of c with that of a fit with every pair at d0, both without a linear trend"
WITH_FIRST = {
    "additive_r": Variable("additive r", description="corr of M with its best additive fit, sqrt(1 - distance × key)"),
    "key_part_r": Variable("key part r", description=KEY_PART),
    "distance_share": Variable("distance", description="share of M's variance"),
    "key_share": Variable("key", description="share of M's variance"),
    "interaction_share": Variable("distance × key", description="share of M's variance that neither explains alone"),
    "key_agreement": Variable("agreement of the key part", "", AGREEMENT, PAIR),
    "refit_r": Variable("agreement of c, fitted again", "", REFIT, (*HEAD, "d0")),
}
BY_VARIANT = WITH_FIRST | without_first_token(WITH_FIRST)
OVER_HEADS = {name: one for name, one in BY_VARIANT.items() if not name.removesuffix(OUT).endswith("share")}
OF_TABLE = [name for name, one in OVER_HEADS.items() if one.dims == HEAD]
VARIABLES = {
    **BY_VARIANT,
    **{
        name: one
        for key, whole in OVER_HEADS.items()
        for name, one in with_ends(f"mean_{key}", f"{whole.label}, mean over heads", "", "", whole.dims[2:]).items()
    },
    "slope_intervention": Variable("slope under intervention", "logits per token", "least squares of its curve"),
    "slope_fit": Variable("slope of the fit", "logits per token", "least squares of a; a convention of the gauge"),
    "curve_r": Variable("agreement of the curves", description="correlation of the two curves without their slopes"),
    "curve_intervention": Variable("score by distance", "logits", "mean score of visible pairs, all put at d", CURVE),
    "curve_fit": Variable("a of the three-axis fit", "logits", "its slope is a convention of the gauge", CURVE),
    "table": Variable("scores by distance and key", "logits", "M of the first prompt, for two heads", TABLE),
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
        "at once). The three-axis fit is made again with every pair at one distance. Then the running model sees every "
        "pair at one distance, or no distance beyond a limit."
    ),
    source="reconstruction, after the controlled-distance claim of Han & Ji 2025 (arXiv 2503.13305)",
    options=DummyDistance,
    procedure=run,
    requires=partial(require_distances, "dummy_distance"),
    matrices=7,
    variables=VARIABLES,
    summarise=summarise,
    findings=findings,
    curves=(f"refit_r{OUT}", "curve_intervention"),
    by_head=frozenset({"refits", "curves"}),
    figures={
        "map": head_map(
            *SHARES,
            f"key_part_r{OUT}",
            title="Dummy-distance tables",
            subtitle="each query against each key at every distance: shares of the table's variance, and key part r",
        ),
        "agreement": agreement,
        "refits": refits,
        "tables": tables,
        "curves": curves,
        "loss": loss,
    },
    table=table,
    legend=(
        "refit r: key part fitted with every pair at that distance, against that at the true distances, with its 95% "
        "interval; loss in nats per token; rise: over the unchanged model's."
    ),
    caveats={
        "alibi": "nothing rotates, and the table leaves the slope out, so it is the same at every distance: additive "
        "r, key part r and every agreement are 1 by construction. The curves and the losses have the slope.",
        "none": "nothing rotates, so the table is the same at every distance: additive r, key part r and every "
        "agreement are 1 by construction, and no dummy distance changes the loss.",
    },
)

"""Magnitudes, phases and positions perturbed in RoPE's planes of the running model: do planes cost what they carry?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import pandas as pd
import xarray as xr

from tl_posgen.collector import Variable
from tl_posgen.errors import InputError
from tl_posgen.measure import Measure, Request
from tl_posgen.models.loss import prompts_of_one_length, require_one_length
from tl_posgen.models.model import Model
from tl_posgen.models.selection import select_heads
from tl_posgen.options import Options
from tl_posgen.position.decomposition.option_checks import check_share
from tl_posgen.position.planes import plane_perturbation_figures as figures
from tl_posgen.position.planes.plane_costs import COSTS, OF, measured, plan, runs_of
from tl_posgen.position.planes.plane_edits import EDITS, Edit
from tl_posgen.position.planes.plane_shares import (
    COST_OF_POSITION,
    PARTS,
    cost_of_half,
    cost_share_correlations,
    plane_shares,
)
from tl_posgen.position.planes.planes import require_rope
from tl_posgen.procedure import Job
from tl_posgen.report.intervals import ENDS, with_ends
from tl_posgen.report.sentences import beside, null_of, said, with_interval
from tl_posgen.result import Result
from tl_posgen.rope.frequency_bands import BANDS
from tl_posgen.summary import NullSummary, Summary


@dataclass(frozen=True)
class PlanePerturbation(Options):
    r"""rise = loss with RoPE planes of queries and keys perturbed - loss, in nats per token, prompt by prompt.

    The edits are those of `perturb_planes`, before RoPE, the first token left as it is. Three things: loss against
    strength with all planes of all layers perturbed, in q, in k, in both; each third of the planes (high, medium, low
    frequencies) in all layers, full strength; and the map, one plane of one layer at a time, of q and k, full
    strength. A full strength of "phase_noise" is a standard deviation of pi radians, a lower one its share of pi.

    Beside every rise stands that of its control: rotary vectors turned in random directions, changed by as much
    energy; and the difference, prompt by prompt. Beside the map stand the shares that each plane of each layer has:
    in the variance of the position part and of the content part (logits^2, mean over heads, as a share of the whole
    map), and in the energy of queries and keys (of its layer's); rho is Spearman's correlation with them over the map,
    and with the map of "shuffle_positions", what position costs there.

    Args:
        edits: of the curves and bands.
        strengths: in (0, 1].
        map_edits: of the map; none for no map.
        map_by: "planes"; "bands": a third of a layer's planes at a time; "auto": planes up to 96 of them, else bands.

    Raises:
        InputError: an unknown edit, a strength outside (0, 1]; later, unusable prompts.
        UnsupportedModelError: a model without RoPE, or whose scores cannot be replaced.

    Source: ours.

    Example:
        >>> from tl_posgen.position.planes import plane_perturbation
        >>> options = {"edits": ["shuffle_positions"], "strengths": [1.0], "map_edits": []}
        >>> cut = {"length": 32, "n_prompts": 1, "null_seeds": (), "progress": False}
        >>> found = plane_perturbation("mini", "Down, down, down. Would the fall never end?" * 4, **options, **cut)
        >>> bool(found.dataset["rise"].sel(of="both", cost="edit") > 0)
        True
    """

    edits: Sequence[Edit] = EDITS
    strengths: Sequence[int | float] = (0.1, 0.3, 1.0)
    map_edits: Sequence[Edit] = ("shuffle_magnitudes", "shuffle_phases", "shuffle_positions")
    map_by: Literal["auto", "planes", "bands"] = "auto"

    def check(self) -> None:
        for name, given in (("edits", self.edits), ("map_edits", self.map_edits)):
            if len(set(given)) < len(given):
                raise InputError(f"{name}={list(given)}: each edit may stand only once")
        if not len(self.edits) or not len(self.strengths):
            raise InputError("plane_perturbation: give at least one of edits and one of strengths")
        for strength in self.strengths:
            check_share("strength", strength)
            if not strength:
                raise InputError("strength 0 changes nothing; give strengths above 0, up to 1")


def run(model: Model, prompts: Any, request: Request, job: Job) -> Result:
    options = request.options
    assert isinstance(options, PlanePerturbation)
    tokens = prompts_of_one_length(model, prompts, job.length, job.n_prompts)

    planned, coords = plan(model, options, select_heads(model, job.layers, job.heads))
    job.plan(len(tokens) * runs_of(planned))

    def of_model(one: Model, label: str, after: Mapping[str, xr.Dataset]) -> xr.Dataset:
        data = measured(one, tokens, planned, coords, seed=job.seed)
        if options.map_edits:
            by_planes = data["planes"].dtype.kind != "U"
            data = data.merge(plane_shares(after["planes"], data["layer"], by_planes))
            data = data.merge(cost_share_correlations(data))
        return data.assign_attrs(rows=("edit", "of", "strength", "cost"), model=label)

    return job.result(request, model, list(tokens), of_model)


# What is shown

NAMES = {
    "shuffle_magnitudes": "magnitudes shuffled over tokens",
    "shuffle_phases": "phases shuffled over tokens",
    "shuffle_positions": "positions shuffled over tokens",
    "mean_magnitude": "magnitudes at their mean",
    "mean_phase": "phases at their mean",
    "phase_noise": "phases at random",
}


def summarise(data: xr.Dataset) -> Summary:
    """Keys are `rise_<edit>_<of>[_<cost>]` at the highest strength, `band_<edit>_<band>[_<cost>]`, and, where a map was
    made, `rho_<edit>_<share>[_<cost>]`, `rho_gap_<edit>[_<cost>]`, `map_sum_<edit>`, the sum over all its cells,
    `half_of_<share>_cells`, how few of them carry half of position or content, and `half_of_<share>_<edit>`, their part
    of that sum."""
    summary: dict[str, Any] = {
        "loss": float(data["loss"]),
        "edits": data["edit"].values.tolist(),
        "strengths": data["strength"].values.tolist(),
        "strength_most": float(data["strength"].max()),
        "map_edits": data["map_edit"].values.tolist() if "map_rise" in data else [],
    }
    most = data.sel(strength=data["strength"].max())
    summary |= flat(most, "rise", "rise", "edit", "of") | flat(data, "band_rise", "band", "edit", "band")
    if not summary["map_edits"]:
        return summary
    summary |= flat(data, "rho", "rho", "map_edit", "share") | flat(data, "rho_gap", "rho_gap", "map_edit")
    for edit in summary["map_edits"]:
        costs = data["map_rise"].sel(map_edit=edit, cost="edit")
        summary[f"map_sum_{edit}"] = float(costs.sum())
        for share in PARTS[:2]:
            summary[f"half_of_{share}_cells"], summary[f"half_of_{share}_{edit}"] = cost_of_half(costs, data[share])
    return summary | {
        "n_cells": int(data["n_cells"]),
        "map_of": "planes" if data["planes"].dtype.kind != "U" else "bands",
        "shares": [str(share) for share in data["share"].values],
    }


def flat(data: xr.Dataset, variable: str, name: str, *dims: str) -> dict[str, float]:
    """A variable and its ends as one number a key: "<name>_<one of each dim>[_<cost>][_low]"; that of the edit itself,
    not of its control, has no cost in its key, and the control no ends."""
    found = {}
    for end, cost in product(ENDS, COSTS):
        if end and cost == "control":
            continue
        array, suffix = data[f"{variable}{end}"].sel(cost=cost), "" if cost == COSTS[0] else f"_{cost}"
        for place in product(*(data[dim].values for dim in dims)):
            at = dict(zip(dims, place, strict=True))
            found["_".join((name, *map(str, place))) + suffix + end] = float(array.sel(at))
    return found


def findings(own: Summary, null: NullSummary | None) -> list[str]:
    lines = [how_much(own, null, edit) for edit in own["edits"]]
    lines.append(
        f"A third of the planes ({', '.join(BANDS)} frequencies) of all layers: "
        + "; ".join(f"{NAMES[edit]} {', '.join(in_band(own, edit, band) for band in BANDS)}" for edit in own["edits"])
        + ". In brackets a random rotation of the same energy."
    )
    return lines + [on_the_map(own, null, edit) for edit in own["map_edits"]]


def how_much(own: Summary, null: NullSummary | None, edit: str) -> str:
    key = f"rise_{edit}_both"
    sides = ", ".join(f"of {side} alone {said(own[f'rise_{edit}_{side}'], '+.3f')}" for side in "qk")
    share = "" if own["strength_most"] == 1 else f" at strength {own['strength_most']:g}"
    return (
        f"{NAMES[edit].capitalize()}{share}, all planes of q and k: the loss rises by "
        f"{with_interval(own, key, '+.3f')} nats ({null_of(null, key, '+.3f')}); {sides}. A random rotation of "
        f"the same energy costs {said(own[f'{key}_control'], '+.3f')}, the difference "
        f"{with_interval(own, f'{key}_less_control', '+.3f')}."
    )


def in_band(own: Summary, edit: str, band: str) -> str:
    key = f"band_{edit}_{band}"
    return f"{said(own[key], '+.3f')} ({said(own[f'{key}_control'], '+.3f')})"


def on_the_map(own: Summary, null: NullSummary | None, edit: str) -> str:
    def rho(share: str, cost: str = "") -> str:
        return with_interval(own, f"rho_{edit}_{share}{cost}", ".2f")

    parts = ", ".join(f"{share} {rho(share)} ({null_of(null, f'rho_{edit}_{share}', '.2f')})" for share in PARTS)
    control = ", ".join(f"{share} {said(own[f'rho_{edit}_{share}_control'], '.2f')}" for share in PARTS)
    of_position = ""
    if COST_OF_POSITION in own["shares"] and edit != "shuffle_positions":
        of_position = f" With the cost of shuffled positions: {rho(COST_OF_POSITION)}."
    at_once = ""
    if f"rise_{edit}_both" in own and own["strength_most"] == 1:
        at_once = f", all at once {said(own[f'rise_{edit}_both'], '+.3f')}"
    halves = [
        f"{own[f'half_of_{share}_cells']} cells with half of {share} {said(own[f'half_of_{share}_{edit}'], '.0%')}"
        for share in PARTS[:2]
    ]
    one = "plane" if own["map_of"] == "planes" else "band"
    return (
        f"Map of {own['n_cells']} cells (layer x {one}), {NAMES[edit]}: Spearman's rho of the cost with the share in "
        f"{parts}; of the control's cost {control}.{of_position} Position less content: "
        f"{with_interval(own, f'rho_gap_{edit}', '+.2f')}. Costs one by one add up to "
        f"{beside(own, null, f'map_sum_{edit}', '+.3f')} nats{at_once}. Of that sum, {' and '.join(halves)}."
    )


def table(data: xr.Dataset) -> pd.DataFrame:
    """A row an edit, highest strength: q, k, both, control, the difference with its interval; thirds of the planes."""
    most = data.sel(strength=data["strength"].max())
    rows = []
    for edit in data["edit"].values:
        rise, bands = most.sel(edit=edit), data["band_rise"].sel(edit=edit, cost="edit")
        both = rise.sel(of="both")
        row = {"edit": str(edit)} | {of: float(rise["rise"].sel(of=of, cost="edit")) for of in OF}
        row |= {"control": float(both["rise"].sel(cost="control"))}
        ends = zip(("less control", "from", "to"), ENDS, strict=True)
        row |= {name: float(both[f"rise{end}"].sel(cost="less_control")) for name, end in ends}
        rows.append(row | {band: float(bands.sel(band=band)) for band in BANDS})
    return pd.DataFrame(rows)


CURVE, BAND, MAP = ("edit", "of", "strength", "cost"), ("edit", "band", "cost"), ("map_edit", "layer", "planes", "cost")
CELL, RHO = ("layer", "planes"), ("map_edit", "cost", "share")
RISE = "loss perturbed - loss, mean over prompts; less_control: less that of a random rotation of the same energy"
NORMAL = "of the 95% interval: standard error over resampled prompts, Student's t"
OF_MAP = "of every plane, or band, of every layer as a share of the whole map; logits^2, mean over heads"
VARIABLES = {
    "loss": Variable("loss", "nats", "per token, nothing perturbed", ()),
    **with_ends("rise", "rise of the loss", "nats", RISE, CURVE),
    "rise_each": Variable("rise of the loss", "nats", "of every prompt", ("prompt", *CURVE)),
    **with_ends("band_rise", "rise of the loss, a third of the planes", "nats", RISE, BAND),
    "band_rise_each": Variable("rise of the loss, a third of the planes", "nats", "of every prompt", ("prompt", *BAND)),
    **with_ends("map_rise", "rise of the loss, one plane of one layer", "nats", RISE, MAP),
    "map_rise_each": Variable("rise of the loss, one plane of one layer", "nats", "of every prompt", ("prompt", *MAP)),
    "position": Variable("share in position", "", f"variance of the position part, {OF_MAP}", CELL),
    "content": Variable("share in content", "", f"variance of the content part, {OF_MAP}", CELL),
    "energy": Variable("share of energy", "", "of E|z|^2 of its layer, mean over q, k and heads", CELL),
    "wavelength": Variable("wavelength", "tokens", "2 pi / theta; of a band the mean", CELL),
    **with_ends("rho", "Spearman's rho", "", "of cost and share over the cells of the map", RHO, NORMAL),
    **with_ends("rho_gap", "rho with position less rho with content", "", "", RHO[:2], NORMAL),
    "n_cells": Variable("cells of the map", "", "", ()),
}

MEASURE = Measure(
    name="plane_perturbation",
    question="What do magnitudes, phases and positions in RoPE's planes cost?",
    explanation=(
        "In the running model, before RoPE: magnitudes or phases of queries and keys shuffled over tokens, replaced by "
        "their mean, or noisy, and positions shuffled while both stay; in all planes, in a third of them, and in one "
        "plane of one layer at a time. Beside each a random rotation that changes as much energy; beside the map what "
        "share of position and of content each plane carries. The first token stays as it is; 95 % intervals "
        "over prompts."
    ),
    source="ours",
    options=PlanePerturbation,
    procedure=run,
    after=("planes",),
    requires=require_rope,
    check_prompts=lambda options, tokens: require_one_length("plane_perturbation", tokens),
    matrices=7,
    variables=VARIABLES,
    summarise=summarise,
    findings=findings,
    figures={"curves": figures.curves, "bands": figures.bands, "map": figures.cost_map, "scatter": figures.scatter},
    drawn=figures.drawn,
    table=table,
    legend=(
        "rise of the loss in nats when q, k, or both are edited; control: a random rotation of the same energy; from, "
        "to: 95% interval of the difference; high, medium, low: a third of the planes alone."
    ),
)

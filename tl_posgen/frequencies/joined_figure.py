"""The results of one report put together for one figure: the use of planes, what each costs, and loss across a gap."""

from collections.abc import Mapping
from dataclasses import replace

import xarray as xr

from tl_posgen.core.result import Result
from tl_posgen.frequencies.gap import Gap
from tl_posgen.frequencies.plane_cost import DONE, PlaneCost
from tl_posgen.frequencies.plane_use import PlaneUse


def join_costs_and_gap(report: Mapping[str, Result]) -> dict[str, Result]:
    """Return the results of a report, that of `plane_use` with what each plane costs and with loss across a gap, which
    its figure shows below its use; of `plane_cost` and `gap` what the report has, and planes that were edited one by
    one.

    Example:
        >>> import tl_posgen
        >>> cut = {"length": 24, "n_prompts": 1, "nulls": 0, "progress": False}
        >>> measures, text = ["plane_use", PlaneCost(["drop"], ["planes"])], "Down, down, down. Would it never end?" * 3
        >>> joined = join_costs_and_gap(tl_posgen.analyze("mini", text, measures=measures, **cut))
        >>> joined["plane_use"].trained["cost"].sizes["plane"]
        16
    """
    results = dict(report)
    use, cost, gap = (results.get(kind.name) for kind in (PlaneUse, PlaneCost, Gap))
    arrays: dict[str, xr.DataArray] = {}
    if use is not None and cost is not None and (costs := cost.measure.costs(cost.numbers)):
        edits = xr.concat(list(costs.values()), "edit").assign_coords(edit=[DONE[edit] for edit in costs])
        arrays["cost"] = edits.reindex(plane=use.dataset["plane"].values)
    if use is not None and gap is not None:
        names = [gap.measure.words.get(str(name), str(name)) for name in gap.dataset["condition"].values]
        loss = gap.dataset["loss"].mean("prompt").assign_coords(condition=names, gap=gap.trained["contexts"].values)
        arrays["across_gap"] = loss.rename(condition="rule", gap="contexts")
    if use is None or not arrays:
        return results
    of_inits = {
        name: array.reindex(init=use.dataset["init"].values)
        .transpose("init", *PlaneUse.variables[name].dims, missing_dims="ignore")
        .drop_vars(("init_label", "prompt"), errors="ignore")
        for name, array in arrays.items()
    }
    return results | {PlaneUse.name: replace(use, dataset=use.measure.describe(use.dataset.assign(of_inits)))}

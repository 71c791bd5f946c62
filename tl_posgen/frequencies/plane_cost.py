"""What each plane of RoPE, and each third and quarter of them, costs the running model when it is edited."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, Any, Literal, get_args

import torch
import xarray as xr

from tl_posgen.core.number import Number
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.options import Each, require
from tl_posgen.core.run import Run
from tl_posgen.editing.printed_hooks import HookList, printing_call
from tl_posgen.extension.frequency_rules import with_frequencies
from tl_posgen.extension.held_planes import hold_planes
from tl_posgen.interventions import PREDICTIONS, UNTOUCHED, Interventions, tokens_by_condition
from tl_posgen.models.layer_table import geometry_of
from tl_posgen.models.model import Model
from tl_posgen.models.selection import Heads, Layers
from tl_posgen.models.session import Session
from tl_posgen.report.kinds import bars, lines
from tl_posgen.rope.frequency_bands import PlaneChoice, planes_of
from tl_posgen.rope.rotation import Rope
from tl_posgen.slash.band_ablation import ablate_bands

Edit = Literal["drop", "freeze", "slow", "hold"]
Group = Literal["planes", "thirds", "quarters"]
DONE = {
    "drop": "dropped",
    "freeze": "frozen",
    "slow": "half as fast",
    "hold": "held at a quarter turn",
}  # what sentences and figures call an edit
_PARTS: dict[Group, Sequence[str]] = {
    "thirds": ("fastest third", "middle third", "slowest third"),
    "quarters": ("fastest quarter", "second quarter", "third quarter", "slowest quarter"),
}
_MOST_NAMED = 3  # planes in a sentence


@printing_call
def edit_planes(
    model: Model | Session, edit: Edit, planes: PlaneChoice, *, layers: Layers = None, heads: Heads = None
) -> HookList:
    """score_ij <- scale <R'_i q'_i, R'_j k'_j> with chosen planes dropped (q'_m = k'_m = 0), frozen (theta'_m = 0),
    half as fast (theta'_m = theta_m / 2) or held at their quarter turn (theta_m min(D, pi / 2 theta_m) at distance D).

    Args:
        planes: indices, 0 the fastest of a layer; a boolean per plane; or a function from a layer's `Rope` to one of
            these.
        layers, heads: chosen layers and heads; all if left out.

    Raises:
        UnsupportedModelError: see `tl_posgen.hooks.replace_scores`; no chosen layer with RoPE.

    Source: ours.

    Example:
        >>> import torch
        >>> from tl_posgen import load_model
        >>> model, tokens = load_model("mini"), torch.arange(12)[None]
        >>> none = edit_planes(model, "slow", lambda rope: torch.zeros_like(rope.inv_freq, dtype=torch.bool))
        >>> torch.allclose(model.run_with_hooks(tokens, fwd_hooks=none), model(tokens), atol=1e-4)
        True
    """
    require("edit", edit, Edit)
    where: dict[str, Any] = {"layers": layers, "heads": heads}
    if edit == "hold":
        return hold_planes(model, planes, at="quarter turn", **where)
    if edit != "slow":
        return ablate_bands(model, edit, planes, **where)

    def slower(rope: Rope) -> Rope:
        theta = rope.inv_freq
        return replace(rope, inv_freq=torch.where(planes_of(rope, planes).to(theta.device), theta / 2, theta))

    return with_frequencies(model, slower, **where)


def one_plane(plane: int) -> PlaneChoice:
    """Return what chooses the plane of this number; of a layer that lacks it none."""
    return lambda rope: torch.arange(len(rope.inv_freq)) == plane


def part_of_planes(part: int, n_parts: int) -> PlaneChoice:
    """Return what chooses one of n equal parts of a layer's planes, 0 the fastest."""
    return lambda rope: n_parts * torch.arange(len(rope.inv_freq)) // max(1, len(rope.inv_freq)) == part


def _planes_by_part(group: Group, n_planes: int) -> dict[str, PlaneChoice]:
    """Return what chooses the planes of each part of a group, by the part's name, the fastest first."""
    if group == "planes":
        return {f"plane {plane}": one_plane(plane) for plane in range(n_planes)}
    names = _PARTS[group]
    return {name: part_of_planes(part, len(names)) for part, name in enumerate(names)}


@dataclass(frozen=True)
class PlaneCost(Interventions):
    r"""rise = L(planes edited) - L(unchanged), for every plane of RoPE, and for thirds and quarters of them.

    What does the running model lose when one plane of RoPE is taken from its scores, or no longer turns? Planes are
    edited one by one, and in thirds and quarters, the fastest first, in all heads at once or in those that are chosen:
    dropped from queries and keys, frozen (their content stays and does not turn), turned half as fast, or held where
    they have made a quarter turn.

    A plane that is frozen keeps what its queries and keys say to each other, so that what it costs is the loss of its
    turning. Planes go by their number in each layer; layers may have frequencies of their own.

    Args:
        edits: any of "drop", "freeze", "slow" and "hold".
        groups: which planes are edited together: "planes" (each by itself), "thirds", "quarters".

    Raises:
        InputError: prompts of several lengths.
        UnsupportedModelError: a model without rotary planes, or whose scores cannot be replaced.

    Source: planes dropped one by one: Karypis et al. 2026 (arXiv 2607.10134) of a model with learned frequencies, as we
    read it; the slowest quarter frozen is p-RoPE, Barbero et al. 2024 (arXiv 2410.06205); the others: ours

    Example:
        >>> cut = {"length": 24, "n_prompts": 1, "nulls": 0, "progress": False}
        >>> found = PlaneCost(["drop"], ["thirds"])("mini", "Down, down, down. Would the fall never end?" * 3, **cut)
        >>> found.frame()["condition"].tolist()
        ['unchanged', 'drop fastest third', 'drop middle third', 'drop slowest third']
    """

    edits: Annotated[Sequence[Edit], Each()] = ("drop", "freeze")
    groups: Annotated[Sequence[Group], Each()] = ("planes", "thirds", "quarters")

    question = "What does each plane of RoPE cost?"
    variables = {**Interventions.variables, **PREDICTIONS}
    words = DONE
    token_view = tokens_by_condition(DONE)

    def requires(self, session: Session) -> None:
        session.require_rope(self.name)

    figures = {
        "planes": lines(
            lambda result: {
                "rise of the loss, nats": [
                    (DONE[edit], lambda numbers, edit=edit: numbers.measure.costs(numbers)[edit])
                    for edit in result.measure.edits
                ]
            },
            "plane",
            title="What each plane costs",
            subtitle="nats per token over the unchanged model; planes by number, the fastest first",
        ),
        "groups": bars(
            {"rise of the loss, nats": [("rise", lambda numbers: numbers.measure.rise_of_groups(numbers))]},
            "condition",
            title="What thirds and quarters of the planes cost",
            subtitle="nats per token, over the unchanged model",
            form="+.3f",
        ),
    }

    def conditions(self, run: Run) -> Mapping[str, Any]:
        n_planes = max(len(geometry.rope.inv_freq) for geometry in geometry_of(run.session))
        groups: Sequence[Group] = [group for group in get_args(Group) if group in self.groups]
        chosen = {name: planes for group in groups for name, planes in _planes_by_part(group, n_planes).items()}
        pairs = product(self.edits, chosen.items())
        by_name = {
            f"{edit} {name}": edit_planes(run.session, edit, planes, **run.where) for edit, (name, planes) in pairs
        }
        return {name: hooks for name, hooks in by_name.items() if hooks}  # some parts have no plane, or none that turns

    def kinds(self, data: xr.Dataset) -> Sequence[str]:
        is_there = {"planes": "planes" in self.groups, "groups": bool({"thirds", "quarters"} & set(self.groups))}
        return [kind for kind, present in is_there.items() if present]

    def costs(self, numbers: Numbers) -> dict[str, xr.DataArray]:
        """Return the rise of the loss [.., plane, prompt] by edit; none where planes were not edited one by one."""
        rise, costs = self.rise_of(numbers), {}
        names = [*_planes_by_part("planes", rise.sizes["condition"])]  # edits that were left out are of slower planes
        for edit in self.edits:
            conditions = [f"{edit} {name}" for name in names]
            of_edit = rise.sel(condition=rise["condition"].isin(conditions))
            planes = [conditions.index(condition) for condition in of_edit["condition"].values]
            if planes:
                costs[edit] = of_edit.rename(condition="plane").assign_coords(plane=planes)
        return costs

    def rise_of_groups(self, numbers: Numbers) -> xr.DataArray:
        """Return the rise of the loss under edits of thirds and quarters."""
        rise = self.rise_of(numbers)
        names = [f"{edit} {name}" for edit in self.edits for parts in _PARTS.values() for name in parts]
        return rise.sel(condition=rise["condition"].isin(names))

    def findings(self, numbers: Numbers) -> list[str]:
        sentences = []
        for edit, rise in self.costs(numbers).items():
            rises = numbers.along(rise, "plane")
            dearest = sorted(rises, key=lambda plane: -rises[plane].value)[:_MOST_NAMED]
            named = "; ".join(f"plane {plane} {rises[plane]:+.3f}" for plane in dearest)
            sentences.append(f"Loss with one plane {DONE[edit]}, the dearest of {len(rises)}: {named} nats.")
        rises = self.rises(numbers)
        for edit in self.edits:
            quarters = {name: rises.get(f"{edit} {name}") for name in ("fastest quarter", "slowest quarter")}
            phrases = [f"{name} {number:+.3f}" for name, number in quarters.items() if isinstance(number, Number)]
            sentences += [f"With a quarter of the planes {DONE[edit]}: {'; '.join(phrases)} nats."] if phrases else []
        loss = numbers("loss", condition=UNTOUCHED)
        return sentences or [f"Loss of the unchanged model: {loss:.3f} nats."]

"""Magnitudes, phases and positions perturbed in RoPE's planes of the running model: do planes cost what they carry?"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
import torch
import xarray as xr
from torch import Tensor

from tl_posgen.core.formatting import in_brackets
from tl_posgen.core.measure import Variable
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.options import Each, Threshold
from tl_posgen.core.run import Run
from tl_posgen.editing.printed_hooks import HookList
from tl_posgen.interventions import UNTOUCHED, Interventions
from tl_posgen.models.layer_table import geometry_of
from tl_posgen.models.session import Session
from tl_posgen.models.streaming.stream import prompts_at_once
from tl_posgen.position.planes.hooks import perturb_planes
from tl_posgen.position.planes.numbers.plane_edits import Edit
from tl_posgen.position.planes.planes import Planes
from tl_posgen.report.kinds import bars, heat_maps
from tl_posgen.rope.frequency_bands import BANDS, PlaneChoice, bands_by_thirds

_SHUFFLES: tuple[Edit, ...] = ("shuffle_magnitudes", "shuffle_phases", "shuffle_positions")
_WORDS = {
    "shuffle_magnitudes": "magnitudes shuffled",
    "shuffle_phases": "phases shuffled",
    "shuffle_positions": "positions shuffled",
    "mean_magnitude": "magnitudes at their mean",
    "mean_phase": "phases at their mean",
    "phase_noise": "phases with noise",
}
CARRIED = ("position", "content", "energy")
COSTS = ("edit", "control")
MOST_LAYERS = 12  # that are mapped unless asked for
MOST_CELLS = 96  # up to so many layers x planes are mapped one by one, else by frequency band


def plane_shares(planes: xr.Dataset, layers: Any, by_planes: bool) -> xr.DataArray:
    """Return the shares [part, layer, planes] of the planes of the map, from `Planes`, first token left out.

    position_lm is the mean over heads of the covariance of plane m's position part with the whole position part
    (`plane_parts`), divided by its sum over the map; content_lm likewise; energy_lm is the share of E|z|^2 in its
    layer, mean over heads, queries and keys. The unrotated rest of partial rotary heads is not in the map.

    Args:
        by_planes: planes by number, NaN where a layer has fewer; else bands by name, which sum planes.
    """
    data = planes.sel(layer=layers, tokens="without first").drop_vars("tokens").rename(plane="planes")
    turning = np.isfinite(data["wavelength"])
    data, turning = (values.isel(planes=turning.any("layer").values) for values in (data, turning))
    parts = (data["share_by_plane"] * data["share"] * data["std"] ** 2).sel(part=list(CARRIED[:2])).mean("head")
    energy = data["energy"].sum("side").mean("head").expand_dims(part=["energy"]) / 2
    share = xr.concat([parts, energy], "part").where(turning)
    if not by_planes:
        place = xr.DataArray(np.arange(share.sizes["planes"]), dims="planes")
        third = 3 * place // turning.sum("planes")
        share = xr.concat([share.where(third == number).sum("planes") for number in range(len(BANDS))], "planes")
        share = share.assign_coords(planes=list(BANDS))
    total = share.sum(("layer", "planes"))
    return (share / total.where(total["part"] != "energy", 1)).transpose("part", "layer", "planes")


@dataclass(frozen=True)
class PlanePerturbation(Interventions):
    r"""rise = loss with RoPE planes of queries and keys perturbed - loss, in nats per token, prompt by prompt.

    In the running model, before RoPE, magnitudes or phases of queries and keys are shuffled over tokens, replaced by
    their mean, or made noisy, or positions are shuffled while both stay. This is done in all planes, in a third of
    them, and in one plane of one layer at a time. The control is a random rotation that changes as much energy. The map
    also has the share of position and of content that each plane carries. The first token stays as it is; 95 %
    intervals are over prompts.

    The edits are those of `perturb_planes`: of all planes of all layers at every strength, in q, in k and in both; of
    each third of the planes (high, medium, low frequencies), and of one plane of one layer at a time (the map), at full
    strength in both. A full strength of "phase_noise" is a standard deviation of pi radians, a lower one its share of
    pi. rho is Spearman's correlation over the map of the rise with what planes carry.

    Args:
        edits: what is done in all planes and in thirds of them.
        strengths: how far edits go, in (0, 1]: full alone if left out, as each takes six passes an edit and prompt; a
            third of the planes is edited at the highest.
        map_edits: for the map; none for no map. If left out, the three that shuffle, of models with up to 12 layers.
        map_by: "planes"; "bands": a third of a layer's planes at a time; "auto": planes up to 96 of them, else bands.

    Raises:
        InputError: unusable prompts.
        UnsupportedModelError: a model without RoPE, or whose scores cannot be replaced.

    Source: ours

    Example:
        >>> measure = PlanePerturbation(edits=["shuffle_positions"], strengths=[1.0], map_edits=[])
        >>> cut = {"length": 32, "n_prompts": 1, "nulls": 0, "progress": False}
        >>> result = measure("mini", "Down, down, down. Would the fall never end?" * 4, **cut)
        >>> result.measure.rises(result.numbers)["shuffle_positions"].value > 0
        True
    """

    edits: Annotated[Sequence[Edit], Each()] = _SHUFFLES
    strengths: Annotated[Sequence[Threshold], Each()] = (1.0,)
    map_edits: Annotated[Sequence[Edit], Each(least=0)] | None = None
    map_by: Literal["auto", "planes", "bands"] = "auto"

    words = _WORDS
    question = "What do magnitudes, phases and positions in RoPE's planes cost?"
    matrices = 7
    after = (Planes,)
    variables = {
        "loss": Variable(
            "loss",
            "nats",
            "per token; control: under a random rotation of the same energy",
            ("condition", "cost", "prompt"),
            "loss",
        ),
        "map_rise": Variable(
            "rise of the loss, one plane of one layer",
            "nats",
            "as of all planes",
            ("map_edit", "layer", "planes", "cost", "prompt"),
        ),
        "share": Variable(
            "share of the plane",
            description="position, content: variance of the part, of every plane, or band, of every layer as a share "
            "of the whole map, logits^2, mean over heads; energy: of E|z|^2 of its layer, mean over q, k and heads",
            dims=("part", "layer", "planes"),
        ),
    }
    figures = {
        "rise": bars(
            {
                "rise of the loss, nats": [
                    ("edit", lambda numbers: numbers.measure.of_edits(numbers)),
                    ("random rotation of equal energy", lambda numbers: numbers.measure.of_edits(numbers, "control")),
                ]
            },
            "condition",
            title="Queries and keys perturbed in RoPE's planes",
            subtitle="all planes of q and k; nats per token, over the unchanged model; first token as it is",
            form="+.3f",
        ),
        "map": heat_maps(
            "map_rise",
            "layer",
            "planes",
            per=["map_edit"],
            title="Rise of the loss, one plane of one layer at a time",
            subtitle="nats per token, full strength, q and k",
        ),
    }
    legend = "rise of the loss in nats; control: under a random rotation of the same energy; high, medium, low: thirds."

    @property
    def most(self) -> float:
        """The highest strength."""
        return float(max(self.strengths))

    def labels(self) -> Mapping[str, Sequence[Any]]:
        return {"cost": COSTS}

    def usual(self) -> Mapping[str, Any]:
        return {"condition": UNTOUCHED, "cost": COSTS[0]}

    def kinds(self, data: xr.Dataset) -> Sequence[str]:
        return [kind for kind in self.figures if kind != "map" or "map_rise" in data]

    def requires(self, session: Session) -> None:
        session.require_rope(self.name)

    def refuse(self, run: Run) -> None:
        run.session.require_rope(self.name, run.heads)

    def prepare(self, session: Session, tokens: Sequence[Tensor]) -> "PlanePerturbation":
        usual = _SHUFFLES if session.model.cfg.n_layers <= MOST_LAYERS else ()
        return replace(self, map_edits=usual if self.map_edits is None else self.map_edits)

    def _cells_of_map(self, run: Run) -> tuple[dict[int, int], bool]:
        """Return how many planes each layer with some has, and whether the map has planes, or else bands."""
        geometries = geometry_of(run.session, list(run.heads))
        n_planes = {geometry.layer: len(geometry.rope.inv_freq) for geometry in geometries if geometry.rope.rotary_dim}
        by_planes = self.map_by == "planes" or (self.map_by == "auto" and sum(n_planes.values()) <= MOST_CELLS)
        return n_planes, by_planes

    def conditions(self, run: Run) -> Mapping[str, Any]:
        """Return arguments of `perturb_planes` by name: "phase_noise", "phase_noise of q", "phase_noise at 0.3", ..,
        "phase_noise, high planes"."""
        by_name: dict[str, Any] = {}
        for edit in self.edits:
            for strength in sorted(map(float, self.strengths), reverse=True):
                at = edit if strength == self.most else f"{edit} at {strength:g}"
                options = {"edit": edit, "strength": strength, **run.where}
                by_name |= {at: options, **{f"{at} of {side}": {**options, "of": (side,)} for side in "qk"}}
            by_name |= {f"{edit}, {band} planes": {"edit": edit, "band": _third(band), **run.where} for band in BANDS}
        return by_name

    def hooks_of(self, run: Run, condition: Any, prompt: int = 0, **options: Any) -> HookList:
        """Return the hooks of a condition's arguments; a full strength of phase noise, which is nearly uniform, is pi
        radians."""
        strength = condition.get("strength", 1.0) * (math.pi if condition["edit"] == "phase_noise" else 1)
        return perturb_planes(run.session, **{**condition, "strength": strength}, **options)

    def under(self, run: Run, hooks: Any) -> Mapping[str, Any]:
        """Return the loss [cost, prompt] under an edit and under its control; every prompt has different draws."""
        batches = run.tokens.split(prompts_at_once(run.session, run.tokens.shape[1]))
        if not hooks:
            return {"loss": np.tile(run.loss.mean(-1).numpy(), (len(COSTS), 1))}
        losses = []
        for control in (False, True):
            for number, batch in enumerate(batches):
                seed = (run.seed * len(batches) + number) % 2**63
                perturbed = self.hooks_of(run, hooks, seed=seed, control=control)
                losses.append(run.losses(batch, perturbed).mean(-1))
        return {"loss": torch.cat(losses).unflatten(0, (2, -1)).numpy()}

    def of_model(self, run: Run) -> xr.Dataset:
        data = super().of_model(run)
        if not self.map_edits:
            return data
        loss = run.loss.mean(-1).numpy()
        n_planes, by_planes = self._cells_of_map(run)

        def one_cell(map_edit: str, layer: int, planes: Any) -> Mapping[str, Any]:
            if by_planes and planes >= n_planes[layer]:
                return {"map_rise": np.full((len(COSTS), len(run.rows)), np.nan)}
            band = [planes] if by_planes else _third(planes)
            options = {"edit": map_edit, "heads": [(layer, head) for head in run.heads[layer]], "band": band}
            return {"map_rise": self.under(run, options)["loss"] - loss}

        planes = range(max(n_planes.values())) if by_planes else BANDS
        data = data.merge(run.grid(one_cell, pure=True, map_edit=self.map_edits, layer=list(n_planes), planes=planes))
        return data.assign(share=plane_shares(run.dataset_of(Planes), list(n_planes), by_planes))

    def rise_of(self, numbers: Numbers, cost: str = COSTS[0]) -> xr.DataArray:
        loss = numbers.array("loss", condition=None, cost=cost)
        return loss - loss.sel(condition=UNTOUCHED, drop=True)

    def of_edits(self, numbers: Numbers, cost: str = COSTS[0]) -> xr.DataArray:
        """Return the rises by each edit of all planes of q and k at the highest strength."""
        return self.rise_of(numbers, cost).sel(condition=list(self.edits))

    def _less_control(self, numbers: Numbers, condition: str) -> Number:
        """Return the rise less that of its control."""
        loss = numbers.array("loss", condition=condition, cost=None)
        return numbers.number(loss.sel(cost="edit") - loss.sel(cost="control"))

    def rho(self, numbers: Numbers, edit: str, part: str = "position", cost: str = COSTS[0]) -> Number:
        """Return Spearman's rho over the planes of the map of their cost with what they carry of a part."""
        rise, share = numbers.array("map_rise", map_edit=edit, cost=cost), numbers.array("share", part=part)
        return numbers.correlation(rise, share, ranks=True, over=("layer", "planes"))

    def findings(self, numbers: Numbers) -> list[str]:
        strength, rises = "" if self.most == 1 else f" at strength {self.most:g}", self.rises(numbers)
        null = max((abs(init) for rise in rises.values() for init in rise.inits), default=math.nan)
        of_init = in_brackets("" if math.isnan(null) else f"random init at most {null:.3f}")
        costs = (
            f"{self.in_words(edit)} {rises[edit].with_interval:+.3f}, "
            f"{self._less_control(numbers, edit).with_interval:+.3f} more than a "
            "random rotation of the same energy"
            for edit in self.edits
        )
        sentences = [f"Rise of the loss in nats, all planes of q and k edited{strength}{of_init}: {'; '.join(costs)}."]
        if "map_rise" in numbers:
            edits = numbers.data["map_edit"].values
            rhos = (f"{self.in_words(edit)} {self.rho(numbers, edit):.2f}" for edit in edits)
            sentences.append(
                f"Over planes, the rise has a rank correlation with what they carry of position: {'; '.join(rhos)}."
            )
        return sentences

    def table(self, numbers: Numbers) -> pd.DataFrame:
        control = numbers.along(self.rise_of(numbers, "control"), "condition")
        return super().table(numbers).assign(control=[rise.value for rise in control.values()])


def _third(band: str) -> PlaneChoice:
    """Return a function from a layer's Rope to the planes of a band by thirds."""
    return lambda rope: bands_by_thirds(len(rope.inv_freq))[BANDS.index(band)]

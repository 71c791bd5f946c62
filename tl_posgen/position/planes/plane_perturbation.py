"""Magnitudes, phases and positions perturbed in RoPE's planes of the running model: do planes cost what they carry?"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from tl_posgen.core.formatting import in_brackets
from tl_posgen.core.measure import ENDS, Measure, Variable
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.options import Each, Threshold
from tl_posgen.core.run import Run
from tl_posgen.models.layer_table import geometry_of
from tl_posgen.models.loss import token_losses
from tl_posgen.models.selection import select_heads
from tl_posgen.position.planes import plane_perturbation_figures as drawn
from tl_posgen.position.planes.hooks import perturb_planes
from tl_posgen.position.planes.numbers.plane_edits import Edit
from tl_posgen.position.planes.planes import Planes, require_rope
from tl_posgen.rope.frequency_bands import BANDS, bands_by_thirds
from tl_posgen.rope.rotation import Rope
from tl_posgen.stats.agreement import spearman
from tl_posgen.stats.intervals import resampled_interval

CARRIED = ("position", "content", "energy")
MapBy = Literal["auto", "planes", "bands"]
SHUFFLES: tuple[Edit, ...] = ("shuffle_magnitudes", "shuffle_phases", "shuffle_positions")
MOST_LAYERS = 12  # that are mapped unless asked for
MOST_CELLS = 96  # up to so many layers x planes are mapped one by one, else by frequency band
COSTS = ("edit", "control")
BATCH = 8  # prompts per forward pass
OF = {"q": ("q",), "k": ("k",), "both": ("q", "k")}
PAIRS, RHO = ("cost", "prompt"), ("map_edit", "cost")
RISE = "loss perturbed - loss; control: of a random rotation of the same energy"
CARRIES = (
    "position, content: variance of the part, of every plane, or band, of every layer as a share of the whole map, "
    "logits^2, mean over heads; energy: of E|z|^2 of its layer, mean over q, k and heads"
)


def plane_shares(planes: xr.Dataset, layers: Any, by_planes: bool) -> xr.Dataset:
    """Return the shares of the planes of the map, from `Planes`, first token left out; bands sum planes.

    position_lm is the mean over heads of the covariance of plane m's position part with the whole position part
    (`plane_parts`), divided by its sum over the map; content_lm likewise; energy_lm is the share of E|z|^2 in its
    layer, mean over heads, queries and keys. The unrotated rest of partial rotary heads is not in the map.

    Returns:
        share [part, layer, planes], with planes by number or bands by name, NaN where a layer has fewer planes; and
        wavelength [layer, planes], of a band the mean wavelength.
    """
    known = planes.sel(layer=layers, tokens="without first", drop=True).rename(plane="planes")
    known = known.isel(planes=np.isfinite(known["wavelength"]).any("layer").values)
    parts = (known["share_by_plane"] * known["share"] * known["std"] ** 2).sel(part=list(CARRIED[:2])).mean("head")
    energy = known["energy"].sum("side").mean("head").expand_dims(part=["energy"]) / 2
    found = xr.Dataset({"share": xr.concat([parts, energy], "part"), "wavelength": known["wavelength"]})
    turning = found["wavelength"] < np.inf
    found = found.where(turning)
    if not by_planes:
        place = xr.DataArray(np.arange(found.sizes["planes"]), dims="planes")
        bands = [found.where(3 * place // turning.sum("planes") == number) for number in range(len(BANDS))]
        summed = [one[["share"]].sum("planes").assign(wavelength=one["wavelength"].mean("planes")) for one in bands]
        found = xr.concat(summed, "planes").assign_coords(planes=list(BANDS))
    whole = found["share"].sum(("layer", "planes"))
    share = found["share"] / whole.where(whole["part"] != "energy", 1)
    return found.assign(share=share).transpose("part", "layer", "planes")


def cost_share_correlations(data: xr.Dataset) -> xr.Dataset:
    """Return Spearman's rho over the map of each cost with each share, and with the cost of shuffled positions.

    `rho_gap` is rho with position less rho with content. `rho_positions` is there where shuffled positions were mapped.
    Intervals resample the prompts of the costs; shares are fixed.

    Args:
        data: map_rise [map_edit, layer, planes, cost, prompt] and share [part, layer, planes].
    """
    cells = data[["map_rise", "share"]].stack(cell=("layer", "planes"))
    cells = cells.isel(cell=cells["share"].sel(part=CARRIED[0]).notnull().values)
    each = cells["map_rise"].transpose("prompt", "map_edit", "cost", "cell").values
    shares = torch.tensor(cells["share"].sel(part=list(CARRIED)).transpose("part", "cell").values)
    edits = [str(edit) for edit in data["map_edit"].values]
    at = edits.index("shuffle_positions") if "shuffle_positions" in edits else None

    def rho_gap_and_positions(
        means: Float[np.ndarray, "some map_edit cost cell"],
    ) -> Float[np.ndarray, "some map_edit cost found"]:
        costs = torch.tensor(means)
        found = [spearman(costs, share.expand_as(costs)) for share in shares]
        found.append(found[0] - found[1])
        if at is not None:
            found.append(spearman(costs, costs[:, at, 0][:, None, None].expand_as(costs)))
            found[-1][:, at, 0] = torch.nan  # the correlation of positions' cost with itself
        return torch.stack(found, -1).numpy()

    every = np.stack(resampled_interval(each, rho_gap_and_positions, (-2.0, 2.0)), -1)  # [map_edit, cost, found, end]
    n, dims = len(CARRIED), ("map_edit", "cost")
    found: dict[str, Any] = {"rho": ((*dims, "part", "end"), every[:, :, :n].clip(-1, 1))}
    found["rho_gap"] = ((*dims, "end"), every[:, :, n])
    if at is not None:
        found["rho_positions"] = ((*dims, "end"), every[:, :, n + 1].clip(-1, 1))
    coords = {"map_edit": edits, "cost": data["cost"].values, "part": list(CARRIED), "end": list(ENDS)}
    return xr.Dataset(found, coords)


@dataclass(frozen=True)
class PlanePerturbation(Measure):
    r"""rise = loss with RoPE planes of queries and keys perturbed - loss, in nats per token, prompt by prompt.

    In the running model, before RoPE: magnitudes or phases of queries and keys shuffled over tokens, replaced by their
    mean, or noisy, and positions shuffled while both stay; in all planes, in a third of them, and in one plane of one
    layer at a time. Beside each a random rotation that changes as much energy; beside the map what share of position
    and of content each plane carries. The first token stays as it is; 95 % intervals over prompts.

    The edits are those of `perturb_planes`: of all planes of all layers at every strength, in q, in k and in both; of
    each third of the planes (high, medium, low frequencies), and of one plane of one layer at a time (the map), at full
    strength in both. A full strength of "phase_noise" is a standard deviation of pi radians, a lower one its share of
    pi. rho is Spearman's correlation over the map of costs with what planes carry, and with the cost of
    "shuffle_positions", what position costs there; its intervals are over resampled prompts.

    Args:
        edits: for curves and bands.
        strengths: in (0, 1].
        map_edits: for the map; none for no map. If left out, the three that shuffle, of models with up to 12 layers.
        map_by: "planes"; "bands": a third of a layer's planes at a time; "auto": planes up to 96 of them, else bands.

    Raises:
        InputError: unusable prompts.
        UnsupportedModelError: a model without RoPE, or whose scores cannot be replaced.

    Source: ours

    Example:
        >>> measure = PlanePerturbation(edits=["shuffle_positions"], strengths=[1.0], map_edits=[])
        >>> cut = {"length": 32, "n_prompts": 1, "null_seeds": (), "progress": False}
        >>> result = measure("mini", "Down, down, down. Would the fall never end?" * 4, **cut)
        >>> result.numbers("rise", edit="shuffle_positions").value > 0
        True
    """

    edits: Annotated[Sequence[Edit], Each()] = SHUFFLES
    strengths: Annotated[Sequence[Threshold], Each()] = (0.3, 1.0)
    map_edits: Annotated[Sequence[Edit], Each(least=0)] | None = None
    map_by: MapBy = "auto"

    words = drawn.WORDS
    question = "What do magnitudes, phases and positions in RoPE's planes cost?"
    one_length = True
    matrices = 7
    fewer_with = ("map_by", "map_edits", "edits", "strengths")
    after = (Planes,)
    rows = ("edit", "of", "strength", "cost")
    variables = {
        "loss": Variable("loss", "nats", "per token, nothing perturbed", ("prompt",)),
        "rise": Variable("rise of the loss", "nats", RISE, ("edit", "of", "strength", *PAIRS), "rise"),
        "band_rise": Variable("rise of the loss, a third of the planes", "nats", RISE, ("edit", "band", *PAIRS)),
        "map_rise": Variable(
            "rise of the loss, one plane of one layer", "nats", RISE, ("map_edit", "layer", "planes", *PAIRS)
        ),
        "share": Variable("share of the plane", "", CARRIES, ("part", "layer", "planes")),
        "wavelength": Variable("wavelength", "tokens", "2 pi / theta; of a band the mean", ("layer", "planes")),
        "rho": Variable("Spearman's rho", "", "of cost and share over the cells of the map", (*RHO, "part", "end")),
        "rho_gap": Variable("rho with position less rho with content", "", "", (*RHO, "end")),
        "rho_positions": Variable("Spearman's rho with positions shuffled", "", "of the two costs", (*RHO, "end")),
    }
    requires = require_rope
    figures = {"curves": drawn.curves, "bands": drawn.bands, "map": drawn.cost_map, "scatter": drawn.scatter}
    legend = (
        "rise of the loss in nats when q, k, or both are edited; control: a random rotation of the same energy; from, "
        "to: 95% interval of the difference; high, medium, low: a third of the planes alone."
    )

    @property
    def most(self) -> float:
        """The highest strength."""
        return float(max(self.strengths))

    def labels(self) -> Mapping[str, Sequence[Any]]:
        return {"cost": COSTS}

    def usual(self) -> Mapping[str, Any]:
        return {"cost": COSTS[0], "of": "both", "strength": self.most}

    def kinds(self, data: xr.Dataset) -> Sequence[str]:
        return [kind for kind in self.figures if "map_rise" in data or kind in ("curves", "bands")]

    def prepare(self, model: Any, tokens: Sequence[Tensor]) -> "PlanePerturbation":
        usual = SHUFFLES if model.cfg.n_layers <= MOST_LAYERS else ()
        return replace(self, map_edits=usual if self.map_edits is None else self.map_edits)

    def passes(self, run: Run) -> int:
        n_planes, by_planes = self.cells_of_map(run)
        cells = sum(n_planes.values()) if by_planes else len(n_planes) * len(BANDS)
        edits = len(self.edits) * (len(OF) * len(self.strengths) + len(BANDS)) + len(self.map_edits or ()) * cells
        return len(run.rows) * (1 + len(COSTS) * edits)

    def cells_of_map(self, run: Run) -> tuple[dict[int, int], bool]:
        """Return how many planes each layer with some has, and whether the map has planes, or else bands."""
        geometry = geometry_of(run.wrapped, list(select_heads(run.model, **run.where)))
        n_planes = {one.layer: len(one.rope.inv_freq) for one in geometry if one.rope.rotary_dim}
        by_planes = self.map_by == "planes" or (self.map_by == "auto" and sum(n_planes.values()) <= MOST_CELLS)
        return n_planes, by_planes

    def of_model(self, run: Run) -> xr.Dataset:
        loss = run.loss.mean(-1).numpy()

        def all_planes(edit: str, of: str, strength: float) -> Mapping[str, Any]:
            return {"rise": rises(run, edit, strength, of=OF[of], **run.where)}

        def one_band(edit: str, band: str) -> Mapping[str, Any]:
            return {"band_rise": rises(run, edit, band=third(band), **run.where)}

        strengths = [float(strength) for strength in self.strengths]
        data = run.grid(all_planes, pure=True, edit=self.edits, of=list(OF), strength=strengths)
        data = data.merge(run.grid(one_band, pure=True, edit=self.edits, band=BANDS))
        data = data.assign(loss=("prompt", loss))
        return data.merge(self.mapped(run)) if self.map_edits else data

    def mapped(self, run: Run) -> xr.Dataset:
        """Return costs and shares of one plane, or band, of one layer at a time, and their correlations."""
        heads = select_heads(run.model, **run.where)
        n_planes, by_planes = self.cells_of_map(run)

        def one_cell(map_edit: str, layer: int, planes: Any) -> Mapping[str, Any]:
            if by_planes and planes >= n_planes[layer]:
                return {"map_rise": np.full((len(COSTS), len(run.rows)), np.nan)}
            band = [planes] if by_planes else third(planes)
            return {"map_rise": rises(run, map_edit, layers=[layer], heads=heads[layer], band=band)}

        planes = range(max(n_planes.values())) if by_planes else BANDS
        data = run.grid(one_cell, pure=True, map_edit=self.map_edits or (), layer=list(n_planes), planes=planes)
        data = data.merge(plane_shares(run.found(Planes), list(n_planes), by_planes))
        return data.merge(cost_share_correlations(data))

    def findings(self, own: Numbers) -> list[str]:
        share = "" if self.most == 1 else f" at strength {self.most:g}"
        rises = {edit: own("rise", edit=edit) for edit in self.edits}
        null = max((abs(init) for rise in rises.values() for init in rise.inits), default=math.nan)
        beside = in_brackets("" if math.isnan(null) else f"random init at most {null:.3f}")
        costs = "; ".join(f"{drawn.WORDS[edit]} {rise.with_interval:+.3f}" for edit, rise in rises.items())
        gaps = (f"{drawn.WORDS[edit]} {self.less_control(own, edit).with_interval:+.3f}" for edit in self.edits)
        return [
            f"Rise of the loss in nats, all planes of q and k edited{share}{beside}: {costs}.",
            f"Less what a random rotation of the same energy costs: {'; '.join(gaps)}.",
        ]

    def less_control(self, own: Numbers, edit: str) -> Number:
        """Return the rise less that of its control, of q and k at the highest strength."""
        rise = own.array("rise", edit=edit, cost=None)
        return own.number(rise.sel(cost="edit") - rise.sel(cost="control"))

    def table(self, own: Numbers) -> pd.DataFrame:
        """Return a row an edit, highest strength: q, k, both, control, the difference with its interval; thirds of the
        planes."""
        rows = []
        for edit in self.edits:
            gap = self.less_control(own, edit)
            row = {"edit": edit} | {of: own("rise", edit=edit, of=of).value for of in OF}
            row |= {"control": own("rise", edit=edit, cost="control").value, "less control": gap.value}
            row |= {"from": gap.low, "to": gap.high}
            rows.append(row | {band: own("band_rise", edit=edit, band=band).value for band in BANDS})
        return pd.DataFrame(rows)


def rises(run: Run, edit: str, strength: float = 1.0, **how: Any) -> Float[np.ndarray, "cost=2 prompt"]:
    """Return the rises of every prompt's loss under an edit and under its control; every prompt has different draws.

    Args:
        strength: 1 stands for phase noise of pi radians, which is nearly uniform.
        how: further arguments of `perturb_planes`.
    """
    batches = run.tokens.split(BATCH)
    found = []
    for control in (False, True):
        for number, batch in enumerate(batches):
            draw = {"seed": (run.seed * len(batches) + number) % 2**63, "control": control}
            in_its_unit = strength * (math.pi if edit == "phase_noise" else 1)
            hooks = perturb_planes(run.model, edit, strength=in_its_unit, **draw, **how)
            found.append(token_losses(run.wrapped, batch, hooks, batch=BATCH).mean(-1))
    return (torch.cat(found).unflatten(0, (2, -1)) - run.loss.mean(-1)).numpy()


def third(band: str) -> Callable[[Rope], Tensor]:
    """Return a function from a layer's Rope to the planes of a band by thirds."""
    return lambda rope: bands_by_thirds(len(rope.inv_freq))[BANDS.index(band)]

"""Loss with replaced scores: the share recovered by condition and by searched split, and the cost of each head."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.collector import HeadRows
from tl_posgen.errors import InputError
from tl_posgen.hooks.replace_scores import HookList, ScoresOf
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.loss import token_losses
from tl_posgen.models.model import Model
from tl_posgen.position.decomposition.pair_weights_fit import LONGEST
from tl_posgen.position.substitution.changed_tokens import changes
from tl_posgen.position.substitution.hooks import (
    all_positions,
    by_constant,
    by_split,
    by_three_axis,
    near,
    own_profile,
    query_profile,
    stand_in,
    substitute,
)
from tl_posgen.position.substitution.optimise_split import CONTROLS
from tl_posgen.position.substitution.splits import attention_kl, point_mass, triangle, uniform
from tl_posgen.report.intervals import ENDS
from tl_posgen.stats.agreement import pearson, spearman
from tl_posgen.stats.intervals import statistic_interval

SHARES = (0.25, 0.5, 0.75)  # shares of the residual between the condition itself (0) and the unchanged model (1)
NO_STAND_IN = ("unchanged", "uniform_attention")
WORTHLESS = 0.01  # nats: where attention is worth less, shares of it are noise


def conditions_of(options: Any, length: int) -> dict[str, ScoresOf | None]:
    """Return the stand-ins for the scores of prompts of `length` tokens, by name; None for the unchanged model.

    Args:
        options: a `Substitution`.
    """
    if not len(options.widths):
        raise InputError("widths: give at least one triangle width")
    splits = {f"mean_key_{d0:g}": by_split(point_mass(d0)) for d0 in options.dummy_distances}
    splits |= {f"triangle_{width:g}": by_split(triangle(width)) for width in options.widths}
    constant = partial(by_constant, gamma=options.gamma, threshold=options.threshold)
    splits |= {f"mean_query_{n}": by_split(uniform(n), query="mean") for n in options.mean_query_distances}
    splits |= {"k_q_simplify": by_split(all_positions, query="mean")}
    splits |= {"own_profile": by_split(own_profile), "query_profile": by_split(query_profile)}
    splits |= {part: by_split(triangle(options.widths[0]), part) for part in CONTROLS}
    fits: dict[str, ScoresOf] = {"three_axis": by_three_axis}
    fits |= {f"three_axis_near_{width:g}": partial(by_three_axis, weights=near(width)) for width in options.near_widths}
    if length <= LONGEST:
        fits["three_axis_attention"] = partial(by_three_axis, weights="attention")
    return {"unchanged": None, "uniform_attention": constant, **fits, **splits}


def runs_of(conditions: Mapping[str, ScoresOf | None]) -> int:
    """Return how often `measure` runs every prompt: once per condition, for two dose curves, and for the capture."""
    return len(conditions) + 2 * len(SHARES) + 1


def measure(
    model: Model,
    tokens: Int[Tensor, "prompt pos"],
    conditions: Mapping[str, ScoresOf | None],
    where: Mapping[str, Any],
    label: str,
) -> xr.Dataset:
    """Return the loss of every condition and dose, and the errors of its scores and attention, head by head."""

    def losses(by: ScoresOf | None, residual: float = 0.0) -> Float[Tensor, "prompt target"]:
        hooks: HookList = [] if by is None else substitute(model, by, residual=residual, **where)
        return token_losses(model, tokens, hooks)

    found = {name: losses(by) for name, by in conditions.items()}
    data = xr.Dataset(
        {"loss": (("condition", "prompt"), np.stack([one.mean(1).numpy() for one in found.values()]))},
        {"condition": list(conditions), "prompt": range(len(tokens))},
        {"rows": "condition", "model": label},
    )
    data["loss_mean"] = data["loss"].mean("prompt")
    dosed = ["three_axis", next(name for name in conditions if name.startswith("triangle"))]
    some = [[float(losses(conditions[name], share).mean()) for share in SHARES] for name in dosed]
    none, everything = (data["loss_mean"].sel(condition=names).values for names in (dosed, ["unchanged"] * 2))
    data["dose_loss"] = xr.DataArray(
        np.column_stack([none, some, everything]), {"stand_in": dosed, "residual_share": [0.0, *SHARES, 1.0]}
    )
    data = data.assign(shares_of(data["loss"].values, data, ("condition",), "recovered"))
    data = data.assign(changes(model, tokens[0], {name: one[0] for name, one in found.items()}))
    return with_ranks(data.merge(score_errors(model, tokens, conditions, where)))


def shares_of(losses: Float[np.ndarray, "row prompt"], data: xr.Dataset, dims: tuple[str], name: str) -> dict[str, Any]:
    """Return `recovered` of each row, as variables `<name>`, `<name>_low`, `<name>_high`."""
    columns = recovered(losses, *(data["loss"].sel(condition=one).values for one in NO_STAND_IN))
    return {f"{name}{end}": (dims, column) for end, column in zip(ENDS, columns, strict=True)}


def recovered(
    losses: Float[np.ndarray, "row prompt"],
    unchanged: Float[np.ndarray, " prompt"],
    uniform: Float[np.ndarray, " prompt"],
) -> tuple[Float[np.ndarray, " row"], Float[np.ndarray, " row"], Float[np.ndarray, " row"]]:
    """(U - L) / (U - B) of mean losses, U of uniform attention, L of each row and B unchanged.

    The interval is cut at 1, unless the share itself is more: a stand-in can do better than the model.

    Returns:
        The share and its 95 % interval over prompts. NaN if U - B is below WORTHLESS; the interval is NaN if it is so
        without one of the prompts.
    """
    if uniform.mean() - unchanged.mean() < WORTHLESS:
        nothing = np.full(len(losses), np.nan)
        return nothing, nothing, nothing

    def share_of_means(means: Float[np.ndarray, "some loss"]) -> Float[np.ndarray, "some row"]:
        rows, b, u = np.split(means, [-2, -1], axis=1)
        return (u - rows) / np.where(u - b < WORTHLESS, np.nan, u - b)

    return statistic_interval(np.stack([*losses, unchanged, uniform], 1), share_of_means, (-np.inf, 1.0))


def with_ranks(data: xr.Dataset) -> xr.Dataset:
    """Add Spearman's rho over stand-ins of the share recovered with r, and with attention KL."""
    stand_ins = data.drop_sel(condition=list(NO_STAND_IN))
    r, kl = (stand_ins[name].mean(("layer", "head")) for name in ("r", "attention_kl"))

    def rank(values: xr.DataArray) -> float:
        both = xr.Dataset({"x": values, "y": stand_ins["recovered"]}).dropna("condition")
        return float(spearman(*(torch.from_numpy(both[name].values) for name in ("x", "y"))))

    return data.assign(r_rank=rank(r), kl_rank=rank(kl))


def score_errors(
    model: Model, tokens: Int[Tensor, "prompt pos"], conditions: Mapping[str, ScoresOf | None], where: Mapping[str, Any]
) -> xr.Dataset:
    """Return attention KL and Pearson's r between each stand-in's and the model's scores, on the unchanged q and k.

    r is over visible scores; NaN where one of the two is constant.
    """
    rows = HeadRows()

    def compare(capture: LayerCapture, prompt: int) -> None:
        capture.prompt = prompt
        exact = capture.scores()
        visible = capture.geometry.visible(exact.shape[1], exact.device)
        rule = {name: value for name, value in where.items() if name != "heads"}
        every = [exact if by is None else stand_in(capture, by, **rule) for by in conditions.values()]
        kl = [attention_kl(exact, scores, visible).mean(1) for scores in every]
        r = [pearson(exact[:, visible], scores[:, visible]) for scores in every]
        rows.add(capture, attention_kl=torch.stack(kl, 1), r=torch.stack(r, 1))

    for number, prompt in enumerate(tokens):
        run_capture(model, prompt[None], partial(compare, prompt=number), heads=where["heads"])
    means = {name: rows.array(name, "condition").mean("prompt", skipna=False) for name in rows.names}
    coords = {"layer": range(model.cfg.n_layers), "head": range(model.cfg.n_heads)}
    data = xr.Dataset(means).assign_coords(condition=list(conditions)).reindex(coords)
    return data.transpose("condition", "layer", "head")


def search_dataset(found: xr.Dataset, held_out: xr.Dataset, replaced: xr.DataArray) -> xr.Dataset:
    """Return the result of `optimise_split`, with the shares recovered on prompts that were not searched on."""
    losses = found["search_losses"]
    shares = shares_of(losses.transpose("family", "prompt").values, held_out, ("family",), "search_recovered")
    data = found.drop_vars("search_losses").assign(shares | {"search_loss": losses.mean("prompt")})
    return data.assign(distribution=found["distribution"].where(replaced), turn=found["turn"].where(replaced))


def costs(model: Model, tokens: Int[Tensor, "prompt pos"], width: float, replaced: xr.DataArray) -> xr.Dataset:
    """Return the rise of the loss when one head alone loses its residual, or all its attention."""
    unchanged = float(token_losses(model, tokens).mean())
    places = np.argwhere(replaced.values).tolist()
    names = {"residual_cost": by_split(triangle(width)), "uniform_cost": by_constant}
    values = {name: np.full(replaced.shape, np.nan) for name in names}
    for layer, head in places:
        for name, by in names.items():
            hooks = substitute(model, by, layers=[layer], heads=[head])
            values[name][layer, head] = float(token_losses(model, tokens, hooks).mean()) - unchanged
    return xr.Dataset({name: (("layer", "head"), x) for name, x in values.items()})

"""Does the model run on position + meaning? Scores replaced by a split, and the loss that is left."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posgen.errors import InputError
from tl_posgen.experiments.law_search import Found, searched
from tl_posgen.experiments.loss import prompts_of_one_length, token_losses
from tl_posgen.interventions.scores import HookList, ScoresOf
from tl_posgen.interventions.substitution import (
    by_constant,
    by_split,
    by_three_axis,
    own_profile,
    query_profile,
    stand_in,
    substitute,
)
from tl_posgen.maths.bootstrap import bootstrap_interval
from tl_posgen.maths.splits import attention_kl, point_mass, triangle
from tl_posgen.models.backend import Model
from tl_posgen.models.capture import LayerCapture
from tl_posgen.models.hooks import run_capture
from tl_posgen.models.provenance import model_label, null_label, provenance_of
from tl_posgen.models.random_like import random_like
from tl_posgen.results import Result

SHARES = (0.25, 0.5, 0.75)  # of the residual; 0 and 1 are the arm itself and the untouched model
COST_PROMPTS = 4


def substitution(
    model: Model,
    prompts: Any,
    *,
    length: int | None = 256,
    n_prompts: int | None = 16,
    dummy_distances: Sequence[int | float] = (0, 64, 1000),
    widths: Sequence[int | float] = (8, 256),
    gamma: int | float = 1.0,
    from_layer: int = 0,
    search: bool = True,
    search_prompts: int = 64,
    search_steps: int = 60,
    head_costs: bool = True,
    null_seed: int | None = 0,
    seed: int = 0,
    progress: bool = True,
) -> Result:
    r"""recovered = (L_uniform - L_arm) / (L_uniform - L_base): the loss L with all scores replaced, arm by arm.

    Arms: `base` (untouched), `uniform` (one constant per head: the control), `three_axis`, `mean_key_<d0>`,
    `triangle_<width>` (the optimal split for p(d) proportional to width - d), `own_profile` (p is the head's own
    attention), `query_profile` (p is each query's own, from its position part alone: nothing is fitted), and `position`
    and `meaning` alone, at the first width.

    Args:
        prompts, length, n_prompts: as in `analyze`.
        dummy_distances, widths: of the arms.
        gamma, from_layer: replace only scores below this quantile, from this layer on; see `substitute`.
        search: look for the best split on other prompts of the text, and report it on these; see `searched`.
        search_prompts: how many others, where the text has that many; half of a short text is kept to report on.
        search_steps: of gradient descent.
        head_costs: also replace each head alone, by the best triangle found, or the first width.
        null_seed: of the randomly initialised model that the arms are repeated on; None skips it.
        seed: of the search and the bootstrap.

    Returns:
        A Result named "substitution". Over (arm, prompt): `loss` in nats per token. Over arm: `loss_mean`,
        `recovered`, `recovered_low`, `recovered_high` (95 % bootstrap over prompts). Over (arm, layer, head), on the
        untouched model's q and k: `attention_kl` (nats, mean over queries and prompts) and `r` (Pearson, over visible
        scores), which shows what a correlation alone would have made one believe; `r_rank` and `kl_rank` are the
        Spearman correlations, over arms, of their means with `recovered`. Over (stand_in, residual_share):
        `dose_loss` with that share of what the stand-in leaves out added back. Over family, on prompts not searched
        on: `search_loss`, `search_recovered` with its interval, `search_prediction_kl`; `search_loss_chosen_on`,
        `search_parameters`; the laws found, `law`, and |Rbar| of the free splits, `turn`. Over (layer, head):
        `residual_cost` and `uniform_cost`, the rise of the loss with this one head replaced.

    Raises:
        InputError: unusable prompts or options; a search with fewer than two prompts.

    Source: the substitution with gamma = .97, d0 = 1000 and from_layer = 4 is in the public code of the first author of
    Han & Ji 2025; the other arms, the share recovered, the residual's dose and the searches are ours.
    """
    tokens, others = two_sets(model, prompts, length, n_prompts, search_prompts if search else 0)
    arms = arms_of(dummy_distances, widths, gamma)
    options = {"gamma": gamma, "from_layer": from_layer}
    dataset = measured(model, tokens, arms, options, model_label(model), seed, progress)
    width = float(widths[0])
    if search:
        held_out = tokens if others is not None else tokens[: len(tokens) // 2]
        others = others if others is not None else tokens[len(tokens) // 2 :]
        found, width = searched(model, others, held_out, options, steps=search_steps, seed=seed, progress=progress)
        dataset = dataset.merge(search_dataset(found, dataset.isel(prompt=slice(len(held_out))), seed))
        dataset.attrs |= {"search_prompts": len(others), "held_out_prompts": len(held_out), "search_width": width}
    if head_costs:
        dataset = dataset.merge(costs(model, tokens[:COST_PROMPTS], width, from_layer, progress))
        dataset.attrs["cost_width"] = width
    dataset.attrs |= {"gamma": gamma, "from_layer": from_layer}
    null = None
    if null_seed is not None:
        null = measured(random_like(model, null_seed), tokens, arms, options, null_label(null_seed), seed, progress)
    provenance = provenance_of(model, list(tokens), null_seed) | options | {"seed": seed}
    return Result("substitution", dataset, null, provenance)


def two_sets(
    model: Model, prompts: Any, length: int | None, n_prompts: int | None, n_others: int
) -> tuple[Int[Tensor, "prompt pos"], Int[Tensor, "other pos"] | None]:
    """The prompts to report on, and further ones to search on: None where there are none, so that half must do."""
    if not n_others:
        return prompts_of_one_length(model, prompts, length, n_prompts), None
    rows = prompts_of_one_length(model, prompts, length, None)
    n = len(rows) if n_prompts is None else n_prompts
    if len(rows) < n:
        prompts_of_one_length(model, prompts, length, n_prompts)  # refuses, with what is there and what is missing
    if len(rows) < 2:
        raise InputError("search: some prompts are searched on and others reported on, so give two at least")
    return rows[:n], rows[n : n + n_others] if len(rows) > n + n // 2 else None


def arms_of(
    dummy_distances: Sequence[int | float], widths: Sequence[int | float], gamma: int | float = 1.0
) -> dict[str, ScoresOf | None]:
    """What stands in for the scores, by name; None for the untouched model."""
    if not widths:
        raise InputError("widths: give at least one triangle width")
    splits = {f"mean_key_{d0:g}": by_split(point_mass(d0)) for d0 in dummy_distances}
    splits |= {f"triangle_{width:g}": by_split(triangle(width)) for width in widths}
    return {
        "base": None,
        "uniform": partial(by_constant, gamma=gamma),
        "three_axis": by_three_axis,
        **splits,
        "own_profile": by_split(own_profile),
        "query_profile": by_split(query_profile),
        "position": by_split(triangle(widths[0]), "position"),
        "meaning": by_split(triangle(widths[0]), "meaning"),
    }


def measured(
    model: Model,
    tokens: Int[Tensor, "prompt pos"],
    arms: dict[str, ScoresOf | None],
    options: dict[str, Any],
    label: str,
    seed: int,
    progress: bool,
) -> xr.Dataset:
    """Loss of every arm and dose, and how far an arm's scores are from the model's, head by head."""

    def hooks(by: ScoresOf | None, residual: float = 0.0) -> HookList:
        return [] if by is None else substitute(model, by, residual=residual, **options)

    made = {name: hooks(by) for name, by in arms.items()}  # bad options are refused here, before work
    bar = tqdm(total=len(made) + 2 * len(SHARES), desc=f"substitution, {label}", unit="arm", disable=not progress)

    def losses(hook_list: HookList) -> Float[np.ndarray, " prompt"]:
        bar.update()
        return token_losses(model, tokens, hook_list).mean(1).numpy()

    data = xr.Dataset(
        {"loss": (("arm", "prompt"), np.stack([losses(made[name]) for name in arms]))},
        {"arm": list(arms), "prompt": range(len(tokens))},
        {"rows": "arm", "model": label},
    )
    dosed = ["three_axis", next(name for name in arms if name.startswith("triangle"))]
    partly = [[losses(hooks(arms[name], share)).mean() for share in SHARES] for name in dosed]
    bar.close()
    whole = [[float(data.loss.sel(arm=arm).mean()) for arm in (name, "base")] for name in dosed]
    dose = [[none, *some, everything] for (none, everything), some in zip(whole, partly, strict=True)]
    data["dose_loss"] = xr.DataArray(dose, {"stand_in": dosed, "residual_share": [0.0, *SHARES, 1.0]})
    data["loss_mean"] = data.loss.mean("prompt")
    base, uniform = (data.loss.sel(arm=arm).values for arm in ("base", "uniform"))
    shares = np.stack([recovered(losses, base, uniform, seed) for losses in data.loss.values])
    for name, column in zip(("recovered", "recovered_low", "recovered_high"), shares.T, strict=True):
        data[name] = ("arm", column)
    return with_ranks(data.merge(score_errors(model, tokens, arms, options)))


def recovered(
    losses: Float[np.ndarray, " prompt"],
    base: Float[np.ndarray, " prompt"],
    uniform: Float[np.ndarray, " prompt"],
    seed: int,
) -> tuple[float, float, float]:
    """(U - L) / (U - B) of the means, and its 95 % bootstrap interval over prompts.

    The denominator is held at its mean: the prompts' own spread of L - B is what the interval tells.
    """
    gap = float(uniform.mean() - base.mean())
    low, high = bootstrap_interval(1 - (losses - base) / gap, seed=seed)
    return float(uniform.mean() - losses.mean()) / gap, float(low), float(high)


def with_ranks(data: xr.Dataset) -> xr.Dataset:
    """Spearman over arms: does the better correlation, or the smaller attention KL, recover more?"""
    arms = data.drop_sel(arm=["base", "uniform"])
    means = {name: arms[name].mean(("layer", "head")).values for name in ("r", "attention_kl")}
    ranks = pd.DataFrame(means | {"recovered": arms["recovered"].values}).corr(method="spearman").to_numpy()
    return data.assign(r_rank=float(ranks[2, 0]), kl_rank=float(ranks[2, 1]))


def score_errors(
    model: Model, tokens: Int[Tensor, "prompt pos"], arms: dict[str, ScoresOf | None], options: dict[str, Any]
) -> xr.Dataset:
    """Attention KL and Pearson's r between the stand-in and the model's scores, on the untouched q and k."""
    shape = (len(arms), model.cfg.n_layers, model.cfg.n_heads)
    layers = range(options["from_layer"], model.cfg.n_layers)
    sums = {name: torch.full(shape, torch.nan, dtype=torch.float64) for name in ("attention_kl", "r")}
    for total in sums.values():
        total[:, list(layers)] = 0

    def compare(capture: LayerCapture) -> None:
        exact = capture.scores()
        visible = capture.geometry.visible(exact.shape[1], exact.device)
        for number, by in enumerate(arms.values()):
            scores = exact if by is None else stand_in(capture, by, options["gamma"])
            sums["attention_kl"][number, capture.layer] += attention_kl(exact, scores, visible).mean(1).cpu()
            sums["r"][number, capture.layer] += correlation(exact, scores, visible).cpu()

    for prompt in tokens:
        run_capture(model, prompt[None], compare, layers=layers)
    coords = {"arm": list(arms), "layer": range(shape[1]), "head": range(shape[2])}
    return xr.Dataset({name: (tuple(coords), (x / len(tokens)).numpy()) for name, x in sums.items()}, coords)


def correlation(
    one: Float[Tensor, "head query key"], other: Float[Tensor, "head query key"], visible: Bool[Tensor, "query key"]
) -> Float[Tensor, " head"]:
    """Pearson's r over the visible entries; NaN where one of them is constant."""
    x, y = (scores[:, visible].double() for scores in (one, other))
    x, y = (scores - scores.mean(1, keepdim=True) for scores in (x, y))
    product = (x * x).sum(1) * (y * y).sum(1)
    r = (x * y).sum(1) / product.sqrt()
    return torch.where((y.square().mean(1) > 1e-12 * x.square().mean(1)), r, torch.nan)


def search_dataset(found: Sequence[Found], held_out: xr.Dataset, seed: int) -> xr.Dataset:
    """The searches as arrays over family, on the prompts that were not searched on."""
    base, uniform = (held_out.loss.sel(arm=arm).values for arm in ("base", "uniform"))
    shares = np.array([recovered(one.losses.numpy(), base, uniform, seed) for one in found]).T
    columns = {
        "search_loss": [float(one.losses.mean()) for one in found],
        "search_loss_chosen_on": [one.chosen_on for one in found],
        "search_prediction_kl": [one.prediction_kl for one in found],
        "search_parameters": [one.parameters for one in found],
        **dict(zip(("search_recovered", "search_low", "search_high"), shares, strict=True)),
    }
    data = xr.Dataset({name: ("family", x) for name, x in columns.items()}, {"family": [one.family for one in found]})
    (law,) = (one.law for one in found if one.law is not None)
    data["law"] = (("layer", "head", "law_distance"), law.numpy())
    turns = {one.family: one.turn for one in found if one.turn is not None}
    turn = xr.DataArray(torch.stack(list(turns.values())).numpy(), dims=("free_family", "layer", "head", "plane"))
    return data.assign(turn=turn.assign_coords(free_family=list(turns)))


def costs(
    model: Model,
    tokens: Int[Tensor, "prompt pos"],
    width: float,
    from_layer: int,
    progress: bool,
) -> xr.Dataset:
    """How much the loss rises when one head alone loses its residual, or all its attention."""
    base = float(token_losses(model, tokens).mean())
    heads = [(layer, head) for layer in range(from_layer, model.cfg.n_layers) for head in range(model.cfg.n_heads)]
    names = {"residual_cost": by_split(triangle(width)), "uniform_cost": by_constant}
    values = {name: np.full((model.cfg.n_layers, model.cfg.n_heads), np.nan) for name in names}
    for layer, head in tqdm(heads, desc="substitution, head by head", unit="head", disable=not progress):
        for name, by in names.items():
            hooks = substitute(model, by, layers=[layer], heads=[head])
            values[name][layer, head] = float(token_losses(model, tokens, hooks).mean()) - base
    return xr.Dataset({name: (("layer", "head"), x) for name, x in values.items()})

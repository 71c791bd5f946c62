"""Does the model run on position + meaning? Scores replaced by a split, and the loss that is left."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posgen.errors import InputError
from tl_posgen.experiments.law_search import Found, searched
from tl_posgen.experiments.loss import prompts_of_one_length, token_losses
from tl_posgen.interventions.scores import HookList, ScoresOf
from tl_posgen.interventions.substitution import by_constant, by_split, by_three_axis, own_profile, substitute
from tl_posgen.maths.splits import attention_kl, point_mass, triangle
from tl_posgen.models.backend import Model
from tl_posgen.models.capture import LayerCapture
from tl_posgen.models.hooks import run_capture
from tl_posgen.models.provenance import model_label, null_label, provenance_of
from tl_posgen.models.random_like import random_like
from tl_posgen.results import Result


def substitution(
    model: Model,
    prompts: Any,
    *,
    length: int | None = 256,
    n_prompts: int | None = 4,
    dummy_distances: Sequence[int | float] = (0, 64, 1000),
    widths: Sequence[int | float] = (8, 256),
    gamma: int | float = 1.0,
    from_layer: int = 0,
    search: bool = True,
    search_steps: int = 60,
    head_costs: bool = True,
    null_seed: int | None = 0,
    seed: int = 0,
    progress: bool = True,
) -> Result:
    r"""recovered = (L_uniform - L_arm) / (L_uniform - L_base): the loss L with all scores replaced, arm by arm.

    Arms: `base` (untouched), `uniform` (one constant per head: the control), `three_axis`, `mean_key_<d0>`,
    `triangle_<width>` (the optimal split for p(d) proportional to width - d), `own_profile` (p is the head's own
    attention), and `position` and `meaning` alone, at the first width.

    Args:
        prompts, length, n_prompts: as in `analyze`.
        dummy_distances, widths: of the arms.
        gamma, from_layer: replace only scores below this quantile, from this layer on; see `substitute`.
        search: look for a p(d) on the first half of the prompts and report it on the other; see `law_search`.
        search_steps: of gradient descent on a general p(d).
        head_costs: also replace each head alone (by the best triangle found, or the first width).
        null_seed: of the randomly initialised model that the arms are repeated on; None skips it.
        seed: of the search.

    Returns:
        A Result named "substitution". Over (arm, prompt): `loss` in nats per token. Over arm: `loss_mean`,
        `recovered`. Over (arm, layer, head), on the untouched model's q and k: `attention_kl` (nats, mean over queries
        and prompts) and `r` (Pearson, over visible scores), which shows what a correlation alone would have made one
        believe. Over (family, scope): `search_loss`, `search_recovered` on the half of the prompts that was not
        searched on, `search_loss_chosen_on`, and the laws found, `law`. Over (layer, head): `residual_cost` and
        `uniform_cost`, the rise of the loss with this one head replaced.

    Raises:
        InputError: unusable prompts or options; a search with fewer than two prompts.

    Source: the substitution with gamma = .97 and d0 = 1000 is in the public code of the first author of Han & Ji 2025;
    the other arms, the share recovered and the searches are ours.
    """
    tokens = prompts_of_one_length(model, prompts, length, n_prompts)
    if search and len(tokens) < 2:
        raise InputError("search: one half of the prompts is searched on, so give two prompts at least")
    arms = arms_of(dummy_distances, widths)
    options = {"gamma": gamma, "from_layer": from_layer}
    dataset = measured(model, tokens, arms, options, model_label(model), progress)
    width = widths[0]
    if search:
        found = searched(model, tokens, options, steps=search_steps, seed=seed, progress=progress)
        width = found[0].law_width or width
        dataset = dataset.merge(search_dataset(found, dataset))
    if head_costs:
        dataset = dataset.merge(costs(model, tokens, dataset, width, from_layer, progress))
    dataset.attrs |= {"rows": "arm", "model": model_label(model), "gamma": gamma, "from_layer": from_layer}
    null = None
    if null_seed is not None:
        null = measured(random_like(model, null_seed), tokens, arms, options, null_label(null_seed), progress)
    provenance = provenance_of(model, list(tokens), null_seed) | {
        "gamma": gamma,
        "from_layer": from_layer,
        "seed": seed,
    }
    return Result("substitution", dataset, null, provenance)


def arms_of(dummy_distances: Sequence[int | float], widths: Sequence[int | float]) -> dict[str, ScoresOf | None]:
    """What stands in for the scores, by name; None for the untouched model."""
    if not widths:
        raise InputError("widths: give at least one triangle width")
    splits = {f"mean_key_{d0:g}": by_split(point_mass(d0)) for d0 in dummy_distances}
    splits |= {f"triangle_{width:g}": by_split(triangle(width)) for width in widths}
    return {
        "base": None,
        "uniform": by_constant,
        "three_axis": by_three_axis,
        **splits,
        "own_profile": by_split(own_profile),
        "position": by_split(triangle(widths[0]), "position"),
        "meaning": by_split(triangle(widths[0]), "meaning"),
    }


def measured(
    model: Model,
    tokens: Int[Tensor, "prompt pos"],
    arms: dict[str, ScoresOf | None],
    options: dict[str, Any],
    label: str,
    progress: bool,
) -> xr.Dataset:
    """Loss of every arm, and how far its scores are from the model's, head by head."""

    def hooks(by: ScoresOf | None) -> HookList:
        return [] if by is None else substitute(model, by, **options)

    made = {name: hooks(by) for name, by in arms.items()}  # bad options are refused here, before work
    losses = [
        token_losses(model, tokens, made[name]).mean(1).numpy()
        for name in tqdm(arms, desc=f"substitution, {label}", unit="arm", disable=not progress)
    ]
    coords = {"arm": list(arms), "prompt": range(len(tokens))}
    data = xr.Dataset({"loss": (("arm", "prompt"), np.stack(losses))}, coords, {"rows": "arm", "model": label})
    data["loss_mean"] = data.loss.mean("prompt")
    base, uniform = (data.loss_mean.sel(arm=arm, drop=True) for arm in ("base", "uniform"))
    data["recovered"] = (uniform - data.loss_mean) / (uniform - base)
    return data.merge(score_errors(model, tokens, arms))


def score_errors(model: Model, tokens: Int[Tensor, "prompt pos"], arms: dict[str, ScoresOf | None]) -> xr.Dataset:
    """Attention KL and Pearson's r between the stand-in and the model's scores, on the untouched q and k."""
    shape = (len(arms), model.cfg.n_layers, model.cfg.n_heads)
    sums = {name: torch.zeros(shape, dtype=torch.float64) for name in ("attention_kl", "r")}

    def compare(capture: LayerCapture) -> None:
        exact = capture.scores()
        visible = capture.geometry.visible(exact.shape[1], exact.device)
        for number, by in enumerate(arms.values()):
            scores = exact if by is None else by(capture)
            sums["attention_kl"][number, capture.layer] += attention_kl(exact, scores, visible).mean(1).cpu()
            sums["r"][number, capture.layer] += correlation(exact, scores, visible).cpu()

    for prompt in tokens:
        run_capture(model, prompt[None], compare)
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


def search_dataset(found: Sequence[Found], dataset: xr.Dataset) -> xr.Dataset:
    """The searches as arrays over (family, scope), with the share recovered on the prompts not searched on."""
    half = dataset.loss.isel(prompt=slice(dataset.sizes["prompt"] // 2, None)).mean("prompt")
    base, uniform = float(half.sel(arm="base")), float(half.sel(arm="uniform"))
    families, scopes = (list(dict.fromkeys(getattr(one, name) for one in found)) for name in ("family", "scope"))
    n_distances = max(one.weights.shape[-1] for one in found)
    shape = (len(families), len(scopes))
    losses, chosen = np.full(shape, np.nan), np.full(shape, np.nan)
    laws = np.full((*shape, *found[0].weights.shape[:2], n_distances), np.nan)
    for one in found:
        place = families.index(one.family), scopes.index(one.scope)
        losses[place], chosen[place] = one.loss, one.loss_chosen_on
        laws[place] = 0
        laws[place][..., : one.weights.shape[-1]] = one.weights
    coords = {"family": families, "scope": scopes, "law_distance": range(n_distances)}
    dims = ("family", "scope")
    return xr.Dataset(
        {
            "search_loss": (dims, losses),
            "search_loss_chosen_on": (dims, chosen),
            "search_recovered": (dims, (uniform - losses) / (uniform - base)),
            "law": ((*dims, "layer", "head", "law_distance"), laws),
        },
        coords,
    )


def costs(
    model: Model,
    tokens: Int[Tensor, "prompt pos"],
    dataset: xr.Dataset,
    width: int | float,
    from_layer: int,
    progress: bool,
) -> xr.Dataset:
    """How much the loss rises when one head alone loses its residual, or all its attention."""
    base = float(dataset.loss_mean.sel(arm="base"))
    heads = [(layer, head) for layer in range(from_layer, model.cfg.n_layers) for head in range(model.cfg.n_heads)]
    names = {"residual_cost": by_split(triangle(width)), "uniform_cost": by_constant}
    values = {name: np.full((model.cfg.n_layers, model.cfg.n_heads), np.nan) for name in names}
    for layer, head in tqdm(heads, desc="substitution, head by head", unit="head", disable=not progress):
        for name, by in names.items():
            hooks = substitute(model, by, layers=[layer], heads=[head])
            values[name][layer, head] = float(token_losses(model, tokens, hooks).mean()) - base
    return xr.Dataset({name: (("layer", "head"), x) for name, x in values.items()}, attrs={"cost_width": width})

"""Controlled distance: what each head's scores, and the loss, become when pairs see another distance than theirs."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import xarray as xr
from jaxtyping import Float, Int, Real
from torch import Tensor
from tqdm.auto import tqdm

from tl_posgen.analyzers.collect import HeadRows
from tl_posgen.analyzers.three_axis import fit_capture
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.experiments.loss import prompts_of_one_length, token_losses
from tl_posgen.interventions.dummy_distance import dummy_distance as intervention
from tl_posgen.maths.dummy_distance import key_agreement, table_energies
from tl_posgen.maths.planes import turning_factors
from tl_posgen.maths.rope import complex_planes
from tl_posgen.models.backend import Model
from tl_posgen.models.capture import LayerCapture
from tl_posgen.models.hooks import run_capture
from tl_posgen.models.provenance import model_label, null_label, provenance_of
from tl_posgen.models.random_like import random_like
from tl_posgen.results import Result

DUMMY_DISTANCES = (0, 64, 256, 1000, 2048)
SHARES = ("additive_r", "distance_share", "key_share", "interaction_share")


def dummy_distance(
    model: Model,
    prompts: Any,
    *,
    length: int | None = 256,
    n_prompts: int | None = 4,
    distances: Sequence[int | float] = DUMMY_DISTANCES,
    limits: Sequence[int | float] = (1, 2, 4, 8, 16, 32, 64, 128),
    null_seed: int | None = 0,
    progress: bool = True,
) -> Result:
    r"""M_dj = scale <R_d q, R_0 k_j>: each query against each key at every distance. How additive is it in d and j?

    Args:
        prompts, length, n_prompts: as in `analyze`.
        distances: dummy distances d0 of the key agreement and of the intervention; the first is the reference.
        limits: "frozen beyond" interventions: distances above see the limit.
        null_seed: of the randomly initialised model; None skips it.

    Returns:
        A Result named "dummy_distance". Over (layer, head): `additive_r`, and the shares of M's variance over the
        distances 0 .. length - 1 (energies summed over queries), `distance_share`, `key_share`, `interaction_share`,
        which add up to 1; `slope_intervention` and `slope_fit` (least squares, score per token) and `curve_r`, the
        correlation of the two curves below without their slopes. Over distance too: `curve_intervention`, the mean
        score of the visible pairs, all put at d; `curve_fit`, a_d of the three-axis fit, whose slope is a convention
        of the gauge. Over d0: `key_agreement`, the correlation over keys of the key part at d0 with that at the
        reference, and `loss_at`, the model's loss with every pair at d0. Over limit: `loss_beyond`. Also `loss`,
        untouched.

    Raises:
        InputError: unusable prompts, negative distances.
        UnsupportedModelError: models whose scores know no distance.

    Source: the claim (the key part stays, the distance part shifts) is of Han & Ji 2025 (arXiv 2503.13305); tables,
    measures and curves are our reconstruction.
    """
    tokens = prompts_of_one_length(model, prompts, length, n_prompts)
    for d0 in distances:
        intervention(model, d0)  # bad distances are refused here, before work starts
    for limit in limits:
        intervention(model, beyond=limit)
    if not distances or not limits:
        raise InputError("dummy_distance: give one distance and one limit at least")
    options = {"distances": list(distances), "limits": list(limits), "progress": progress}
    dataset = measured(model, tokens, **options, label=model_label(model))
    null = None
    if null_seed is not None:
        null = measured(random_like(model, null_seed), tokens, **options, label=null_label(null_seed))
    return Result("dummy_distance", dataset, null, provenance_of(model, list(tokens), null_seed))


def measured(
    model: Model, tokens: Int[Tensor, "prompt pos"], *, distances: list, limits: list, progress: bool, label: str
) -> xr.Dataset:
    d0s = torch.tensor(distances, dtype=torch.float64)
    rows = HeadRows()

    def take(number: int, capture: LayerCapture) -> None:
        capture.prompt = number
        rows.add(capture, **head_measures(capture, d0s))

    for number, prompt in enumerate(tqdm(tokens, desc=f"dummy distance, {label}", unit="prompt", disable=not progress)):
        run_capture(model, prompt[None], partial(take, number))
    data = xr.Dataset({name: rows.array(name).mean("prompt") for name in SHARES})
    for name in ("curve_intervention", "curve_fit"):
        data[name] = rows.array(name, "distance").mean("prompt")
    data["key_agreement"] = rows.array("key_agreement", "d0").mean("prompt").assign_coords(d0=distances)
    data = data.merge(curve_comparison(data.curve_intervention, data.curve_fit))
    data["loss"] = float(token_losses(model, tokens).mean())
    losses = [float(token_losses(model, tokens, intervention(model, d0)).mean()) for d0 in distances]
    data["loss_at"] = xr.DataArray(losses, {"d0": distances}, ("d0",))
    losses = [float(token_losses(model, tokens, intervention(model, beyond=limit)).mean()) for limit in limits]
    data["loss_beyond"] = xr.DataArray(losses, {"limit": limits}, ("limit",))
    return data.assign_attrs(model=label, gauge="flat_keys")


def head_measures(capture: LayerCapture, d0s: Real[Tensor, " d0"]) -> dict[str, Tensor]:
    """One layer of one prompt."""
    geometry, q, k = capture.geometry, capture.q, capture.k
    if geometry.encoding == "absolute":
        raise UnsupportedModelError(f"layer {capture.layer}: its scores know no distance (positions are embeddings)")
    table = table_energies(q, k, geometry.rope, geometry.scale, capture.positions).pooled()
    fit, _ = fit_capture(capture)
    agreement = key_agreement(q, k, geometry.rope, d0s, reference=float(d0s[0]))
    return {
        "additive_r": table.additive_r[:, 0],
        "distance_share": (table.distance / table.total)[:, 0],
        "key_share": (table.key / table.total)[:, 0],
        "interaction_share": table.interaction_share[:, 0],
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
    slopes, rests = [], []
    for curve in (one, other):
        t = curve["distance"] - curve["distance"].mean()
        slope = (curve * t).mean("distance") / (t * t).mean("distance")
        slopes.append(slope)
        rests.append(curve - curve.mean("distance") - slope * t)
    names = ("slope_intervention", "slope_fit")
    data = xr.Dataset(dict(zip(names, slopes, strict=True)))
    data["curve_r"] = xr.corr(*rests, dim="distance")
    return data

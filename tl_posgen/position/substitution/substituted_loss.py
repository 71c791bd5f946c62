"""Loss with replaced scores: the share recovered by condition, and the cost of each head."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.core.measure import ENDS, HEAD
from tl_posgen.core.numbers import FEWEST, interval_of, leave_one_out
from tl_posgen.core.run import Run
from tl_posgen.hooks.replace_scores import HookList, ScoresOf
from tl_posgen.interventions import WORTHLESS
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.loss import judged, logits_of
from tl_posgen.models.session import Session
from tl_posgen.models.tokens import token_strings
from tl_posgen.position.decomposition.numbers.three_axis_fit import LONGEST
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
from tl_posgen.position.substitution.numbers.splits import attention_kl, point_mass, triangle, uniform
from tl_posgen.report.circuits import CROP
from tl_posgen.stats.correlations import pearson, spearman

SHARES = (0.25, 0.5, 0.75)  # shares of the residual between the condition itself (0) and the unchanged model (1)
N_DOSES = 2 * len(SHARES)  # of two stand-ins
NO_STAND_IN = ("unchanged", "uniform_attention")
CONTROLS = ("position", "content")  # one part alone
REPLACED_BY = ("split", "uniform attention")
PREDICTORS = ("r", "attention_kl")
Conditions = Mapping[str, ScoresOf | None]


def conditions_of(options: Any, length: int) -> dict[str, ScoresOf | None]:
    """Return the stand-ins for the scores of prompts of `length` tokens, by name; None for the unchanged model.

    Args:
        options: a `Substitution`.
    """
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


def losses_of_conditions(run: Run, conditions: Conditions, where: Mapping[str, Any]) -> xr.Dataset:
    """Return the loss of every condition and dose and the KL of predictions by prompt, and the change of each token of
    the first prompt; of a random init whose attention is worth nothing only the loss unchanged and uniform."""

    def hooks(by: ScoresOf | None, residual: float = 0.0) -> HookList:
        return [] if by is None else substitute(run.model, by, residual=residual, **where)

    def dose(stand_in: str, residual_share: float) -> Mapping[str, Any]:
        if is_worth_nothing:
            return {"dose_loss": np.full(len(run.rows), np.nan)}
        losses = run.losses_under(hooks(conditions[stand_in], residual_share))
        return {"dose_loss": losses.mean(1).numpy()}

    def of_prompt(chosen: Conditions, prompt: int) -> Mapping[str, Any]:
        losses, kl = _losses_and_kl(run.session, run.tokens[[prompt]], [hooks(by) for by in chosen.values()])
        change = losses[:, 0, :CROP] - losses[0, 0, :CROP]  # the unchanged model is the first condition
        arrays = {"loss": losses[:, 0].mean(-1), "kl": kl[:, 0], "token_change": change}
        dims, labels = ("condition", "shown_target"), {"condition": list(chosen)}
        return {name: xr.DataArray(one.numpy(), labels, dims[: one.ndim]) for name, one in arrays.items()}

    data, is_worth_nothing, prompts = xr.Dataset(), False, range(len(run.rows))
    if run.init is not None:  # whose attention hardly ever is worth anything
        data = run.grid(partial(of_prompt, {name: conditions[name] for name in NO_STAND_IN}), prompt=prompts)
        unchanged, uniform = (float(data["loss"].sel(condition=one).mean()) for one in NO_STAND_IN)
        is_worth_nothing = not uniform - unchanged >= WORTHLESS
        data = data.reindex(condition=list(conditions))
    if not is_worth_nothing:
        data = run.grid(partial(of_prompt, conditions), pure=True, prompt=prompts)
    data = data.assign(token_change=data["token_change"].isel(prompt=0, drop=True)).transpose("condition", ...)
    dosed = ["three_axis", next(name for name in conditions if name.startswith("triangle"))]
    some = run.grid(dose, pure=True, stand_in=dosed, residual_share=SHARES)["dose_loss"]
    some = some.assign_coords(prompt=data["prompt"])
    none = data["loss"].sel(condition=dosed).rename(condition="stand_in").expand_dims(residual_share=[0.0])
    everything = data["loss"].sel(condition="unchanged", drop=True).expand_dims(stand_in=dosed, residual_share=[1.0])
    doses = xr.concat([none, some, everything], "residual_share").transpose("stand_in", "residual_share", "prompt")
    texts = np.array(token_strings(run.session, run.rows[0][1 : CROP + 1]), dtype=object)
    return data.assign(dose_loss=doses, token_text=("shown_target", texts))


def _losses_and_kl(
    session: Session, tokens: Int[Tensor, "prompt pos"], conditions: Sequence[HookList]
) -> tuple[Float[Tensor, "condition prompt target"], Float[Tensor, "condition prompt"]]:
    """Return the loss of every token under the hooks of each condition, and each prompt's mean KL(unchanged || hooked)
    of the next token, in nats; the unchanged model, which also is a condition without hooks, runs once."""
    losses, kl = [], []
    with session.exclusive(session.owner), torch.no_grad():
        for row in tokens.to(session.device).split(1):
            unchanged = logits_of(session, row)
            wanted = double(unchanged).log_softmax(-1)
            for hooks in conditions:
                with session.under(hooks):
                    logits = logits_of(session, row) if hooks else unchanged
                losses.append(judged(session, logits, row).cpu())
                kl.append((wanted.exp() * (wanted - double(logits).log_softmax(-1))).sum(-1).mean(1).cpu())
    by_prompt = (-1, len(conditions))
    losses, kl = (torch.cat(one).unflatten(0, by_prompt).transpose(0, 1) for one in (losses, kl))
    return losses, kl


def recovered(losses: xr.DataArray, loss: xr.DataArray) -> xr.DataArray:
    """(U - L) / (U - B) of mean losses, L of each row [..., prompt], U and B of uniform attention and unchanged.

    The share and the ends of its 95 % interval over prompts are along `end`. NaN if U - B is below WORTHLESS; the
    interval is NaN if it is so without one of the prompts.

    Args:
        loss: [condition, prompt], which has U and B.
    """
    over = leave_one_out if losses.sizes["prompt"] >= FEWEST else partial(xr.DataArray.mean, dim="prompt")
    unchanged, uniform = (over(loss.sel(condition=one, drop=True)) for one in NO_STAND_IN)
    worth = uniform - unchanged
    parts = interval_of((uniform - over(losses)) / worth.where(worth >= WORTHLESS), (-np.inf, 1))
    return xr.concat(parts, "end", coords="minimal").assign_coords(end=list(ENDS)).transpose(..., "end")


def ranks(data: xr.Dataset) -> xr.DataArray:
    """Return Spearman's rho over stand-ins of the share recovered with r, and with attention KL."""
    stand_ins = data.drop_sel(condition=list(NO_STAND_IN))
    share = stand_ins["recovered"].sel(end="value")

    def rank(name: str) -> float:
        both = xr.Dataset({"x": stand_ins[name].mean(HEAD), "y": share}).dropna("condition")
        return float(spearman(*(torch.from_numpy(both[one].values) for one in ("x", "y"))))

    return xr.DataArray([rank(name) for name in PREDICTORS], {"predictor": list(PREDICTORS)})


def score_errors(run: Run, conditions: Conditions, where: Mapping[str, Any]) -> xr.Dataset:
    """Return attention KL and Pearson's r between each stand-in's and the model's scores, on the unchanged q and k."""
    sums, rule = run.sums(), {name: value for name, value in where.items() if name != "heads"}

    def compare(capture: LayerCapture) -> None:
        exact = capture.scores()
        visible = capture.geometry.visible(exact.shape[1], exact.device)
        every = [exact if by is None else stand_in(capture, by, **rule) for by in conditions.values()]
        kl = [attention_kl(exact, scores, visible).mean(1) for scores in every]
        r = [pearson(exact[:, visible], scores[:, visible]) for scores in every]
        sums.add_layer(capture, {"attention_kl": torch.stack(kl), "r": torch.stack(r)})

    replace(run, where={"heads": where["heads"]}).capture(compare)
    coords = {"layer": range(run.model.cfg.n_layers), "head": range(run.model.cfg.n_heads)}
    return sums.means().assign_coords(condition=list(conditions)).reindex(coords)


def costs(run: Run, n_prompts: int, width: float, replaced: xr.DataArray) -> xr.DataArray:
    """Return the rise of the loss when one head alone loses its residual, or all its attention."""
    tokens, by = run.tokens[:n_prompts], dict(zip(REPLACED_BY, (by_split(triangle(width)), by_constant), strict=True))

    def hooks_of(layer: int, head: int) -> dict[str, HookList]:
        return {name: substitute(run.model, one, heads=[(layer, head)]) for name, one in by.items()}

    selected = {layer: np.flatnonzero(heads).tolist() for layer, heads in enumerate(replaced.values) if heads.any()}
    rises = run.rises_of_heads(tokens, selected, REPLACED_BY, hooks_of).mean("prompt")
    return rises.rename(edit="replaced_by").reindex({dim: replaced[dim] for dim in HEAD})

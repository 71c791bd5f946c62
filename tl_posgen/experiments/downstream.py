"""Multiple-choice and cloze tasks, each continuation scored by its log-likelihood, with the order disturbed."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posgen.errors import InputError
from tl_posgen.experiments.items import Item, as_items
from tl_posgen.experiments.loss import require_context
from tl_posgen.experiments.perturbation import arms_for, check_draws, disturbed, drawn
from tl_posgen.maths.bootstrap import bootstrap_interval
from tl_posgen.models.backend import Model
from tl_posgen.models.probe import unpadded
from tl_posgen.models.provenance import model_label, null_label, provenance_of
from tl_posgen.models.random_like import random_like
from tl_posgen.models.tokens import bos_of, check_ids
from tl_posgen.results import Result

MEASURES = ("accuracy", "accuracy_per_byte", "log_likelihood")


def downstream(
    model: Model,
    items: Any,
    *,
    n_items: int | None = None,
    ratios: Sequence[int | float] = (0.0, 0.05, 0.1, 0.5),
    arms: Sequence[str] | None = None,
    reach: str = "uniform",
    window: int = 8,
    seed: int = 0,
    null_seed: int | None = 0,
    progress: bool = True,
) -> Result:
    """score(choice) = sum_t ln p(token_t | context, choice before t), over its length in bytes; the highest is chosen.

    The context is disturbed as in `perturbation`, with the same draw for all choices of an item; choices never are.

    Args:
        items: a JSONL file (see `read_items`) or a list of `Item` (see `cloze_items`). n_items: only the first so many.
        ratios, arms, reach, window: as in `perturbation`; swaps move a share of the context. seed: of the draws.
        null_seed: of the randomly initialised model; None skips it.

    Returns:
        A Result named "downstream". Over (arm, ratio), each with its 95 % bootstrap interval over items, `_low` and
        `_high`: `accuracy` (highest sum; for a cloze without choices: every token of the target is the most likely
        one), `accuracy_per_byte` (highest sum per byte, the field's acc_norm; the same as accuracy for a cloze),
        `log_likelihood` of the right choice, in nats per token. `chance`: the mean of 1 / number of choices.

    Raises:
        InputError: malformed items, one longer than the training context, a ratio outside [0, 1], an unknown arm.

    Source: scoring as in lm-evaluation-harness (Gao et al.); context and choice are tokenised apart, with a space
    between them. The arms are ours.
    """
    chosen = as_items(items)
    if n_items is not None and n_items < 1:
        raise InputError(f"n_items {n_items}: one item at least")
    chosen = chosen[:n_items]
    arms = arms_for(model, arms)
    check_draws(ratios, [reach], window)
    encoded = [encode(model, item, number) for number, item in enumerate(chosen)]
    axes = {"arm": arms, "ratio": [float(ratio) for ratio in ratios]}
    options = {"reach": reach, "window": window, "seed": seed, "progress": progress}
    dataset = measured(model, chosen, encoded, axes, **options, label=model_label(model))
    null = None
    if null_seed is not None:
        twin = random_like(model, null_seed)
        null = measured(twin, chosen, encoded, axes, **options, label=null_label(null_seed))
    contexts = [context for context, _ in encoded]
    settings = {"items": len(chosen), "reach": reach, "window": window, "seed": seed}
    return Result("downstream", dataset, null, provenance_of(model, contexts, null_seed) | settings)


Encoded = tuple[Tensor, list[Tensor]]  # the context, and every choice
Score = tuple[Tensor, bool]  # ln p of each token of a choice, and whether each was the most likely one


def encode(model: Model, item: Item, number: int) -> Encoded:
    """Token ids of the context, BOS included where the model has one, and of every choice."""
    bos = bos_of(model)

    def ids(text: str) -> list[int]:
        return model.tokenizer(text, add_special_tokens=False, verbose=False).input_ids

    context = bos + ids(item.context.rstrip())
    choices = [ids(choice if choice[0].isspace() else f" {choice}") for choice in item.choices]
    try:
        for choice in choices:
            n = len(context + choice)
            require_context(model, n, f"{n} tokens with its longest choice", "shorten it or leave it out")
            check_ids(model, context + choice)
    except InputError as error:
        raise InputError(f"item {number + 1}: {error}") from error
    return torch.tensor(context), [torch.tensor(choice) for choice in choices]


def measured(
    model: Model,
    items: Sequence[Item],
    encoded: Sequence[Encoded],
    axes: dict[str, list],
    *,
    reach: str,
    window: int,
    seed: int,
    progress: bool,
    label: str,
) -> xr.Dataset:
    values = np.full((len(items), len(axes["arm"]), len(axes["ratio"]), len(MEASURES)), np.nan)
    places = list(product(range(len(items)), range(len(axes["arm"])), range(len(axes["ratio"]))))
    for at, a, r in tqdm(places, desc=f"downstream, {label}", unit="item", disable=not progress):
        options = {"seed": seed * len(items) + at, "window": window, "reach": reach}
        rows = scores_of(model, *encoded[at], axes["arm"][a], axes["ratio"][r], **options)
        values[at, a, r] = judged(items[at], rows)
    low, high = bootstrap_interval(values)
    names = ("arm", "ratio")
    data = {}
    for number, name in enumerate(MEASURES):
        data[name] = (names, values.mean(0)[..., number])
        data[f"{name}_low"], data[f"{name}_high"] = (names, low[..., number]), (names, high[..., number])
    data["chance"] = float(np.mean([1 / len(item.choices) if len(item.choices) > 1 else 0 for item in items]))
    return xr.Dataset(data, axes, {"rows": names, "model": label, "items": len(items)})


def scores_of(
    model: Model,
    context: Int[Tensor, " pos"],
    choices: Sequence[Int[Tensor, " _"]],
    arm: str,
    ratio: int | float,
    *,
    seed: int,
    window: int,
    reach: str,
) -> list[Score]:
    """Every choice's score after the one disturbed context; choices of one length share a forward pass."""
    longest = torch.cat([context, max(choices, key=len)])
    n, total = len(context), len(longest)
    if arm != "jitter":  # a jitter moves a share of the pairs, swaps a share of all tokens
        ratio = ratio * n / total
    protected = [0, *range(n, total)]
    draw = drawn(model, longest, arm, reach, ratio, seed=seed, window=window, protected=protected)
    scores: dict[int, Score] = {}
    for length in {len(choice) for choice in choices}:
        at = [number for number, choice in enumerate(choices) if len(choice) == length]
        rows = torch.stack([torch.cat([context, choices[number]]) for number in at])
        scores |= dict(zip(at, score(model, *disturbed(model, rows, arm, draw), length), strict=True))
    return [scores[number] for number in range(len(choices))]


def score(model: Model, rows: Int[Tensor, "row pos"], hooks: Sequence[tuple], n_choice: int) -> list[Score]:
    """Of each row, ln p of the last n_choice tokens, and whether each of them was the most likely one."""
    rows = rows.to(next(model.parameters()).device)
    with torch.no_grad(), model.hooks(fwd_hooks=list(hooks)):
        logits = model(rows, return_type="logits", **unpadded(model, rows))[:, -n_choice - 1 : -1]
    targets = rows[:, -n_choice:]
    log_p = logits.double().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    greedy = (logits.argmax(-1) == targets).all(-1)
    return list(zip(log_p.cpu(), greedy.tolist(), strict=True))


def judged(item: Item, rows: Sequence[Score]) -> list[float]:
    """accuracy, accuracy_per_byte and log_likelihood of one item."""
    right, greedy = rows[item.gold]
    per_token = float(right.mean())
    if len(rows) == 1:
        return [float(greedy), float(greedy), per_token]
    sums = np.array([float(log_p.sum()) for log_p, _ in rows])
    lengths = np.array([len(choice.strip().encode()) for choice in item.choices])
    picks = sums.argmax(), (sums / lengths).argmax()
    return [*(float(pick == item.gold) for pick in picks), per_token]

"""Order disturbed in the text, in the position index, or in the features: how fast does the loss rise?"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, get_args

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.experiments.loss import prompts_of_one_length, token_losses
from tl_posgen.interventions.positions import distances_jittered, position_part_permuted, positions_permuted
from tl_posgen.interventions.scores import HookList
from tl_posgen.maths.bootstrap import bootstrap_interval
from tl_posgen.maths.swaps import Arm as Reach
from tl_posgen.maths.swaps import Swaps, jittered_distances, swap_tokens, swap_words
from tl_posgen.models.backend import Model
from tl_posgen.models.provenance import model_label, null_label, provenance_of
from tl_posgen.models.random_like import random_like
from tl_posgen.models.tokens import token_strings
from tl_posgen.results import Result

PerturbationArm = Literal["tokens", "words", "positions", "key_positions", "jitter", "position_part"]

ARMS: tuple[str, ...] = get_args(PerturbationArm)
REACHES: tuple[str, ...] = get_args(Reach)
RATIOS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
TARGETS = ("all", "unmoved", "suffix")


@dataclass(frozen=True)
class Draw:
    """What is out of order in a prompt; see `disturbed` for where: in its text, its index or its features.

    Attributes:
        permutation: new order of the places. distances: what each pair sees, for a jitter; else None.
        moved: places whose token, or whose position, is swapped (none for a jitter, which moves pairs).
        ratio: share of tokens (of pairs, for a jitter) that is really moved.
    """

    permutation: Int[Tensor, " pos"]
    distances: Int[Tensor, "query key"] | None
    moved: Bool[Tensor, " pos"]
    ratio: float


def perturbation(
    model: Model,
    prompts: Any,
    *,
    length: int | None = 256,
    n_prompts: int | None = 8,
    ratios: Sequence[int | float] = RATIOS,
    arms: Sequence[str] | None = None,
    reaches: Sequence[str] = REACHES,
    seeds: Sequence[int] = (0, 1),
    window: int = 8,
    clean: int | float = 0.25,
    null_seed: int | None = 0,
    progress: bool = True,
) -> Result:
    """change(rho) = loss disturbed - loss, on the same targets, with a share rho of the prompt out of order.

    Arms: "tokens" and "words" (T: the text itself is swapped, targets move with it), "positions" (P: only the position
    index of queries and keys), "key_positions" (P on keys, which is also F: each key rotated as another position),
    "jitter" (F: pairs see i - j + u), "position_part" (F': the position part f sees the swapped index, meaning and
    residual do not). One seeded draw of disjoint swaps per prompt, seed and ratio, the same for all arms but words;
    the draws of a lower ratio are among those of a higher one. The first token and a suffix are never moved.

    Args:
        ratios: shares of tokens to move, in [0, 1].
        arms: all that the model can have, if left out: only the text's where scores know no distance.
        reaches: how far the swapped are apart: adjacent, within `window`, anything ("uniform"). A jitter moves by up to
            1, `window`, or the length of the prompt.
        clean: share of the prompt left in order at its end.
        seeds: draws per prompt. null_seed: of the randomly initialised model; None skips it.

    Returns:
        A Result named "perturbation": over (arm, reach, ratio, target) `change` with its 95 % bootstrap interval over
        prompts (each the mean over seeds, drawn anew for every prompt) `change_low`, `change_high`; `change_each` over
        seed and prompt too; `moved`, the share really moved; `loss`, undisturbed; where arm "positions" was run, `gap`,
        `gap_low`, `gap_high`: change less that of "positions", prompt by prompt. Targets: "all", "unmoved" (places
        whose token, or position, was not swapped), "suffix" (the clean end).

    Raises:
        InputError: unusable prompts, a ratio outside [0, 1], an unknown arm or reach, a window below 1, no seed.
        UnsupportedModelError: an arm asked for that the model cannot have.

    Source: that few swaps hardly matter, and that index and feature level are alike, is claimed by Han & Ji 2025 (arXiv
    2503.13305); their exact definitions are not known, these are ours.
    """
    tokens = prompts_of_one_length(model, prompts, length, n_prompts)
    arms = arms_for(model, arms)
    check_draws(ratios, reaches, window)
    if not seeds:
        raise InputError("seeds: none given; give one draw per prompt at least, such as seeds=(0,)")
    if not 0 <= clean < 1:
        raise InputError(f"clean {clean} is outside [0, 1); it is the share of the prompt left in order at its end")
    axes = {"arm": list(arms), "reach": list(reaches), "ratio": [float(ratio) for ratio in ratios], "seed": list(seeds)}
    options = {"window": window, "n_clean": round(clean * tokens.shape[1]), "progress": progress}
    dataset = measured(model, tokens, axes, **options, label=model_label(model))
    null = None
    if null_seed is not None:
        null = measured(random_like(model, null_seed), tokens, axes, **options, label=null_label(null_seed))
    settings = {"window": window, "clean": clean, "seeds": list(seeds)}
    return Result("perturbation", dataset, null, provenance_of(model, list(tokens), null_seed) | settings)


def arms_for(model: Model, arms: Sequence[str] | None) -> list[str]:
    """The arms asked for, or all that the model can have; what it cannot have is refused before work."""
    if arms is not None:
        check_choice("arm", arms, ARMS)
        if "words" in arms:
            require_tokenizer(model)
        if not {"tokens", "words"}.issuperset(arms):
            positions_permuted(model, torch.arange(2))
        return list(arms)
    of_text = ["tokens", "words"] if model.tokenizer is not None else ["tokens"]
    try:
        positions_permuted(model, torch.arange(2))
    except UnsupportedModelError:
        return of_text
    return [*of_text, *(arm for arm in ARMS if arm not in ("tokens", "words"))]


def check_draws(ratios: Sequence[int | float], reaches: Sequence[str], window: int) -> None:
    check_choice("reach", reaches, REACHES)
    if not ratios:
        raise InputError("ratios: none given; give shares of tokens to move, such as ratios=(0.05, 0.1)")
    for ratio in ratios:
        if not 0 <= ratio <= 1:
            raise InputError(f"ratio {ratio} is outside [0, 1]; it is the share of tokens to move")
    if window < 1:
        raise InputError(f"window {window}: give at least 1 token")


def check_choice(name: str, given: Sequence[str], known: Sequence[str]) -> None:
    if unknown := [one for one in given if one not in known]:
        raise InputError(f"{name} {unknown[0]!r}: choose from {', '.join(known)}")
    if not given:
        raise InputError(f"no {name} chosen; choose from {', '.join(known)}")


def measured(
    model: Model,
    tokens: Int[Tensor, "prompt pos"],
    axes: dict[str, list],
    *,
    window: int,
    n_clean: int,
    progress: bool,
    label: str,
) -> xr.Dataset:
    """The change of the loss for every combination, prompt by prompt."""
    dims = ("arm", "reach", "ratio", "seed", "prompt")
    coords = axes | {"prompt": list(range(len(tokens))), "target": list(TARGETS)}
    change = np.full((*(len(coords[dim]) for dim in dims), len(TARGETS)), np.nan)
    moved = np.full(change.shape[:-1], np.nan)
    base = token_losses(model, tokens)
    protected = [0, *range(tokens.shape[1] - n_clean, tokens.shape[1])]
    places = list(product(*(range(len(coords[dim])) for dim in dims)))
    for place in tqdm(places, desc=f"perturbation, {label}", unit="run", disable=not progress):
        arm, reach, ratio, seed, prompt = (coords[dim][at] for dim, at in zip(dims, place, strict=True))
        draw = seed * len(tokens) + prompt  # every prompt has draws of its own
        options = {"seed": draw, "window": window, "protected": protected}
        done = drawn(model, tokens[prompt], arm, reach, ratio, **options)
        row, hooks = disturbed(model, tokens[prompt], arm, done)
        change[place] = changes(token_losses(model, row[None], hooks)[0] - base[prompt], done.moved, n_clean)
        moved[place] = done.ratio
    names = ("arm", "reach", "ratio", "target")
    data = {
        **with_interval("change", change.mean(axis=3), names),
        "change_each": ((*dims, "target"), change),
        "moved": (names[:3], moved.mean(axis=(3, 4))),
        "loss": float(base.mean()),
    }
    if "positions" in coords["arm"]:
        gap = change - change[coords["arm"].index("positions")]
        data |= with_interval("gap", gap.mean(axis=3), names)
    return xr.Dataset(data, coords, {"rows": names, "model": label})


def with_interval(name: str, values: Float[np.ndarray, "arm reach ratio prompt target"], dims: tuple) -> dict[str, Any]:
    """The mean over prompts, and its 95 % bootstrap interval."""
    by_prompt = np.moveaxis(values, 3, 0)
    low, high = bootstrap_interval(by_prompt)
    return {name: (dims, by_prompt.mean(0)), f"{name}_low": (dims, low), f"{name}_high": (dims, high)}


def changes(difference: Float[Tensor, " target"], moved: Bool[Tensor, " pos"], n_clean: int) -> list[float]:
    """Its mean over all targets, over those at places that were not moved, and over the suffix; NaN over none."""
    suffix = torch.zeros_like(difference, dtype=torch.bool)
    suffix[len(suffix) - n_clean :] = True
    masks = (torch.ones_like(suffix), ~moved[1:], suffix)
    return [float(difference[mask].mean()) for mask in masks]


def drawn(
    model: Model,
    tokens: Int[Tensor, " pos"],
    arm: str,
    reach: str,
    ratio: int | float,
    *,
    seed: int,
    window: int,
    protected: Sequence[int],
) -> Draw:
    """The draw of one arm; see `perturbation`. Protected places are in order among themselves, always."""
    n = len(tokens)
    if arm == "jitter":
        width = {"adjacent": 1, "window": window, "uniform": n}[reach]
        distances = jittered_distances(n, ratio, width, seed=seed)
        kept = torch.zeros(n, dtype=torch.bool)
        kept[list(protected)] = True
        true = (torch.arange(n)[:, None] - torch.arange(n)).clamp(min=0)
        distances = torch.where(kept[:, None] & kept, true, distances)
        share = float((distances != true).sum() / (n * (n + 1) / 2))
        return Draw(torch.arange(n), distances, torch.zeros(n, dtype=torch.bool), share)
    options = {"seed": seed, "window": window, "protected": protected}
    swaps: Swaps
    if arm == "words":
        swaps = swap_words(n, words_of(model, tokens), ratio, reach, **options)  # pyright: ignore[reportArgumentType]
    else:
        swaps = swap_tokens(n, ratio, reach, **options)  # pyright: ignore[reportArgumentType]
    return Draw(swaps.permutation, None, swaps.moved, swaps.ratio)


def disturbed(
    model: Model, tokens: Int[Tensor, "*row pos"], arm: str, draw: Draw
) -> tuple[Int[Tensor, "*row pos"], HookList]:
    """What the model reads, and what is done to its attention meanwhile.

    The draw may be of a longer prompt, if what is cut off was in order.
    """
    n = tokens.shape[-1]
    permutation = draw.permutation[:n]
    if arm in ("tokens", "words"):
        return tokens[..., permutation], []
    if arm == "jitter":
        assert draw.distances is not None
        return tokens, distances_jittered(model, draw.distances[:n, :n])
    hooks = {
        "positions": lambda: positions_permuted(model, permutation),
        "key_positions": lambda: positions_permuted(model, permutation, keys_only=True),
        "position_part": lambda: position_part_permuted(model, permutation),
    }[arm]()
    return tokens, hooks


def require_tokenizer(model: Model) -> None:
    if model.tokenizer is None:
        raise InputError("arm 'words': this model has no tokenizer, so words are not known; choose other arms")


def words_of(model: Model, tokens: Int[Tensor, " pos"]) -> list[tuple[int, int]]:
    """Token ranges of the words: a word begins at a token that begins with white space; tokens without a letter or
    digit belong to none, and end one."""
    require_tokenizer(model)
    words: list[tuple[int, int]] = []
    after_word = False
    for place, text in enumerate(token_strings(model, tokens)):
        is_word = any(letter.isalnum() for letter in text)
        if is_word and after_word and not text[0].isspace():
            words[-1] = (words[-1][0], place + 1)
        elif is_word:
            words.append((place, place + 1))
        after_word = is_word
    return words

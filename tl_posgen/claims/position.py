"""Position generalization: the seven claims of Han & Ji 2025 (arXiv 2503.13305), and what they are read off."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xarray as xr

from tl_posgen.analysis import analyze
from tl_posgen.claims.base import Claim, Finding, Procedure, both, threshold
from tl_posgen.experiments import (
    any_distance,
    dummy_distance,
    emergence,
    length,
    perturbation,
    plane_sufficiency,
    substitution,
)
from tl_posgen.models.backend import Model
from tl_posgen.models.load import load_model
from tl_posgen.models.origin import origin_of
from tl_posgen.results import Result

DUMMY = (0, 64, 256, 1000, 2048)
WORTHLESS = 0.01  # nats: shares of less are noise


def procedures(
    model: Model, text: str, cut: Mapping[str, Any], checkpoints: Sequence[str | Path]
) -> dict[str, Procedure]:
    """What the claims need, by name, quick ones first."""
    every: dict[str, Procedure] = {
        "residual": lambda: list(analyze(model, text, analyzers=["residual", "across_prompts"], **cut).values()),
        "planes": lambda: [sufficient(model, text, **cut), any_distance(model, text, **cut)],
        "distance": lambda: [dummy_distance(model, text, distances=DUMMY, **cut)],
        "substitution": lambda: [substitution(model, text, head_costs=False, **{**cut, "n_prompts": 16})],
        "perturbation": lambda: [perturbation(model, text, **cut)],
        "length": lambda: [length(beyond_context(model), text, **{k: v for k, v in cut.items() if k != "length"})],
    }
    if checkpoints:
        tokenizer = origin_of(model).directory
        every["emergence"] = lambda: [emergence(checkpoints, text, tokenizer=tokenizer, **cut)]
    return every


def sufficient(model: Model, text: str, *, null_seed: int, **cut: Any) -> Result:
    return plane_sufficiency(model, text, seed=null_seed, **cut)


def beyond_context(model: Model) -> Model:
    """The same model on a backend that takes prompts longer than its training context."""
    origin = origin_of(model)
    if origin.backend == "bridge":
        return model
    return load_model(str(origin.directory or origin.name), backend="bridge")


def three_axes(three_axis: Result, mean_key: Result) -> Finding:
    def say(fit: xr.Dataset, split: xr.Dataset) -> str:
        r, rest, rows = (float(fit[name].mean()) for name in ("r", "r_no_first", "r_visible"))
        of_split = float(split["mean_key_r"].mean())
        return (
            f"exact fit r {r:.3f} (first token out {rest:.3f}, within rows {rows:.3f}); mean-key split {of_split:.3f}"
        )

    verdict = threshold(float(three_axis.dataset["r_no_first"].mean()), 0.95, 0.75)
    return Finding(verdict, *both(say, three_axis, mean_key))


def two_axes(variance: Result, substitution: Result) -> Finding:
    def plain(data: xr.Dataset) -> float:
        return float(data["recovered"].sel(arm="query_profile"))

    def searched(data: xr.Dataset) -> float | None:
        """Of the free split, on prompts that it was not searched on; None where nothing was searched."""
        return float(data["search_recovered"].sel(family="free")) if "search_recovered" in data else None

    def say(shares: xr.Dataset, arms: xr.Dataset) -> str:
        losses = arms["loss_mean"]
        worth = float(losses.sel(arm="uniform") - losses.sel(arm="base"))
        words = f"additive r {float(shares['additive_r'].mean()):.3f}; attention is worth {worth:.2f} nats"
        if worth < WORTHLESS:
            return f"{words}, so there is nothing to recover"
        words += f", of which the split by each query's profile recovers {plain(arms):.0%}"
        best = searched(arms)
        return words if best is None else f"{words}, a searched one {best:.0%}"

    best = searched(substitution.dataset)
    recovered = plain(substitution.dataset) if best is None else best
    return Finding(threshold(recovered, 0.95, 0.75), *both(say, variance, substitution))


def controlled_distance(dummy_distance: Result) -> Finding:
    def agreement(data: xr.Dataset) -> xr.DataArray:
        return data["key_agreement"].mean(("layer", "head"))

    def say(data: xr.Dataset) -> str:
        at = ", ".join(f"{float(d0):g}: {float(r):.2f}" for d0, r in agreement(data)[1:].to_series().items())
        first = float(data["d0"][0])
        share = float(data["interaction_share"].mean())
        return f"key part at distance {first:g} against others, r {at}; interaction {share:.0%} of the table's variance"

    verdict = threshold(float(agreement(dummy_distance.dataset).min()), 0.95, 0.75)
    return Finding(verdict, *both(say, dummy_distance))


def planes(plane_sufficiency: Result, any_distance: Result) -> Finding:
    data = plane_sufficiency.dataset
    means = data[["score_sum_no_first", "interaction_no_first", "additive"]].mean(("layer", "head"))

    def say(kind: str) -> str:
        r = float(data["pearson"].sel(group=kind, variant="no_first"))
        of_kind = means.sel(weights=kind)
        interaction, certified = float(of_kind["interaction_no_first"]), float(of_kind["additive"])
        return (
            f"{kind}: sum of plane scores against interaction share r {r:.2f}, interaction {interaction:.0%}, "
            f"certified additive {certified:.0%} of heads"
        )

    exact = any_distance.dataset["error"].sel(planes="inverse DFT")
    measured = f"{say('trained')}; any function of distance is possible (error {float(exact.max()):.0e})"
    predicted = float(data["pearson"].sel(group="trained", variant="no_first"))
    trained, random = (float(means["interaction_no_first"].sel(weights=kind)) for kind in ("trained", "random init"))
    apart = trained <= 0.5 * random
    verdict = "held" if predicted >= 0.5 and apart else "partly" if apart else "not held"
    return Finding(verdict, measured, f"{say('random init')}; {say('shuffled')}")


def nats(change: float) -> str:
    """'+0.38', and never '-0.00'."""
    return f"{round(change, 2) + 0.0:+.2f}"


def word_order(perturbation: Result) -> Finding:
    def change(data: xr.Dataset, arm: str, ratio: float) -> float:
        return float(data["change"].sel(arm=arm, reach="uniform", target="all").sel(ratio=ratio, method="nearest"))

    def say(data: xr.Dataset) -> str:
        parts = [
            f"{name} {nats(change(data, arm, 0.05))} nats at 5 %, {nats(change(data, arm, 0.2))} at 20 %"
            for arm, name in (("words", "words"), ("positions", "index"), ("position_part", "features"))
        ]
        return "; ".join(parts)

    data = perturbation.dataset
    few, many = change(data, "words", 0.05), change(data, "words", 0.2)
    index, features = change(data, "positions", 0.2), change(data, "position_part", 0.2)
    alike = abs(index - features) <= 0.25 * max(index, features)
    verdict = "held" if few <= 0.1 and many > 0.1 and alike else "partly" if few <= 0.1 or alike else "not held"
    return Finding(verdict, *both(say, perturbation))


def length_claim(length: Result) -> Finding:
    def within(data: xr.Dataset, arm: str) -> float:
        """Share of heads whose outputs beyond the training length are no further off than half the prompts are."""
        beyond = data[["frechet", "floor"]].sel(arm=arm).isel(segment=slice(1, None)).mean("segment")
        return float((beyond["frechet"] <= beyond["floor"]).mean())

    def say(data: xr.Dataset) -> str:
        loss = data["loss_segment"].isel(segment=-1)
        arms = [
            f"{str(arm).replace('_', ' ')} {within(data, str(arm)):.0%}, loss {float(loss.sel(arm=arm)):.2f}"
            for arm in data["arm"].values
        ]
        inside = float(data["loss_segment"].sel(arm="vanilla").isel(segment=0))
        times = data.sizes["segment"]
        return f"heads within the floor up to {times} times the length: {'; '.join(arms)} (loss inside {inside:.2f})"

    data = length.dataset
    windowed, vanilla = within(data, "lm_infinite"), within(data, "vanilla")
    verdict = "held" if windowed >= 0.9 > vanilla else "partly" if windowed > vanilla else "not held"
    return Finding(verdict, *both(say, length))


def left_over(residual: Result, across_prompts: Result) -> Finding:
    def say(left: xr.Dataset, shared: xr.Dataset) -> str:
        names = ("position", "by_distance")
        position, by_distance = (float(shared[name].mean()) for name in names)
        share, one = (float(left[name].mean()) for name in ("share", "top_share"))
        words = f"the fit leaves {share:.0%} of the variance within rows, {one:.0%} of that in one direction; "
        return words + f"{position:.0%} is the same in every prompt, {by_distance:.0%} by distance alone"

    return Finding("open", *both(say, residual, across_prompts))


def formation(emergence: Result) -> Finding:
    data = emergence.dataset
    values = data["three_axis_r_visible"].mean(("layer", "head")).values
    told = ", ".join(f"{value:.2f} at step {step}" for step, value in zip(data["step"].values, values, strict=True))
    return Finding("open", f"r within rows {told}", f"step {data['step'].values[0]} is the random initialisation")


CLAIMS = [
    Claim(
        "position",
        1,
        "Scores are close to a(i-j) + b(i) + c(j), with a correlation above .95.",
        "r without the first token, mean over heads: .95 held, .75 partly",
        ("three_axis", "mean_key"),
        three_axes,
    ),
    Claim(
        "position",
        2,
        "Scores are f(q, i-j) + g(q, k): position and meaning are apart.",
        "share of the loss recovered when the model runs on a split: 95 % held, 75 % partly",
        ("variance", "substitution"),
        two_axes,
    ),
    Claim(
        "position",
        3,
        "At a dummy distance the key part stays as it is and the position part shifts.",
        "least agreement of the key part over distances: .95 held, .75 partly",
        ("dummy_distance",),
        controlled_distance,
    ),
    Claim(
        "position",
        4,
        "Magnitude and phase of trained q and k in RoPE's planes make the split possible; random init lacks them.",
        "plane scores tell heads apart (r at least .5), and the trained interaction is at most half of random init's; "
        "partly: the second alone",
        ("plane_sufficiency", "any_distance"),
        planes,
    ),
    Claim(
        "position",
        5,
        "Swapping up to 5 % of the words hardly matters, more than 10 % does; index and features are alike.",
        "words: at most .1 nats at 5 % and more at 20 %; index and features within a quarter of each other",
        ("perturbation",),
        word_order,
    ),
    Claim(
        "position",
        6,
        "With LM-Infinite the attention output stays in its training distribution beyond the training length.",
        "heads whose outputs stay within the noise floor: 90 % with LM-Infinite and fewer without: held; more: partly",
        ("length",),
        length_claim,
    ),
    Claim(
        "position",
        "7a",
        "Open, as readers say: what the residual holds, and what carries over to other encodings.",
        "not judged",
        ("residual", "across_prompts"),
        left_over,
    ),
    Claim(
        "position",
        "7b",
        "Open, as readers say: how the split forms in training.",
        "not judged",
        ("emergence",),
        formation,
    ),
]

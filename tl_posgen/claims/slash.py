"""The claims of Cheng et al. 2026 (arXiv 2601.08297), the slash pattern: numbers, thresholds, and what would speak
against each."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import get_args

import numpy as np

from tl_posgen.claims.judging import Claim, Criterion, Group, Verdict, or_lacking
from tl_posgen.core.formatting import counted, in_ranges
from tl_posgen.core.measure import ENDS, HEAD
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import leave_one_out
from tl_posgen.core.result import Result
from tl_posgen.rope.frequency_bands import BANDS
from tl_posgen.slash.band_ablation import mean_of_slash_heads
from tl_posgen.slash.cone import INPUTS
from tl_posgen.slash.dominance import group_mean
from tl_posgen.slash.numbers.slash_scores import LONG, long_distances
from tl_posgen.slash.slash_ablation import Scheme
from tl_posgen.slash.slash_toy import FEATURES
from tl_posgen.stats.intervals import FEWEST


def _transfer(slash_transfer: Result, fewest: int, **decides: float) -> list[Criterion | Group]:
    """Return the criteria of r at each distance where `fewest` heads are dominant, and of the mean r over the other
    distances where as many are dominant at any of these, weighted by these heads. r itself is over all heads; at
    distances where fewer are dominant it decides nothing, as hardly any head attends there."""
    numbers, measure = slash_transfer.numbers, slash_transfer.measure
    heads = {at: int(measure.n_dominant(numbers, at, "natural").value) for at in measure.reached(numbers.data)}
    r = {at: measure.correlation(numbers, at) for at, n in heads.items() if n}
    r = {at: number for at, number in r.items() if heads[at] >= fewest or not np.isnan(number.value)}
    few = [at for at in r if heads[at] < fewest]
    criteria: list[Criterion | Group] = [
        (Criterion.beside if at in few else partial(Criterion.of, **decides))(
            f"r at D = {at}", number, basis=counted(heads[at], "dominant head")
        )
        for at, number in r.items()
    ]
    n_together = int(measure.n_dominant(numbers, few, "natural").value) if few else 0
    if len(few) > 1 and n_together >= fewest:
        mean = _weighted([r[at] for at in few], [heads[at] for at in few])
        criteria += [
            Criterion.of(f"mean r at D = {in_ranges(few)}", mean, basis=counted(n_together, "dominant head"), **decides)
        ]
    elif len(few) == len(r):
        return [Group("open", criteria, "" if r else "no head is slash-dominant")]
    return criteria


def _weighted(numbers: Sequence[Number], weights: Sequence[int]) -> Number:
    """Return the weighted mean of numbers. Its ends are the means of their ends, as if all erred together: the widest
    that the interval can be."""
    value, low, high = (
        float(np.average([getattr(number, end) for number in numbers], weights=weights)) for end in ENDS
    )
    of_kinds = {kind: np.array([number.by_null[kind] for number in numbers]) for kind in numbers[0].by_null}
    nulls = {kind: np.average(of_kind, axis=0, weights=weights) for kind, of_kind in of_kinds.items()}
    return Number(value, low, high, {kind: tuple(of_kind.tolist()) for kind, of_kind in nulls.items()})


def _rank_one(cone: Result, side: str, **at: float) -> Criterion:
    """Return the share in dominant heads, beside those of all heads of a null model, and of its dominant ones."""
    numbers, name = cone.numbers, f"r1 of {side.upper()}"
    r1, of_all = group_mean(numbers, "r1", "dominant", side=side), numbers("r1", side=side)
    of_dominant = or_lacking(r1.by_null)
    beyond = {kind: [*values, *of_dominant[kind]] for kind, values in of_all.by_null.items()}
    criterion = Criterion.of(name, r1, **at, beyond=beyond, digits=3)
    return replace(criterion, number=replace(r1, by_null=of_all.by_null))


def _ranks(cone: Result, **at: float) -> list[Criterion]:
    """Return the criteria of Q and K; beside them r1 in the dominant heads of null models, where these have any; and
    where there are biases, which are of rank one, what r1 is without them."""
    numbers, name = cone.numbers, "r1_without_bias"
    dominant = {side: group_mean(numbers, "r1", "dominant", side=side) for side in "qk"}
    of_nulls = [
        Criterion.beside(f"r1 of {side.upper()} beside dominant heads of null models", r1, digits=3)
        for side, r1 in dominant.items()
        if not np.isnan([value for values in r1.by_null.values() for value in values]).all()
    ]
    without = {side: group_mean(numbers, name, "dominant", side=side) for side in ("qk" if name in numbers else "")}
    without_biases = [
        Criterion.beside(f"r1 of {side.upper()} without biases", r1, digits=3)
        for side, r1 in without.items()
        if not math.isnan(r1.value)  # a layer without biases
    ]
    return [*(_rank_one(cone, side, **at) for side in "qk"), *of_nulls, *without_biases]


def _parts_of_inputs(cone: Result, axis: float, partly: float, others: float) -> list[Group]:
    numbers, ratio = cone.numbers, cone.measure.ratio_above_no_inputs
    difference = ratio(numbers, INPUTS[1], less=INPUTS[2])
    alone = Criterion.without_nulls("axis alone", ratio(numbers, INPUTS[1]), axis, partly=partly)
    rest = Criterion.without_nulls("the rest", ratio(numbers, INPUTS[2]), others, sign=-1)
    beyond = or_lacking(difference.by_null)
    more = Criterion.of("more than the rest", difference, beyond=beyond, otherwise="held")
    has_biases, of_biases = "bias only" in numbers.data["input"].values, cone.measure.ratio_of_biases(numbers)
    by_biases = [Criterion.beside("biases without inputs", of_biases)] if has_biases else []
    is_part = alone.verdict != "not held" and more.value > 0
    return [Group.of(alone.holds and rest.holds, is_part, [alone, rest, more, *by_biases])]


def _bands(band_ablation: Result, kept: float, low_alone: float, lost: float, part: float) -> list[Group]:
    """Return, by each way of making bands, the shares of the unchanged slash score that are left without each band, and
    on the low one alone; and how much more is left without the low band than without the others, which has to be beyond
    the nulls. Open where no head is dominant, or some band has no plane; where both ways disagree, partly if one holds.
    """
    numbers, groups = band_ablation.numbers, []
    scores = mean_of_slash_heads(numbers.dataset)
    scores = leave_one_out(scores) if scores.sizes["prompt"] >= FEWEST else scores.mean("prompt")
    left = scores / scores.sel(condition="unchanged", drop=True)
    for scheme in get_args(Scheme) if numbers.measure.n_heads(numbers).value else ():
        names = [f"drop {band}, {scheme}" for band in BANDS]
        is_there = set(names) <= set(numbers.data["condition"].values)
        if not is_there or not all(numbers.data["n_planes"].sel(condition=name).any() for name in names):
            continue
        arrays = [left.sel(condition=name, drop=True) for name in names]
        of_others = (arrays[0] + arrays[1]) / 2
        high, medium, low = (
            Criterion.without_nulls(f"without {band}", numbers.number(array), kept)
            for band, array in zip(BANDS, arrays, strict=True)
        )
        on_low = numbers.number(left.sel(condition=f"keep low, {scheme}", drop=True))
        alone = Criterion.without_nulls("low alone", on_low, low_alone, sign=-1)
        more = Criterion.of(
            "more without low than without others", numbers.number(arrays[2] - of_others), otherwise="held"
        )
        is_held = low.holds and alone.holds and high.verdict == medium.verdict == "not held"
        cost = 1 - (high.value + medium.value) / 2
        is_part = cost >= lost and 1 - low.value <= part * cost
        groups.append(Group.of(is_held, is_part, [high, medium, low, alone, more], scheme))
    groups = [group for group in groups if group.verdict != "open"] or groups
    if not groups:
        return [Group("open", name="no head is slash-dominant, or a band has no plane")]
    verdicts = {group.verdict for group in groups}
    disagree: Verdict = "partly" if "held" in verdicts else "not held"
    return [Group(disagree if len(verdicts) > 1 else groups[0].verdict, groups)]


def _toy(slash_toy: Result, formed: float) -> list[Group]:
    numbers, measure = slash_toy.numbers, slash_toy.measure
    beyond = {
        "before training": [numbers("score", features="trained", step=0).value],
        "uniform attention": [numbers("uniform", distance=measure.distance).value],
    }
    ends = {features: numbers.array("score", features=features).isel(step=-1) for features in FEATURES}
    least = {features: float(end.min(skipna=False)) for features, end in ends.items()}
    trained, unseen = (Criterion(f"least, {name}", value, formed, beyond=beyond) for name, value in least.items())
    return [Group("not held" if not trained.holds else "held" if unseen.holds else "partly", [trained, unseen])]


def _far(slash: Result) -> list[Criterion]:
    numbers = slash.numbers
    n = numbers.number((numbers.array("n_long", first_token=False) > 0).sum(HEAD))
    return [Criterion.of("heads", n, end=None, otherwise="held", digits=0)]


def _nothing_far(slash: Result) -> str:
    far = [*long_distances(slash.trained.sizes["distance"])]
    if not far:
        return f"not measured: no prompt has {2 * LONG} tokens"
    return "" if (slash.trained["uniform"].sel(distance=far) > 0).any() else f"windows end before {LONG} tokens"


SLASH = [
    Claim(
        "slash 1",
        "Slash-dominant heads belong to the model: the same heads, with like scores, on random tokens.",
        "correlation of scores over heads, at every distance where at least {fewest} heads are dominant, and in the "
        "mean over the others, weighted by heads, where {fewest} are together: {held} held, {partly} partly",
        ("slash_transfer",),
        _transfer,
        thresholds={"fewest": 10, "held": 0.9, "partly": 0.6},
    ),
    Claim(
        "slash 2",
        "Queries and keys of slash-dominant heads are almost of rank one before RoPE.",
        "share of the first singular direction in dominant heads, Q and K: {held} held, {partly} partly; a null "
        "model's is that of all its heads, and of its dominant ones where it has any",
        ("cone",),
        _ranks,
        thresholds={"held": 0.9, "partly": 0.7},
    ),
    Claim(
        "slash 3a",
        "Inputs of the attention lie on a cone.",
        "95% interval of the mean cosine with their axis above every null model's: partly; and its lower end at least "
        "{held}: held",
        ("cone",),
        lambda cone, held: [Criterion.of_end("cosine with the axis", cone.numbers("cosine"), held, otherwise="partly")],
        thresholds={"held": 0.7},
    ),
    Claim(
        "slash 3b",
        "W_Q and W_K project onto the axis of the cone.",
        "95% interval of the axis's gain above every null model's, of one or both: detectable; of both, and each lower "
        "end at least {held:g}: held, {partly}: partly",
        ("cone",),
        lambda cone, **at: [
            Criterion.of_end(f"gain in W_{side.upper()}", cone.numbers("gain", side=side), **at, otherwise="detectable")
            for side in "qk"
        ],
        thresholds={"held": 2.0, "partly": 1.5},
    ),
    Claim(
        "slash 3c",
        "With only the part of the inputs along the cone's axis in W_Q and W_K, slash-dominant heads keep their slash; "
        "with only the rest they lose it.",
        "dominant heads' slash score above uniform, or above what biases of queries and keys make without inputs: with "
        "the axis part alone at least {axis} times the measured and with the rest at most {others} times: held; "
        "{partly} times and more than with the rest: partly; how much more has to be beyond the null",
        ("cone",),
        _parts_of_inputs,
        thresholds={"axis": 0.75, "others": 0.25, "partly": 0.4},
    ),
    Claim(
        "slash 4",
        "Medium and high frequencies of RoPE make the slash, low ones do not.",
        "without the low band {kept} of the slash score is left, without the high and without the medium one less, on "
        "the low one alone at most {low_alone}: held; the others cost {lost} in the mean, and the low one at most "
        "{part} of that: partly. By thirds and by wavelength; where they disagree, partly if one holds. How much "
        "more is left without the low band than without the others has to be beyond the null",
        ("band_ablation",),
        _bands,
        options={"band_ablation": {"schemes": ("thirds", "wavelength")}},
        thresholds={"kept": 0.75, "low_alone": 0.25, "lost": 0.25, "part": 0.5},
    ),
    Claim(
        "slash 5",
        "Gradient descent makes slash-dominant heads in a shallow RoPE transformer, and they generalise.",
        "slash score at the end at least {formed} in every seed: partly; and on unseen features: held; a toy, whose "
        "nulls are the score before training and that of uniform attention",
        ("slash_toy",),
        _toy,
        own_null=True,
        thresholds={"formed": 0.5},
    ),
    Claim(
        "slash 6",
        "Some heads are slash-dominant at long distances.",
        f"heads dominant at some distance from {LONG} tokens to half the prompt, without the first token: more than in "
        "any null model (a count, without an interval): held",
        ("slash",),
        _far,
        _nothing_far,
    ),
]

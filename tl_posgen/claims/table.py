"""The claims of three papers, each with its numbers, their thresholds and what would speak against it.

Position generalization: Han & Ji 2025 (arXiv 2503.13305). The slash pattern: Cheng et al. 2026 (arXiv 2601.08297).
Coupling of residual Jacobians: Aubry et al. 2024 (arXiv 2407.07810).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np

from tl_posgen.claims.frequency import FREQUENCY
from tl_posgen.claims.judging import Claim, Criterion, Group, Verdict, ends_of_nulls, or_lacking
from tl_posgen.core.formatting import counted, in_ranges
from tl_posgen.core.measure import ENDS, HEAD, OUT
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import leave_one_out
from tl_posgen.core.result import Result
from tl_posgen.position.order.cloze import N_CHOICES
from tl_posgen.position.substitution.substitution import AT_RANDOM, AT_SINKS
from tl_posgen.rope.frequency_bands import BANDS
from tl_posgen.slash.band_ablation import mean_of_slash_heads
from tl_posgen.slash.cone import INPUTS
from tl_posgen.slash.dominance import group_mean
from tl_posgen.slash.numbers.slash_scores import LONG, long_distances
from tl_posgen.slash.slash_ablation import Scheme
from tl_posgen.slash.slash_toy import FEATURES
from tl_posgen.stats.intervals import FEWEST

CLOSE: Mapping[str, Any] = {"held": 0.95, "partly": 0.75}  # a correlation, or a share recovered
_GAINED: Mapping[str, Any] = {"held": 2.0, "partly": 1.5, "otherwise": "detectable"}
ALONE: Mapping[str, Any] = {"beyond": None, "end": None}  # of a number that is not itself held against nulls
_JUDGED_ORDER = {"ratios": (0.0, 0.05, 0.1, 0.2), "n_draws": 2, "n_cloze": 800, "cloze_conditions": ("words",)}
_FEWEST_HEADS = 10  # that a correlation over heads at a distance is judged on
_SLIGHT = 0.02  # of accuracy
_HARDLY = 0.1  # nats
INSIDE = 0.9  # of heads
MOVED = ("words", "positions", "position_part")  # words, index and features
_LEFT = {"share": "variance within rows that the fit leaves", "top_share": "of that in one direction"}
OF_TOKENS = {"self": "own Jacobians", "same_input": "of one input", "same_output": "of one output"}

# Position generalization


def _additive(variance: Result) -> list[Criterion | Group]:
    """Return the criterion of r of what softmax sees, and r over all scores, which decides nothing."""
    over_all = Criterion.of(
        "over all scores", variance.numbers("additive_r_of_scores"), otherwise="held", digits=3, **ALONE
    )
    return [*_where_rotated(variance, "additive r", "additive_r"), over_all]


def _where_rotated(result: Result, quantity: str, name: str, **labels: str) -> list[Group]:
    """Return the criterion of r of a sum; open where no layer rotates q and k: the sum is the score by construction."""
    r = Criterion.of(quantity, result.numbers(name, **labels), **CLOSE, digits=3)
    rotates = not result.encodings or bool(set(result.encodings) - set(result.measure.caveats))
    return [Group(r.verdict if rotates else "open", [r])]


def _recovered(substitution: Result, condition: str = "query_profile") -> list[Criterion]:
    """Return the least share, of the loss and of the KL, how each stands beside its nulls, and of what they are."""
    own, names = substitution.numbers, {"loss": "share of the loss", "kl": "share of the KL"}
    shares = {words: own.measure.recovered(own, name)[condition] for name, words in names.items()}
    encodings = set(substitution.encodings)
    meaningless = encodings and encodings <= substitution.measure.without_meaning
    least = math.nan if meaningless else min(one.value for one in shares.values())  # NaN where attention has no worth
    each = [Criterion.of(words, one, beyond=or_lacking(one.by_null), otherwise="held") for words, one in shares.items()]
    worth = Criterion.of("nats that attention is worth", own.measure.worth(own), otherwise="held", **ALONE)
    return [Criterion("least share", least, **CLOSE), *each, worth]


def _recovered_at_sinks(substitution: Result) -> list[Criterion]:
    """Return the criteria of the shares with the true scores of sinks; the control's share decides nothing."""
    own = substitution.numbers
    control = own.measure.recovered(own)[AT_RANDOM]
    beside = Criterion.of("share of the loss with random keys", control, otherwise="held", **ALONE)
    return [*_recovered(substitution, AT_SINKS["query_profile"]), beside]


def _no_sinks(substitution: Result) -> str:
    own = substitution.own
    has_any = bool((own["first_is_sink"] + own["n_later_sinks"]).sum() > 0)
    return "" if has_any else f"no key takes more than {substitution.measure.sink_share:.0%} of a layer's attention"


def _planes(planes: Result) -> list[Criterion]:
    own = planes.numbers
    interaction = own("share", part="interaction", **OUT)
    halves = {f"half of {kind}": [one / 2 for one in each] for kind, each in interaction.by_null.items()}
    return [
        Criterion.of("r of plane scores with interaction", own.measure.correlation(own), otherwise="held"),
        Criterion.of("interaction", interaction, beyond=halves, otherwise="held", sign=-1),
    ]


def _order(perturbation: Result) -> list[Group]:
    """Return the rises of the loss by words at 5 % and 20 %; at 10 %, or the lowest share above, they should matter."""
    own, (few, above, many) = perturbation.numbers, _ratios(perturbation.measure)
    if not set(MOVED) <= set(own.data["condition"].values):
        return [Group("open", name="not all of words, index and features were moved")]
    at_few, at_more, at_many = (own("change", condition="words", ratio=ratio) for ratio in (few, above, many))
    kept = Criterion.of(f"words at {few:.0%}", at_few, _HARDLY, sign=-1, **ALONE)
    more = [Criterion.of(f"words at {above:.0%}", at_more, otherwise="held", **ALONE)] if above < many else []
    matters = Criterion.of(f"words at {many:.0%}", at_many, otherwise="held")
    index, features = (own("change", condition=one, ratio=many) for one in MOVED[1:])
    both = [
        Criterion.of(f"{name} at {many:.0%}", one, otherwise="held", **ALONE)
        for name, one in {"index": index, "features": features}.items()
    ]
    apart = abs(index.value - features.value) / (max(abs(index.value), abs(features.value)) or 1.0)
    alike = Criterion("index and features apart", apart, 0.25, sign=-1)
    # where neither costs more than in a null model, that they are alike says nothing
    are_alike = alike.holds and all(Criterion.of("", one, otherwise="held").holds for one in (index, features))
    whole = kept.holds and at_more.value > _HARDLY and are_alike
    verdict = "held" if whole else "partly" if kept.holds or are_alike else "not held"
    return [Group(verdict, [kept, *more, matters, *both, alike])]


def _ratios(measure: Any) -> tuple[float, float, float]:
    few, many, _ = measure.few_many_most
    return few, min((one for one in measure.ratios if one >= 0.1), default=many), many


def _cloze(perturbation: Result) -> list[Group]:
    own, (few, above, _) = perturbation.numbers, _ratios(perturbation.measure)
    accuracy = own.array("cloze_accuracy", condition="words")
    in_order = accuracy.sel(ratio=min(own.measure.ratios), drop=True)
    whole = own.number(in_order, own.bounds_of("cloze_accuracy"))
    at_few, at_more = (own.number(accuracy.sel(ratio=one, drop=True) - in_order) for one in (few, above))
    kept = Criterion.of_end(f"change at {few:.0%}", at_few, -_SLIGHT, beyond=None, digits=3)
    still = Criterion.of_end(f"change at {above:.0%}", at_more, -_SLIGHT, "high", beyond=None, digits=3)
    beyond = {"chance": [1 / N_CHOICES], **whole.by_null}
    in_order = Criterion.of("accuracy in order", whole, beyond=beyond, otherwise="held", digits=3)
    of_more = "partly" if still.holds else "held"
    verdict = "not held" if at_few.high < -_SLIGHT else of_more if kept.holds else "open"
    return [Group(verdict, [kept, still, in_order])]


def _no_cloze(perturbation: Result) -> str:
    is_made = "cloze_accuracy" in perturbation.own and "words" in perturbation.own["condition"].values
    return "" if is_made else "not measured: no cloze was made of this text"


def _beyond(length_extrapolation: Result) -> list[Group]:
    measure, own = length_extrapolation.measure, length_extrapolation.numbers
    if "lm_infinite" not in own.data["condition"].values:
        return [Group("open", name="LM-Infinite was not run")]
    windowed, vanilla = (measure.beyond(own, one)["within_noise"] for one in ("lm_infinite", "vanilla"))
    gains = {kind: np.subtract(one, vanilla.by_null[kind]).tolist() for kind, one in windowed.by_null.items()}
    kept = Criterion.of("heads within noise with LM-Infinite", windowed, INSIDE, **ALONE)
    lost = Criterion.of("unchanged", vanilla, INSIDE, **ALONE)
    more = Criterion("more with LM-Infinite", windowed.value - vanilla.value, beyond=gains, otherwise="held")
    verdict = "held" if kept.holds and not lost.holds else "partly" if more.value > 0 else "not held"
    return [Group(verdict, [kept, lost, more])]


# Over training


def _fewer_steps(name: str, n: int, why: str) -> Callable[[Result], str]:
    """Return what says why a number that was measured at fewer than n checkpoints cannot be judged."""
    return lambda emergence: "" if len(emergence.measure.at_steps(emergence.numbers, name)) >= n else why


def _over_training(name: str, words: str, sign: int = 1, least: float | None = None) -> dict[str, Any]:
    """Return what a claim says of a number that rises during training, with the sign -1 falls, and ends at `least` or
    more: held where no checkpoint is further than the last. The first is its null: step 0, or no random init."""

    def by(emergence: Result) -> list[Group]:
        over = emergence.measure.at_steps(emergence.numbers, name)
        (step, first), (to, last) = [*over.items()][:: len(over) - 1]
        beyond, otherwise = {f"step {step}": [first.high if sign > 0 else first.low]}, "detectable" if least else "held"
        at_last = Criterion.of(
            f"{words} at step {to}", last, least, beyond=beyond, otherwise=otherwise, sign=sign, digits=3
        )
        is_furthest = max(sign * one.value for one in over.values()) == sign * last.value
        return [Group("partly" if at_last.holds and not is_furthest else at_last.verdict, [at_last])]

    lacks = _fewer_steps(name, 2, f"{words} was not measured at two checkpoints or more")
    return {"by": by, "lacks": lacks, "options": {"emergence": {"measures": ["coupling"]}}, "own_null": True}


def _split_over_training(emergence: Result) -> list[Group]:
    over = emergence.measure.at_steps(emergence.numbers, "three_axis_r_within_rows")
    return [Group("open", [Criterion.of(f"r within rows at step {step}", one, **ALONE) for step, one in over.items()])]


# Slash heads


def _transfer(slash_transfer: Result) -> list[Criterion | Group]:
    """Return the criteria of r at each distance where at least ten heads are dominant, and of the mean r over the other
    distances where as many are dominant at any of these, weighted by these heads. r itself is over all heads; at
    distances where fewer are dominant it decides nothing, as hardly any head attends there."""
    own, measure = slash_transfer.numbers, slash_transfer.measure
    heads = {at: int(measure.n_dominant(own, at, "natural").value) for at in measure.reached(own.data)}
    r = {at: measure.correlation(own, at) for at, n in heads.items() if n}
    r = {at: one for at, one in r.items() if heads[at] >= _FEWEST_HEADS or not np.isnan(one.value)}
    few = [at for at in r if heads[at] < _FEWEST_HEADS]
    decides, beside = {"held": 0.9, "partly": 0.6}, {"otherwise": "held", **ALONE}
    found: list[Criterion | Group] = [
        Criterion.of(
            f"r at D = {at}", one, basis=counted(heads[at], "dominant head"), **(beside if at in few else decides)
        )
        for at, one in r.items()
    ]
    n_together = int(measure.n_dominant(own, few, "natural").value) if few else 0
    if len(few) > 1 and n_together >= _FEWEST_HEADS:
        mean = _weighted([r[at] for at in few], [heads[at] for at in few])
        found += [
            Criterion.of(f"mean r at D = {in_ranges(few)}", mean, basis=counted(n_together, "dominant head"), **decides)
        ]
    elif len(few) == len(r):
        return [Group("open", found, "" if r else "no head is slash-dominant")]
    return found


def _weighted(numbers: Sequence[Number], weights: Sequence[int]) -> Number:
    """Return the weighted mean of numbers. Its ends are the means of their ends, as if all erred together: the widest
    that the interval can be."""
    value, low, high = (float(np.average([getattr(one, end) for one in numbers], weights=weights)) for end in ENDS)
    of_kinds = {kind: np.array([one.by_null[kind] for one in numbers]) for kind in numbers[0].by_null}
    nulls = {kind: np.average(of_kind, axis=0, weights=weights) for kind, of_kind in of_kinds.items()}
    return Number(value, low, high, {kind: tuple(of_kind.tolist()) for kind, of_kind in nulls.items()})


def _rank_one(cone: Result, side: str) -> Criterion:
    """Return the share in dominant heads, beside those of all heads of a null model, and of its dominant ones."""
    own, name = cone.numbers, f"r1 of {side.upper()}"
    r1, of_all = group_mean(own, "r1", "dominant", side=side), own("r1", side=side)
    of_dominant = or_lacking(r1.by_null)
    beyond = {kind: [*each, *of_dominant[kind]] for kind, each in of_all.by_null.items()}
    found = Criterion.of(name, r1, 0.9, partly=0.7, beyond=beyond, digits=3)
    return replace(found, number=replace(r1, by_null=of_all.by_null))


def _ranks(cone: Result) -> list[Criterion]:
    """Return the criteria of Q and K, and where there are biases, which are of rank one, what r1 is without them."""
    own, name = cone.numbers, "r1_without_bias"
    without = {side: group_mean(own, name, "dominant", side=side) for side in ("qk" if name in own else "")}
    beside = [
        Criterion.of(f"r1 of {side.upper()} without biases", one, otherwise="held", digits=3, **ALONE)
        for side, one in without.items()
        if not math.isnan(one.value)  # a layer without biases
    ]
    return [*(_rank_one(cone, side) for side in "qk"), *beside]


def _parts_of_inputs(cone: Result) -> list[Group]:
    own, ratio = cone.numbers, cone.measure.ratio_above_no_inputs
    difference = ratio(own, INPUTS[1], less=INPUTS[2])
    alone = Criterion.of("axis alone", ratio(own, INPUTS[1]), 0.75, partly=0.4, **ALONE)
    rest = Criterion.of("the rest", ratio(own, INPUTS[2]), 0.25, sign=-1, **ALONE)
    beyond = or_lacking(difference.by_null)
    more = Criterion.of("more than the rest", difference, beyond=beyond, otherwise="held")
    has_biases, of_biases = "bias only" in own.data["input"].values, cone.measure.ratio_of_biases(own)
    by_biases = [Criterion.of("biases without inputs", of_biases, otherwise="held", **ALONE)] if has_biases else []
    is_part = alone.verdict != "not held" and more.value > 0
    verdict = "held" if alone.holds and rest.holds else "partly" if is_part else "not held"
    return [Group(verdict, [alone, rest, more, *by_biases])]


def _bands(band_ablation: Result) -> list[Group]:
    """Return, by each way of making bands, the shares of the unchanged slash score that are left without each band, and
    on the low one alone; and how much more is left without the low band than without the others, which has to be beyond
    the nulls. Open where no head is dominant, or some band has no plane; where both ways disagree, partly if one holds.
    """
    own, found = band_ablation.numbers, []
    scores = mean_of_slash_heads(own.dataset)
    scores = leave_one_out(scores) if scores.sizes["prompt"] >= FEWEST else scores.mean("prompt")
    left = scores / scores.sel(condition="unchanged", drop=True)
    for scheme in get_args(Scheme) if own.measure.n_heads(own).value else ():
        names = [f"drop {band}, {scheme}" for band in BANDS]
        is_there = set(names) <= set(own.data["condition"].values)
        if not is_there or not all(own.data["n_planes"].sel(condition=one).any() for one in names):
            continue
        arrays = [left.sel(condition=one, drop=True) for one in names]
        others = (arrays[0] + arrays[1]) / 2
        high, medium, low = (
            Criterion.of(f"without {band}", own.number(one), 0.75, **ALONE)
            for band, one in zip(BANDS, arrays, strict=True)
        )
        on_low = own.number(left.sel(condition=f"keep low, {scheme}", drop=True))
        alone = Criterion.of("low alone", on_low, 0.25, sign=-1, **ALONE)
        more = Criterion.of("more without low than without others", own.number(arrays[2] - others), otherwise="held")
        whole = low.holds and alone.holds and high.verdict == medium.verdict == "not held"
        cost = 1 - (high.value + medium.value) / 2
        is_part = cost >= 0.25 and 1 - low.value <= 0.5 * cost
        verdict = "held" if whole else "partly" if is_part else "not held"
        found.append(Group(verdict, [high, medium, low, alone, more], scheme))
    found = [one for one in found if one.verdict != "open"] or found
    if not found:
        return [Group("open", name="no head is slash-dominant, or a band has no plane")]
    verdicts = {one.verdict for one in found}
    disagree: Verdict = "partly" if "held" in verdicts else "not held"
    return [Group(disagree if len(verdicts) > 1 else found[0].verdict, found)]


def _toy(slash_toy: Result) -> list[Group]:
    own, measure = slash_toy.numbers, slash_toy.measure
    beyond = {
        "before training": [own("score", features="trained", step=0).value],
        "uniform attention": [own("uniform", distance=measure.distance).value],
    }
    ends = {one: own.array("score", features=one).isel(step=-1) for one in FEATURES}
    least = {one: float(end.min(skipna=False)) for one, end in ends.items()}
    trained, unseen = (Criterion(f"least, {name}", one, 0.5, beyond=beyond) for name, one in least.items())
    return [Group("not held" if not trained.holds else "held" if unseen.holds else "partly", [trained, unseen])]


def _far(slash: Result) -> list[Criterion]:
    own = slash.numbers
    n = own.number((own.array("n_long", **OUT) > 0).sum(HEAD))
    return [Criterion.of("heads", n, end=None, otherwise="held", digits=0)]


def _nothing_far(slash: Result) -> str:
    far = [*long_distances(slash.own.sizes["distance"])]
    if not far:
        return f"not measured: no prompt has {2 * LONG} tokens"
    return "" if (slash.own["uniform"].sel(distance=far) > 0).any() else f"windows end before {LONG} tokens"


# Coupling


def _coupling(result: Result, quantity: str = "coupling", **labels: str) -> Criterion:
    """Return the criterion of a coupling, whose low end has to be above random bases and the intervals of all null
    models."""
    own, of_chance = result.numbers, {dim: label for dim, label in labels.items() if dim != "bases"}
    beyond = {"random bases": [own("chance", **of_chance).value], **ends_of_nulls(own, "coupling", "high", **labels)}
    how: dict[str, Any] = {"partly": 0.1, "beyond": beyond, "otherwise": "detectable", "digits": 3}
    return Criterion.of_end(quantity, own("coupling", **labels), 0.2, **how)


def _beyond_ends(result: Result, quantity: str, name: str, held: float, sign: int = 1, **how: Any) -> Criterion:
    """Return the criterion of a number whose interval has to be beyond the intervals of all null models."""
    beyond = ends_of_nulls(result.numbers, name, "high" if sign > 0 else "low")
    return Criterion.of(quantity, result.numbers(name), held, beyond=beyond, sign=sign, **how)


def _growth(coupling: Result) -> list[Group]:
    r2 = _beyond_ends(coupling, "R² of ln |x| against depth", "growth_r2", 0.9, otherwise="detectable")
    nulls = coupling.numbers("growth_r2").nulls
    return [Group("partly" if r2.holds and max(nulls) >= 0.9 else r2.verdict, [r2])]


POSITION = [
    Claim(
        "position 1",
        "Scores are close to a sum of position and content, f(q, i-j) + g(q, k), with a correlation of 0.959.",
        "r of what softmax sees with the best such sum, an upper end; first token left out, mean over heads: 0.95 "
        "held, 0.75 partly; open where nothing rotates; r over all scores, the paper's, beside it",
        ("variance",),
        _additive,
    ),
    Claim(
        "position 1b",
        "Scores are close to a(i-j) + b(i) + c(j), a sum of three curves, with a correlation above 0.95.",
        "r without the first token, mean over heads: 0.95 held, 0.75 partly; that of the mean-key split beside it",
        ("three_axis", "mean_key"),
        lambda three_axis, mean_key: [
            Criterion.of("r", three_axis.numbers("r", **OUT), **CLOSE, digits=3),
            Criterion.of("mean-key split's r", mean_key.numbers("r", **OUT), otherwise="held", digits=3, **ALONE),
        ],
    ),
    Claim(
        "position 2",
        "The model can run on f(q, i-j) + g(q, k): position and content are apart.",
        "shares recovered, of the loss and of the KL of predictions, when the model runs on each query's profile: both "
        "95 % held, 75 % partly; open where what attention is worth is not above 0.01 nats by its interval: no share "
        "is defined",
        ("substitution",),
        _recovered,
        options={"substitution": {"n_prompts": 8}},
    ),
    Claim(
        "position 2b",
        "The model can run on f(q, i-j) + g(q, k) and its own scores of attention sinks (ours: not in the paper).",
        "the same shares, with the true scores of the keys that take more than 10 % of a layer's attention from afar; "
        "open without such keys; the share with as many true scores of random keys beside it",
        ("substitution",),
        _recovered_at_sinks,
        _no_sinks,
    ),
    Claim(
        "position 3",
        "At a dummy distance the key part stays as it is and the position part shifts.",
        "r of the key part with the scores at all distances, each distance's mean removed, first token left out, mean "
        "over heads: 0.95 held, 0.75 partly; open where nothing rotates",
        ("dummy_distance",),
        lambda dummy_distance: _where_rotated(dummy_distance, "r", "key_part_r", **OUT),
    ),
    Claim(
        "position 4",
        "Magnitude and phase of trained q and k in RoPE's planes make the split possible; random init lacks them.",
        "first token left out, plane scores tell heads apart better than in null models, shuffled weights among them "
        "(95% interval of r above each), and the trained interaction is less than half of every null model's: held",
        ("planes",),
        _planes,
    ),
    Claim(
        "position 5",
        "Swapping up to 5 % of the words hardly matters, more than 10 % does (figures of a third-party summary); index "
        "and features are alike.",
        "words: at most 0.1 nats at 5 % and more at 10 %, and at 20 % index and features within a quarter of the "
        "larger, each beyond the null: held; one of both: partly; words at 20 % have to be beyond the null",
        ("perturbation",),
        _order,
    ),
    Claim(
        "position 5b",
        "Downstream scores hardly change with up to 5 % of the words swapped, and do with more than 10 % (figures of a "
        "third-party summary).",
        "cloze accuracy falls by at most 2 points at 5 % and by more at 10 %, by the ends of the intervals: held; the "
        "first alone: partly; accuracy in order has to be beyond the null and chance",
        ("perturbation",),
        _cloze,
        _no_cloze,
        options={"perturbation": _JUDGED_ORDER},
    ),
    Claim(
        "position 6",
        "With LM-Infinite the attention output stays in its training distribution beyond the training length.",
        "heads whose outputs stay within the noise level, and 0.05 of the variance inside: 90 % with LM-Infinite and "
        "fewer without: held; more: partly; how many more has to be beyond the null (a count, without an interval)",
        ("length_extrapolation",),
        _beyond,
        options={"length_extrapolation": {"length": None}},
    ),
    Claim(
        "position 7a",
        "Open, as readers say: what the residual holds, and what carries over to other encodings.",
        "not judged",
        ("residual",),
        lambda residual: [
            Group(
                "open", [Criterion.of(words, residual.numbers(name, **OUT), **ALONE) for name, words in _LEFT.items()]
            )
        ],
    ),
    Claim(
        "position 7b",
        "Open, as readers say: how the split forms in training.",
        "not judged",
        ("emergence",),
        _split_over_training,
        _fewer_steps("three_axis_r_within_rows", 1, "r within rows was not measured over training"),
        options={"emergence": {"measures": ["three_axis"]}},
    ),
]
SLASH = [
    Claim(
        "slash 1",
        "Slash-dominant heads belong to the model: the same heads, with like scores, on random tokens.",
        "correlation of scores over heads, at every distance where at least ten heads are dominant, and in the mean "
        "over the others, weighted by heads, where ten are together: 0.9 held, 0.6 partly",
        ("slash_transfer",),
        _transfer,
    ),
    Claim(
        "slash 2",
        "Queries and keys of slash-dominant heads are almost of rank one before RoPE.",
        "share of the first singular direction in dominant heads, Q and K: 0.9 held, 0.7 partly; a null model's is "
        "that of all its heads, and of its dominant ones where it has any",
        ("cone",),
        _ranks,
    ),
    Claim(
        "slash 3a",
        "Inputs of the attention lie on a cone.",
        "95% interval of the mean cosine with their axis above every null model's: partly; and its lower end at least "
        "0.7: held",
        ("cone",),
        lambda cone: [Criterion.of_end("cosine with the axis", cone.numbers("cosine"), 0.7, otherwise="partly")],
    ),
    Claim(
        "slash 3b",
        "W_Q and W_K project onto the axis of the cone.",
        "95% interval of the axis's gain above every null model's, of one or both: detectable; of both, and each lower "
        "end at least 2: held, 1.5: partly",
        ("cone",),
        lambda cone: [
            Criterion.of_end(f"gain in W_{side.upper()}", cone.numbers("gain", side=side), **_GAINED) for side in "qk"
        ],
    ),
    Claim(
        "slash 3c",
        "With only the part of the inputs along the cone's axis in W_Q and W_K, slash-dominant heads keep their slash; "
        "with only the rest they lose it.",
        "dominant heads' slash score above uniform, or above what biases of queries and keys make without inputs: with "
        "the axis part alone at least 0.75 times the measured and with the rest at most 0.25 times: held; 0.4 times "
        "and more than with the rest: partly; how much more has to be beyond the null",
        ("cone",),
        _parts_of_inputs,
    ),
    Claim(
        "slash 4",
        "Medium and high frequencies of RoPE make the slash, low ones do not.",
        "without the low band three quarters of the slash score are left, without the high and without the medium one "
        "less, on the low one alone at most a quarter: held; the others cost a quarter in the mean, and the low one at "
        "most half of that: partly. By thirds and by wavelength; where they disagree, partly if one holds. How much "
        "more is left without the low band than without the others has to be beyond the null",
        ("band_ablation",),
        _bands,
        options={"band_ablation": {"schemes": ("thirds", "wavelength")}},
    ),
    Claim(
        "slash 5",
        "Gradient descent makes slash-dominant heads in a shallow RoPE transformer, and they generalise.",
        "slash score at the end at least 0.5 in every seed: partly; and on unseen features: held; a toy, whose nulls "
        "are the score before training and that of uniform attention",
        ("slash_toy",),
        _toy,
        own_null=True,
    ),
    Claim(
        "slash 6",
        "Some heads are slash-dominant at long distances.",
        "heads dominant at some distance from 50 tokens to half the prompt, without the first token: more than in any "
        "null model (a count, without an interval): held",
        ("slash",),
        _far,
        _nothing_far,
    ),
]
COUPLING = [
    Claim(
        "coupling 1",
        "Top singular vectors of residual Jacobians align across layers, left with right; not at random init.",
        "95% intervals of coupling, and of left with right vectors, above random bases and above those of all null "
        "models, of one or both: detectable; of both, and each lower end at least 0.2: held, 0.1: partly",
        ("coupling",),
        lambda coupling: [_coupling(coupling), _coupling(coupling, "left with right", bases="swapped")],
    ),
    Claim(
        "coupling 2",
        "Token trajectories are close to straight lines; not at random init.",
        "95% interval below those of all null models: partly; and line-shape score at most 1.25: held",
        ("coupling",),
        lambda coupling: [
            _beyond_ends(coupling, "line-shape score", "line_shape_score", 1.25, otherwise="partly", sign=-1)
        ],
    ),
    Claim(
        "coupling 3",
        "Norms grow exponentially with depth; not at random init.",
        "95% interval of the exponential's R² above those of all null models: detectable; and R² at least 0.9: partly; "
        "and all of theirs below 0.9: held; open with one layer",
        ("coupling",),
        _growth,
        lambda coupling: "one layer: a line through two states is exact" if coupling.own.sizes["state"] < 3 else "",
    ),
    Claim(
        "coupling 4",
        "Coupling rises during training.",
        "95% interval of the last checkpoint above that of the first, which is the null: partly; and no checkpoint "
        "higher: held",
        ("emergence",),
        **_over_training("coupling_coupling", "coupling"),
    ),
    Claim(
        "coupling 4b",
        "Token trajectories become straighter during training.",
        "95% interval of the last checkpoint's line-shape score below that of the first, which is the null: partly; "
        "and no checkpoint lower: held",
        ("emergence",),
        **_over_training("coupling_line_shape_score", "line-shape score", sign=-1),
    ),
    Claim(
        "coupling 4c",
        "The growth of norms with depth becomes exponential during training.",
        "95% interval of the last checkpoint's R² above that of the first, which is the null: detectable; and R² at "
        "least 0.9: partly; and no checkpoint higher: held",
        ("emergence",),
        **_over_training("coupling_growth_r2", "R² of ln |x| against depth", least=0.9),
    ),
    Claim(
        "coupling 5",
        "Top singular vectors align across the tokens of a layer; not at random init.",
        "95% intervals above random bases and above those of all null models, of one kind or more: detectable; of all "
        "three, and every lower end at least 0.2: held, 0.1: partly",
        ("token_coupling",),
        lambda token_coupling: [
            _coupling(token_coupling, f"coupling {words}", kind=kind) for kind, words in OF_TOKENS.items()
        ],
    ),
    Claim(
        "coupling 6",
        "Over many models coupling goes with benchmark score.",
        "not judged of one model",
        ("coupling_scores",),
    ),
]
PAPERS: Mapping[str, Sequence[Claim]] = {
    "position": POSITION,
    "slash": SLASH,
    "coupling": COUPLING,
    "frequency": FREQUENCY,  # of many papers
}

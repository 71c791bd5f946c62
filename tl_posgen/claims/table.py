"""The claims of three papers, each with its numbers, their thresholds and what would speak against it.

Position generalization: Han & Ji 2025 (arXiv 2503.13305). The slash pattern: Cheng et al. 2026 (arXiv 2601.08297).
Coupling of residual Jacobians: Aubry et al. 2024 (arXiv 2407.07810).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import numpy as np

from tl_posgen.claims.judging import Claim, Criterion, Group, Verdict, ends_of_nulls, or_lacking
from tl_posgen.core.formatting import counted
from tl_posgen.core.measure import HEAD, OUT, in_words
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import Numbers, leave_one_out
from tl_posgen.core.result import Result
from tl_posgen.interventions import WORTHLESS
from tl_posgen.position.decomposition.variance import SIZES
from tl_posgen.position.length.length_extrapolation import TOLERATED
from tl_posgen.position.order.cloze import N_CHOICES, fewer_of_inits
from tl_posgen.position.substitution.substitution import WORDS
from tl_posgen.rope.frequency_bands import BANDS
from tl_posgen.slash.band_ablation import mean_of_slash_heads
from tl_posgen.slash.cone import INPUTS
from tl_posgen.slash.dominance import count, group_mean, in_groups, n_heads
from tl_posgen.slash.numbers.slash_scores import LONG, long_distances
from tl_posgen.slash.slash_ablation import WHOLE_KINDS, Scheme
from tl_posgen.slash.slash_toy import FEATURES
from tl_posgen.slash.slash_transfer import SOURCES
from tl_posgen.stats.intervals import FEWEST

CLOSE: Mapping[str, Any] = {"held": 0.95, "partly": 0.75}  # a correlation, or a share recovered
GAINED: Mapping[str, Any] = {"held": 2.0, "partly": 1.5, "otherwise": "detectable"}
JUDGED_ORDER = {"ratios": (0.0, 0.05, 0.1, 0.2), "n_draws": 2, "n_cloze": 800, "cloze_conditions": ("words",)}
SLIGHT = 0.02  # of accuracy
HARDLY = 0.1  # nats
INSIDE = 0.9  # of heads
MOVED = {"words": "words", "positions": "index", "position_part": "features"}
OF_TOKENS = {"self": "own Jacobians", "same_input": "of one input", "same_output": "of one output"}


def _of_low_end(quantity: str, number: Number, **how: Any) -> Criterion:
    """Return the criterion of the lower end of a number's interval, which thresholds are for too."""
    return Criterion(quantity, number.low, **{"beyond": number.by_null, **how})


# Position generalization


def _where_rotated(result: Result, quantity: str, name: str, **labels: str) -> list[Group]:
    """Return the criterion of r of a sum; open where no layer rotates q and k: the sum is the score by construction."""
    r = Criterion.of(quantity, result.numbers(name, **labels), **CLOSE, digits=3)
    rotates = not result.encodings or bool(set(result.encodings) - set(result.measure.caveats))
    return [Group(r.verdict if rotates else "open", [r])]


def _additive_sum(variance: Numbers) -> str:
    scores, *parts = (f"{of} {variance('size', of=of).with_interval:.2f}" for of in SIZES)
    return (
        f"additive r {variance('additive_r').with_interval:.3f}, first token left out; standard deviation within rows, "
        f"in logits: {scores}; {', '.join(parts)}"
    )


def _recovered(substitution: Numbers) -> str:
    def share(condition: str, name: str = "loss") -> str:
        return f"{substitution.measure.recovered(substitution, name)[condition].with_interval:.0%}"

    worth = substitution.measure.worth(substitution)
    found = f"attention is worth {worth.with_interval:.2f} nats"
    if worth.value < WORTHLESS:
        return f"{found}, so there is nothing to recover"
    axes = ("three_axis", "mean_query", "k_q_simplify")  # splits without the query, or fits of three axes
    fitted = [str(one) for one in substitution.data["condition"].values if str(one).startswith(axes)]
    of_axes = ", ".join(f"{in_words(one, WORDS)} {share(one)}" for one in fitted)
    return (
        f"{found}, of which each query's profile {share('query_profile')} (of the KL of predictions "
        f"{share('query_profile', 'kl')}); {of_axes}"
    )


def _recovered_by(substitution: Result) -> list[Criterion]:
    """Return the least share, of the loss and of the KL, and how each stands beside its nulls."""
    own, names = substitution.numbers, {"loss": "share of the loss", "kl": "share of the KL"}
    shares = {words: own.measure.recovered(own, name)["query_profile"] for name, words in names.items()}
    encodings = set(substitution.encodings)
    meaningless = encodings and encodings <= substitution.measure.without_meaning
    least = math.nan if meaningless else min(one.value for one in shares.values())  # NaN where attention has no worth
    each = [Criterion.of(words, one, beyond=or_lacking(one.by_null), otherwise="held") for words, one in shares.items()]
    return [Criterion("least share", least, **CLOSE), *each]


def _dummy_distance(own: Numbers) -> str:
    refits = {d0: one for d0 in own.data["d0"].values if (one := own("refit_r", d0=d0, **OUT))}  # a window hides some
    ends = [pick(refits, key=lambda d0: refits[d0].value) for pick in (min, max)] if refits else []
    again = " to ".join(f"{refits[d0].with_interval:.2f} at {d0:g}" for d0 in dict.fromkeys(ends))
    return (
        f"first token left out, key part's r {own('key_part_r', **OUT).with_interval:.2f}, mean over heads; table of "
        f"distance and key: additive r {own('additive_r', **OUT).with_interval:.3f}, the distance part has "
        f"{own('share', part='distance', **OUT).plain:.0%} of its variance; c fitted again with all pairs at one "
        f"distance against c, r {again or 'not defined'}"
    )


def _planes(own: Numbers) -> str:
    r, interaction = own.measure.correlation(own), own("share", part="interaction", **OUT)
    return (
        f"sum of plane scores against interaction share over heads, r {r.with_interval:.2f}, interaction "
        f"{interaction.with_interval:.0%}, first token left out; with it, certified additive "
        f"{own('additive').plain:.0%} of heads"
    )


def _planes_by(planes: Result) -> list[Criterion]:
    own = planes.numbers
    r, interaction = own.measure.correlation(own), own("share", part="interaction", **OUT)
    halves = {f"half of {kind}": [one / 2 for one in each] for kind, each in interaction.by_null.items()}
    return [
        Criterion.of("r", r, beyond=r.by_null, otherwise="held"),
        Criterion.of("interaction", interaction, beyond=halves, otherwise="held", sign=-1),
    ]


def _ratios(measure: Any) -> tuple[float, float, float]:
    """Return the shares of words at which order is judged: 5 %, the lowest of 10 % and more, and 20 %."""
    few, many, _ = measure.few_many_most
    return few, min((one for one in measure.ratios if one >= 0.1), default=many), many


def _order(own: Numbers) -> str:
    def rise(condition: str, ratio: float) -> str:
        return f"{own('change', condition=condition, ratio=ratio).with_interval:+.2f} at {ratio:.0%}"

    ratios, measured = sorted({*_ratios(own.measure)}), (one for one in MOVED if one in own.data["condition"])
    return "rise in nats: " + "; ".join(
        f"{MOVED[one]} {', '.join(rise(one, ratio) for ratio in ratios)}" for one in measured
    )


def _order_by(perturbation: Result) -> list[Group]:
    own, (few, above, many) = perturbation.numbers, _ratios(perturbation.measure)
    if not set(MOVED) <= set(own.data["condition"].values):
        return []
    at_few, at_more, at_many = (own("change", condition="words", ratio=ratio) for ratio in (few, above, many))
    index, features = (own("change", condition=one, ratio=many).value for one in MOVED if one != "words")
    apart = abs(index - features) / (max(abs(index), abs(features)) or 1.0)
    kept = Criterion(f"words at {few:.0%}", at_few.value, HARDLY, sign=-1)
    alike = Criterion("index and features apart", apart, 0.25, sign=-1)
    matters = Criterion.of(f"words at {many:.0%}", at_many, otherwise="held")
    whole = kept.holds and at_more.value > HARDLY and alike.holds
    return [Group("held" if whole else "partly" if kept.holds or alike.holds else "not held", [kept, alike, matters])]


def _accuracy(own: Numbers, ratio: float | None = None) -> Number:
    """Return the accuracy on the cloze with the words in order, or its change, item by item, with some swapped."""
    accuracy = own.array("cloze_accuracy", condition="words")
    in_order = accuracy.sel(ratio=min(own.measure.ratios), drop=True)
    if ratio is None:
        return own.number(in_order, own.bounds_of("cloze_accuracy"))
    return own.number(accuracy.sel(ratio=ratio, drop=True) - in_order)


def _cloze(own: Numbers) -> str:
    changes = {ratio: _accuracy(own, ratio).with_interval for ratio in sorted({*_ratios(own.measure)})}
    swapped = ", ".join(f"{change:+.1%} with {ratio:.0%} of the words swapped" for ratio, change in changes.items())
    accuracy, n = f"accuracy {_accuracy(own).plain:.1%} in order, {swapped}", own.data.sizes["item"]
    return accuracy if own.is_null else f"cloze of {n} items{fewer_of_inits(n)}: {accuracy}; chance {1 / N_CHOICES:.1%}"


def _no_cloze(perturbation: Result) -> str:
    is_made = "cloze_accuracy" in perturbation.own and "words" in perturbation.own["condition"].values
    return "" if is_made else "not measured: no cloze was made of this text"


def _cloze_by(perturbation: Result) -> list[Group]:
    own, (few, above, _) = perturbation.numbers, _ratios(perturbation.measure)
    whole, at_few, at_more = (_accuracy(own, ratio) for ratio in (None, few, above))
    kept = Criterion(f"low end at {few:.0%}", at_few.low, -SLIGHT, digits=3)
    still = Criterion(f"high end at {above:.0%}", at_more.high, -SLIGHT, digits=3)
    beyond = {"chance": [1 / N_CHOICES], **whole.by_null}
    accuracy = Criterion.of("accuracy in order", whole, beyond=beyond, otherwise="held", digits=3)
    of_more = "partly" if still.holds else "held"
    verdict = "not held" if at_few.high < -SLIGHT else of_more if kept.holds else "open"
    return [Group(verdict, [kept, still, accuracy])]


def _beyond(own: Numbers) -> str:
    def words(condition: str) -> str:
        share, loss, rise = (own.measure.beyond(own, condition)[name] for name in ("within_noise", "loss", "rise"))
        name = in_words(condition, own.measure.words)
        return f"{name} {share.plain:.0%}, loss {loss.plain:.2f} ({rise.with_interval:+.2f})"

    inside = own("segment_loss", condition="vanilla", segment=0).plain
    return (
        f"heads within the noise level + {TOLERATED}, and loss, mean from the training length to "
        f"{own.measure.times:g} times it: {'; '.join(words(str(one)) for one in own.data['condition'].values)}; in "
        f"brackets against {inside:.2f} inside, by prompt"
    )


def _beyond_by(length_extrapolation: Result) -> list[Group]:
    measure, own = length_extrapolation.measure, length_extrapolation.numbers
    if "lm_infinite" not in own.data["condition"].values:
        return []
    windowed, vanilla = (measure.beyond(own, one)["within_noise"] for one in ("lm_infinite", "vanilla"))
    gains = {kind: np.subtract(one, vanilla.by_null[kind]).tolist() for kind, one in windowed.by_null.items()}
    kept, lost = Criterion("LM-Infinite", windowed.value, INSIDE), Criterion("unchanged", vanilla.value, INSIDE)
    more = Criterion("more with LM-Infinite", windowed.value - vanilla.value, beyond=gains, otherwise="held")
    verdict = "held" if kept.holds and not lost.holds else "partly" if more.value > 0 else "not held"
    return [Group(verdict, [kept, lost, more])]


def _course(own: Numbers, name: str, form: str = ".3f") -> str:
    over = own.measure.at_steps(own, name).items()
    return ", ".join(f"{one.with_interval:{form}} at step {step}" for step, one in over)


def _first_step(own: Numbers, name: str) -> str:
    """Say what stands for the null over training: step 0, or the first checkpoint that was given."""
    step = next(iter(own.measure.at_steps(own, name)))
    return "step 0 is the random initialisation" if step == 0 else f"step {step}, the first given, is no random init"


def _fewer_steps(name: str, n: int, why: str) -> Callable[[Result], str]:
    """Return what says why a number that was measured at fewer than n checkpoints cannot be judged."""
    return lambda emergence: "" if len(emergence.measure.at_steps(emergence.numbers, name)) >= n else why


def _over_training(name: str, words: str, sign: int = 1, least: float | None = None) -> tuple[Any, ...]:
    """Return words, criterion, refusal and null of a number that rises during training, with the sign -1 falls, and
    ends at `least` or more: held where no checkpoint is further than the last."""

    def by(emergence: Result) -> list[Group]:
        over = emergence.measure.at_steps(emergence.numbers, name)
        (step, first), (_, last) = [*over.items()][:: len(over) - 1]
        beyond, otherwise = {f"step {step}": [first.high if sign > 0 else first.low]}, "detectable" if least else "held"
        at_last = Criterion.of("at last", last, least, beyond=beyond, otherwise=otherwise, sign=sign, digits=3)
        is_furthest = max(sign * one.value for one in over.values()) == sign * last.value
        return [Group("partly" if at_last.holds and not is_furthest else at_last.verdict, [at_last])]

    lacks = _fewer_steps(name, 2, f"{words} was not measured at two checkpoints or more")
    options = {"emergence": {"measures": ["coupling"]}}
    return lambda own: f"{words} {_course(own, name)}", by, lacks, lambda _, own: _first_step(own, name), options


# Slash heads


def _transfer(own: Numbers) -> str:
    measure, parts = own.measure, []
    for at in measure.reached(own.data):
        natural, random = (measure.n_dominant(own, at, source).value for source in SOURCES)
        overlap = f", Jaccard {measure.jaccard(own, at).plain:.2f}" if natural + random else ""
        r = measure.correlation(own, at)
        parts.append(f"D = {at}: r {r.with_interval:.2f}, {natural:.3g} and {count(random)}{overlap}")
    return f"over heads, {'; '.join(parts)}"


def _transfer_by(slash_transfer: Result) -> list[Criterion] | list[Group]:
    own, measure = slash_transfer.numbers, slash_transfer.measure
    dominant = [at for at in measure.reached(own.data) if measure.n_dominant(own, at, "natural").value]
    each = [Criterion.of(f"r at D = {at}", measure.correlation(own, at), 0.9, partly=0.6) for at in dominant]
    return each or [Group("open", name="no head is slash-dominant")]


def _rank_one(cone: Result, side: str) -> Criterion:
    """Return the share in dominant heads, beside those of all heads of a null model, and of its dominant ones."""
    own, name = cone.numbers, f"r1 of {side.upper()}"
    r1, of_all = group_mean(own, "r1", "dominant", side=side), own("r1", side=side).by_null
    of_dominant = or_lacking(r1.by_null)
    beyond = {kind: [*each, *of_dominant[kind]] for kind, each in of_all.items()}
    return Criterion.of(name, r1, 0.9, partly=0.7, beyond=beyond, digits=3)


def _parts_of_inputs(cone: Numbers) -> str:
    if not n_heads(cone, "dominant").value:
        return f"of {count(n_heads(cone, 'other').value)} none is slash-dominant"
    measured, alone, rest = (group_mean(cone, "best_score", "dominant", input=one).with_interval for one in INPUTS)
    uniform = group_mean(cone, "best_uniform", "dominant").with_interval
    ratios = [cone.measure.ratio_above_uniform(cone, part).with_interval for part in INPUTS[1:]]
    return (
        f"slash score of dominant heads {measured:.2f}, axis alone {alone:.2f}, the rest {rest:.2f}, uniform "
        f"{uniform:.2f}: above uniform, the axis alone makes {ratios[0]:.2f} times the measured, the rest "
        f"{ratios[1]:.2f} times"
    )


def _parts_of_inputs_by(cone: Result) -> list[Group]:
    own, ratio = cone.numbers, cone.measure.ratio_above_uniform
    difference = ratio(own, INPUTS[1], less=INPUTS[2])
    alone = Criterion("axis alone", ratio(own, INPUTS[1]).value, 0.75, 0.4)
    rest = Criterion("the rest", ratio(own, INPUTS[2]).value, 0.25, sign=-1)
    beyond = or_lacking(difference.by_null)
    more = Criterion.of("more than the rest", difference, beyond=beyond, otherwise="held")
    is_part = alone.verdict != "not held" and more.value > 0
    verdict = "held" if alone.holds and rest.holds else "partly" if is_part else "not held"
    return [Group(verdict, [alone, rest, more])]


def _schemes(own: Numbers) -> list[str]:
    """Return the ways of making bands that were measured."""
    return [one for one in get_args(Scheme) if f"drop low, {one}" in own.data["condition"].values]


def _bands(own: Numbers) -> list[Group]:
    """Return, by each way of making bands, the shares of the unchanged slash score that are left without each band, and
    on the low one alone; and how much more is left without the low band than without the others, which has to be beyond
    the nulls. None where no head is dominant, or some band has no plane."""
    scores, found = mean_of_slash_heads(own.dataset), []
    scores = leave_one_out(scores) if scores.sizes["prompt"] >= FEWEST else scores.mean("prompt")
    left = scores / scores.sel(condition="unchanged", drop=True)
    for scheme in _schemes(own) if own.measure.n_heads(own).value else ():
        names = [f"drop {band}, {scheme}" for band in BANDS]
        if not all(own.data["n_planes"].sel(condition=one).any() for one in names):
            continue
        arrays = [left.sel(condition=one, drop=True) for one in names]
        alone_left = own.number(left.sel(condition=f"keep low, {scheme}")).value
        others = (arrays[0] + arrays[1]) / 2
        high, medium, low = (
            Criterion(f"without {band}", own.number(one).value, 0.75) for band, one in zip(BANDS, arrays, strict=True)
        )
        alone = Criterion("low alone", alone_left, 0.25, sign=-1)
        more = Criterion.of("more without low than without others", own.number(arrays[2] - others), otherwise="held")
        whole = low.holds and alone.holds and high.verdict == medium.verdict == "not held"
        cost = 1 - (high.value + medium.value) / 2
        is_part = cost >= 0.25 and 1 - low.value <= 0.5 * cost
        verdict = "held" if whole else "partly" if is_part else "not held"
        found.append(Group(verdict, [high, medium, low, alone, more], scheme))
    return [one for one in found if one.verdict != "open"]


def _frequencies_by(band_ablation: Result) -> list[Group]:
    """Return both ways of making bands: where they disagree, partly if one holds, else not held."""
    each = _bands(band_ablation.numbers)
    verdicts = [one.verdict for one in each]
    disagree: Verdict = "partly" if "held" in verdicts else "not held"
    return [Group(disagree if len({*verdicts}) > 1 else each[0].verdict, each)] if each else []


def _frequencies(own: Numbers) -> str:
    def at(condition: str) -> str:
        score, change = own.measure.slash_score(own, condition), own.measure.rises(own)[condition]
        return f"{score.with_interval:.2f} (loss {change.with_interval:+.2f})"

    heads = "" if own.measure.n_heads(own).value else " of all heads, none dominant,"
    unchanged = f"slash score{heads} in the running model {own.measure.slash_score(own).with_interval:.2f}"
    parts = [f"{unchanged}, {WHOLE_KINDS['no_rope']} {at('no_rope')}"]
    for scheme in _schemes(own):
        dropped = ", ".join(f"{band} {at(f'drop {band}, {scheme}')}" for band in BANDS)
        parts.append(f"by {scheme} without {dropped}, low alone {at(f'keep low, {scheme}')}")
    groups = [] if own.is_null else _bands(own)
    if len({one.verdict for one in groups}) > 1:
        each = ", ".join(f"{one.verdict} by {one.name}" for one in groups)
        parts.insert(0, f"the two ways of making bands disagree: {each}")
    elif groups and len(groups) < len(_schemes(own)):
        parts.insert(0, f"judged by {groups[0].name} alone, as by the other a band has no plane")
    return "; ".join(parts)


def _least(toy: Numbers) -> list[float]:
    """Return the lowest slash score of the seeds at the end, on trained and on unseen features."""
    return [float(toy.array("score", features=one).isel(step=-1).min(skipna=False)) for one in FEATURES]


def _toy(toy: Numbers) -> str:
    measure, least = toy.measure, _least(toy)
    means = [f"{measure.at_end(toy, 'score', features=one).plain:.2f}" for one in FEATURES]
    r1_q, r1_k = (measure.at_end(toy, "r1", side=side).plain for side in "qk")
    return (
        f"shallow RoPE transformer, {counted(len(measure.seeds), 'seed')} of {measure.steps} steps, slash score at D = "
        f"{measure.distance}: {means[0]} on trained features (least {least[0]:.2f}), {means[1]} on unseen ones (least "
        f"{least[1]:.2f}); r1 of Q {r1_q:.2f}, of K {r1_k:.2f}"
    )


def _toy_nulls(toy: Numbers) -> dict[str, Number]:
    start, uniform = toy("score", features="trained", step=0), toy("uniform", distance=toy.measure.distance)
    return {"before training": start, "uniform attention": uniform}


def _toy_by(slash_toy: Result) -> list[Group]:
    beyond = {name: [one.value] for name, one in _toy_nulls(slash_toy.numbers).items()}
    least = zip(FEATURES, _least(slash_toy.numbers), strict=True)
    trained, unseen = (Criterion(f"least, {name}", one, 0.5, beyond=beyond) for name, one in least)
    return [Group("not held" if not trained.holds else "held" if unseen.holds else "partly", [trained, unseen])]


def _n_far(own: Numbers) -> Number:
    """Return how many heads are slash-dominant at a long distance."""
    return own.number((own.array("n_long", **OUT) > 0).sum(HEAD))


def _nothing_far(slash: Result) -> str:
    far = [*long_distances(slash.own.sizes["distance"])]
    if not far:
        return f"not measured: no prompt has {2 * LONG} tokens"
    return "" if (slash.own["uniform"].sel(distance=far) > 0).any() else f"windows end before {LONG} tokens"


# Coupling


def _low_end(result: Result, quantity: str, **labels: str) -> Criterion:
    """Return the lower end of a coupling, which has to be above random bases and the intervals of all null models."""
    own = result.numbers
    beyond = {"random bases": [own("chance", **labels).value], **ends_of_nulls(own, "coupling", "high", **labels)}
    low = own("coupling", **labels)
    return _of_low_end(quantity, low, held=0.2, partly=0.1, beyond=beyond, otherwise="detectable", digits=3)


def _beyond_ends(result: Result, quantity: str, name: str, held: float, sign: int = 1, **how: Any) -> Criterion:
    """Return the criterion of a number whose interval has to be beyond the intervals of all null models."""
    beyond = ends_of_nulls(result.numbers, name, "high" if sign > 0 else "low")
    return Criterion.of(quantity, result.numbers(name), held, beyond=beyond, sign=sign, **how)


def _growth_by(coupling: Result) -> list[Group]:
    r2 = _beyond_ends(coupling, "R²", "growth_r2", 0.9, otherwise="detectable")
    nulls = coupling.numbers("growth_r2").nulls
    return [Group("partly" if r2.holds and max(nulls) >= 0.9 else r2.verdict, [r2])]


POSITION = [
    Claim(
        "position 1",
        "Scores are close to a sum of position and content, f(q, i-j) + g(q, k), with a correlation of .959.",
        "r with the best such sum, an upper end; first token left out, mean over heads: .95 held, .75 partly; open "
        "where nothing rotates",
        ("variance",),
        _additive_sum,
        lambda variance: _where_rotated(variance, "additive r", "additive_r"),
    ),
    Claim(
        "position 1b",
        "Scores are close to a(i-j) + b(i) + c(j), a narrower sum, with a correlation above .95.",
        "r without the first token, mean over heads: .95 held, .75 partly",
        ("three_axis", "mean_key"),
        lambda fit, split: (
            f"exact fit r {fit('r').with_interval:.3f} (first token out {fit('r', **OUT).with_interval:.3f}, within "
            f"rows {fit('r_within_rows').with_interval:.3f}); mean-key split {split('r').with_interval:.3f}"
        ),
        lambda three_axis, _: [Criterion.of("r", three_axis.numbers("r", **OUT), **CLOSE, digits=3)],
    ),
    Claim(
        "position 2",
        "The model can run on f(q, i-j) + g(q, k): position and content are apart.",
        "shares recovered, of the loss and of the KL of predictions, when the model runs on each query's profile: both "
        "95 % held, 75 % partly; open where attention is worth nothing",
        ("substitution",),
        _recovered,
        _recovered_by,
        options={"substitution": {"n_prompts": 8}},
    ),
    Claim(
        "position 3",
        "At a dummy distance the key part stays as it is and the position part shifts.",
        "r of the key part with the scores at all distances, each distance's mean removed, first token left out, mean "
        "over heads: .95 held, .75 partly; open where nothing rotates",
        ("dummy_distance",),
        _dummy_distance,
        lambda dummy_distance: _where_rotated(dummy_distance, "r", "key_part_r", **OUT),
    ),
    Claim(
        "position 4",
        "Magnitude and phase of trained q and k in RoPE's planes make the split possible; random init lacks them.",
        "first token left out, plane scores tell heads apart better than in null models, shuffled weights among them "
        "(95% interval of r above each), and the trained interaction is less than half of every null model's: held",
        ("planes",),
        _planes,
        _planes_by,
    ),
    Claim(
        "position 5",
        "Swapping up to 5 % of the words hardly matters, more than 10 % does (figures of a third-party summary); index "
        "and features are alike.",
        "words: at most .1 nats at 5 % and more at 10 %, and at 20 % index and features within a quarter of the "
        "larger: held; one of both: partly; words at 20 % have to be beyond the null",
        ("perturbation",),
        _order,
        _order_by,
    ),
    Claim(
        "position 5b",
        "Downstream scores hardly change with up to 5 % of the words swapped, and do with more than 10 % (figures of a "
        "third-party summary).",
        "cloze accuracy falls by at most 2 points at 5 % and by more at 10 %, by the ends of the intervals: held; the "
        "first alone: partly; accuracy in order has to be beyond the null and chance",
        ("perturbation",),
        _cloze,
        _cloze_by,
        _no_cloze,
        options={"perturbation": JUDGED_ORDER},
    ),
    Claim(
        "position 6",
        "With LM-Infinite the attention output stays in its training distribution beyond the training length.",
        "heads whose outputs stay within the noise level, and .05 of the variance inside: 90 % with LM-Infinite and "
        "fewer without: held; more: partly; how many more has to be beyond the null (a count, without an interval)",
        ("length_extrapolation",),
        _beyond,
        _beyond_by,
        options={"length_extrapolation": {"length": None}},
    ),
    Claim(
        "position 7a",
        "Open, as readers say: what the residual holds, and what carries over to other encodings.",
        "not judged",
        ("residual",),
        lambda residual: (
            f"first token left out, the fit leaves {residual('share', **OUT).with_interval:.0%} of the variance within "
            f"rows, {residual('top_share', **OUT).plain:.0%} of that in one direction"
        ),
    ),
    Claim(
        "position 7b",
        "Open, as readers say: how the split forms in training.",
        "not judged",
        ("emergence",),
        lambda own: f"r within rows {_course(own, 'three_axis_r_within_rows', '.2f')}",
        lacks=_fewer_steps("three_axis_r_within_rows", 1, "r within rows was not measured over training"),
        null=lambda _, own: _first_step(own, "three_axis_r_within_rows"),
        options={"emergence": {"measures": ["three_axis"]}},
    ),
]
SLASH = [
    Claim(
        "slash 1",
        "Slash-dominant heads belong to the model: the same heads, with like scores, on random tokens.",
        "correlation of scores over heads, at every distance where heads are dominant: .9 held, .6 partly",
        ("slash_transfer",),
        _transfer,
        _transfer_by,
    ),
    Claim(
        "slash 2",
        "Queries and keys of slash-dominant heads are almost of rank one before RoPE.",
        "share of the first singular direction in dominant heads, Q and K: .9 held, .7 partly; a null model's is that "
        "of all its heads, and of its dominant ones where it has any",
        ("cone",),
        lambda cone: f"r1 of Q and K {in_groups(cone, 'r1', form='.2f')}",
        lambda cone: [_rank_one(cone, side) for side in "qk"],
    ),
    Claim(
        "slash 3a",
        "Inputs of the attention lie on a cone.",
        "95% interval of the mean cosine with their axis above every null model's: partly; and its lower end at least "
        ".7: held",
        ("cone",),
        lambda cone: f"cosine of the inputs with their axis {cone('cosine').with_interval:.2f}, mean over layers",
        lambda cone: [_of_low_end("low end", cone.numbers("cosine"), held=0.7, otherwise="partly")],
    ),
    Claim(
        "slash 3b",
        "W_Q and W_K project onto the axis of the cone.",
        "95% interval of the axis's gain above every null model's, of one or both: detectable; of both, and each lower "
        "end at least 2: held, 1.5: partly",
        ("cone",),
        lambda cone: (
            f"the axis gains {cone('gain', side='q').with_interval:.1f} times in W_Q, "
            f"{cone('gain', side='k').with_interval:.1f} in W_K, mean over heads"
        ),
        lambda cone: [
            _of_low_end(f"low end of {side.upper()}", cone.numbers("gain", side=side), **GAINED) for side in "qk"
        ],
    ),
    Claim(
        "slash 3c",
        "With only the part of the inputs along the cone's axis in W_Q and W_K, slash-dominant heads keep their slash; "
        "with only the rest they lose it.",
        "dominant heads' slash score above uniform: with the axis part alone at least .75 times the measured and with "
        "the rest at most .25 times: held; .4 times and more than with the rest: partly; how much more has to be "
        "beyond the null",
        ("cone",),
        _parts_of_inputs,
        _parts_of_inputs_by,
    ),
    Claim(
        "slash 4",
        "Medium and high frequencies of RoPE make the slash, low ones do not.",
        "without the low band three quarters of the slash score are left, without the high and without the medium one "
        "less, on the low one alone at most a quarter: held; the others cost a quarter in the mean, and the low one at "
        "most half of that: partly. By thirds and by wavelength; where they disagree, partly if one holds. How much "
        "more is left without the low band than without the others has to be beyond the null",
        ("band_ablation",),
        _frequencies,
        _frequencies_by,
        options={"band_ablation": {"schemes": ("thirds", "wavelength")}},
    ),
    Claim(
        "slash 5",
        "Gradient descent makes slash-dominant heads in a shallow RoPE transformer, and they generalise.",
        "slash score at the end at least .5 in every seed: partly; and on unseen features: held; a toy, whose nulls "
        "are the score before training and that of uniform attention",
        ("slash_toy",),
        _toy,
        _toy_by,
        null=lambda _, toy: ", ".join(f"{name} {one.plain:.3f}" for name, one in _toy_nulls(toy).items()),
    ),
    Claim(
        "slash 6",
        "Some heads are slash-dominant at long distances.",
        "heads dominant at some distance from 50 tokens to half the prompt, without the first token: more than in any "
        "null model (a count, without an interval): held",
        ("slash",),
        lambda slash: (
            f"{_n_far(slash).plain:.3g} of "
            f"{counted(slash.number(slash.array('n_long', **OUT).notnull().sum(HEAD)).value, 'head')} at {LONG} tokens "
            "or further, without the first token"
        ),
        lambda slash: [Criterion.of("heads", _n_far(slash.numbers), end=None, otherwise="held", digits=0)],
        lacks=_nothing_far,
    ),
]
COUPLING = [
    Claim(
        "coupling 1",
        "Top singular vectors of residual Jacobians align across layers, left with right; not at random init.",
        "95% interval above random bases and above those of all null models: detectable; and its lower end at least "
        ".2: held, .1: partly",
        ("coupling",),
        lambda own: (
            f"coupling {own('coupling').with_interval:.3f}, random bases {own('chance').plain:.3f}, left with right "
            f"{own('coupling', bases='swapped').plain:.3f}; signed {own('coupling', version='signed').plain:.3f}, "
            f"random bases {own('chance', version='signed').plain:.3f}, {own('negative_share').plain:.0%} of the "
            "diagonal negative"
        ),
        lambda coupling: [_low_end(coupling, "low end")],
    ),
    Claim(
        "coupling 2",
        "Token trajectories are close to straight lines; not at random init.",
        "95% interval below those of all null models: partly; and line-shape score at most 1.25: held",
        ("coupling",),
        lambda own: (
            f"line-shape score {own('line_shape_score').with_interval:.2f} over {own.data.sizes['state'] - 1} layers"
        ),
        lambda coupling: [_beyond_ends(coupling, "score", "line_shape_score", 1.25, otherwise="partly", sign=-1)],
    ),
    Claim(
        "coupling 3",
        "Norms grow exponentially with depth; not at random init.",
        "95% interval of the exponential's R² above those of all null models: detectable; and R² at least .9: partly; "
        "and all of theirs below .9: held; open with one layer",
        ("coupling",),
        lambda own: (
            f"R² of ln |x| against depth {own('growth_r2').with_interval:.2f}, expodistance "
            f"{own('expodistance').with_interval:.2f}"
        ),
        _growth_by,
        lambda coupling: "one layer: a line through two states is exact" if coupling.own.sizes["state"] < 3 else "",
    ),
    Claim(
        "coupling 4",
        "Coupling rises during training.",
        "95% interval of the last checkpoint above that of the first, which is the null: partly; and no checkpoint "
        "higher: held",
        ("emergence",),
        *_over_training("coupling_coupling", "coupling"),
    ),
    Claim(
        "coupling 4b",
        "Token trajectories become straighter during training.",
        "95% interval of the last checkpoint's line-shape score below that of the first, which is the null: partly; "
        "and no checkpoint lower: held",
        ("emergence",),
        *_over_training("coupling_line_shape_score", "line-shape score", sign=-1),
    ),
    Claim(
        "coupling 4c",
        "The growth of norms with depth becomes exponential during training.",
        "95% interval of the last checkpoint's R² above that of the first, which is the null: detectable; and R² at "
        "least .9: partly; and no checkpoint higher: held",
        ("emergence",),
        *_over_training("coupling_growth_r2", "R² of ln |x| against depth", least=0.9),
    ),
    Claim(
        "coupling 5",
        "Top singular vectors align across the tokens of a layer; not at random init.",
        "95% intervals above random bases and above those of all null models, of one kind or more: detectable; of all "
        "three, and every lower end at least .2: held, .1: partly",
        ("token_coupling",),
        lambda own: (
            f"coupling of {own.data.sizes['token']} tokens within layers: "
            + "; ".join(
                f"{words} {own('coupling', kind=kind).with_interval:.3f}, random bases "
                f"{own('chance', kind=kind).plain:.3f}"
                for kind, words in OF_TOKENS.items()
            )
        ),
        lambda token_coupling: [
            _low_end(token_coupling, f"{words} low end", kind=kind) for kind, words in OF_TOKENS.items()
        ],
    ),
    Claim(
        "coupling 6",
        "Over many models coupling goes with benchmark score.",
        "not judged of one model",
        ("coupling_scores",),
    ),
]
PAPERS: Mapping[str, Sequence[Claim]] = {"position": POSITION, "slash": SLASH, "coupling": COUPLING}

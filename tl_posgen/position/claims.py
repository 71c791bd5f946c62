"""Position generalization: the claims of Han & Ji 2025 (arXiv 2503.13305), and how each is judged."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tl_posgen.core.claim import Claim, Criterion, Judgement, first_checkpoint, judgement, or_lacking
from tl_posgen.core.measure import in_words
from tl_posgen.core.numbers import Number, Numbers
from tl_posgen.core.result import Result
from tl_posgen.position.decomposition.across_prompts import resolved
from tl_posgen.position.decomposition.variance import SIZES
from tl_posgen.position.length.length_extrapolation import TOLERATED
from tl_posgen.position.order.cloze import N_CHOICES, fewer_of_inits
from tl_posgen.position.substitution.substituted_loss import WORTHLESS
from tl_posgen.position.substitution.substitution_figures import SEARCHED, WORDS

OUT: Mapping[str, Any] = {"tokens": "without first"}
CLOSE: Mapping[str, Any] = {"held": 0.95, "partly": 0.75}  # a correlation, or a share recovered
SLIGHT = 0.02  # of accuracy
HARDLY = 0.1  # nats
INSIDE = 0.9  # of heads
RECOVERED = {"recovered": "share of the loss", "kl_recovered": "share of the KL"}
JUDGED_SEARCHES = ("free", "position", "shuffled")
JUDGED_RATIOS = (0.0, 0.05, 0.1, 0.2)  # shares of words moved that the criteria name
AXES = ("three_axis", "mean_query", "k_q_simplify")  # splits without the query, or fits of three axes
MOVED = {"words": "words", "positions": "index", "position_part": "features"}


def rotates(result: Result) -> bool:
    """Return whether some layer rotates q and k: elsewhere the sum is the score by construction."""
    return not result.encodings or bool(set(result.encodings) - set(result.measure.caveats))


def position_and_content(variance: Result) -> Judgement:
    def words(own: Numbers) -> str:
        scores, *parts = (f"{of} {own('size', of=of).with_interval:.2f}" for of in SIZES)
        return (
            f"additive r {own('additive_r').with_interval:.3f}, first token left out; standard deviation within rows, "
            f"in logits: {scores}; {', '.join(parts)}"
        )

    r = Criterion.of("additive r", variance.numbers("additive_r"), **CLOSE, digits=3)
    return judgement(r.verdict if rotates(variance) else "open", words, variance, by=[r])


def three_axes(three_axis: Result, mean_key: Result) -> Judgement:
    def words(fit: Numbers, split: Numbers) -> str:
        r, rest, within = (one.with_interval for one in (fit("r"), fit("r", **OUT), fit("r_within_rows")))
        return (
            f"exact fit r {r:.3f} (first token out {rest:.3f}, within rows {within:.3f}); mean-key split "
            f"{split('r').with_interval:.3f}"
        )

    r = Criterion.of("r", three_axis.numbers("r", **OUT), **CLOSE, digits=3)
    return judgement(r.verdict, words, three_axis, mean_key, by=[r])


def two_axes(substitution: Result) -> Judgement:
    measure = substitution.measure
    fitted = [str(one) for one in substitution.own["condition"].values if str(one).startswith(AXES)]

    def words(losses: Numbers) -> str:
        def recovered(condition: str) -> str:
            return f"{losses('recovered', condition=condition).with_interval:.0%}"

        worth = measure.worth(losses)
        found = f"attention is worth {worth.with_interval:.2f} nats"
        if worth.value < WORTHLESS:
            return f"{found}, so there is nothing to recover"
        of_axes = ", ".join(f"{in_words(name, WORDS)} {recovered(name)}" for name in fitted)
        predictions = losses("kl_recovered", condition="query_profile").with_interval
        found += (
            f", of which each query's profile {recovered('query_profile')} (of the KL of predictions "
            f"{predictions:.0%}); {of_axes}"
        )
        if "search_recovered" not in losses:
            return found
        searched = {one: losses("search_recovered", family=one).with_interval for one in JUDGED_SEARCHES}
        return f"{found}; searched: " + ", ".join(f"{SEARCHED[one]} {share:.0%}" for one, share in searched.items())

    own = substitution.numbers
    shares = {name: own(name, condition="query_profile") for name in RECOVERED}
    encodings = set(substitution.encodings)
    meaningless = bool(encodings) and encodings <= measure.without_meaning
    least = math.nan if meaningless else min(one.value for one in shares.values())  # NaN where attention has no worth
    beyond = {name: or_lacking(one.by_null) for name, one in shares.items()}
    if "search_recovered" in own:
        beyond["recovered"]["a search over shuffled q and k"] = [own("search_recovered", family="shuffled").high]
    of_least = Criterion("least share", least, **CLOSE)
    of_each = [
        Criterion.of(RECOVERED[name], one, beyond=beyond[name], otherwise="held") for name, one in shares.items()
    ]
    return judgement(of_least.verdict, words, substitution, by=[of_least, *of_each])


def controlled_distance(dummy_distance: Result) -> Judgement:
    def words(own: Numbers) -> str:
        refits = {
            d0: one for d0 in own.data["d0"].values if (one := own("refit_r", d0=d0, **OUT))
        }  # a window hides some
        ends = [pick(refits, key=lambda d0: refits[d0].value) for pick in (min, max)] if refits else []
        again = " to ".join(f"{refits[d0].with_interval:.2f} at {d0:g}" for d0 in dict.fromkeys(ends))
        return (
            f"first token left out, table of distance and key: additive r {own('additive_r', **OUT).with_interval:.3f} "
            f"(with it {own('additive_r').plain:.3f}), the distance part has "
            f"{own('share', part='distance', **OUT).plain:.0%} of its variance; without that the key part's r is "
            f"{own('key_part_r', **OUT).with_interval:.2f}, mean over heads; c fitted again with all pairs at one "
            f"distance against c, r {again or 'not defined'}"
        )

    r = Criterion.of("r", dummy_distance.numbers("key_part_r", **OUT), **CLOSE, digits=3)
    return judgement(r.verdict if rotates(dummy_distance) else "open", words, dummy_distance, by=[r])


def planes(plane_sufficiency: Result, any_distance: Result) -> Judgement:
    def words(own: Numbers, weights: str = "own") -> str:
        r, interaction = (own(name, weights=weights, **OUT).with_interval for name in ("pearson", "interaction"))
        return (
            f"sum of plane scores against interaction share over heads, r {r:.2f}, interaction {interaction:.0%}, "
            f"first token left out; with it, certified additive {own('additive', weights=weights).plain:.0%} of heads"
        )

    own = plane_sufficiency.numbers
    r, interaction = own("pearson", **OUT), own("interaction", **OUT)
    shuffled_here = own("pearson", weights="shuffled", **OUT).value
    halves = {f"half of {kind}": [one / 2 for one in each] for kind, each in interaction.by_null.items()}
    by = [
        Criterion.of("r", r, beyond={**r.by_null, "weights shuffled here": [shuffled_here]}, otherwise="held"),
        Criterion.of("interaction", interaction, beyond=halves, otherwise="held", sign=-1),
    ]
    error = any_distance.own["error"].sel(planes="inverse DFT").max()
    found = judgement("held", words, plane_sufficiency, by=by)
    return found._replace(
        measured=f"{found.measured}; any function of distance is possible (error {float(error):.0e})",
        null=f"{found.null}; weights shuffled here: {words(own, 'shuffled')}" if found.null else "",
    )


def word_order(perturbation: Result) -> Judgement:
    few, above, many = ratios_of(perturbation)
    moved = [one for one in MOVED if one in perturbation.own["condition"].values]

    def words(own: Numbers) -> str:
        def at(condition: str, ratio: float) -> str:
            return f"{own('change', condition=condition, ratio=ratio).with_interval:+.2f}"

        def over(condition: str) -> str:
            return ", ".join(f"{at(condition, ratio)} at {ratio:.0%}" for ratio in sorted({few, above, many}))

        return f"rise in nats: {'; '.join(f'{MOVED[one]} {over(one)}' for one in moved)}"

    if len(moved) < len(MOVED):
        return judgement("open", words, perturbation)
    own = perturbation.numbers
    at_few, at_more, at_many = (own("change", condition="words", ratio=ratio) for ratio in (few, above, many))
    index, features = (own("change", condition=one, ratio=many).value for one in MOVED if one != "words")
    apart = abs(index - features) / (max(abs(index), abs(features)) or 1.0)
    kept = Criterion(f"words at {few:.0%}", at_few.value, HARDLY, sign=-1)
    alike = Criterion("index and features apart", apart, 0.25, sign=-1)
    matters = Criterion.of(f"words at {many:.0%}", at_many, otherwise="held")
    whole = kept.holds and at_more.value > HARDLY and alike.holds
    verdict = "held" if whole else "partly" if kept.holds or alike.holds else "not held"
    return judgement(verdict, words, perturbation, by=[kept, alike, matters])


def ratios_of(perturbation: Result) -> tuple[float, float, float]:
    """Return the shares of words at which the claim is judged: 5 %, the lowest of 10 % and more, and 20 %."""
    few, many, _ = perturbation.measure.few_many_most
    return few, min((one for one in perturbation.measure.ratios if one >= 0.1), default=many), many


def downstream(perturbation: Result) -> Judgement:
    measure, own = perturbation.measure, perturbation.numbers
    few, above, many = ratios_of(perturbation)
    if "cloze_accuracy" not in own or "words" not in own.data["condition"].values:
        return Judgement("open", "not measured: no cloze was made of this text", "not measured")
    in_order, swapped = {"ratio": min(measure.ratios)}, {"condition": "words"}

    def change(one: Numbers, ratio: float) -> Number:
        words = one.array("cloze_accuracy", **swapped)
        return one.number(words.sel(ratio=ratio) - words.sel(ratio=in_order["ratio"]))  # item by item

    def words(one: Numbers) -> str:
        parts = [
            f"{change(one, ratio).with_interval:+.1%} with {ratio:.0%} of the words swapped"
            for ratio in sorted({few, above, many})
        ]
        accuracy = one("cloze_accuracy", **in_order, **swapped).plain
        return f"accuracy {accuracy:.1%} in order, {', '.join(parts)}"

    whole = own("cloze_accuracy", **in_order, **swapped)
    at_few, at_more = (change(own, ratio) for ratio in (few, above))
    kept = Criterion(f"low end at {few:.0%}", at_few.low, held=-SLIGHT, digits=3)
    still = Criterion(f"high end at {above:.0%}", at_more.high, held=-SLIGHT, digits=3)
    of_more = "partly" if still.holds else "held"
    verdict = "not held" if at_few.high < -SLIGHT else of_more if kept.holds else "open"
    beyond = {"chance": [1 / N_CHOICES], **whole.by_null}
    accuracy = Criterion.of("accuracy in order", whole, beyond=beyond, otherwise="held", digits=3)
    found = judgement(verdict, words, perturbation, by=[kept, still, accuracy])
    n_items = own.data.sizes["item"]
    return found._replace(
        measured=f"cloze of {n_items} items{fewer_of_inits(n_items)}: {found.measured}; chance {1 / N_CHOICES:.1%}"
    )


def length_claim(length_extrapolation: Result) -> Judgement:
    measure, own = length_extrapolation.measure, length_extrapolation.numbers
    conditions = [str(one) for one in own.data["condition"].values]

    def words(own: Numbers) -> str:
        parts = []
        for condition in conditions:
            numbers = measure.beyond(own, condition)
            share, loss, rise = (numbers[name] for name in ("within_noise", "loss", "rise"))
            name = in_words(condition, measure.words)
            parts.append(f"{name} {share.plain:.0%}, loss {loss.plain:.2f} ({rise.with_interval:+.2f})")
        inside = own("segment_loss", condition="vanilla", segment=0).plain
        return (
            f"heads within the noise level + {TOLERATED}, and loss, mean from the training length to "
            f"{measure.times:g} times it: {'; '.join(parts)}; in brackets against {inside:.2f} inside, by prompt"
        )

    if "lm_infinite" not in conditions:
        return judgement("open", words, length_extrapolation)
    windowed, vanilla = (measure.beyond(own, one)["within_noise"] for one in ("lm_infinite", "vanilla"))
    gain = windowed.value - vanilla.value
    gains = {kind: np.subtract(one, vanilla.by_null[kind]).tolist() for kind, one in windowed.by_null.items()}
    kept, lost = (Criterion(*one, INSIDE) for one in (("LM-Infinite", windowed.value), ("unchanged", vanilla.value)))
    more = Criterion("more with LM-Infinite", gain, beyond=gains, otherwise="held")
    verdict = "held" if kept.holds and not lost.holds else "partly" if gain > 0 else "not held"
    return judgement(verdict, words, length_extrapolation, by=[kept, lost, more])


def left_over(residual: Result, across_prompts: Result) -> Judgement:
    def words(left: Numbers, shared: Numbers) -> str:
        share, top = left("share", **OUT).with_interval, left("top_share", **OUT).plain
        same, by_distance = shared("position", **OUT), shared("share", function="distance", **OUT)
        return (
            f"first token left out, the fit leaves {share:.0%} of the variance within rows, {top:.0%} of that in one "
            f"direction; {resolved(same, '.0%')} is the same in every prompt, {resolved(by_distance, '.0%')} by "
            "distance alone"
        )

    return judgement("open", words, residual, across_prompts)


def formation(emergence: Result) -> Judgement:
    over = emergence.measure.at_steps(emergence.numbers, "three_axis_r_within_rows")
    if not over:
        return Judgement("open", "r within rows was not measured over training", "not measured")
    course = ", ".join(f"{one.with_interval:.2f} at step {step}" for step, one in over.items())
    return Judgement("open", f"r within rows {course}", first_checkpoint(next(iter(over))))


CLAIMS = [
    Claim(
        "position",
        1,
        "Scores are close to a sum of position and content, f(q, i-j) + g(q, k), with a correlation of .959.",
        "r with the best such sum, an upper end, as the paper's estimator is not public; first token left out, mean "
        "over heads: .95 held, .75 partly; open where nothing rotates and every score is such a sum",
        ("variance",),
        position_and_content,
    ),
    Claim(
        "position",
        "1b",
        "Scores are close to a(i-j) + b(i) + c(j), a narrower sum, with a correlation above .95.",
        "r without the first token, mean over heads: .95 held, .75 partly",
        ("three_axis", "mean_key"),
        three_axes,
    ),
    Claim(
        "position",
        2,
        "The model can run on f(q, i-j) + g(q, k): position and content are apart.",
        "shares recovered, of the loss and of the KL of predictions, when the model runs on each query's profile, "
        "which is not fitted: both 95 % held, 75 % partly; the first also above the interval of a split searched over "
        "shuffled q and k; open where attention is worth nothing, and a null model whose attention is worth nothing "
        "does not do as well",
        ("substitution",),
        two_axes,
        {"substitution": {"n_prompts": 8, "head_costs": False, "search_prompts": 16, "search_steps": 30}},
    ),
    Claim(
        "position",
        3,
        "At a dummy distance the key part stays as it is and the position part shifts.",
        "r of the key part with the scores at all distances up to the prompt's, each distance's mean removed, first "
        "token left out, mean over heads: .95 held, .75 partly; open where nothing rotates",
        ("dummy_distance",),
        controlled_distance,
    ),
    Claim(
        "position",
        4,
        "Magnitude and phase of trained q and k in RoPE's planes make the split possible; random init lacks them.",
        "first token left out, plane scores tell heads apart better than in null models and under shuffled weights "
        "(95% interval of r above each), and the trained interaction is less than half of every null model's: held",
        ("plane_sufficiency", "any_distance"),
        planes,
    ),
    Claim(
        "position",
        5,
        "Swapping up to 5 % of the words hardly matters, more than 10 % does (figures of a third-party summary); index "
        "and features are alike.",
        "words: at most .1 nats at 5 % and more at 10 %, and at 20 % index and features within a quarter of the "
        "larger: held; at most .1 nats at 5 %, or the two alike: partly; what has to be beyond the null is words at "
        "20 %",
        ("perturbation",),
        word_order,
    ),
    Claim(
        "position",
        "5b",
        "Downstream scores hardly change with up to 5 % of the words swapped, and do with more than 10 % (figures of a "
        "third-party summary).",
        "cloze accuracy falls by at most 2 points at 5 % and by more at 10 %, by the ends of the 95% intervals of the "
        "change, item by item: held; the first alone: partly; open where the interval holds both; what has to be "
        "beyond the null, and chance, is accuracy in order",
        ("perturbation",),
        downstream,
        {"perturbation": {"ratios": JUDGED_RATIOS, "n_draws": 2, "n_cloze": 800, "cloze_conditions": ("words",)}},
    ),
    Claim(
        "position",
        6,
        "With LM-Infinite the attention output stays in its training distribution beyond the training length.",
        "heads whose outputs stay within the noise level of as many prompts, and .05 of the variance inside: 90 % with "
        "LM-Infinite and fewer without: held; more: partly; what has to be beyond the null is how many more (a count "
        "of heads, without an interval)",
        ("length_extrapolation",),
        length_claim,
        {"length_extrapolation": {"length": None}},
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
        {"emergence": {"measures": ["three_axis"]}},
    ),
]

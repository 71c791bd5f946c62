"""Position generalization: the claims of Han & Ji 2025 (arXiv 2503.13305), and how each is judged."""

from collections.abc import Sequence
from typing import Any

from tl_posgen.core.claim import Claim, Judgement, both, highest, threshold, where_known
from tl_posgen.position.decomposition.across_prompts import resolved
from tl_posgen.position.first_token import WITHOUT_FIRST_TOKEN as OUT
from tl_posgen.position.substitution.substitution_figures import in_words
from tl_posgen.report.sentences import entry, said, with_interval
from tl_posgen.core.result import Result
from tl_posgen.summary import Summary

SLIGHT = 0.02  # of accuracy
AXES = ("three_axis", "mean_query", "k_q_simplify")  # splits without the query, or fits of three axes
MOVED = {"words": "words", "positions": "index", "position_part": "features"}


def three_axes(three_axis: Result, mean_key: Result) -> Judgement:
    def say(fit: Summary, split: Summary) -> str:
        return (
            f"exact fit r {with_interval(fit, 'r')} (first token out {with_interval(fit, f'r{OUT}')}, within rows "
            f"{with_interval(fit, 'r_within_rows')}); mean-key split {with_interval(split, 'mean_key_r')}"
        )

    verdict = threshold(three_axis.summary["r_without_first_token"], 0.95, 0.75)
    return Judgement(verdict, *both(say, three_axis, mean_key))


def two_axes(variance: Result, substitution: Result) -> Judgement:
    def say(shares: Summary, losses: Summary) -> str:
        worth = f"attention is worth {with_interval(losses, 'worth', '.2f')} nats"
        words = f"additive r {with_interval(shares, 'additive_r')}; {worth}"
        if losses["nothing_to_recover"]:
            return f"{words}, so there is nothing to recover"
        of_axes = (f"{in_words(name)} {recovered(losses, name)}" for name in fitted)
        words += f", of which {', '.join(of_axes)}; each query's profile {recovered(losses, 'query_profile')}"
        if losses["search_recovered_free"] is None:
            return words
        return f"{words}, a searched split {with_interval(losses, 'search_recovered_free', '.0%')}"

    def recovered(losses: Summary, condition: str) -> str:
        return with_interval(losses, f"recovered_{condition}", ".0%")

    conditions = map(str, substitution.dataset["condition"].values)
    fitted = [name for name in conditions if name.startswith(AXES)]
    own = substitution.summary
    if substitution.encodings and set(substitution.encodings) <= substitution.measure.without_meaning:
        return Judgement("open", *both(say, variance, substitution))
    split = float("nan") if own["nothing_to_recover"] else own["split_recovered"]
    return Judgement(threshold(split, 0.95, 0.75), *both(say, variance, substitution))


def controlled_distance(dummy_distance: Result) -> Judgement:
    def say(own: Summary) -> str:
        refit = f"refit_r{OUT}"
        known = [place for place, r in enumerate(own[refit]) if r == r]  # a window hides distances
        ends = [pick(known, key=own[refit].__getitem__) for pick in (min, max)] if known else []
        again = " to ".join(
            f"{with_interval(entry(own, refit, place), refit, '.2f')} at {own['distances'][place]:g}"
            for place in dict.fromkeys(ends)
        )
        additive_r, key_part_r = with_interval(own, f"additive_r{OUT}"), with_interval(own, f"key_part_r{OUT}", ".2f")
        return (
            f"first token left out, table of distance and key: additive r {additive_r} (paper: .959; with it "
            f"{own['additive_r']:.3f}), the distance part has {own[f'distance_share{OUT}']:.0%} of its variance; "
            f"without that the key part's r is {key_part_r}, mean over heads; c fitted again with all pairs at one "
            f"distance against c, r {again or 'not defined'}"
        )

    own, null = dummy_distance.summary, dummy_distance.null_summary
    key_part_r = f"key_part_r{OUT}"
    verdict = threshold(own[key_part_r], 0.95, 0.75)
    if dummy_distance.encodings and set(dummy_distance.encodings) <= set(dummy_distance.measure.caveats):
        verdict = "open"
    elif own[key_part_r] <= highest(null, key_part_r):
        verdict = "not held"
    return Judgement(verdict, *both(say, dummy_distance))


def planes(plane_sufficiency: Result, any_distance: Result) -> Judgement:
    own = plane_sufficiency.summary

    def say(weights: str, words: str) -> str:
        pearson, interaction = (f"{name}{OUT}_{weights}" for name in ("pearson", "interaction"))
        if own[interaction] is None:
            return f"{words}: not measured"
        return (
            f"{words}: sum of plane scores against interaction share over heads, r "
            f"{with_interval(own, pearson, '.2f')}, interaction {with_interval(own, interaction, '.0%')}, first token "
            f"left out; with it, certified additive {own[f'additive_{weights}']:.0%} of heads"
        )

    error = any_distance.summary["exact_error"]
    measured = f"{say('trained', 'trained')}; any function of distance is possible (error {error:.0e})"
    predicted, of_random = (own[f"pearson{OUT}_{one}"] for one in ("trained", "random_init"))
    trained, random = (own[f"interaction{OUT}_{one}"] for one in ("trained", "random_init"))
    apart = random is not None and trained <= 0.5 * random
    verdict = where_known(
        "held" if predicted >= 0.5 and apart else "partly" if apart else "not held", predicted, trained, random
    )
    null = f"{say('random_init', 'random init')}; {say('shuffled', 'shuffled')}"
    if of_random is not None and min(predicted, of_random) >= 0.5:
        null += "; that plane scores tell heads apart holds without training too: the verdict rests on the interaction"
    return Judgement(verdict, measured, null)


def word_order(perturbation: Result) -> Judgement:
    def say(own: Summary) -> str:
        parts = [
            f"{words} {with_interval(own, f'{name}_change_few', '+.2f')} nats at {own['ratio_few']:.0%}, "
            f"{with_interval(own, f'{name}_change_many', '+.2f')} at {own['ratio_many']:.0%}"
            for name, words in MOVED.items()
            if own[f"{name}_change_few"] is not None
        ]
        return "; ".join(parts)

    own = perturbation.summary
    few, many = own["words_change_few"], own["words_change_many"]
    index, features = own["positions_change_many"], own["position_part_change_many"]
    if None in (few, many, index, features):
        return Judgement("open", *both(say, perturbation))
    alike = abs(index - features) <= 0.25 * max(index, features)
    verdict = "held" if few <= 0.1 and many > 0.1 and alike else "partly" if few <= 0.1 or alike else "not held"
    return Judgement(verdict, *both(say, perturbation))


def downstream(perturbation: Result) -> Judgement:
    own, null = perturbation.summary, perturbation.null_summary
    if not own["cloze_items"] or own["words_cloze_accuracy_few"] is None:
        return Judgement("open", "not measured: no cloze was made of this text", "not measured")

    def say(one: Summary) -> str:
        few, many = (with_interval(one, f"words_cloze_accuracy_{place}", ".1%") for place in ("few", "many"))
        return (
            f"cloze of {one['cloze_items']} items: accuracy {one['cloze_accuracy_least']:.1%} in order, {few} with "
            f"{one['ratio_few']:.0%} of the words swapped, {many} with {one['ratio_many']:.0%}; chance "
            f"{one['cloze_chance']:.1%}"
        )

    whole, floor = own["cloze_accuracy_least"], max(own["cloze_chance"], highest(null, "cloze_accuracy_least"))
    low, high = (own[f"words_cloze_accuracy_few_{end}"] for end in ("low", "high"))
    kept, fallen = low >= whole - SLIGHT, high < whole - SLIGHT
    lost = own["words_cloze_accuracy_many_high"] < whole - SLIGHT
    verdict = "not held" if fallen else "open" if not kept else "held" if lost else "partly"
    verdict = verdict if whole > floor else "open"
    return Judgement(verdict, *both(say, perturbation))


def length_claim(length_extrapolation: Result) -> Judgement:
    def say(own: Summary) -> str:
        parts = [
            f"{name.replace('_', ' ')} {said(own[f'within_noise_{name}'], '.0%')}, loss "
            f"{said(own[f'loss_beyond_{name}'], '.2f')} ({with_interval(own, f'rise_{name}', '+.2f')})"
            for name in own["conditions"]
        ]
        return (
            f"heads within the noise level, and loss, mean from the training length to {own['times']:g} times it: "
            f"{'; '.join(parts)}; in brackets against {own['loss_inside']:.2f} inside, by prompt"
        )

    own = length_extrapolation.summary
    windowed, vanilla = (own.get(f"within_noise_{name}") for name in ("lm_infinite", "vanilla"))
    measured, of_null = both(say, length_extrapolation)
    if windowed is None or vanilla is None:
        return Judgement("open", measured, of_null)
    verdict = "held" if windowed >= 0.9 > vanilla else "partly" if windowed > vanilla else "not held"
    null = length_extrapolation.null_summary
    if null is not None and null["within_noise_vanilla"] >= 0.9:
        of_null += "; untouched, at most a tenth of heads leave theirs: only a trained model can show the claim"
    return Judgement(where_known(verdict, windowed, vanilla), measured, of_null)


def left_over(residual: Result, across_prompts: Result) -> Judgement:
    def say(left: Summary, shared: Summary) -> str:
        share, same = with_interval(left, f"share{OUT}", ".0%"), resolved(shared, f"position{OUT}", ".0%")
        return (
            f"first token left out, the fit leaves {share} of the variance within rows, "
            f"{left[f'top_share{OUT}']:.0%} of that in one direction; {same} is the same in every prompt, "
            f"{resolved(shared, f'by_distance{OUT}', '.0%')} by distance alone"
        )

    return Judgement("open", *both(say, residual, across_prompts))


def formation(emergence: Result) -> Judgement:
    own = emergence.summary
    steps: Sequence[Any] = own["steps"]
    key = "three_axis_r_within_rows_over_steps"
    if not steps or key not in own:
        return Judgement("open", "r within rows was not measured over training", "not measured")
    told = ", ".join(
        f"{with_interval(entry(own, key, place), key, '.2f')} at step {step}" for place, step in enumerate(steps)
    )
    return Judgement("open", f"r within rows {told}", f"step {steps[0]} is the random initialisation")


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
        "Scores are f(q, i-j) + g(q, k): position and content are apart.",
        "share of the loss recovered when the model runs on a split searched on other prompts (mean rotation and "
        "reference key a head; on each query's profile where nothing was searched): 95 % held, 75 % partly",
        ("variance", "substitution"),
        two_axes,
        {"substitution": {"n_prompts": 16, "head_costs": False}},
    ),
    Claim(
        "position",
        3,
        "At a dummy distance the key part stays as it is and the position part shifts.",
        "r of the key part with the scores at all distances up to the prompt's, each distance's mean removed, first "
        "token left out, mean over heads, above every random init: .95 held, .75 partly; open where nothing rotates",
        ("dummy_distance",),
        controlled_distance,
    ),
    Claim(
        "position",
        4,
        "Magnitude and phase of trained q and k in RoPE's planes make the split possible; random init lacks them.",
        "first token left out, plane scores tell heads apart (r at least .5), and the trained interaction is at most "
        "half of random init's; partly: the second alone",
        ("plane_sufficiency", "any_distance"),
        planes,
    ),
    Claim(
        "position",
        5,
        "Swapping up to 5 % of the words hardly matters, more than 10 % does; index and features are alike.",
        "words: at most .1 nats at 5 % and more at 20 %; at 20 % index and features within a quarter of the larger; "
        "partly: at most .1 nats at 5 %, or the two alike",
        ("perturbation",),
        word_order,
    ),
    Claim(
        "position",
        "5b",
        "Downstream scores hardly change with up to 5 % of the words swapped, and do with more than 10 %.",
        "cloze accuracy falls by at most 2 points at 5 % and by more at 20 %, by the ends of its 95% intervals: held; "
        "the first alone: partly; open where the interval holds both, or accuracy is not above random init's and "
        "chance",
        ("perturbation",),
        downstream,
    ),
    Claim(
        "position",
        6,
        "With LM-Infinite the attention output stays in its training distribution beyond the training length.",
        "heads whose outputs stay within the noise level: 90 % with LM-Infinite and fewer without: held; more: partly",
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

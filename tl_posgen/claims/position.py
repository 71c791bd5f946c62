"""The claims of Han & Ji 2025 (arXiv 2503.13305), position generalization: numbers, thresholds, and what would speak
against each."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tl_posgen.claims.judging import Claim, Criterion, Group, or_lacking
from tl_posgen.claims.over_training import fewer_steps
from tl_posgen.core.result import Result
from tl_posgen.interventions import LEAST_COST
from tl_posgen.position.length.length_extrapolation import TOLERATED
from tl_posgen.position.order.cloze import N_CHOICES
from tl_posgen.position.substitution.substitution import Substitution

_CLOSE: Mapping[str, float] = {"held": 0.95, "partly": 0.75}  # a correlation, or a share recovered
_EIGHT_PROMPTS = {"substitution": {"n_prompts": 8}}
_JUDGED_ORDER = {"ratios": (0.0, 0.05, 0.1, 0.2), "n_draws": 2, "n_cloze": 800, "cloze_conditions": ("words",)}
_MOVED = ("words", "positions", "position_part")  # words, index and features
_LEFT = {"share": "variance within rows that the fit leaves", "top_share": "of that in one direction"}


def _additive(variance: Result, **at: float) -> list[Criterion | Group]:
    """Return the criterion of r of what softmax sees, and r over all scores, which decides nothing."""
    over_all = Criterion.beside("over all scores", variance.numbers("additive_r_of_scores"), digits=3)
    return [*_where_rotated(variance, "additive r", "additive_r", at), over_all]


def _where_rotated(result: Result, quantity: str, name: str, at: Mapping[str, float], **labels: Any) -> list[Group]:
    """Return the criterion of r of a sum; open where no layer rotates q and k: the sum is the score by construction."""
    r = Criterion.of(quantity, result.numbers(name, **labels), **at, digits=3)
    rotates = not result.encodings or bool(set(result.encodings) - set(result.measure.caveats))
    return [Group(r.verdict if rotates else "open", [r])]


def _recovered(substitution: Result, condition: str = "query_profile", **at: Any) -> list[Criterion]:
    """Return the least share, of the loss and of the KL, how each stands beside its nulls, and of what they are."""
    numbers, names = substitution.numbers, {"loss": "share of the loss", "kl": "share of the KL"}
    shares = {quantity: numbers.measure.recovered(numbers, name)[condition] for name, quantity in names.items()}
    encodings = set(substitution.encodings)
    undefined = encodings and encodings <= substitution.measure.without_meaning
    least = math.nan if undefined else min(share.value for share in shares.values())  # NaN where attention has no worth
    of_shares = [
        Criterion.of(quantity, share, beyond=or_lacking(share.by_null), otherwise="held")
        for quantity, share in shares.items()
    ]
    worth = Criterion.beside("nats that attention is worth", numbers.measure.worth(numbers))
    return [Criterion("least share", least, **at), *of_shares, worth]


def _recovered_at_sinks(substitution: Result, **at: float) -> list[Criterion]:
    """Return the criteria of the shares with the true scores of sinks; the control's share decides nothing."""
    numbers = substitution.numbers
    control = numbers.measure.recovered(numbers)["query_profile, true at random keys"]
    with_random_keys = Criterion.beside("share of the loss with random keys", control)
    return [*_recovered(substitution, "query_profile, true at sinks", **at), with_random_keys]


def _no_sinks(substitution: Result) -> str:
    numbers = substitution.trained
    has_any = bool((numbers["first_is_sink"] + numbers["n_later_sinks"]).sum() > 0)
    return "" if has_any else f"no key takes more than {substitution.measure.sink_share:.0%} of a layer's attention"


def _planes(planes: Result) -> list[Criterion]:
    numbers = planes.numbers
    interaction = numbers("share", part="interaction", first_token=False)
    halves = {f"half of {kind}": [value / 2 for value in values] for kind, values in interaction.by_null.items()}
    return [
        Criterion.of("r of plane scores with interaction", numbers.measure.correlation(numbers), otherwise="held"),
        Criterion.of("interaction", interaction, beyond=halves, otherwise="held", sign=-1),
    ]


def _order(perturbation: Result, hardly: float, apart: float) -> list[Group]:
    """Return the rises of the loss by words at 5 % and 20 %; at 10 %, or the lowest share above, they should matter."""
    numbers, (few, above, many) = perturbation.numbers, _ratios(perturbation.measure)
    if not set(_MOVED) <= set(numbers.data["condition"].values):
        return [Group("open", name="not all of words, index and features were moved")]
    at_few, at_more, at_many = (numbers("change", condition="words", ratio=ratio) for ratio in (few, above, many))
    few_moved = Criterion.without_nulls(f"words at {few:.0%}", at_few, hardly, sign=-1)
    more = [Criterion.beside(f"words at {above:.0%}", at_more)] if above < many else []
    matters = Criterion.of(f"words at {many:.0%}", at_many, otherwise="held")
    index, features = (numbers("change", condition=condition, ratio=many) for condition in _MOVED[1:])
    index_and_features = [
        Criterion.beside(f"{name} at {many:.0%}", change)
        for name, change in {"index": index, "features": features}.items()
    ]
    difference = abs(index.value - features.value) / (max(abs(index.value), abs(features.value)) or 1.0)
    alike = Criterion("index and features apart", difference, apart, sign=-1)
    # where neither costs more than in a null model, that they are alike says nothing
    are_alike = alike.holds and all(Criterion.of("", change, otherwise="held").holds for change in (index, features))
    is_held = few_moved.holds and at_more.value > hardly and are_alike
    return [Group.of(is_held, few_moved.holds or are_alike, [few_moved, *more, matters, *index_and_features, alike])]


def _ratios(measure: Any) -> tuple[float, float, float]:
    few, many, _ = measure.few_many_most
    return few, min((ratio for ratio in measure.ratios if ratio >= 0.1), default=many), many


def _cloze(perturbation: Result, slight: float) -> list[Group]:
    numbers, (few, above, _) = perturbation.numbers, _ratios(perturbation.measure)
    accuracy = numbers.array("cloze_accuracy", condition="words")
    in_order = accuracy.sel(ratio=min(numbers.measure.ratios), drop=True)
    accuracy_in_order = numbers.number(in_order, numbers.bounds_of("cloze_accuracy"))
    at_few, at_more = (
        numbers.number(accuracy.sel(ratio=ratio, drop=True) - in_order, (-1, 1)) for ratio in (few, above)
    )
    change_at_few = Criterion.of_end(f"change at {few:.0%}", at_few, -slight, beyond=None, digits=3)
    change_at_more = Criterion.of_end(f"change at {above:.0%}", at_more, -slight, "high", beyond=None, digits=3)
    beyond = {"chance": [1 / N_CHOICES], **accuracy_in_order.by_null}
    in_order = Criterion.of("accuracy in order", accuracy_in_order, beyond=beyond, otherwise="held", digits=3)
    of_more = "partly" if change_at_more.holds else "held"
    verdict = "not held" if at_few.high < -slight else of_more if change_at_few.holds else "open"
    return [Group(verdict, [change_at_few, change_at_more, in_order])]


def _no_cloze(perturbation: Result) -> str:
    is_made = "cloze_accuracy" in perturbation.trained and "words" in perturbation.trained["condition"].values
    return "" if is_made else "not measured: no cloze was made of this text"


def _beyond(length_extrapolation: Result, inside: float) -> list[Group]:
    measure, numbers = length_extrapolation.measure, length_extrapolation.numbers
    if "lm_infinite" not in numbers.data["condition"].values:
        return [Group("open", name="LM-Infinite was not run")]
    windowed, unchanged = (
        measure.beyond(numbers, condition)["within_noise"] for condition in ("lm_infinite", "unchanged")
    )
    gains = {kind: np.subtract(shares, unchanged.by_null[kind]).tolist() for kind, shares in windowed.by_null.items()}
    of_windowed = Criterion.without_nulls("heads within noise with LM-Infinite", windowed, inside)
    of_unchanged = Criterion.without_nulls("unchanged", unchanged, inside)
    more = Criterion("more with LM-Infinite", windowed.value - unchanged.value, beyond=gains, otherwise="held")
    return [Group.of(of_windowed.holds and not of_unchanged.holds, more.value > 0, [of_windowed, of_unchanged, more])]


def _split_over_training(emergence: Result) -> list[Group]:
    over = emergence.measure.at_steps(emergence.numbers, "three_axis_r_within_rows")
    return [Group("open", [Criterion.beside(f"r within rows at step {step}", r) for step, r in over.items()])]


POSITION = [
    Claim(
        "position 1",
        "Scores are close to a sum of position and content, f(q, i-j) + g(q, k), with a correlation of 0.959.",
        "r of what softmax sees with the best such sum, an upper end; first token left out, mean over heads: {held} "
        "held, {partly} partly; open where nothing rotates; r over all scores, the paper's, beside it",
        ("variance",),
        _additive,
        thresholds=_CLOSE,
    ),
    Claim(
        "position 1b",
        "Scores are close to a(i-j) + b(i) + c(j), a sum of three curves, with a correlation above 0.95.",
        "r without the first token, mean over heads: {held} held, {partly} partly; that of the mean-key split "
        "beside it",
        ("three_axis", "mean_key"),
        lambda three_axis, mean_key, **at: [
            Criterion.of("r", three_axis.numbers("r", first_token=False), **at, digits=3),
            Criterion.beside("mean-key split's r", mean_key.numbers("r", first_token=False), digits=3),
        ],
        thresholds=_CLOSE,
    ),
    Claim(
        "position 2",
        "The model can run on f(q, i-j) + g(q, k): position and content are apart.",
        "shares recovered, of the loss and of the KL of predictions, when the model runs on each query's profile: both "
        "{held:.0%} held, {partly:.0%} partly; open where what attention is worth is not above "
        f"{LEAST_COST} nats by its interval: no share is defined",
        ("substitution",),
        _recovered,
        options=_EIGHT_PROMPTS,
        thresholds=_CLOSE,
    ),
    Claim(
        "position 2b",
        "The model can run on f(q, i-j) + g(q, k) and its own scores of attention sinks (ours: not in the paper).",
        "the same shares, both {held:.0%} held, {partly:.0%} partly, with the true scores of the keys that take more "
        f"than {Substitution.sink_share:.0%} of a layer's attention from afar; open without such keys; the share with "
        "as many true scores of random keys beside it",
        ("substitution",),
        _recovered_at_sinks,
        _no_sinks,
        options=_EIGHT_PROMPTS,
        thresholds=_CLOSE,
    ),
    Claim(
        "position 3",
        "At a dummy distance the key part stays as it is and the position part shifts.",
        "r of the key part with the scores at all distances, each distance's mean removed, first token left out, mean "
        "over heads: {held} held, {partly} partly; open where nothing rotates",
        ("dummy_distance",),
        lambda dummy_distance, **at: _where_rotated(dummy_distance, "r", "key_part_r", at, first_token=False),
        thresholds=_CLOSE,
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
        "words: at most {hardly} nats at 5 % and more at 10 %, and at 20 % index and features apart by at most {apart} "
        "of the larger, each beyond the null: held; one of both: partly; words at 20 % have to be beyond the null",
        ("perturbation",),
        _order,
        thresholds={"hardly": 0.1, "apart": 0.25},
    ),
    Claim(
        "position 5b",
        "Downstream scores hardly change with up to 5 % of the words swapped, and do with more than 10 % (figures of a "
        "third-party summary).",
        "cloze accuracy, from 0 to 1, falls by at most {slight} at 5 % and by more at 10 %, by the ends of the "
        "intervals: held; the first alone: partly; accuracy in order has to be beyond the null and chance",
        ("perturbation",),
        _cloze,
        _no_cloze,
        options={"perturbation": _JUDGED_ORDER},
        thresholds={"slight": 0.02},
    ),
    Claim(
        "position 6",
        "With LM-Infinite the attention output stays in its training distribution beyond the training length.",
        f"heads whose outputs stay within the noise level, and {TOLERATED} of the variance inside: "
        "{inside:.0%} with LM-Infinite and fewer without: held; more: partly; how many more has to be beyond the null "
        "(a count, without an interval)",
        ("length_extrapolation",),
        _beyond,
        options={"length_extrapolation": {"length": None}},
        thresholds={"inside": 0.9},
    ),
    Claim(
        "position 7a",
        "Open, as readers say: what the residual holds, and what carries over to other encodings.",
        "not judged",
        ("residual",),
        lambda residual: [
            Group(
                "open",
                [
                    Criterion.beside(quantity, residual.numbers(name, first_token=False))
                    for name, quantity in _LEFT.items()
                ],
            )
        ],
    ),
    Claim(
        "position 7b",
        "Open, as readers say: how the split forms in training.",
        "not judged",
        ("emergence",),
        _split_over_training,
        fewer_steps("three_axis_r_within_rows", 1, "r within rows was not measured over training"),
        options={"emergence": {"measures": ["three_axis"]}},
    ),
]

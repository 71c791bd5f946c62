"""Coupling of residual Jacobians: the claims of Aubry et al. 2024 (arXiv 2407.07810)."""

from dataclasses import replace
from functools import partial

from tl_posgen.core.claim import (
    Claim,
    Criterion,
    Judgement,
    each_init,
    first_checkpoint,
    highest,
    joint_verdict,
    judgement,
)
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.result import Result

EXPONENTIAL = 0.9  # R² of ln |x| against depth
OF_COUPLING = {"emergence": {"measures": ["coupling"]}}
OF_TOKENS = {"self": "own Jacobians", "same_input": "of one input", "same_output": "of one output"}


def alignment(coupling: Result) -> Judgement:
    def words(own: Numbers) -> str:
        signed, chance = own("coupling", version="signed").plain, own("chance", version="signed").plain
        return (
            f"coupling {own('coupling').with_interval:.3f}, random bases {own('chance').plain:.3f}, left with right "
            f"{own('coupling', bases='swapped').plain:.3f}; signed {signed:.3f}, random bases {chance:.3f}, "
            f"{own('negative_share').plain:.0%} of the diagonal negative"
        )

    low = low_end(coupling, "low end")
    return judgement(low.verdict, words, coupling, by=[low])


def low_end(result: Result, quantity: str, **labels: str) -> Criterion:
    """Return the lower end of a coupling, which has to be above random bases and the intervals of all random inits."""
    own = result.numbers
    nulls = [own("chance", **labels).value, *(one("coupling", **labels).high for one in each_init(own))]
    low = own("coupling", **labels).low
    return Criterion(quantity, low, held=0.2, partly=0.1, beyond=nulls, otherwise="detectable", digits=3)


def straightness(coupling: Result) -> Judgement:
    def words(own: Numbers) -> str:
        layers = own.data.sizes["state"] - 1
        return f"line-shape score {own('line_shape_score').with_interval:.2f} over {layers} layers"

    own = coupling.numbers
    number, lows = own("line_shape_score"), [one("line_shape_score").low for one in each_init(own)]
    score = Criterion("score", number.value, held=1.25, otherwise="partly", sign=-1)
    high = Criterion("high end", number.high, beyond=lows, otherwise="held", sign=-1)
    return judgement(score.verdict if high.holds else "not held", words, coupling, by=[score, high])


def growth(coupling: Result) -> Judgement:
    def words(own: Numbers) -> str:
        r2, distance = (own(name).with_interval for name in ("growth_r2", "expodistance"))
        return f"R² of ln |x| against depth {r2:.2f}, expodistance {distance:.2f}"

    if coupling.own.sizes["state"] < 3:
        return Judgement("open", "one layer: a line through two states is exact", "not measured")
    number, highs = coupling.numbers("growth_r2"), [one("growth_r2").high for one in each_init(coupling.numbers)]
    r2 = Criterion("R²", number.value, held=EXPONENTIAL, otherwise="detectable")
    low = Criterion("low end", number.low, beyond=highs, otherwise="held")
    of_size = "partly" if r2.holds and highest(number.inits) >= EXPONENTIAL else r2.verdict
    return judgement(of_size if low.holds else "not held", words, coupling, by=[r2, low])


def over_training(emergence: Result, name: str, words: str, sign: int = 1, least: float | None = None) -> Judgement:
    """Judge whether a number rises during training, and ends at `least` or more; with the sign -1, whether it falls."""
    over = emergence.measure.at_steps(emergence.numbers, name)
    if len(over) < 2:
        return Judgement("open", f"{words} was not measured at two checkpoints or more", "not measured")
    numbers = [*over.values()]
    end, end_of_first = ("low", "high")[::sign]
    first, last = getattr(numbers[0], end_of_first), getattr(numbers[-1], end)
    by = [Criterion(f"{end} end at last", last, beyond=[first], otherwise="held", sign=sign, digits=3)]
    if least is not None:
        by.append(Criterion("at last", numbers[-1].value, held=least, otherwise="detectable"))
    verdict = by[-1].verdict if by[0].holds else "not held"
    if verdict == "held" and max(sign * one.value for one in numbers) != sign * numbers[-1].value:
        verdict = "partly"
    course = ", ".join(f"{one.with_interval:.3f} at step {step}" for step, one in over.items())
    return Judgement(verdict, f"{words} {course}", first_checkpoint(next(iter(over)))).decided_by(*by)


def between_tokens(token_coupling: Result) -> Judgement:
    def words(own: Numbers) -> str:
        parts = [
            f"{kind_in_words} {own('coupling', kind=kind).with_interval:.3f}, random bases "
            f"{own('chance', kind=kind).plain:.3f}"
            for kind, kind_in_words in OF_TOKENS.items()
        ]
        return f"coupling of {own.data.sizes['token']} tokens within layers: {'; '.join(parts)}"

    lows = [low_end(token_coupling, f"{words} low end", kind=kind) for kind, words in OF_TOKENS.items()]
    from_nulls = [replace(one, held=None, partly=None) for one in lows]  # in the margin
    return judgement(joint_verdict(lows), words, token_coupling, by=from_nulls)


CLAIMS = [
    Claim(
        "coupling",
        1,
        "Top singular vectors of residual Jacobians align across layers, left with right; not at random init.",
        "95% interval above random bases and above random init's: detectable; and its lower end at least .2: held, .1: "
        "partly",
        ("coupling",),
        alignment,
    ),
    Claim(
        "coupling",
        2,
        "Token trajectories are close to straight lines; not at random init.",
        "95% interval below random init's: partly; and line-shape score at most 1.25: held",
        ("coupling",),
        straightness,
    ),
    Claim(
        "coupling",
        3,
        "Norms grow exponentially with depth; not at random init.",
        "95% interval of the exponential's R² above random init's: detectable; and R² at least .9: partly; and random "
        "init's below .9: held; open with one layer",
        ("coupling",),
        growth,
    ),
    Claim(
        "coupling",
        4,
        "Coupling rises during training.",
        "95% interval of the last checkpoint above that of the first: partly; and no checkpoint higher: held",
        ("emergence",),
        partial(over_training, name="coupling_coupling", words="coupling"),
        OF_COUPLING,
    ),
    Claim(
        "coupling",
        "4b",
        "Token trajectories become straighter during training.",
        "95% interval of the last checkpoint's line-shape score below that of the first: partly; and no checkpoint "
        "lower: held",
        ("emergence",),
        partial(over_training, name="coupling_line_shape_score", words="line-shape score", sign=-1),
        OF_COUPLING,
    ),
    Claim(
        "coupling",
        "4c",
        "The growth of norms with depth becomes exponential during training.",
        "95% interval of the last checkpoint's R² above that of the first: detectable; and R² at least .9: partly; and "
        "no checkpoint higher: held",
        ("emergence",),
        partial(over_training, name="coupling_growth_r2", words="R² of ln |x| against depth", least=EXPONENTIAL),
        OF_COUPLING,
    ),
    Claim(
        "coupling",
        5,
        "Top singular vectors align across the tokens of a layer; not at random init.",
        "95% intervals above random bases and above random init's, of one kind or more: detectable; of all three, and "
        "every lower end at least .2: held, .1: partly",
        ("token_coupling",),
        between_tokens,
    ),
    Claim(
        "coupling",
        6,
        "Over many models coupling goes with benchmark score.",
        "not judged of one model",
        ("coupling_scores",),
    ),
]

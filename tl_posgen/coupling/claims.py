"""Coupling of residual Jacobians: the claims of Aubry et al. 2024 (arXiv 2407.07810)."""

import math
from functools import partial

from tl_posgen.core.claim import (
    Claim,
    Judgement,
    Verdict,
    each_init,
    first_checkpoint,
    highest,
    judgement,
    lowest,
    margin_of,
    where_known,
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

    own = coupling.numbers
    low, high = own("coupling").low, highest(one("coupling").high for one in each_init(own))
    null = max(own("chance").value, high)
    verdict = "not held" if low <= null else strength(low)
    margin = margin_of("low end", low, 0.2, 0.1, null, digits=3)
    return judgement(where_known(verdict, low, null, high), words, coupling, margin=margin)


def strength(low: float) -> Verdict:
    """Return the verdict of a coupling above its nulls, by the lower end of its interval."""
    return "held" if low >= 0.2 else "partly" if low >= 0.1 else "detectable"


def straightness(coupling: Result) -> Judgement:
    def words(own: Numbers) -> str:
        layers = own.data.sizes["state"] - 1
        return f"line-shape score {own('line_shape_score').with_interval:.2f} over {layers} layers"

    own = coupling.numbers
    score, low = own("line_shape_score"), lowest(one("line_shape_score").low for one in each_init(own))
    verdict = "not held" if score.high >= low else "held" if score.value <= 1.25 else "partly"
    margin = f"{margin_of('score', score.value, 1.25)}; {margin_of('high end', score.high, low)}"
    return judgement(where_known(verdict, score.high, low), words, coupling, margin=margin)


def growth(coupling: Result) -> Judgement:
    def words(own: Numbers) -> str:
        r2, distance = (own(name).with_interval for name in ("growth_r2", "expodistance"))
        return f"R² of ln |x| against depth {r2:.2f}, expodistance {distance:.2f}"

    if coupling.own.sizes["state"] < 3:
        return Judgement("open", "one layer: a line through two states is exact", "not measured")
    r2 = coupling.numbers("growth_r2")
    high = highest(one("growth_r2").high for one in each_init(coupling.numbers))
    of_size = "held" if highest(r2.inits) < EXPONENTIAL else "partly"
    verdict = "not held" if r2.low <= high else of_size if r2.value >= EXPONENTIAL else "detectable"
    margin = f"{margin_of('R²', r2.value, EXPONENTIAL)}; {margin_of('low end', r2.low, high)}"
    return judgement(where_known(verdict, r2.low, high), words, coupling, margin=margin)


def over_training(emergence: Result, name: str, words: str, sign: int = 1, least: float = -math.inf) -> Judgement:
    """Judge whether a number rises during training, and ends at `least` or more; with the sign -1, whether it falls."""
    over = emergence.measure.at_steps(emergence.numbers, name)
    if len(over) < 2:
        return Judgement("open", f"{words} was not measured at two checkpoints or more", "not measured")
    numbers = [*over.values()]
    end, end_of_first = ("low", "high")[::sign]
    last, first = getattr(numbers[-1], end), getattr(numbers[0], end_of_first)
    furthest = "held" if max(sign * one.value for one in numbers) == sign * numbers[-1].value else "partly"
    furthest = furthest if numbers[-1].value >= least else "detectable"
    verdict = "not held" if sign * last <= sign * first else furthest
    course = ", ".join(f"{one.with_interval:.3f} at step {step}" for step, one in over.items())
    null = first_checkpoint(next(iter(over)))
    margin = margin_of(f"{end} end at last", last, first, digits=3)
    if math.isfinite(least):
        margin = f"{margin}; {margin_of('at last', numbers[-1].value, least)}"
    return Judgement(where_known(verdict, last, first), f"{words} {course}", null, margin)


def between_tokens(token_coupling: Result) -> Judgement:
    def words(own: Numbers) -> str:
        parts = [
            f"{kind_in_words} {own('coupling', kind=kind).with_interval:.3f}, random bases "
            f"{own('chance', kind=kind).plain:.3f}"
            for kind, kind_in_words in OF_TOKENS.items()
        ]
        return f"coupling of {own.data.sizes['token']} tokens within layers: {'; '.join(parts)}"

    own = token_coupling.numbers
    lows = [own("coupling", kind=kind).low for kind in OF_TOKENS]
    highs = [highest(one("coupling", kind=kind).high for one in each_init(own)) for kind in OF_TOKENS]
    chances = [own("chance", kind=kind).value for kind in OF_TOKENS]
    above = [low > max(chance, high) for low, chance, high in zip(lows, chances, highs, strict=True)]
    verdict = strength(min(lows)) if all(above) else "detectable" if any(above) else "not held"
    margins = [
        margin_of(f"{kind} low end", low, max(chance, high), digits=3)
        for kind, low, chance, high in zip(OF_TOKENS.values(), lows, chances, highs, strict=True)
    ]
    return judgement(where_known(verdict, *lows, *highs), words, token_coupling, margin="; ".join(margins))


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

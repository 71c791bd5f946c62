"""Coupling of residual Jacobians: the claims of Aubry et al. 2024 (arXiv 2407.07810)."""

from functools import partial

from tl_posgen.core.claim import (
    Claim,
    Criterion,
    Judgement,
    Verdict,
    each_null,
    first_checkpoint,
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
    """Return the lower end of a coupling, which has to be above random bases and the intervals of all null models."""
    own = result.numbers
    beyond = {"random bases": [own("chance", **labels).value], **ends_of_nulls(own, "coupling", "high", **labels)}
    low = own("coupling", **labels).low
    return Criterion(quantity, low, 0.2, 0.1, beyond, otherwise="detectable", digits=3)


def ends_of_nulls(own: Numbers, name: str, end: str, **labels: str) -> dict[str, list[float]]:
    """Return one end of the interval that a number has in each null model, by kind."""
    return {kind: [getattr(one(name, **labels), end) for one in each] for kind, each in each_null(own).items()}


def straightness(coupling: Result) -> Judgement:
    def words(own: Numbers) -> str:
        layers = own.data.sizes["state"] - 1
        return f"line-shape score {own('line_shape_score').with_interval:.2f} over {layers} layers"

    own = coupling.numbers
    lows = ends_of_nulls(own, "line_shape_score", "low")
    score = Criterion.of("score", own("line_shape_score"), 1.25, beyond=lows, otherwise="partly", sign=-1)
    return judgement(score.verdict, words, coupling, by=[score])


def growth(coupling: Result) -> Judgement:
    def words(own: Numbers) -> str:
        r2, distance = (own(name).with_interval for name in ("growth_r2", "expodistance"))
        return f"R² of ln |x| against depth {r2:.2f}, expodistance {distance:.2f}"

    if coupling.own.sizes["state"] < 3:
        return Judgement("open", "one layer: a line through two states is exact", "not measured")
    own, number = coupling.numbers, coupling.numbers("growth_r2")
    r2 = Criterion.of("R²", number, EXPONENTIAL, beyond=ends_of_nulls(own, "growth_r2", "high"), otherwise="detectable")
    is_part = r2.holds and max(number.nulls) >= EXPONENTIAL
    return judgement("partly" if is_part else r2.verdict, words, coupling, by=[r2])


def over_training(emergence: Result, name: str, words: str, sign: int = 1, least: float | None = None) -> Judgement:
    """Judge whether a number rises during training, and ends at `least` or more; with the sign -1, whether it falls."""
    over = emergence.measure.at_steps(emergence.numbers, name)
    if len(over) < 2:
        return Judgement("open", f"{words} was not measured at two checkpoints or more", "not measured")
    numbers = [*over.values()]
    end_of_first = "high" if sign > 0 else "low"
    first = {f"step {next(iter(over))}": [getattr(numbers[0], end_of_first)]}
    otherwise: Verdict = "held" if least is None else "detectable"
    last = Criterion.of("at last", numbers[-1], least, beyond=first, otherwise=otherwise, sign=sign, digits=3)
    verdict = last.verdict
    if verdict == "held" and max(sign * one.value for one in numbers) != sign * numbers[-1].value:
        verdict = "partly"
    course = ", ".join(f"{one.with_interval:.3f} at step {step}" for step, one in over.items())
    return Judgement(verdict, f"{words} {course}", first_checkpoint(next(iter(over)))).decided_by(last)


def between_tokens(token_coupling: Result) -> Judgement:
    def words(own: Numbers) -> str:
        parts = [
            f"{kind_in_words} {own('coupling', kind=kind).with_interval:.3f}, random bases "
            f"{own('chance', kind=kind).plain:.3f}"
            for kind, kind_in_words in OF_TOKENS.items()
        ]
        return f"coupling of {own.data.sizes['token']} tokens within layers: {'; '.join(parts)}"

    lows = [low_end(token_coupling, f"{words} low end", kind=kind) for kind, words in OF_TOKENS.items()]
    return judgement(joint_verdict(lows), words, token_coupling, margin="; ".join(one.margin for one in lows))


CLAIMS = [
    Claim(
        "coupling",
        1,
        "Top singular vectors of residual Jacobians align across layers, left with right; not at random init.",
        "95% interval above random bases and above those of all null models: detectable; and its lower end at least "
        ".2: held, .1: partly",
        ("coupling",),
        alignment,
    ),
    Claim(
        "coupling",
        2,
        "Token trajectories are close to straight lines; not at random init.",
        "95% interval below those of all null models: partly; and line-shape score at most 1.25: held",
        ("coupling",),
        straightness,
    ),
    Claim(
        "coupling",
        3,
        "Norms grow exponentially with depth; not at random init.",
        "95% interval of the exponential's R² above those of all null models: detectable; and R² at least .9: partly; "
        "and all of theirs below .9: held; open with one layer",
        ("coupling",),
        growth,
    ),
    Claim(
        "coupling",
        4,
        "Coupling rises during training.",
        "95% interval of the last checkpoint above that of the first, which is the null: partly; and no checkpoint "
        "higher: held",
        ("emergence",),
        partial(over_training, name="coupling_coupling", words="coupling"),
        OF_COUPLING,
    ),
    Claim(
        "coupling",
        "4b",
        "Token trajectories become straighter during training.",
        "95% interval of the last checkpoint's line-shape score below that of the first, which is the null: partly; "
        "and no checkpoint lower: held",
        ("emergence",),
        partial(over_training, name="coupling_line_shape_score", words="line-shape score", sign=-1),
        OF_COUPLING,
    ),
    Claim(
        "coupling",
        "4c",
        "The growth of norms with depth becomes exponential during training.",
        "95% interval of the last checkpoint's R² above that of the first, which is the null: detectable; and R² at "
        "least .9: partly; and no checkpoint higher: held",
        ("emergence",),
        partial(over_training, name="coupling_growth_r2", words="R² of ln |x| against depth", least=EXPONENTIAL),
        OF_COUPLING,
    ),
    Claim(
        "coupling",
        5,
        "Top singular vectors align across the tokens of a layer; not at random init.",
        "95% intervals above random bases and above those of all null models, of one kind or more: detectable; of all "
        "three, and every lower end at least .2: held, .1: partly",
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

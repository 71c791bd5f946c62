"""Coupling of residual Jacobians: the claims of Aubry et al. 2024 (arXiv 2407.07810)."""

from tl_posgen.core.claim import Claim, Judgement, both, highest, lowest, where_known
from tl_posgen.report.sentences import entry, with_interval
from tl_posgen.core.result import Result
from tl_posgen.summary import Summary

EXPONENTIAL = 0.9  # R² of ln |x| against depth


def alignment(coupling: Result) -> Judgement:
    def say(own: Summary) -> str:
        return (
            f"coupling {with_interval(own, 'coupling')}, random bases {own['chance']:.3f}, left with right "
            f"{own['swapped']:.3f}; signed {own['signed']:.3f}, random bases {own['chance_signed']:.3f}, "
            f"{own['negative_share']:.0%} of the diagonal negative"
        )

    own, low, high = coupling.summary, coupling.summary["coupling_low"], highest(coupling.null_summary, "coupling_high")
    verdict = "not held" if low <= max(own["chance"], high) else "held" if low >= 0.2 else "partly"
    return Judgement(where_known(verdict, low, high), *both(say, coupling))


def straightness(coupling: Result) -> Judgement:
    def say(own: Summary) -> str:
        return f"line-shape score {with_interval(own, 'line_shape_score', '.2f')} over {own['blocks']:g} layers"

    own = coupling.summary
    high, low = own["line_shape_score_high"], lowest(coupling.null_summary, "line_shape_score_low")
    verdict = "not held" if high >= low else "held" if own["line_shape_score"] <= 1.25 else "partly"
    return Judgement(where_known(verdict, high, low), *both(say, coupling))


def growth(coupling: Result) -> Judgement:
    def say(own: Summary) -> str:
        r2, distance = (with_interval(own, key, ".2f") for key in ("growth_r2", "expodistance"))
        return f"R² of ln |x| against depth {r2}, expodistance {distance}"

    own, null = coupling.summary, coupling.null_summary
    low, high = own["growth_r2_low"], highest(null, "growth_r2_high")
    alone = highest(null, "growth_r2") < EXPONENTIAL and low > high
    verdict = where_known("held" if alone else "partly", low, high)
    return Judgement(verdict if own["growth_r2"] >= EXPONENTIAL else "not held", *both(say, coupling))


def training(emergence: Result) -> Judgement:
    own = emergence.summary
    if "coupling_coupling" not in own:
        return Judgement("open", "coupling was not measured over training", "not measured")
    steps, key = own["steps"], "coupling_coupling_over_steps"
    top = steps.index(own["coupling_coupling_largest_step"])
    measured = ", ".join(
        f"{with_interval(entry(own, key, place), key)} at step {steps[place]}" for place in range(len(steps))
    )
    low, high = own["coupling_coupling_low"], own["coupling_coupling_first_high"]
    verdict = "not held" if low <= high else "held" if top == len(steps) - 1 else "partly"
    return Judgement(
        where_known(verdict, low, high), f"coupling {measured}", f"step {steps[0]} is the random initialisation"
    )


def between_tokens(token_coupling: Result) -> Judgement:
    def say(own: Summary) -> str:
        parts = [
            f"{words} {with_interval(own, kind)}, random bases {own[f'{kind}_chance']:.3f}"
            for kind, words in OF_TOKENS.items()
        ]
        return f"coupling of {own['tokens']} tokens within layers: {'; '.join(parts)}"

    own, null = token_coupling.summary, token_coupling.null_summary
    lows, highs = [own[f"{kind}_low"] for kind in OF_TOKENS], [highest(null, f"{kind}_high") for kind in OF_TOKENS]
    chances = [own[f"{kind}_chance"] for kind in OF_TOKENS]
    above = [low > max(chance, high) for low, chance, high in zip(lows, chances, highs, strict=True)]
    verdict = "held" if all(above) else "partly" if any(above) else "not held"
    return Judgement(where_known(verdict, *lows, *highs), *both(say, token_coupling))


OF_TOKENS = {"self": "own Jacobians", "same_input": "of one input", "same_output": "of one output"}
CLAIMS = [
    Claim(
        "coupling",
        1,
        "Top singular vectors of residual Jacobians align across layers, left with right; not at random init.",
        "95% interval above random bases and above random init's: partly; and its lower end at least .2: held",
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
        "R² of the exponential at least .9: partly; and random init's below .9, its 95% interval below the model's: "
        "held",
        ("coupling",),
        growth,
    ),
    Claim(
        "coupling",
        4,
        "Coupling rises during training.",
        "95% interval of the last checkpoint above that of the first: partly; and no checkpoint higher: held",
        ("emergence",),
        training,
        {"emergence": {"measures": ["coupling"]}},
    ),
    Claim(
        "coupling",
        5,
        "Top singular vectors align across the tokens of a layer; not at random init.",
        "95% intervals above random bases and above random init: of all three kinds held, of some partly",
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

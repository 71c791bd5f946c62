"""Coupling of residual Jacobians: the claims of Aubry et al. 2024 (arXiv 2407.07810)."""

import math

from tl_posgen.claim import Claim, Judgement, both, highest
from tl_posgen.report.sentences import with_interval
from tl_posgen.result import Result
from tl_posgen.summary import Summary


def alignment(coupling: Result) -> Judgement:
    def say(own: Summary) -> str:
        return (
            f"coupling {with_interval(own, 'coupling')}, random bases {own['chance']:.3f}, left with right "
            f"{own['swapped']:.3f}; signed {own['signed']:.3f}, random bases {own['chance_signed']:.3f}, "
            f"{own['negative_share']:.0%} of the diagonal negative"
        )

    own, null = coupling.summary, coupling.null_summary
    least, low = max(own["chance"], highest(null, "coupling_high")), own["coupling_low"]
    above = "held" if low >= max(0.2, least) else "partly" if low > least else "not held"
    verdict = "open" if math.isnan(low) else above  # one prompt has no interval
    return Judgement(verdict, *both(say, coupling))


def straightness(coupling: Result) -> Judgement:
    def say(own: Summary) -> str:
        return f"line-shape score {with_interval(own, 'line_shape_score', '.2f')} over {own['blocks']:g} layers"

    value, null = coupling.summary["line_shape_score"], coupling.null_summary
    straighter = null is not None and value < null["line_shape_score"]
    verdict = "held" if value <= 1.25 else "partly" if straighter else "not held"
    return Judgement(verdict, *both(say, coupling))


def growth(coupling: Result) -> Judgement:
    def say(own: Summary) -> str:
        r2, distance = (with_interval(own, key, ".2f") for key in ("growth_r2", "expodistance"))
        return f"R² of ln |x| against depth {r2}, expodistance {distance}"

    value, null = coupling.summary["growth_r2"], coupling.null_summary
    above = value > highest(null, "growth_r2")
    verdict = "not held" if value < 0.9 else "held" if above else "partly"
    return Judgement(verdict, *both(say, coupling))


def training(emergence: Result) -> Judgement:
    own = emergence.summary
    if "coupling_coupling" not in own:
        return Judgement("open", "coupling was not measured over training", "not measured")
    steps, values = own["steps"], own["coupling_coupling_over_steps"]
    top = steps.index(own["coupling_coupling_largest_step"])
    measured = ", ".join(f"{values[at]:.3f} at step {steps[at]}" for at in sorted({0, top, len(values) - 1}))
    risen = own["coupling_coupling_low"] > own["coupling_coupling_first_high"]
    verdict = "held" if risen and top == len(values) - 1 else "partly" if risen else "not held"
    return Judgement(verdict, f"coupling {measured}", f"step {steps[0]} is the random initialisation")


def between_tokens(token_coupling: Result) -> Judgement:
    def say(own: Summary) -> str:
        parts = [
            f"{words} {with_interval(own, kind)}, random bases {own[f'{kind}_chance']:.3f}"
            for kind, words in OF_TOKENS.items()
        ]
        return f"coupling of {own['tokens']} tokens within layers: {'; '.join(parts)}"

    own, null = token_coupling.summary, token_coupling.null_summary
    if any(math.isnan(own[f"{kind}_low"]) for kind in OF_TOKENS):
        return Judgement("open", *both(say, token_coupling))
    above = [own[f"{kind}_low"] > max(own[f"{kind}_chance"], highest(null, f"{kind}_high")) for kind in OF_TOKENS]
    verdict = "held" if all(above) else "partly" if any(above) else "not held"
    return Judgement(verdict, *both(say, token_coupling))


OF_TOKENS = {"self": "own Jacobians", "same_input": "of one input", "same_output": "of one output"}
CLAIMS = [
    Claim(
        "coupling",
        1,
        "Top singular vectors of residual Jacobians align across layers, left with right; not at random init.",
        "95% interval above random bases and above random init: partly; and coupling at least .2: held",
        ("coupling",),
        alignment,
    ),
    Claim(
        "coupling",
        2,
        "Token trajectories are close to straight lines; not at random init.",
        "line-shape score at most 1.25: held; below random init: partly",
        ("coupling",),
        straightness,
    ),
    Claim(
        "coupling",
        3,
        "Norms grow exponentially with depth; not at random init.",
        "R² of the exponential at least .9 and above random init: held; the first alone: partly",
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

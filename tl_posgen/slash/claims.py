"""The slash pattern: the claims of Cheng et al. 2026 (arXiv 2601.08297), and how each is judged."""

from tl_posgen.claim import Claim, Judgement, both, threshold
from tl_posgen.report.sentences import said
from tl_posgen.result import Result
from tl_posgen.slash.band_ablation import of_condition
from tl_posgen.slash.cone_figures import BEST
from tl_posgen.slash.head_groups import count, in_groups
from tl_posgen.slash.slash_ablation import in_words
from tl_posgen.summary import Summary

CONDITIONS = ("unchanged", "drop high, thirds", "drop medium, thirds", "drop low, thirds", "no_rope")


def random_tokens(slash_transfer: Result) -> Judgement:
    def say(own: Summary) -> str:
        lists = (own[key] for key in ("distances", "pearson", "n_natural", "n_random", "jaccard"))
        parts = []
        for at, r, natural, random, jaccard in list(zip(*lists, strict=True))[:3]:
            overlap = f", Jaccard {jaccard:.2f}" if natural + random else ""
            parts.append(f"D = {at}: r {r:.2f}, {natural:.3g} and {count(random)}{overlap}")
        return "; ".join(parts)

    least = slash_transfer.summary["least_pearson_where_dominant"]
    return Judgement(threshold(least, 0.9, 0.6), *both(say, slash_transfer))


def rank_one(cone: Result) -> Judgement:
    def say(own: Summary) -> str:
        return f"r1 of Q and K {in_groups(own, ['r1_q', 'r1_k'], form='.2f')}"

    own = cone.summary
    least = min(own["r1_q_dominant"], own["r1_k_dominant"]) if own["n_dominant"] else float("nan")
    return Judgement(threshold(least, 0.9, 0.7), *both(say, cone))


def axis(cone: Result) -> Judgement:
    def say(own: Summary) -> str:
        words = f"the axis gains {own['gain_q']:.1f} times in W_Q, {own['gain_k']:.1f} in W_K"
        if not own["n_dominant"]:
            return f"{words}; no head is slash-dominant"
        measured, alone, rest, uniform = (said(own[f"{name}_dominant"], ".2f") for name in BEST)
        return f"{words}; slash score {measured}, axis alone {alone}, the rest {rest}, uniform {uniform}"

    return Judgement(threshold(cone.summary["axis_part"], 0.75, 0.4), *both(say, cone))


def frequencies(band_ablation: Result) -> Judgement:
    def say(own: Summary) -> str:
        names = [in_words(condition).removesuffix(", thirds") for condition in CONDITIONS]
        scores = [of_condition(own, "slash_score", condition) for condition in CONDITIONS]
        losses = [f"{of_condition(own, 'loss', condition):.2f}" for condition in CONDITIONS]
        parts = [f"{name} {score:.2f}" for name, score in zip(names, scores, strict=True)]
        return f"slash score in the running model: {', '.join(parts)}; loss {', '.join(losses)}"

    own = band_ablation.summary
    whole, high, _, low, _ = (of_condition(own, "slash_score", condition) for condition in CONDITIONS)
    verdict = "held" if high <= 0.25 * whole and low >= 0.75 * whole else "partly" if high <= 0.5 * low else "not held"
    return Judgement(verdict, *both(say, band_ablation))


def training(slash_toy: Result) -> Judgement:
    own = slash_toy.summary
    measured = (
        f"shallow RoPE transformer of {own['seeds']} seeds, slash score at D = {own['distance']}: "
        f"{own['score_trained_mean']:.2f} on trained features, {own['score_unseen_mean']:.2f} on unseen ones; r1 of Q "
        f"{own['r1_q_end_mean']:.2f}, of K {own['r1_k_end_mean']:.2f}"
    )
    null = f"before training {own['score_at_start']:.3f}, uniform attention {own['uniform']:.3f}"
    everywhere = own["formed"] == own["seeds"]
    unseen = own["score_unseen_mean"] >= 0.5
    return Judgement("held" if everywhere and unseen else "partly" if everywhere else "not held", measured, null)


CLAIMS = [
    Claim(
        "slash",
        1,
        "Slash-dominant heads belong to the model: the same heads, with like scores, on random tokens.",
        "least correlation of scores over heads, at the distances where heads are dominant: .9 held, .6 partly",
        ("slash_transfer",),
        random_tokens,
    ),
    Claim(
        "slash",
        2,
        "Queries and keys of slash-dominant heads are almost of rank one before RoPE.",
        "share of the first singular direction in dominant heads, Q and K: .9 held, .7 partly",
        ("cone",),
        rank_one,
    ),
    Claim(
        "slash",
        3,
        "Inputs of the attention lie on a cone, and W_Q and W_K project onto its axis: hence rank one.",
        "share of dominant heads' slash score, above uniform, that the axis part alone makes: .75 held, .4 partly",
        ("cone",),
        axis,
    ),
    Claim(
        "slash",
        4,
        "Medium and high frequencies of RoPE make the slash, low ones do not.",
        "without the high third at most a quarter of the slash score is left, without the low third three quarters; "
        "partly: the high third costs twice as much as the low",
        ("band_ablation",),
        frequencies,
    ),
    Claim(
        "slash",
        5,
        "Gradient descent makes slash-dominant heads in a shallow RoPE transformer, and they generalise.",
        "slash score of at least .5 in every seed: partly; and on unseen features: held; a toy of ours, not this model",
        ("slash_toy",),
        training,
    ),
]

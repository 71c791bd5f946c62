"""The slash pattern: the claims of Cheng et al. 2026 (arXiv 2601.08297), and how each is judged."""

from tl_posgen.core.claim import Claim, Judgement, Verdict, both, threshold
from tl_posgen.report.sentences import entry, with_interval
from tl_posgen.core.result import Result
from tl_posgen.rope.frequency_bands import BANDS
from tl_posgen.slash.band_ablation import SCHEMES, of_condition
from tl_posgen.slash.cone_figures import BEST
from tl_posgen.slash.head_groups import count, in_groups
from tl_posgen.slash.slash_ablation import in_words
from tl_posgen.summary import Summary


def random_tokens(slash_transfer: Result) -> Judgement:
    def say(own: Summary) -> str:
        lists = (own[key] for key in ("distances", "n_natural", "n_random", "jaccard"))
        parts = []
        for place, (at, natural, random, jaccard) in enumerate(zip(*lists, strict=True)):
            overlap = f", Jaccard {jaccard:.2f}" if natural + random else ""
            r = with_interval(entry(own, "pearson", place), "pearson", ".2f")
            parts.append(f"D = {at}: r {r}, {natural:.3g} and {count(random)}{overlap}")
        return f"over heads, {'; '.join(parts)}"

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
        gains = (with_interval(own, f"gain_{side}", ".1f") for side in "qk")
        words = f"the axis gains {' times in W_Q, '.join(gains)} in W_K"
        if not own["n_dominant"]:
            return f"{words}; no head is slash-dominant"
        measured, alone, rest, uniform = (with_interval(own, f"{name}_dominant", ".2f") for name in BEST)
        return (
            f"{words}; slash score {measured}, axis alone {alone}, the rest {rest}, uniform {uniform}; the axis part "
            f"makes {with_interval(own, 'axis_part', '.0%')} of it above uniform"
        )

    return Judgement(threshold(cone.summary["axis_part"], 0.75, 0.4), *both(say, cone))


def frequencies(band_ablation: Result) -> Judgement:
    def say(own: Summary) -> str:
        heads = "" if own["slash_heads"][0] else " of all heads, none dominant,"
        unchanged = f"slash score{heads} in the running model {at(own, 'unchanged')}"
        parts = [f"{unchanged}, {in_words('no_rope')} {at(own, 'no_rope')}"]
        for scheme in schemes_of(own):
            dropped = ", ".join(f"{band} {at(own, f'drop {band}, {scheme}')}" for band in BANDS)
            parts.append(f"by {scheme} without {dropped}, low alone {at(own, f'keep low, {scheme}')}")
        return "; ".join(parts)

    def at(own: Summary, condition: str) -> str:
        place = own["conditions"].index(condition)
        score, change = (entry(own, key, place) for key in ("slash_score", "loss_change"))
        rise = "" if condition == "unchanged" else f" (loss {with_interval(change, 'loss_change', '+.2f')})"
        return f"{with_interval(score, 'slash_score', '.2f')}{rise}"

    own = band_ablation.summary
    by_scheme: dict[str, Verdict] = {scheme: frequencies_by(own, scheme) for scheme in schemes_of(own)}
    found: dict[str, Verdict] = {scheme: one for scheme, one in by_scheme.items() if one != "open"}
    verdicts = list(dict.fromkeys(found.values()))
    verdict: Verdict = verdicts[0] if verdicts else "open"
    if len(verdicts) > 1:
        verdict = "partly" if "held" in verdicts else "not held"
    measured, null = both(say, band_ablation)
    if len(verdicts) > 1:
        told = ", ".join(f"{one} by {scheme}" for scheme, one in found.items())
        measured = f"the two ways of making bands disagree: {told}; {measured}"
    elif found and len(found) < len(by_scheme):
        measured = f"judged by {next(iter(found))} alone, as by the other a band has no plane; {measured}"
    return Judgement(verdict, measured, null)


def schemes_of(own: Summary) -> list[str]:
    return [scheme for scheme in SCHEMES if f"drop low, {scheme}" in own["conditions"]]


def frequencies_by(own: Summary, scheme: str) -> Verdict:
    """The verdict under one way of making bands; open where no head is dominant, or some band has no plane."""

    def left(condition: str) -> float:
        return of_condition(own, "slash_score", f"{condition}, {scheme}") / of_condition(
            own, "slash_score", "unchanged"
        )

    planes = [of_condition(own, "n_planes", f"drop {band}, {scheme}") for band in BANDS]
    if not own["slash_heads"][0] or not all(planes):
        return "open"
    high, medium, low = (left(f"drop {band}") for band in BANDS)
    if low >= 0.75 > max(high, medium) and left("keep low") <= 0.25:
        return "held"
    of_others = 1 - (high + medium) / 2
    return "partly" if of_others >= 0.25 and 1 - low <= 0.5 * of_others else "not held"


def training(slash_toy: Result) -> Judgement:
    own = slash_toy.summary
    measured = (
        f"shallow RoPE transformer, {own['seeds']} seeds of {own['steps']} steps, slash score at D = "
        f"{own['distance']}: {own['score_trained_mean']:.2f} on trained features (least "
        f"{own['score_trained_least']:.2f}), {own['score_unseen_mean']:.2f} on unseen ones (least "
        f"{own['score_unseen_least']:.2f}); r1 of Q {own['r1_q_end_mean']:.2f}, of K {own['r1_k_end_mean']:.2f}"
    )
    null = f"before training {own['score_at_start']:.3f}, uniform attention {own['uniform']:.3f}"
    everywhere, unseen = (own[f"score_{features}_least"] >= 0.5 for features in ("trained", "unseen"))
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
        "without the low band three quarters of the slash score are left, without the high and without the medium one "
        "less, on the low one alone at most a quarter: held; the others cost a quarter in the mean, and the low one at "
        "most half of that: partly. By thirds and by wavelength, or by one of them where the other has a band without "
        "a plane; where they disagree, partly if one holds, else not held",
        ("band_ablation",),
        frequencies,
    ),
    Claim(
        "slash",
        5,
        "Gradient descent makes slash-dominant heads in a shallow RoPE transformer, and they generalise.",
        "slash score at the end at least .5 in every seed: partly; and on unseen features: held; a toy, not this model",
        ("slash_toy",),
        training,
    ),
]

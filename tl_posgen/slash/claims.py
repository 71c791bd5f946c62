"""The slash pattern: the claims of Cheng et al. 2026 (arXiv 2601.08297), and how each is judged."""

from collections.abc import Sequence

from tl_posgen.core.claim import Claim, Criterion, Judgement, Verdict, joint_verdict, judgement, or_lacking
from tl_posgen.core.formatting import counted
from tl_posgen.core.measure import HEAD
from tl_posgen.core.numbers import Number, Numbers, leave_one_out
from tl_posgen.core.result import Result
from tl_posgen.rope.frequency_bands import BANDS
from tl_posgen.slash.band_ablation import SCHEMES
from tl_posgen.slash.cone import INPUTS
from tl_posgen.slash.head_groups import count, group_mean, in_groups, mean_of_slash_heads, n_heads
from tl_posgen.slash.numbers.slash_scores import LONG, long_distances
from tl_posgen.slash.slash_ablation import WHOLE_KINDS
from tl_posgen.slash.slash_toy import FEATURES
from tl_posgen.stats.intervals import FEWEST

OUT = {"tokens": "without first"}


def random_tokens(slash_transfer: Result) -> Judgement:
    def words(own: Numbers) -> str:
        parts = []
        for at in own.data["short_distance"].values:
            r, jaccard = (own(name, short_distance=at) for name in ("pearson", "jaccard"))
            natural, random = (own("n_dominant", source=one, short_distance=at).value for one in ("natural", "random"))
            overlap = f", Jaccard {jaccard.plain:.2f}" if natural + random else ""
            parts.append(f"D = {at}: r {r.with_interval:.2f}, {natural:.3g} and {count(random)}{overlap}")
        return f"over heads, {'; '.join(parts)}"

    own, counts = slash_transfer.numbers, slash_transfer.numbers.data["n_dominant"]
    found = counts.sel(tokens="all", source="natural")
    rs = {at: own("pearson", short_distance=at) for at in found["short_distance"].values[found.values > 0]}
    by = [Criterion.of(f"r at D = {at}", r, 0.9, partly=0.6) for at, r in rs.items()]
    if not by:
        return judgement("open", words, slash_transfer, margin="no head is slash-dominant")
    return judgement(joint_verdict(by), words, slash_transfer, by=by)


def rank_one(cone: Result) -> Judgement:
    def words(own: Numbers) -> str:
        return f"r1 of Q and K {in_groups(own, 'r1', form='.2f')}"

    def criterion(side: str) -> Criterion:
        heads, dominant = own("r1", side=side), group_mean(own, "r1", "dominant", side=side)
        of_dominant = or_lacking(dominant.by_null)
        beyond = {kind: [*each, *of_dominant[kind]] for kind, each in heads.by_null.items()}
        return Criterion.of(f"r1 of {side.upper()}", dominant, 0.9, partly=0.7, beyond=beyond, digits=3)

    own = cone.numbers
    by = [criterion(side) for side in "qk"]
    return judgement(joint_verdict(by), words, cone, by=by)


def on_a_cone(cone: Result) -> Judgement:
    def words(own: Numbers) -> str:
        return f"cosine of the inputs with their axis {own('cosine').with_interval:.2f}, mean over layers"

    cosine = cone.numbers("cosine")
    low = Criterion("low end", cosine.low, 0.7, beyond=cosine.by_null, otherwise="partly")
    return judgement(low.verdict, words, cone, by=[low])


def onto_the_axis(cone: Result) -> Judgement:
    def words(own: Numbers) -> str:
        q, k = (own("gain", side=side).with_interval for side in "qk")
        return f"the axis gains {q:.1f} times in W_Q, {k:.1f} in W_K, mean over heads"

    def low_end(side: str) -> Criterion:
        gain, name = cone.numbers("gain", side=side), f"low end of {side.upper()}"
        return Criterion(name, gain.low, 2.0, 1.5, gain.by_null, otherwise="detectable")

    lows = [low_end(side) for side in "qk"]
    return judgement(joint_verdict(lows), words, cone, margin="; ".join(one.margin for one in lows))


def of_the_axis(cone: Result) -> Judgement:
    measure = cone.measure

    def words(own: Numbers) -> str:
        if not n_heads(own, "dominant").value:
            return f"of {count(n_heads(own, 'other').value)} none is slash-dominant"
        measured, alone, rest = (group_mean(own, "best_score", "dominant", input=one).with_interval for one in INPUTS)
        uniform = group_mean(own, "best_uniform", "dominant").with_interval
        ratios = [measure.ratio_above_uniform(own, part).with_interval for part in INPUTS[1:]]
        return (
            f"slash score of dominant heads {measured:.2f}, axis alone {alone:.2f}, the rest {rest:.2f}, uniform "
            f"{uniform:.2f}: above uniform, the axis alone makes {ratios[0]:.2f} times the measured, the rest "
            f"{ratios[1]:.2f} times"
        )

    own = cone.numbers
    ratios = [measure.ratio_above_uniform(own, part).value for part in INPUTS[1:]]
    more = measure.ratio_above_uniform(own, INPUTS[1], less=INPUTS[2])
    alone = Criterion("axis alone", ratios[0], 0.75, 0.4)
    rest = Criterion("the rest", ratios[1], 0.25, sign=-1)
    apart = Criterion.of("more than the rest", more, beyond=or_lacking(more.by_null), otherwise="held")
    is_part = alone.verdict != "not held" and more.value > 0
    verdict = "held" if alone.holds and rest.holds else "partly" if is_part else "not held"
    return judgement(verdict, words, cone, by=[alone, rest, apart])


def frequencies(band_ablation: Result) -> Judgement:
    measure, schemes = band_ablation.measure, schemes_of(band_ablation)

    def words(own: Numbers) -> str:
        heads = "" if measure.n_heads(own).value else " of all heads, none dominant,"
        unchanged = f"slash score{heads} in the running model {measure.slash_score(own).with_interval:.2f}"
        parts = [f"{unchanged}, {WHOLE_KINDS['no_rope']} {at(own, 'no_rope')}"]
        for scheme in schemes:
            dropped = ", ".join(f"{band} {at(own, f'drop {band}, {scheme}')}" for band in BANDS)
            parts.append(f"by {scheme} without {dropped}, low alone {at(own, f'keep low, {scheme}')}")
        return "; ".join(parts)

    def at(own: Numbers, condition: str) -> str:
        score, change = measure.slash_score(own, condition), measure.rise(own, condition)
        return f"{score.with_interval:.2f} (loss {change.with_interval:+.2f})"

    by_scheme: dict[str, Verdict] = {scheme: frequencies_by(band_ablation, scheme) for scheme in schemes}
    known: dict[str, Verdict] = {scheme: one for scheme, one in by_scheme.items() if one != "open"}
    shares = {scheme: shares_left(band_ablation, scheme) for scheme in known}
    margins = [f"{scheme}: {', '.join(share.margin for share in each)}" for scheme, each in shares.items()]
    as_good = any(share.is_beyond is False for each in shares.values() for share in each)  # a null does as well
    verdict = "not held" if as_good else combined([*known.values()])
    found = judgement(verdict, words, band_ablation, margin="; ".join(margins))
    if len({*known.values()}) > 1:
        each = ", ".join(f"{one} by {scheme}" for scheme, one in known.items())
        return found._replace(measured=f"the two ways of making bands disagree: {each}; {found.measured}")
    if known and len(known) < len(schemes):
        alone = f"judged by {next(iter(known))} alone, as by the other a band has no plane"
        return found._replace(measured=f"{alone}; {found.measured}")
    return found


def schemes_of(band_ablation: Result) -> list[str]:
    """Return the ways of making bands that were measured."""
    return [one for one in SCHEMES if f"drop low, {one}" in band_ablation.own["condition"].values]


def combined(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict of both ways of making bands: where they disagree, partly if one holds, else not held."""
    if len({*verdicts}) > 1:
        return "partly" if "held" in verdicts else "not held"
    return verdicts[0] if verdicts else "open"


def frequencies_by(band_ablation: Result, scheme: str) -> Verdict:
    """Return the verdict under one way of making bands; open where no head is dominant, or some band has no plane."""
    measure, own = band_ablation.measure, band_ablation.numbers
    planes = [own.data["n_planes"].sel(condition=f"drop {band}, {scheme}").any() for band in BANDS]
    if not measure.n_heads(own).value or not all(planes):
        return "open"
    high, medium, low, low_alone, more = shares_left(band_ablation, scheme)
    if not more.holds:
        return more.verdict
    if low.holds and low_alone.holds and high.verdict == medium.verdict == "not held":
        return "held"
    of_others = 1 - (high.value + medium.value) / 2
    return "partly" if of_others >= 0.25 and 1 - low.value <= 0.5 * of_others else "not held"


def shares_left(band_ablation: Result, scheme: str) -> list[Criterion]:
    """Return the shares of the unchanged slash score that are left without each band, and on the low one alone; and how
    much more is left without the low band than without the others, which has to be beyond the nulls."""
    own, scores = band_ablation.numbers, mean_of_slash_heads(band_ablation.dataset)
    scores = leave_one_out(scores) if scores.sizes["prompt"] >= FEWEST else scores.mean("prompt")
    left = scores / scores.sel(condition="unchanged")
    high, medium, low = dropped = [left.sel(condition=f"drop {band}, {scheme}", drop=True) for band in BANDS]
    low_alone = own.number(left.sel(condition=f"keep low, {scheme}"))
    return [
        *(Criterion(f"without {band}", own.number(one).value, 0.75) for band, one in zip(BANDS, dropped, strict=True)),
        Criterion("low alone", low_alone.value, 0.25, sign=-1),
        Criterion.of("more without low than without others", own.number(low - (high + medium) / 2), otherwise="held"),
    ]


def training(slash_toy: Result) -> Judgement:
    own, measure = slash_toy.numbers, slash_toy.measure
    trained, unseen = (own.array("score", features=features).isel(step=-1) for features in FEATURES)
    means = [f"{measure.over_seeds(one).plain:.2f}" for one in (trained, unseen)]
    least = [float(one.min(skipna=False)) for one in (trained, unseen)]
    r1_q, r1_k = (measure.at_end(own, "r1", side=side).plain for side in "qk")
    measured = (
        f"shallow RoPE transformer, {counted(len(measure.seeds), 'seed')} of {measure.steps} steps, slash score at D = "
        f"{measure.distance}: {means[0]} on trained features (least {least[0]:.2f}), {means[1]} on unseen ones (least "
        f"{least[1]:.2f}); r1 of Q {r1_q:.2f}, of K {r1_k:.2f}"
    )
    start, uniform = own("score", features="trained", step=0), own("uniform", distance=measure.distance)
    null = f"before training {start.plain:.3f}, uniform attention {uniform.plain:.3f}"
    beyond = {"before training": [start.value], "uniform attention": [uniform.value]}
    by = [Criterion(f"least, {name}", one, 0.5, beyond=beyond) for name, one in zip(FEATURES, least, strict=True)]
    verdict = "not held" if not by[0].holds else "held" if by[1].holds else "partly"
    return Judgement(verdict, measured, null).decided_by(*by)


def far_away(slash: Result) -> Judgement:
    def words(own: Numbers) -> str:
        heads = own.number(own.array("n_long", **OUT).notnull().sum(HEAD))
        found = f"{n_far(own).plain:.3g} of {counted(heads.value, 'head')}"
        return f"{found} at {LONG} tokens or further, without the first token"

    own = slash.numbers
    if not len(long_distances(own.data.sizes["distance"])):
        return Judgement("open", f"not measured: no prompt has {2 * LONG} tokens", "not measured")
    far = own.data["uniform"].sel(distance=list(long_distances(own.data.sizes["distance"])))
    if not (far > 0).any():
        return Judgement("open", f"windows end before {LONG} tokens", "not measured")
    heads = Criterion("heads", n_far(own).value, beyond=n_far(own).by_null, otherwise="held", digits=0)
    return judgement(heads.verdict, words, slash, by=[heads])


def n_far(own: Numbers) -> Number:
    """Return how many heads are slash-dominant at a long distance."""
    return own.number((own.array("n_long", **OUT) > 0).sum(HEAD))


CLAIMS = [
    Claim(
        "slash",
        1,
        "Slash-dominant heads belong to the model: the same heads, with like scores, on random tokens.",
        "correlation of scores over heads, at every distance where heads are dominant: .9 held, .6 partly",
        ("slash_transfer",),
        random_tokens,
    ),
    Claim(
        "slash",
        2,
        "Queries and keys of slash-dominant heads are almost of rank one before RoPE.",
        "share of the first singular direction in dominant heads, Q and K: .9 held, .7 partly; a null model's is that "
        "of all its heads, and of its dominant ones where it has any",
        ("cone",),
        rank_one,
    ),
    Claim(
        "slash",
        "3a",
        "Inputs of the attention lie on a cone.",
        "95% interval of the mean cosine with their axis above every null model's: partly; and its lower end at least "
        ".7: held",
        ("cone",),
        on_a_cone,
    ),
    Claim(
        "slash",
        "3b",
        "W_Q and W_K project onto the axis of the cone.",
        "95% interval of the axis's gain above every null model's, of one or both: detectable; of both, and each lower "
        "end at least 2: held, 1.5: partly",
        ("cone",),
        onto_the_axis,
    ),
    Claim(
        "slash",
        "3c",
        "With only the part of the inputs along the cone's axis in W_Q and W_K, slash-dominant heads keep their slash; "
        "with only the rest they lose it.",
        "dominant heads' slash score above uniform: with the axis part alone at least .75 times the measured and with "
        "the rest at most .25 times: held; .4 times and more than with the rest: partly; what has to be beyond the "
        "null is how much more; a null model without dominant heads does not do as well",
        ("cone",),
        of_the_axis,
    ),
    Claim(
        "slash",
        4,
        "Medium and high frequencies of RoPE make the slash, low ones do not.",
        "without the low band three quarters of the slash score are left, without the high and without the medium one "
        "less, on the low one alone at most a quarter: held; the others cost a quarter in the mean, and the low one at "
        "most half of that: partly. By thirds and by wavelength, or by one of them where the other has a band without "
        "a plane; where they disagree, partly if one holds, else not held. What has to be beyond the null is how much "
        "more is left without the low band than without the others, in its own dominant heads, or all if it has none",
        ("band_ablation",),
        frequencies,
        {"band_ablation": {"schemes": ("thirds", "wavelength")}},
    ),
    Claim(
        "slash",
        5,
        "Gradient descent makes slash-dominant heads in a shallow RoPE transformer, and they generalise.",
        "slash score at the end at least .5 in every seed: partly; and on unseen features: held; a toy, not this "
        "model, whose nulls are the score before training and that of uniform attention",
        ("slash_toy",),
        training,
    ),
    Claim(
        "slash",
        6,
        "Some heads are slash-dominant at long distances.",
        "heads dominant at some distance from 50 tokens to half the prompt, without the first token, which many heads "
        "attend to from everywhere: more than in any null model (a count, without an interval): held",
        ("slash",),
        far_away,
    ),
]

"""The claims of papers on RoPE's frequencies, and two of ours, each with its numbers, thresholds and what would speak
against it; of most papers only abstracts, repositories and others' notes could be read: "as we read it"."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import xarray as xr

from tl_posgen.claims.judging import Claim, Criterion, Group, or_lacking
from tl_posgen.core.formatting import counted
from tl_posgen.core.measure import HEAD
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.result import Result
from tl_posgen.frequencies.numbers.use import step_of
from tl_posgen.frequencies.plane_use import SINK
from tl_posgen.frequencies.recall import CONTROL, DRAWN, FASTEST, SLOWEST

_DIAGONAL = 0.3  # attention at a distance from which a head is a diagonal or previous-token head
_RECALLED = 0.3  # of the copy: a model that recalls less has too little to lose
_FEWEST_MASSIVE = 10  # coordinates in all heads, below which a share of them says nothing
_TURNED = 0.5  # radians in a prompt, below which a plane hardly turns at all


def _thirds(array: xr.DataArray) -> tuple[xr.DataArray, xr.DataArray]:
    """Return the fastest and the slowest third of an array's planes."""
    third = 3 * np.arange(array.sizes["plane"]) // array.sizes["plane"]
    return array.isel(plane=third == 0), array.isel(plane=third == 2)


def _turning(plane_use: Result) -> np.ndarray:
    """Return which planes turn in any layer; the unrotated rest of partial rotary does not, nor a layer without RoPE,
    whose turns are NaN."""
    turns = plane_use.trained["turns"]
    turning = (turns > 0).any([dim for dim in turns.dims if dim != "plane"]).values
    return turning | ~turning.any()  # all, where none is known to turn


def _mean_of(array: xr.DataArray, heads: xr.DataArray) -> xr.DataArray:
    """Return the mean over the heads of a group; NaN where it has none."""
    return array.where(heads, 0).sum(HEAD) / heads.sum(HEAD)


def _lengths(planes: Result, **at: float) -> list[Criterion]:
    numbers = planes.numbers
    turning = np.isfinite(numbers.data["wavelength"].values).any(0)
    criteria = []
    for side in "qk":
        fast, slow = _thirds(numbers.array("magnitude", side=side, first_token=False).isel(plane=turning))
        ratio = np.exp(np.log(slow.mean("plane") / fast.mean("plane")).mean(HEAD))
        criteria.append(Criterion.of(f"slow third / fast third of {side}", numbers.number(ratio), **at))
    return criteria


def _band(plane_use: Result, held: float) -> list[Group]:
    numbers = plane_use.numbers
    use = numbers.array("use")
    n_planes = use.sizes["plane"]
    step = step_of(n_planes)
    profile = use.mean("head").isel(plane=_turning(plane_use))
    away = profile["plane"] - profile.fillna(-1).idxmax("plane")
    of_band, of_slower = (profile.where(mask).mean("plane") * n_planes for mask in (abs(away) <= step, away > step))
    band = Criterion.of("the longest band, x uniform", numbers.number(of_band), held, otherwise="partly")
    slower = Criterion.without_nulls("slower planes", numbers.number(of_slower), 1.0, sign=-1)
    return [Group.of(band.holds and slower.holds, band.value > slower.value, [band, slower])]


def _partial(plane_use: Result, **at: float) -> list[Criterion]:
    numbers = plane_use.numbers
    partial = numbers("partial")
    beyond = {"all planes": [numbers("partial_planes").value], **partial.by_null}
    return [Criterion.of("heads whose longest plane is partial", partial, **at, beyond=beyond)]


def _half_turn(plane_use: Result, **at: float) -> list[Group]:
    """Return the criterion of the context that fits best, and the numbers of others beside it."""
    numbers, criteria = plane_use.numbers, []
    for context in numbers.data["context"].values.tolist():
        share = numbers("at_half_turn", context=context)
        beyond = {"chance": [numbers("chance", context=context).value], **share.by_null}
        quantity = f"heads at the half-turn plane of {context:,} tokens"
        criteria.append(Criterion.of(quantity, share, **at, beyond=beyond))
    best, *other_contexts = sorted(criteria, key=lambda criterion: -np.nan_to_num(criterion.value))
    return [
        Group(
            best.verdict,
            [best, *(replace(criterion, partly=None, beyond=None, end=None) for criterion in other_contexts)],
        )
    ]


def _massive(plane_use: Result, a_head: float, times: float) -> list[Group]:
    numbers = plane_use.numbers
    q, k, v = (numbers("massive", vector=vector) for vector in plane_use.measure.labels()["vector"])
    of_qk = [
        Criterion.of(f"massive coordinates a head, {side}", number, end=None, otherwise="held")
        for side, number in (("q", q), ("k", k))
    ]
    least = min(q.value, k.value)
    is_held = least >= a_head and least >= times * v.value
    return [Group.of(is_held, least > v.value, [*of_qk, Criterion.beside("v", v)])]


def _no_massive(plane_use: Result) -> str:
    n = float(plane_use.trained["massive"].sel(vector=["q", "k"]).sum())
    why = f"not measured: {counted(round(n), 'coordinate')} of queries and keys above five times the mean of their head"
    return "" if n >= _FEWEST_MASSIVE else f"{why}, too few"


def _massive_slow(plane_use: Result, **at: float) -> list[Criterion]:
    numbers = plane_use.numbers
    massive = numbers.array("massive").sel(vector=["q", "k"]).rename(vector="side")
    share = numbers.number(numbers.array("massive_slow").sum((*HEAD, "side")) / massive.sum((*HEAD, "side")))
    return [Criterion.of("in the slower half", share, **at, beyond=or_lacking(share.by_null), end=None)]


def _contextual(recall: Result, lost: float, little: float, rise: float, partly: float, times: float) -> list[Group]:
    numbers = recall.numbers
    falls, rises = numbers.measure.falls(numbers), numbers.measure.rises(numbers)
    at_mean, of_another = falls["largest at mean"], falls["another at mean"]
    fall = Criterion.of("recall falls with the largest coordinate at its mean", at_mean, lost, otherwise="partly")
    with_another = Criterion.without_nulls("with another", of_another, little, sign=-1)
    text = Criterion.without_nulls("text rises by", rises["largest at mean"], rise, sign=-1)
    at_zero = Criterion.beside("recall falls with it at zero", falls["largest at zero"])
    is_part = at_mean.value >= partly and at_mean.value >= times * of_another.value
    return [Group.of(fall.holds and with_another.holds and text.holds, is_part, [fall, with_another, text, at_zero])]


def _recalls_little(recall: Result) -> str:
    recalled = recall.numbers("recall")
    why = f"not measured: the model recalls {recalled.with_interval:.2f} of the copy, too little"
    return "" if recalled.value >= _RECALLED else why


def _none_looks_up(recall: Result) -> str:
    is_there = {SLOWEST, CONTROL} <= set(recall.trained["condition"].values.tolist())
    return _recalls_little(recall) or ("" if is_there else "not measured: no head looks up, or there is none beside it")


def _slow_for_recall(recall: Result, lost: float, little: float) -> list[Group]:
    numbers = recall.numbers
    falls = numbers.measure.falls(numbers)
    drawn = [fall for name, fall in falls.items() if name.startswith(DRAWN)]
    worst = max(drawn, key=lambda fall: fall.value)
    slow = Criterion.of("recall falls without the slowest planes", falls[SLOWEST], lost, otherwise="partly")
    random = Criterion.without_nulls("without random ones, at most", worst, little, sign=-1)
    control = Criterion.without_nulls("in control heads", falls[CONTROL], little, sign=-1)
    is_held = slow.holds and random.holds and control.holds
    return [Group.of(is_held, slow.value > max(random.value, control.value), [slow, random, control])]


def _fast_for_recall(recall: Result, little: float, part: float) -> list[Group]:
    numbers = recall.numbers
    falls = numbers.measure.falls(numbers)
    fast = Criterion.without_nulls("recall falls without the fastest planes", falls[FASTEST], little, sign=-1)
    slow = Criterion.of("without the slowest", falls[SLOWEST], otherwise="held")
    return [Group.of(fast.holds, fast.value <= part * slow.value, [fast, slow])]


def _diagonal(numbers: Numbers) -> tuple[xr.DataArray, xr.DataArray]:
    """Return which heads are diagonal or previous-token heads, and which distance each attends most."""
    attention = numbers.array("diagonal", near=None)
    return attention.max("near") >= _DIAGONAL, attention == attention.max("near")


def _diagonals(plane_roles: Result, plane_use: Result, more: float, **at: float) -> list[Criterion]:
    numbers = plane_roles.numbers
    heads, most = _diagonal(numbers)
    lift = numbers.array("contrast", near=None).where(most, 0).sum("near")
    turning = _turning(plane_use)
    fast, _ = _thirds(lift.isel(plane=turning))
    share = numbers.number(_mean_of(fast.sum("plane") / lift.sum("plane"), heads))
    fast, _ = _thirds(plane_use.numbers.array("use").isel(plane=turning))
    of_fast = fast.sum("plane")
    above = numbers.number(_mean_of(of_fast, heads) - _mean_of(of_fast, ~heads), (-1, 1))
    return [
        Criterion.of("lift by the fast third", share, **at, beyond=or_lacking(share.by_null)),
        Criterion.of("more use of it than in other heads", above, more, partly=0.0, beyond=or_lacking(above.by_null)),
    ]


def _no_diagonal(plane_roles: Result, plane_use: Result) -> str:
    heads, _ = _diagonal(plane_roles.numbers)
    n = int(heads.sel(init="trained", group="all").sum())
    return "" if n else f"not measured: no head attends to its own or the previous token by {_DIAGONAL:g}"


def _place_by_frequency(plane_roles: Result, plane_use: Result, **at: float) -> list[Criterion]:
    numbers = plane_roles.numbers
    variance = plane_use.numbers.array("variance_share")
    slowness = (variance * variance["plane"]).sum("plane", min_count=1)
    rho = numbers.correlation(numbers.array("positional") - numbers.array("symbolic"), -slowness, ranks=True)
    return [Criterion.of("rank correlation over heads", rho, **at)]


def _centres(plane_use: Result, fixed: float, **at: float) -> list[Criterion]:
    numbers = plane_use.numbers
    criteria = []
    for side in "qk":
        centre = numbers.array("centre", side=side)
        share = numbers.number((centre > fixed).where(centre.notnull()), (0, 1))
        criteria.append(Criterion.of(f"heads with fixed centres, {side}", share, **at))
    return criteria


def _sinks(numbers: Numbers) -> xr.DataArray:
    return numbers.array("sink") > SINK


def _no_sink(plane_use: Result) -> str:
    return (
        ""
        if bool((plane_use.trained["sink"] > SINK).any())
        else f"not measured: no head attends to the first token by {SINK:g}"
    )


def _sinks_by_angle(plane_use: Result, above: float) -> list[Group]:
    numbers = plane_use.numbers
    heads = _sinks(numbers)
    share = numbers.number(heads.where(numbers.array("sink").notnull()), (0, 1))
    length, cosine = (
        numbers.number(_mean_of(numbers.array(name), heads), numbers.bounds_of(name))
        for name in ("first_length", "first_cosine")
    )
    shorter = Criterion.without_nulls("|k_0| / E|k| in sink heads", length, 1.0, sign=-1)
    angle = Criterion.of(
        "cosine with q above other keys'", cosine, above, beyond=or_lacking(cosine.by_null), otherwise="detectable"
    )
    sinks = Criterion.beside("sink heads", share)
    return [Group.of(shorter.holds and angle.holds, angle.holds, [angle, shorter, sinks])]


def _sinks_from_partial(plane_use: Result, **at: float) -> list[Criterion]:
    numbers = plane_use.numbers
    context = numbers.data["context"].values[0]
    turns = numbers.data["turns"].sel(context=context, drop=True)
    partial = (turns > 0) & (turns < 1)  # not the unrotated rest of a head
    lift = numbers.array("sink_lift").where(_sinks(numbers), 0)
    share = numbers.number(lift.where(partial, 0).sum((*HEAD, "plane")) / lift.sum((*HEAD, "plane")))
    beyond = {"all planes": [numbers("partial_planes").value], **or_lacking(share.by_null)}
    return [Criterion.of("lift of the first token by partial planes", share, **at, beyond=beyond)]


def _decay(plane_roles: Result, still: float, times: float) -> list[Group]:
    numbers = plane_roles.numbers
    score = numbers.array("mean_score")
    doubling = score["doubling"].where(score.notnull())  # a window ends before some distances of other layers
    doubling = doubling - doubling.mean("doubling")
    slope = (score * doubling).sum("doubling") / (doubling**2).sum("doubling") / numbers.array("spread")
    fall = numbers.number(-slope)
    falls = Criterion.of("std within rows that scores fall by per doubling", fall, otherwise="held")
    largest = max((abs(null) for null in fall.nulls), default=np.nan)
    nulls = Criterion("null models, at most", largest, still, sign=-1)
    is_far = falls.value >= times * largest
    return [Group.of(nulls.holds and is_far, is_far, [falls, nulls])]


def _frozen_quarters(plane_cost: Result, _: Result, slowest: float, fastest: float, part: float) -> list[Group]:
    numbers = plane_cost.numbers
    rises = numbers.measure.rises(numbers)
    of_fast = rises["freeze fastest quarter"]
    fast = Criterion.of("rise with the fastest quarter frozen", of_fast, fastest, otherwise="partly")
    slow = Criterion.without_nulls("with the slowest", rises["freeze slowest quarter"], slowest, sign=-1)
    return [Group.of(fast.holds and slow.holds, slow.value <= part * fast.value, [fast, slow])]


def _hardly_turns(plane_cost: Result, plane_use: Result) -> str:
    """Say where the slowest quarter of the planes turns so little in a prompt that freezing it says nothing."""
    numbers, length = plane_use.numbers, plane_cost.provenance.get("length")
    longest = length if isinstance(length, int) else max(length or [0])
    theta = (
        2
        * np.pi
        * numbers.array("turns", context=None).isel(context=0)
        / numbers.array("reach", context=None).isel(context=0)
    )
    n_planes = int((plane_use.trained["turns"].isel(context=0) > 0).any("layer").sum())  # without the unrotated rest
    angle = numbers.number((longest * theta.isel(plane=(3 * n_planes + 3) // 4)).max("layer"))
    why = f"not measured: the slowest quarter turns by {angle.plain:.2f} radians in these prompts, too little"
    return "" if angle.value >= _TURNED else why


def _base(plane_use: Result, held: float) -> list[Criterion]:
    numbers = plane_use.numbers
    share = numbers.number((numbers.array("first_negative") / numbers.array("reach")).min("layer"))
    return [Criterion.without_nulls("first negative sum of cosines, over L", share, held)]


FREQUENCY: Sequence[Claim] = [
    Claim(
        "frequency 1",
        "Queries and keys are longer in low frequencies (Barbero et al. 2024, as we read it).",
        "E|z| of the slowest third of the planes over that of the fastest, of q and of k, mean of logarithms over "
        "heads: both {held} held, {partly} partly",
        ("planes",),
        _lengths,
        thresholds={"held": 1.5, "partly": 1.1},
    ),
    Claim(
        "frequency 1b",
        "They are so in one band, and slower planes are little used (Oka et al. 2026, as we read it).",
        "use of the planes within a step of the most used one of each layer at least {held:g} times uniform, and of "
        "slower ones at most uniform: held; more than of slower ones: partly; the band has to be beyond the null",
        ("plane_use",),
        _band,
        thresholds={"held": 2.0},
    ),
    Claim(
        "frequency 2",
        "The longest plane makes less than a turn within the context (Jonasson 2025, as we read it).",
        "heads of which that is true: {held} held, {partly} partly; beyond the share of all planes and the nulls",
        ("plane_use",),
        _partial,
        thresholds={"held": 0.9, "partly": 0.75},
    ),
    Claim(
        "frequency 2h",
        "It is the one that makes half a turn (LeRoPE, Karypis et al. 2026: a wavelength of 2.2 contexts, as we read "
        "it; half a turn: ours).",
        "heads whose longest plane is within a step of the fastest that makes at most half a turn: {held} held, "
        "{partly} partly; beyond chance and the nulls; of two contexts the one that fits better, the other beside it",
        ("plane_use",),
        _half_turn,
        thresholds={"held": 0.75, "partly": 0.5},
    ),
    Claim(
        "frequency 2q",
        "There queries lead keys by a quarter turn, so that the plane penalises distance (ours; an angle of its own: "
        "Jonasson 2025, as we read it).",
        "sine of the phase between mean query and mean key, mean over heads: {held} held, {partly} partly",
        ("plane_use",),
        lambda plane_use, **at: [Criterion.of("sine of the phase", plane_use.numbers("sine"), **at)],
        thresholds={"held": 0.8, "partly": 0.5},
    ),
    Claim(
        "frequency 3",
        "Queries and keys have massive coordinates, values have none (Jin et al. 2025, as we read it).",
        "coordinates above 5 times the mean of their head, a head: of q and of k at least {a_head} and {times:g} times "
        f"those of v: held; more than of v: partly; open below {_FEWEST_MASSIVE} such coordinates of q and k in all "
        "heads (counts, without an interval)",
        ("plane_use",),
        _massive,
        _no_massive,
        thresholds={"a_head": 0.5, "times": 3.0},
    ),
    Claim(
        "frequency 3b",
        "Massive coordinates of queries and keys lie in low frequencies (Jin et al. 2025, as we read it).",
        "share of them in the slower half of the planes: {held} held, {partly} partly; "
        f"open below {_FEWEST_MASSIVE} of them in all heads (a count, without an interval)",
        ("plane_use",),
        _massive_slow,
        _no_massive,
        thresholds={"held": 0.9, "partly": 0.75},
    ),
    Claim(
        "frequency 4",
        "The largest coordinate holds contextual knowledge: at its mean, recall is lost and little else (Jin et al. "
        "2025, as we read it).",
        "recall of a copy falls by {lost}, with another coordinate by at most {little}, and the text's loss rises by "
        "at most {rise} nats: held; by {partly}, and {times:g} times as far as with another: partly. Harmless at its "
        "mean and not at zero would be an offset",
        ("recall",),
        _contextual,
        _recalls_little,
        thresholds={"lost": 0.5, "little": 0.05, "rise": 0.5, "partly": 0.2, "times": 4.0},
    ),
    Claim(
        "frequency 5",
        "Diagonal and previous-token heads are made by the highest frequencies (Barbero et al. 2024, as we read it).",
        f"in heads that attend {_DIAGONAL} to their own or the previous token, the share of the fastest third in its "
        "lift above the next three distances, nearly an identity: {held} held, {partly} partly; and their use of that "
        "third {more} above other heads': held; above: partly",
        ("plane_roles", "plane_use"),
        _diagonals,
        _no_diagonal,
        thresholds={"held": 0.75, "partly": 0.5, "more": 0.1},
    ),
    Claim(
        "frequency 6",
        "Positional heads use fast planes, symbolic heads slow ones (Urrutia et al. 2026, as we read it).",
        "rank correlation over heads of positional less symbolic score with the frequency of the planes that vary "
        "within rows: {held} held, {partly} partly; beyond every one of {inits} random inits or more, as these differ",
        ("plane_roles", "plane_use"),
        _place_by_frequency,
        inits=5,
        thresholds={"held": 0.7, "partly": 0.4},
    ),
    Claim(
        "frequency 7",
        "Queries and keys before RoPE stand around fixed centres (TriAttention 2026, as we read it).",
        "heads with |E x| / E|x| above {fixed}, of q and of k: both {held} held, {partly} partly",
        ("plane_use",),
        _centres,
        thresholds={"fixed": 0.95, "held": 0.8, "partly": 0.5},
    ),
    Claim(
        "frequency 7b",
        "The curve of the mean query and key over distance foretells scores (TriAttention 2026, as we read it).",
        "r with the scores of single queries, mean over heads: {held} held, {partly} partly",
        ("plane_roles",),
        lambda plane_roles, **at: [Criterion.of("r", plane_roles.numbers("curve_r"), **at)],
        thresholds={"held": 0.5, "partly": 0.3},
    ),
    Claim(
        "frequency 8",
        "The first token is a sink by its key's angle, not its length (Gu et al. 2024, as we read it).",
        f"in heads that give it {SINK} of their attention, cosine of queries with its key at least "
        "{above} above those with others, and its key no longer than theirs: held; the first alone: partly; the cosine "
        "beyond the null",
        ("plane_use",),
        _sinks_by_angle,
        _no_sink,
        thresholds={"above": 0.1},
    ),
    Claim(
        "frequency 9",
        "Planes that make less than a turn make the sink (DoPE 2025, Jonasson 2025, as we read them).",
        "share of them in the lift of the first token above other keys, in the same heads: {held} held, {partly} "
        "partly; beyond the share of all planes and the nulls",
        ("plane_use",),
        _sinks_from_partial,
        _no_sink,
        thresholds={"held": 0.75, "partly": 0.5},
    ),
    Claim(
        "frequency 10",
        "RoPE by itself makes no decay with distance; training does (Barbero et al. 2024, as we read it).",
        "slope of mean scores per doubling of distance, in std within rows: of every null at most {still} either way, "
        "and the model's falls {times:g} times as far as any: held; the last alone: partly",
        ("plane_roles",),
        _decay,
        thresholds={"still": 0.05, "times": 4.0},
    ),
    Claim(
        "frequency 11",
        "The slowest quarter of the planes need not turn, the fastest must (Barbero et al. 2024, as we read it).",
        "rise of the loss with the slowest quarter frozen at most {slowest} nats, with the fastest at least "
        "{fastest}: held; at most {part} of it: partly; "
        f"open where the slowest quarter turns by less than {_TURNED} radians in a prompt",
        ("plane_cost", "plane_use"),
        _frozen_quarters,
        _hardly_turns,
        options={"plane_cost": {"edits": ("freeze",), "groups": ("quarters",)}},
        thresholds={"slowest": 0.01, "fastest": 0.1, "part": 0.1},
    ),
    Claim(
        "frequency 12",
        "Heads that look up a copy need their slowest planes (Bayram 2026, as we read it).",
        "recall falls by {lost} without them, and by at most {little} without random planes or in control heads: held; "
        "further than without these: partly",
        ("recall",),
        _slow_for_recall,
        _none_looks_up,
        thresholds={"lost": 0.3, "little": 0.05},
    ),
    Claim(
        "frequency 13",
        "They do not need their fastest planes (Chiang & Yogatama 2025, as we read it).",
        "recall falls by at most {little} without them: held; by at most {part} of what it falls by without the "
        "slowest: partly; the latter has to be beyond the null",
        ("recall",),
        _fast_for_recall,
        _none_looks_up,
        thresholds={"little": 0.05, "part": 0.5},
    ),
    Claim(
        "frequency 14",
        "The base is large enough for the context: a query never prefers a random key to one like itself (Men et al. "
        "2024, as we read it).",
        "least distance at which the sum over planes of cos(theta D) is below 0, over the context or window: {held:g}, "
        "no such distance: held; of the config, without nulls",
        ("plane_use",),
        _base,
        thresholds={"held": 1.0},
    ),
]

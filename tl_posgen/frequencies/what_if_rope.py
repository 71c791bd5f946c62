"""Other frequencies without another run: what a rule makes of every head's scores, forecast from a short prompt."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import pandas as pd
import xarray as xr
from torch import Tensor

from tl_posgen.arithmetic import MOST_DISTANCES
from tl_posgen.core.formatting import in_brackets
from tl_posgen.core.measure import ENDS, HEAD, Measure, Variable
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.options import Count, Each, NonNegative, Within
from tl_posgen.core.run import Run
from tl_posgen.core.sums import Sums
from tl_posgen.errors import InputError
from tl_posgen.frequencies.forecasts import Conditions, LayerForecast, curves_of
from tl_posgen.frequencies.hooks import changed_rope, rotary_layers, with_frequencies
from tl_posgen.frequencies.longer_prompts import SEGMENTS, beyond
from tl_posgen.frequencies.loss_of_heads import PREDICTORS, rank_correlations, rises
from tl_posgen.frequencies.numbers.forecast import PARTS
from tl_posgen.frequencies.rules import FrequencyRule, RuleName
from tl_posgen.frequencies.what_if_rope_figures import draw_check, draw_curves
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.selection import select_heads
from tl_posgen.position.decomposition.numbers.variance_shares import TripleMoments
from tl_posgen.position.decomposition.variance import moments_of
from tl_posgen.report.head_figures import head_map
from tl_posgen.stats.intervals import FEWEST

CHANGES = ("rule", "random")
DRIFT = 2  # so many times the error inside, further on, is called drift: our choice
AT_LEAST_ONE = Within(1, words="a number, 1 or more")
Times = Annotated[int | float, AT_LEAST_ONE]
FORECAST = ("change", "rule", "times", *HEAD)
OF_CURVE = ("rule", "times", *HEAD)
UNCHECKED = (
    "How far scores move does not say what that costs, neither by rule nor by head: the option check measures the "
    "loss, as does running the model under `tl_posgen.with_frequencies`."
)
NO_TURN = "nothing rotates, so there are no frequencies to change."


@dataclass(frozen=True)
class WhatIfRope(Measure):
    r"""w'(q, k, d) = s Re sum_m z^q_m conj(z^k_m) u'_m(d), u'_m(d) = scaling^2 e^{i theta'_m d}: scores at theta'.

    What other frequencies of RoPE would do to every head, forecast from short prompts alone: the mean curve a'(d) and
    where it is highest, the shares of position, content and interaction, and the distortion of scores, at several times
    the length. Beside each rule a random change of the same total angle. On longer prompts the forecast is compared
    with scores, and the option check compares it with the loss.

    Scores are bilinear in queries and keys before RoPE, so that moments over the tokens of a short prompt (first token
    left out) give all of it; no pass runs at other frequencies. distortion = sd(w' - w) / sd(w), both over every query,
    key and distance, w' - w below `times` x `inside` and w below `inside`, less what is the same for all keys and
    distances of a query, which softmax does not see. a'(d) is the score of the mean query and the mean key; `overshoot`
    is how far it leaves the range that a(d) has below `inside`, means removed, in sd(w). A soft cap is not part of w.
    Other frequencies in earlier layers would change the queries and keys of later ones: the forecast leaves these as
    they are, so it is one of each head by itself.

    The random change adds the same changes theta' - theta to other planes, drawn so that none keeps its own, with the
    rule's scaling; the draw depends on the seed and the rule's label, and is the same in all layers with as many
    planes. Prompts longer than `inside` run under each rule in all chosen heads: `error` is the root mean square over
    distances of the mean score at a distance less a'(d), in sd(w): of queries at positions below `inside`; of the
    queries beyond, at the same distances and by the same weights, the numbers of pairs inside; and further, of the
    queries beyond at larger distances. The constant that softmax does not see is removed from queries inside and from
    queries beyond, from each over all its pairs.
    check=True runs the first `inside` tokens with one head alone changed, for each rule, head and random change:
    `rise`, and Spearman's rho over heads of rise and three predictors: distortion; sd(w' - w), in logits, which is what
    softmax acts on; and sd(w) alone, which knows no rule. Where the interval of the mean rise over prompts holds zero,
    findings rank nothing by it.

    Args:
        rules: of context extension, see `tl_posgen.frequencies.FrequencyRule`; "longrope" and "given" take `values`.
        factors: how many times longer texts each rule is made for; a label such as "yarn 4" has both.
        times: lengths of the forecast, in units of `inside`; 1 is always among them.
        inside: tokens of each prompt whose moments count; all of the longest if left out.
        values: one a plane: what "longrope" divides frequencies by, or the frequencies that are "given".
        training_length: that rules are told; cfg.n_ctx if left out.
        check: whether to measure the rise of the loss.

    Raises:
        InputError: a rule that a layer cannot have; "longrope" beside "given"; layers with one plane alone; a check of
            prompts shorter than `inside`.
        UnsupportedModelError: a model without rotary planes; with check=True, whose scores cannot be replaced.

    Source: ours; rules are those of the papers that `FrequencyRule` names.

    Example:
        >>> short = {"null_seeds": (), "progress": False}
        >>> result = WhatIfRope(rules=["linear"], factors=[2])("mini", "Down, down, down.", **short)
        >>> result.sel(change="rule", rule="linear 2", times=1)["distortion"].dims
        ('layer', 'head')
    """

    rules: Annotated[Sequence[RuleName], Each()] = ("linear", "ntk", "yarn", "p_rope")
    factors: Annotated[Sequence[Times], Each()] = (2, 4)
    times: Annotated[Sequence[Times], Each()] = (2, 4, 8)
    inside: Annotated[int, Within(2, MOST_DISTANCES, f"a whole number, 2 to {MOST_DISTANCES}")] | None = None
    values: Sequence[NonNegative] = ()
    training_length: Count | None = None
    check: bool = False

    question = "What would other frequencies do to each head?"
    rows = ("rule", *HEAD)
    variables = {
        "distortion": Variable(
            *("distortion", "", "sd(w' - w) / sd(w), as softmax sees it", FORECAST, "distortion", "dist"),
            interval=True,
            bounds=(0, np.inf),
        ),
        "share": Variable(
            *("share of what softmax sees", "", "of the variance of w'", (*FORECAST, "part")),
            interval=True,
            bounds=(0, 1),
        ),
        "sd": Variable("sd(w)", "logits", "as softmax sees it, at the model's own frequencies"),
        "amplitude": Variable("amplitude", "logits", "|c_m|, c_m = s E q_m conj(E k_m)", (*HEAD, "plane")),
        "phase": Variable("phase", "radians", "arg c_m: a'(d) = Re sum_m c_m u'_m(d)", (*HEAD, "plane")),
        "curve": Variable("mean curve", "logits", "a'(d)", ("rule", *HEAD, "distance")),
        "peak": Variable("peak of the mean curve", "tokens", "argmax of a'(d) below times x inside", OF_CURVE),
        "overshoot": Variable("overshoot", "", "of a'(d), beyond its range below inside, in sd(w)", OF_CURVE),
        "error": Variable(
            "error of a'(d)", "", "root mean square over distances, in sd(w)", ("rule", "segment", *HEAD)
        ),
        "rise": Variable(
            "rise of the loss", "nats", "with this head alone changed", ("change", "rule", "prompt", *HEAD)
        ),
        "rho": Variable(
            *("Spearman's rho", "", "with the rise, over heads", ("predictor", "change", "rule", "end")), bounds=(-1, 1)
        ),
    }
    figures = {
        "curves": draw_curves,
        "map": head_map(
            *("distortion", ("distortion", {"change": "random"})),
            title="Distortion",
            subtitle="{first}: sd of the change of scores over sd of scores; beside it, "
            "a random change of the same total angle",
            limits=None,
        ),
        "check": draw_check,
    }
    legend = (
        "random: a random change of the same total angle; moved: share of heads whose mean curve peaks elsewhere; "
        "overshoot: of mean curves at the longest length, in sd of scores; position: share of what softmax "
        "sees, at so many times the length; rho (with check): of ranks, with the rise of the loss."
    )
    caveats = dict.fromkeys(("absolute", "alibi", "none"), NO_TURN)

    @property
    def labelled(self) -> Mapping[str, FrequencyRule | None]:
        """Rules by their labels; None for the model's own frequencies, which stand first."""
        made = [self.rule(name, factor) for name in self.rules for factor in self.factors]
        return {"unchanged": None} | {one.label: one for one in made}

    def rule(self, name: RuleName, factor: int | float) -> FrequencyRule:
        values = self.values if name in ("longrope", "given") else ()
        return FrequencyRule(name, factor, self.training_length, values)

    @property
    def all_times(self) -> list[int | float]:
        return sorted({1, *self.times})

    def conditions(self, seed: int) -> Conditions:
        """Return all that is forecast, once `prepare` has filled in the lengths.

        Args:
            seed: of the random changes.
        """
        assert self.inside is not None
        return Conditions(self.labelled, self.all_times, self.inside, seed)

    def labels(self) -> Mapping[str, Sequence[Any]]:
        own = {"change": CHANGES, "rule": list(self.labelled), "times": self.all_times, "part": PARTS}
        return {**own, "segment": SEGMENTS, "end": ENDS, "predictor": PREDICTORS}

    def usual(self) -> Mapping[str, Any]:
        return {"change": "rule", "rule": list(self.labelled)[1], "times": 1, "predictor": PREDICTORS[0]}

    def kinds(self, data: xr.Dataset) -> Sequence[str]:
        return [kind for kind in self.figures if kind != "check" or "rise" in data]

    def requires(self, model: Any) -> None:
        rotary_layers(model)
        if self.check:
            with_frequencies(model, lambda rope: rope)

    def prepare(self, model: Any, tokens: Sequence[Tensor]) -> "WhatIfRope":
        if len(self.values) and not {"longrope", "given"} & {*self.rules}:
            raise InputError(f"{self.name}: values are those of longrope or given, and neither is among its rules")
        if {"longrope", "given"} <= {*self.rules}:
            raise InputError(
                f"{self.name}: values are divisors under longrope and frequencies under given; run the two apart"
            )
        lengths, n_ctx = [len(row) for row in tokens], int(model.cfg.n_ctx)
        inside = min(self.inside or max(lengths), max(lengths))
        if self.check and inside > min(lengths):
            raise InputError(
                f"{self.name}: check=True runs {inside} tokens of every prompt, and one has {min(lengths)}; give "
                "length= to cut all alike, or a smaller inside="
            )
        if max(self.times) * inside > MOST_DISTANCES:
            raise InputError(f"{self.name}: times = {max(self.times)!r}: at most {MOST_DISTANCES:,} tokens in all")
        whole = replace(self, inside=inside, training_length=self.training_length or n_ctx)
        for geometry in rotary_layers(model):
            if geometry.rope.rotary_dim == 2:
                raise InputError(
                    f"{self.name}: layer {geometry.layer} has one RoPE plane alone, so that there is no random change "
                    "to compare rules with"
                )
            for rule in list(whole.labelled.values())[1:]:
                changed_rope(geometry, rule)
        return whole

    # The passes

    def of_layer(self, layer: LayerCapture) -> Mapping[str, Any]:
        assert self.inside is not None
        if layer.length <= self.inside:
            return {"moments": layer.once(moments_of)}
        q, k = layer.q[:, : self.inside], layer.k[:, : self.inside]
        return {"moments": TripleMoments.from_qk(q, k, layer.geometry.rope, first_token=False)}

    def finish(self, sums: Sums) -> xr.Dataset:
        forecasts = {
            layer: LayerForecast(moments, sums.layers[layer][0], self.conditions(sums.seed)).variables()
            for layer, moments in sums.by_layer("moments").items()
        }
        return sums.variables_of(forecasts).assign_attrs(first=list(self.labelled)[1])

    def passes(self, run: Run) -> int:
        assert self.inside is not None
        n, n_rules = len(run.rows), len(self.labelled)
        n_heads = sum(map(len, select_heads(run.model, **run.where).values()))
        of_check = n * (1 + len(CHANGES) * (n_rules - 1) * n_heads) if self.check else 0
        return of_check + (n * n_rules if max(map(len, run.rows)) > self.inside else 0)

    def of_model(self, run: Run) -> xr.Dataset:
        data, conditions = run.data, self.conditions(run.seed)
        geometries = {layer: run.wrapped.layer(layer).geometry for layer in data["layer"].values.tolist()}
        found = curves_of(data, geometries, conditions)
        if max(map(len, run.rows)) > conditions.inside:
            found = found.assign(error=beyond(run, data, conditions))
        if self.check:
            found = found.assign(rise=rises(run, conditions))
            found["rho"] = rank_correlations(data["distortion"].sel(times=1), data["sd"], found["rise"])
        return found.assign({name: one.transpose(*self.variables[str(name)].dims) for name, one in found.items()})

    # Words

    def findings(self, own: Numbers) -> list[str]:
        rules = list(self.labelled)[1:]
        lines = check_sentences(own, rules) if "rho" in own else []
        lines += [distortion_sentence(own, rules, self.inside), self.curves_sentence(own, rules)]
        lines += [] if "rho" in own else [UNCHECKED]
        return [*lines, *self.length_sentences(), *drift_sentences(own, self.inside)]

    def curves_sentence(self, own: Numbers, rules: Sequence[str]) -> str:
        """Return under which rules mean curves peak elsewhere, and where they leave their range most and least."""
        longest = self.all_times[-1]
        peaks_elsewhere = moved(own.array("peak", rule=None))
        elsewhere = {rule: own.number(peaks_elsewhere.sel(rule=rule)) for rule in rules}
        most = [f"{rule} ({share.plain:.0%})" for rule, share in elsewhere.items() if share.value > 0.5]
        overshoots = {rule: own("overshoot", rule=rule, times=longest).value for rule in self.labelled}
        changed = sorted(rules, key=lambda rule: overshoots[rule])
        ends = " to ".join(f"{overshoots[rule]:.2f} ({rule})" for rule in (changed[0], changed[-1]))
        return (
            f"Within {self.inside:,} tokens the mean curves of most heads peak elsewhere under "
            f"{', '.join(most) or 'no rule'}. At {longest:g} times the length they leave the range that they had by "
            f"{ends} standard deviations of scores, unchanged by {overshoots['unchanged']:.2f}."
        )

    def length_sentences(self) -> list[str]:
        """Say where the longest forecast goes beyond the training length, whose moments no short prompt shows."""
        assert self.inside is not None
        assert self.training_length is not None
        longest = round(max(self.all_times) * self.inside)
        if longest <= self.training_length:
            return []
        return [
            f"The forecast goes on to {longest:,} tokens, beyond the training length of {self.training_length:,}: it "
            "takes moments there to be those of the short prompts."
        ]

    def table(self, own: Numbers) -> pd.DataFrame:
        """Return a row a rule: distortion, peaks that move, overshoot; and how well distortion orders heads by loss."""
        longest = self.all_times[-1]
        columns = {
            "distortion": own.array("distortion", rule=None),
            "random": own.array("distortion", rule=None, change="random"),
            "moved": moved(own.array("peak", rule=None)),
            f"position at {longest:g} times": own.array("share", rule=None, part="position", times=longest),
            "overshoot": own.array("overshoot", rule=None, times=longest),
        }
        if "rho" in own:
            columns = {"distortion": columns.pop("distortion"), "rise": own.array("rise", rule=None)} | columns
            columns |= {f"rho, {name}": own.array("rho", rule=None, predictor=name) for name in PREDICTORS}
        return own.frame(columns, "rule")


def moved(peak: xr.DataArray) -> xr.DataArray:
    """Return whether the peak of a head is not where it is at the model's own frequencies."""
    return (peak != peak.sel(rule="unchanged", drop=True)).where(peak.notnull()).astype(float)


def distortion_sentence(own: Numbers, rules: Sequence[str], inside: int | None) -> str:
    """Return between which rules the mean distortion lies, beside random changes and random inits."""
    every = sorted(rules, key=lambda rule: own("distortion", rule=rule).value)
    parts = []
    for rule in dict.fromkeys((every[0], every[-1])):
        one, random = (own("distortion", rule=rule, change=change) for change in CHANGES)
        beside = in_brackets(f"random change {random.plain:.2f}", f"{one.null:.2f}")
        parts.append(f"{one.with_interval:.2f} under {rule}{beside}")
    return (
        f"Scores within {inside} tokens change, in their standard deviations, mean over heads, by {' to '.join(parts)}."
    )


def drift_sentences(own: Numbers, inside: int | None) -> list[str]:
    """Say how far the forecast is from mean scores on longer prompts and where that is drift, if there are any."""
    if "error" not in own:
        return [f"No prompt is longer than {inside} tokens: whether moments drift beyond is not tested."]
    parts, drifting = [], []
    for rule in own.data["rule"].values:
        within, *later = (own("error", rule=rule, segment=segment) for segment in SEGMENTS)
        parts.append(f"{rule} {', '.join(f'{one.plain:.2f}' for one in (within, *later))}")
        drifting += [rule] if any(float(one) > DRIFT * float(within) for one in later) else []
    return [
        "Mean scores of longer prompts are off the forecast, in standard deviations of scores, for queries within "
        f"{inside} tokens, for queries beyond at the same distances, and for these at larger distances, by "
        f"{'; '.join(parts)}.",
        f"Moments drift (an error beyond of over {DRIFT} times that within; our choice) under "
        f"{', '.join(drifting) or 'no rule'}"
        + ("; there the forecast fails beyond these tokens." if drifting else "."),
    ]


def check_sentences(own: Numbers, rules: Sequence[str]) -> list[str]:
    """Say which rules raise the loss, and how well forecasts order heads by the rise with each alone changed."""
    rises = {rule: own("rise", rule=rule, change="rule") for rule in rules}
    told = [rule for rule, one in rises.items() if one.low > 0 or one.high < 0]
    others = [rule for rule in rules if rule not in told]
    most = max(rules, key=lambda rule: rises[rule].value)
    lines = [
        f"With one head alone changed the loss rises most under {most}: by {rises[most].with_interval:.2g} nats, mean "
        "over heads."
    ]
    if all(math.isnan(one.low) for one in rises.values()):
        return [*lines, f"Intervals need {FEWEST} prompts; without one, heads are not ranked by the rise."]
    if told:
        lines.append(f"The interval of the rise over prompts leaves out zero under {', '.join(told)}.")
    if others:
        lines.append(f"It holds zero under {', '.join(others)}, where nothing can be ranked by the rise.")
    return lines + [rank_sentence(own, told, predictor) for predictor in PREDICTORS if told]


def rank_sentence(own: Numbers, rules: Sequence[str], predictor: str) -> str:
    """Return the rank correlation of a predictor and the rise, a part a rule, beside random changes and inits."""
    parts = []
    for rule in rules:
        one, random = (own("rho", predictor=predictor, rule=rule, change=change) for change in CHANGES)
        beside = in_brackets(f"random change {random.plain:.2f}", f"{one.null:.2f}")
        parts.append(f"{rule} {one.with_interval:.2f}{beside}")
    return f"Rank correlation over heads of {predictor} and the rise of the loss: {'; '.join(parts)}."

"""Does the model run on position + content? Scores replaced by a split, and the loss that is left."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Annotated, Any

import pandas as pd
import torch
import xarray as xr
from jaxtyping import Bool
from torch import Tensor

from tl_posgen.core.formatting import counted, in_brackets
from tl_posgen.core.measure import HEAD, Variable
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import Numbers, is_above
from tl_posgen.core.options import Count, Each, NonNegative, Positive, Real, Share, Threshold, Whole, Within
from tl_posgen.core.run import Run
from tl_posgen.editing.score_functions import ScoresOf
from tl_posgen.interventions import LEAST_COST, PREDICTIONS, UNTOUCHED, Interventions, tokens_by_condition
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.position.substitution.conditions import NO_VALUES, NOT_OF_ALL, STAND_INS, TRUE_AT, UNIFORM, WORDS
from tl_posgen.position.substitution.hooks import (
    attention_sinks,
    heads_from,
    no_values_at,
    stand_in,
    substitute,
    true_at,
)
from tl_posgen.position.substitution.numbers import FAR, ThresholdOf, kl_of_logs, log_attention, random_keys
from tl_posgen.position.substitution.substitution_figure import draw_correlation
from tl_posgen.report.kinds import bars
from tl_posgen.stats.correlations import pearson

_BY_HEAD = ("condition", *HEAD)
EXACT = "nothing rotates, so position + content is the score itself and recovers all of the loss by construction"
Near = Annotated[Real, Within(1, words="a number of tokens, 1 or more")]


@dataclass(frozen=True)
class Substitution(Interventions):
    r"""recovered = (L_uniform - L) / (L_uniform - L_unchanged): the loss L with all scores replaced, by condition.

    All attention scores are replaced in the running model, and the loss is measured. Recovered is the share of the way
    from uniform attention (0) to the unchanged model (1). A high correlation alone would not tell.

    Not defined where what attention is worth is not above 0.01 nats by its interval, as at random init: a share of
    nothing is noise, and null models run no stand-in there.

    Conditions: `unchanged`; `uniform_attention` (one constant per head: the control); `three_axis`, the fit with all
    pairs weighted alike, `three_axis_near_<width>` (pairs weighted by max(width - distance, 0.05)) and
    `three_axis_attention` (by the attention they get; up to 1,024 tokens); `mean_key_<d0>`; `triangle_<width>` (the
    optimal split for p(d) proportional to width - d); `own_profile` (p is the head's own attention); `query_profile` (p
    is each query's own, from its position part alone: nothing is fitted); `mean_query_<n>` and `k_q_simplify` (a(i-j) +
    c(j) of the mean query and the mean key, p uniform on the first n distances, or on all); `position` and `content`
    alone, at the first width.

    Sinks are keys that in the unchanged model take more than `sink_share` of a layer's attention from afar
    (`attention_sinks`), mostly the first token. Content, an average over distances, may be wrong there. `query_profile,
    true at sinks` (so too `own_profile` and `uniform_attention`): the scores of sinks are the model's own. Its control:
    `query_profile, true at random keys`, as many scores of other keys. `.., sinks without value` (of `unchanged` and
    `query_profile`, and with true scores): sinks keep their attention and their values are zero, so that all they do is
    to take attention from other keys. Without sinks these are the conditions that they vary.

    Args:
        dummy_distances: distances d0 of the mean-key splits, a condition each.
        widths: how many distances the falling weights reach, a condition each.
        near_widths: widths of the three-axis fits that weigh near distances more.
        mean_query_distances: how many distances the split of the mean query averages over.
        gamma: only scores below this quantile are replaced, as in `substitute`; 1 replaces all.
        threshold: whose quantile that is: of each "head", or of head 0's last row for the whole "layer".
        from_layer: the first layer whose scores are replaced.
        sink_share: share of a layer's attention above which a key is a sink; 1 for none.

    Raises:
        InputError: unusable prompts, a layer that does not exist.

    Source: the substitution with gamma = 0.97, threshold = "layer", d0 = 1000 and from_layer = 4, and `k_q_simplify`,
    are in the public code of the first author of Han & Ji 2025 (arXiv 2503.13305), github.com/Glaciohound/LM-Infinite;
    a quantile per head, the other conditions and the shares recovered are ours. Their substitution alone:
    `authors_split`.

    Example:
        >>> from tl_posgen.models.tokens import bundled_text
        >>> cut = {"length": 48, "n_prompts": 1, "nulls": 0, "progress": False}
        >>> result = Substitution()("mini", bundled_text(), **cut)
        >>> shares = result.measure.recovered(result.numbers)
        >>> [shares[one].value for one in ("unchanged", "uniform_attention")]
        [1.0, 0.0]
    """

    dummy_distances: Sequence[NonNegative] = (0, 64, 1000)
    widths: Annotated[Sequence[Positive], Each()] = (8, 256)
    near_widths: Sequence[Near] = (8,)
    mean_query_distances: Sequence[Count] = (8,)
    gamma: Threshold = 1.0
    threshold: ThresholdOf = "head"
    from_layer: Whole = 0
    sink_share: Share = 0.1

    usual_prompts = 16
    edits_all_layers = True
    question = "Does the model run on position + content?"
    matrices = 26
    control = UNIFORM
    variables = {
        **Interventions.variables,
        **PREDICTIONS,
        "attention_kl": Variable(
            "attention KL", "nats", "KL(own || stand-in), own q and k, mean over queries", _BY_HEAD
        ),
        "r": Variable("r of stand-in and scores", "", "Pearson over visible scores, unchanged q and k", _BY_HEAD),
        "sink_attention": Variable("attention to sinks", "", "of the unchanged model, mean over queries", HEAD),
        "first_is_sink": Variable("first token is a sink", "", "share of prompts", ("layer",)),
        "n_later_sinks": Variable("sinks behind the first token", "", "number of keys of a prompt", ("layer",)),
    }
    token_view = tokens_by_condition(WORDS)
    legend = (
        "condition: what stands for the scores; recovered: share of the loss between uniform attention and unchanged, "
        "low and high the ends of its 95% interval over prompts, a dash where uniform attention does not surely cost "
        "more than nothing; r: correlation with the scores."
    )
    caveats = {
        "absolute": f"{EXACT}, position alone is uniform attention, and content alone recovers everything too.",
        "alibi": f"{EXACT}. Position alone is the slope, and content alone the scores without it.",
        "none": f"{EXACT}, position alone is uniform attention, and content alone recovers everything too.",
    }
    without_meaning = frozenset({"absolute", "alibi", "none"})
    words = WORDS
    whole_model = frozenset({"recovered"})
    figures = {
        "recovered": bars(
            {"share of the loss recovered": [("recovered", lambda numbers: numbers.measure.recovered_of(numbers))]},
            "condition",
            title="Loss recovered by each stand-in",
            subtitle=lambda result: (
                "every score replaced; 0: uniform attention, 1: the unchanged model. What there is to recover: "
                f"{result.measure.worth(result.numbers):.3f}{'' if result.numbers.metric else ' nats'}"
            ),
            form=".0%",
        ),
        "correlation": draw_correlation,
    }

    def stand_ins(self, length: int) -> dict[str, ScoresOf]:
        """Return what stands for the scores of prompts of `length` tokens, by condition."""
        return {
            condition: row.scores_of(self, value)
            for name, row in STAND_INS.items()
            if length <= row.longest
            for condition, value in row.values(name, self).items()
        }

    def conditions(self, run: Run) -> Mapping[str, Any]:
        heads, stand_ins = heads_from(run.session, self.from_layer, **run.where), self.stand_ins(run.tokens.shape[1])
        replaced = partial(substitute, run.session, gamma=self.gamma, threshold=self.threshold, heads=heads)
        hooks: dict[str, Any] = {name: replaced(by) for name, by in stand_ins.items()}

        @cache
        def hooks_of_prompt(prompt: int) -> dict[str, Any]:
            sinks, controls = self._sinks_and_others(run, prompt)
            true_hooks = {name: replaced(by) for name, by in self._true_at_keys(stand_ins, sinks, controls).items()}
            all_hooks, no_values = {UNTOUCHED: [], **hooks, **true_hooks}, no_values_at(run.session, sinks)
            return true_hooks | {condition: all_hooks[name] + no_values for condition, name in NO_VALUES.items()}

        hooks |= {name: lambda prompt, name=name: hooks_of_prompt(prompt)[name] for name in (*TRUE_AT, *NO_VALUES)}
        if run.init is not None:  # whose attention hardly ever is worth anything
            rise = xr.DataArray((run.losses_under(hooks[UNIFORM]) - run.loss).mean(1), dims="prompt")
            if not is_above(rise, LEAST_COST):
                return dict.fromkeys(hooks) | {UNIFORM: hooks[UNIFORM]}
        return hooks

    def _sinks_and_others(self, run: Run, prompt: int) -> tuple[Bool[Tensor, "layer key"], Bool[Tensor, "layer key"]]:
        """Return the sinks of one prompt in the unchanged model, and random keys with as many scores; found once."""
        if prompt not in run.shared:
            sinks, seed = attention_sinks(run.session, run.rows[prompt], self.sink_share), run.seed + prompt
            sees = (run.session.layer(layer).geometry.visible(sinks.shape[1]) for layer in range(len(sinks)))
            run.shared[prompt] = (
                sinks,
                torch.stack([random_keys(*masks, seed) for masks in zip(sinks, sees, strict=True)]),
            )
        return run.shared[prompt]

    def _true_at_keys(
        self, stand_ins: Mapping[str, ScoresOf], sinks: Bool[Tensor, "layer key"], controls: Bool[Tensor, "layer key"]
    ) -> dict[str, ScoresOf]:
        """Return stand-ins with the true scores of sinks, or of other keys, by condition."""
        keys = {"sinks": sinks, "random keys": controls}
        return {condition: true_at(stand_ins[name], keys[which]) for condition, (name, which) in TRUE_AT.items()}

    def of_model(self, run: Run) -> xr.Dataset:
        data, sums, stand_ins = super().of_model(run), run.sums(), self.stand_ins(run.tokens.shape[1])
        keys = [self._sinks_and_others(run, prompt) for prompt in range(len(run.rows))]

        def compare(capture: LayerCapture) -> None:  # stand-ins and scores, of the unchanged q and k
            exact, sinks = capture.scores(), keys[capture.prompt][0][capture.layer].to(capture.device)
            visible = capture.geometry.visible(exact.shape[1], exact.device)
            several_times = {
                name: partial(LayerCapture.shared, function=stand_ins[name]) for name, _ in TRUE_AT.values()
            }
            all_stand_ins = stand_ins | several_times
            all_stand_ins |= self._true_at_keys(all_stand_ins, *keys[capture.prompt])
            own_sinks = capture.sink_logits()
            log_p, seen, kl, r = log_attention(exact, visible, own_sinks), exact[:, visible], [], []
            for by in (LayerCapture.scores, *all_stand_ins.values()):
                scores = stand_in(capture, by, self.gamma, threshold=self.threshold)
                kl.append(kl_of_logs(log_p, scores, visible, own_sinks).mean(1))
                r.append(pearson(seen, scores[:, visible]))
            values = {"attention_kl": torch.stack(kl), "r": torch.stack(r)}
            values |= {"first_is_sink": sinks[0].double(), "n_later_sinks": sinks[1:].double().sum()}
            sums.add_layer(capture, values | {"sink_attention": capture.attention(exact)[..., sinks].sum(-1).mean(1)})

        replace(run, where={"heads": heads_from(run.session, self.from_layer, **run.where)}).capture(compare)
        coords = {"layer": range(run.model.cfg.n_layers), "head": range(max(run.session.n_heads))}
        means = sums.means().assign_coords(condition=[UNTOUCHED, *stand_ins, *TRUE_AT])
        return data.merge(means.reindex(coords | {"condition": data["condition"]}))

    def worth(self, numbers: Numbers) -> Number:
        """Return the loss that uniform attention costs."""
        return self.rises(numbers)[UNIFORM]

    def rank(self, numbers: Numbers, name: str) -> Number:
        """Return Spearman's rho over stand-ins of the share recovered with `r`, or with `attention_kl`."""
        arrays = (self.recovered_of(numbers), numbers.array(name, condition=None).mean(HEAD))
        x, y = (array.drop_sel(condition=list(NOT_OF_ALL)) for array in arrays)
        return numbers.correlation(x, y, ranks=True, over=("condition",))

    def findings(self, numbers: Numbers) -> list[str]:
        worth, share = self.worth(numbers), self.recovered(numbers)
        null = in_brackets(f"{worth.null:.4f}{'' if numbers.metric else ' nats'}" if worth.inits else "")
        if not share[UNTOUCHED]:
            if numbers.metric:
                return [
                    "The loss under uniform attention less that of the unchanged model: "
                    f"{worth.with_interval:+.3f}{null}, not surely above {LEAST_COST}: shares of it are not defined."
                ]
            return [
                f"Against uniform attention the model's own is worth {worth.with_interval:.3f} nats{null}, not surely "
                "more than nothing: shares of it are not defined."
            ]
        splits = [split for name, row in STAND_INS.items() if row.is_split for split in row.values(name, self)]
        best = max(splits, key=lambda name: share[name].value)
        r, kl = (self.rank(numbers, name).plain for name in ("r", "attention_kl"))
        profile = self.recovered(numbers, "kl")["query_profile"].with_interval
        whole = f"{worth.with_interval:.3f} nats between the unchanged model and uniform attention{null}"
        if numbers.metric:
            whole = f"loss under uniform attention less that of the unchanged model, {worth.with_interval:.3f}{null}"
        return [
            f"Position + content ({self.in_words(best)}, the best of {len(splits)} splits on these prompts) recovers "
            f"{share[best].with_interval:.1%} of the {whole}; position alone "
            f"{share['position'].with_interval:.1%}, content alone {share['content'].with_interval:.1%}. With "
            "the profile of each query, where nothing is chosen or fitted: "
            f"{share['query_profile'].with_interval:.1%}, and {profile:.1%} of the KL that uniform attention has from "
            "the unchanged model's predictions.",
            f"The fit a(i-j) + b(i) + c(j) correlates with the scores at r = "
            f"{numbers('r', condition='three_axis'):.3f}; in their place it recovers "
            f"{share['three_axis'].with_interval:.1%} of the loss with all pairs weighted alike. Over "
            f"{len(share) - len(NOT_OF_ALL)} stand-ins the rank correlation of r with the share recovered is {r:.2f}; "
            f"that of the attention KL is {kl:.2f}.",
            self._of_sinks(numbers),
        ]

    def _of_sinks(self, numbers: Numbers) -> str:
        """Return what the true scores of sinks recover beside their controls, in words."""
        rule = f"more than {self.sink_share:.0%} of a layer's attention from queries {FAR} or more tokens away"
        first, later = (numbers.data[name] for name in ("first_is_sink", "n_later_sinks"))
        if not (first + later).sum():
            return f"No key takes {rule}: there is no attention sink."
        shares = {name: share.with_interval for name, share in self.recovered(numbers).items()}
        n_first, n_later = (int((per_layer >= 0.5).sum()) for per_layer in (first, later))
        behind = f", of others in {n_later}" if n_later else ""
        return (
            f"With the true scores of attention sinks alone (keys that take {rule}: of the first token in {n_first} of "
            f"{counted(first.size, 'layer')}{behind}), the profile of each query recovers "
            f"{shares['query_profile, true at sinks']:.1%} instead of {shares['query_profile']:.1%}; with as many true "
            f"scores of random keys {shares['query_profile, true at random keys']:.1%}; with those of sinks and "
            f"uniform attention elsewhere {shares['uniform_attention, true at sinks']:.1%}. Where the values of sinks "
            "are zero, so that they only take attention from other keys: "
            f"{shares['query_profile, true at sinks without value']:.1%} instead of "
            f"{shares['query_profile, sinks without value']:.1%}, and "
            f"{shares['unchanged, sinks without value']:.1%} in the unchanged model."
        )

    def table(self, numbers: Numbers) -> pd.DataFrame:
        columns = {
            name: numbers.along(numbers.array(name, condition=None), "condition") for name in ("r", "attention_kl")
        }
        frame = super().table(numbers).drop(columns=["rise", "low", "high"])
        frame = frame.assign(**{name: [number.value for number in column.values()] for name, column in columns.items()})
        first = [UNTOUCHED, *(name for name, row in STAND_INS.items() if row.is_first), *TRUE_AT]
        return frame.sort_values("condition", key=lambda names: ~names.isin(first), kind="stable", ignore_index=True)

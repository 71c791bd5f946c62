"""Rules: which cheap rule of attention does a head obey, how much of its attention is recalled, and at what loss?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
import xarray as xr
from jaxtyping import Float
from plotly.colors import hex_to_rgb
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double, double_device
from tl_posgen.core.measure import HEAD, TOKENS, Measure, Variable
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.options import Count, Each
from tl_posgen.core.run import Run
from tl_posgen.errors import InputError
from tl_posgen.hooks.replace_scores import HookList
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.report.figures import Panels, model_label, sides
from tl_posgen.report.head_figures import head_names
from tl_posgen.rules.hooks import REFERENCES, Calibration, ranks_by, rule_hooks
from tl_posgen.rules.numbers import (
    PREDICTING,
    RULES,
    Means,
    Rule,
    Weights,
    best_keys,
    distances_of,
    squared_correlations,
)

CELL = ("rule", "budget")
WORDS = {  # rule -> its name in sentences, tables and figures
    "sinks": "sinks and window",
    "slashes": "slashes a(d)",
    "vertical": "vertical keys c(j)",
    "slashes_and_vertical": "a(d) + c(j)",
    "mean_query": "mean query",
    "position_and_content": "position + content",
    "drawn": "drawn keys",
    "oracle": "best keys",
}
SMALLEST = 1e-300  # attention; of none at all, a rule recalls 0
BLOCK = 256  # queries whose attention is in memory


def _draw_recall(result: Any) -> go.Figure:
    """Draw the recall of every head, a column a rule and a panel a budget, beside the random init."""
    budgets, rules = result.own["budget"].values, result.own["rule"].values[:-1]  # the best keys recall all
    names = [WORDS.get(str(rule), str(rule)) for rule in rules]
    panels = Panels([f"{budget} keys" for budget in budgets], columns=1, row_height=300)
    for side, data, colour in sides(result):
        fill = f"rgba{(*hex_to_rgb(colour), 0.45)}"
        for panel, budget in enumerate(budgets):
            recall = data["recall"].sel(budget=budget, rule=rules, tokens="all").mean("prompt")
            points = recall.stack(unit=HEAD).transpose("rule", "unit")
            dots = go.Box(x=np.repeat(names, points.sizes["unit"]), y=points.values.ravel(), name=side, fillcolor=fill)
            dots.update(text=head_names(points["unit"].values) * len(rules), boxpoints="all", pointpos=0, jitter=0.6)
            panels.add(panel, dots.update(marker={"color": colour, "size": 4}, line={"width": 0}))
    panels.axes("", "recall").figure.update_layout(boxmode="group").update_yaxes(range=[0, 1.03])
    for row, budget in enumerate(budgets, 1):
        rises = result.own["rise"].sel(budget=budget, rule=rules).mean("prompt").values
        texts = [f"{name}<br>{rise:+.2f} nats" for name, rise in zip(names, rises, strict=True)]
        panels.figure.update_xaxes(tickvals=names, ticktext=texts, tickfont_size=10, row=row)
    subtitle = (
        "attention in the keys that a rule keeps / attention in as many best keys, on prompts it was not calibrated "
        "on; a dot a head, the boxes are quartiles; below the names: the rise of the loss with the rule in every head"
    )
    return panels.finish(f"Recall of rules · {model_label(result.own)}", subtitle)


@dataclass(frozen=True)
class Rules(Measure):
    r"""recall(B) = attention in the B keys that a rule ranks first / attention in the best B keys.

    Which cheap rule says where a head attends: the last keys, the first ones too, fixed distances, fixed keys, a mean
    query, or position + content? Means of queries and keys come from half of the prompts. On the other half: the
    attention in the first B keys by each rule, and the loss when every head sees only these. Beside them drawn keys,
    the best keys, and a random init, where almost any keys will do.

    Even prompts (the first, third, ..) calibrate, odd ones are measured; intervals are over the odd ones, from eight
    prompts on. A rule gives key j of query i, at d = i - j, a number to rank it by; the cheapest first: `window` -d;
    `sinks` the first four keys, then -d; `slashes` a(d), the score of the mean query and the mean key; `vertical` c(j),
    the mean query with the key less the mean key, averaged over distances; `slashes_and_vertical` a + c; `mean_query`
    the mean query with the key; `position_and_content` the query with the mean key, and with the key less the mean key,
    averaged over distances. Only the last one reads the query.

    The first key and the query's own are ranked as all others; recall is also given without the attention to the first
    key. A query that sees no more than B keys keeps them all, and is left out of the means. Loss: with the rule in
    every head, over the tokens behind the first B. R^2, of a rule's number with the score within queries, does not tell
    how a head ranks.

    Args:
        rules: which.
        budgets: B, keys that each query head may keep.
        weights: of distances in these averages: "near" 1 / (d + 1), as attention mostly is near; "causal", as often as
            they occur; "uniform".

    Raises:
        InputError: fewer than two prompts; even or odd ones that are all no longer than the largest budget.
        UnsupportedModelError: a model whose scores cannot be replaced.

    Source: window and sinks: Xiao et al. 2023 (arXiv 2309.17453). mean_query after the trigonometric series of
    TriAttention (arXiv 2604.04921), the averaged turns after Expected Attention (arXiv 2510.00636), both reconstructed
    from abstracts and public text, without their weights and evictions. The other rules are ours.

    Example:
        >>> cut = {"length": 24, "n_prompts": 2, "consecutive": True, "null_seeds": (), "progress": False}
        >>> text = "Down, down, down. Would the fall never come to an end? " * 4
        >>> found = Rules(rules=["window", "position_and_content"], budgets=[6])("mini", text, **cut)
        >>> recall = found.sel(budget=6, tokens="all")["recall"].mean(("prompt", "layer", "head"))
        >>> bool(recall.sel(rule="drawn") < recall.sel(rule="position_and_content") < recall.sel(rule="oracle"))
        True
    """

    rules: Annotated[Sequence[Rule], Each()] = RULES
    budgets: Annotated[Sequence[Count], Each()] = (32, 64)
    weights: Weights = "near"

    question = "Which cheap rule of attention does a head obey, and what does it cost?"
    rows = (*CELL, *HEAD)
    whole_rows = True
    words = WORDS
    variables = {
        "recall": Variable(
            *("recall", "", "mass / mass of the best B keys", ("tokens", *CELL, "prompt", *HEAD), "recall"),
            bounds=(0, 1),
        ),
        "mass": Variable(
            *("attention kept", "", "in the rule's B keys", ("tokens", *CELL, "prompt", *HEAD)), bounds=(0, 1)
        ),
        "r2": Variable(
            *("R^2", "", "of the rule's number with the score, within queries", ("rule", "prompt", *HEAD)),
            bounds=(0, 1),
        ),
        "loss": Variable("loss", "nats per token", "no rule, behind the first B tokens", ("budget", "prompt")),
        "rise": Variable("rise of the loss", "nats", "with the rule in every head", (*CELL, "prompt"), "rise"),
        "mean_query": Variable("mean query", "", "before RoPE", (*HEAD, "component")),
        "mean_key": Variable("mean key", "", "before RoPE", (*HEAD, "component")),
        "n_distances": Variable("distances", "", "over which turns are averaged", ("layer",)),
    }
    legend = (
        "budget: keys that a head keeps; recall: attention in them against the best B keys, mean over heads; rise: of "
        "the loss, nats, the rule in every head."
    )
    figures = {"recall": _draw_recall}
    caveats = {
        "absolute": "nothing turns, so slashes are the last keys, and a mean query ranks as vertical keys do.",
        "alibi": "slashes are the last keys where the slope is not zero.",
        "none": "nothing turns, so slashes are the last keys, and a mean query ranks as vertical keys do.",
    }

    def labels(self) -> Mapping[str, Sequence[Any]]:
        cheapest_first = [rule for rule in RULES if rule in self.rules]
        return {"rule": [*cheapest_first, *REFERENCES], "budget": sorted(self.budgets)}

    def usual(self) -> Mapping[str, Any]:
        return {"tokens": "all"}

    def prepare(self, model: Any, tokens: Sequence[Tensor]) -> "Rules":
        if len(tokens) < 2:
            raise InputError("rules: even prompts calibrate and odd ones are measured: give two at least")
        longest = min(max(map(len, half)) for half in (tokens[::2], tokens[1::2]))
        if longest < max(self.budgets) + 2:  # one query that sees more, and the token behind it
            shorter = f", or budgets up to {longest - 2}" if longest > 2 else ""
            raise InputError(
                f"rules: prompts of {longest} tokens with budgets={list(self.budgets)}: no key would be left out; give "
                f"prompts of {max(self.budgets) + 2} tokens or more{shorter}"
            )
        return self

    def passes(self, run: Run) -> int:
        n_odd = len(run.rows) // 2
        return len(run.rows) + n_odd * (1 + len(self.labels()["rule"]) * len(self.budgets))

    def of_model(self, run: Run) -> xr.Dataset:
        odd, seen, labels = run.rows[1::2], run.sums(), self.labels()
        calibration, means = self.calibrated(run)

        def add(capture: LayerCapture) -> None:
            seen.add_layer(capture, _recalls_of(capture, calibration[capture.layer], run.seed, **labels))

        run.capture(add, frozenset({"pattern"}), odd)
        untouched = self.losses(run, odd, [])

        def rise(rule: str, budget: int) -> dict[str, np.ndarray]:
            found = self.losses(run, odd, self.condition(run, rule, budget, calibration)) - untouched
            return {"rise": found[labels["budget"].index(budget)]}

        data = xr.Dataset({name: seen.mean(name) for name in ("recall", "mass", "r2")}).merge(means)
        data = data.merge(run.grid(rise, pure=True, **labels)).assign(loss=(("budget", "prompt"), untouched))
        return data.assign_coords(prompt=np.arange(1, len(run.rows), 2))

    def condition(self, run: Run, rule: str, budget: int, calibration: Calibration) -> HookList:
        """Return the hooks of a rule in every chosen head."""
        heads = [(layer, head) for layer, (some, _) in calibration.items() for head in some]
        return rule_hooks(run.model, rule, budget, calibration, run.seed, heads=heads)

    def calibrated(self, run: Run) -> tuple[Calibration, xr.Dataset]:
        """Return the means over tokens of the even prompts, the first token of each left out; also as arrays."""
        even, sums = run.rows[::2], run.sums()
        longest, n_tokens = max(map(len, even)), sum(len(row) - 1 for row in even)

        def add(capture: LayerCapture) -> None:
            sums.add_layer(capture, {side: double(x)[:, 1:].sum(1) for side, x in (("q", capture.q), ("k", capture.k))})

        run.capture(add, rows=even)
        calibration, found = {}, []
        for layer, (geometry, heads) in sums.layers.items():
            q, k = (torch.from_numpy(sums.by_layer(side)[layer].sum) / n_tokens for side in "qk")
            n_distances = min(longest, geometry.window or longest)
            calibration[layer] = list(heads), Means(q, k, n_distances, self.weights)
            arrays = {"mean_query": q, "mean_key": k}
            values = {name: (("head", "component"), one.numpy()) for name, one in arrays.items()}
            labels = {"layer": layer, "head": list(heads), "component": range(q.shape[1])}
            found.append(xr.Dataset({**values, "n_distances": n_distances}, labels))
        return calibration, sums.join_layers(found)

    def losses(self, run: Run, rows: Sequence[Tensor], hooks: HookList) -> Float[np.ndarray, "budget prompt"]:
        """Return the loss of each prompt behind its first B tokens; NaN where it has no more."""
        budgets, lengths = self.labels()["budget"], [len(row) for row in rows]
        found = np.full((len(budgets), len(rows)), np.nan)
        for length in sorted(set(lengths)):
            places = [place for place, one in enumerate(lengths) if one == length]
            losses = run.losses(torch.stack([rows[place] for place in places]), hooks)
            for number, budget in enumerate(budgets):
                if losses.shape[1] > budget:
                    found[number, places] = losses[:, budget:].mean(1).numpy()
        return found

    def findings(self, own: Numbers) -> list[str]:
        lines, (*rules, drawn, _) = [], self.labels()["rule"]
        for budget in self.labels()["budget"]:
            rises = {rule: own("rise", rule=rule, budget=budget) for rule in (*rules, drawn)}
            recalls = {rule: own("recall", rule=rule, budget=budget) for rule in (*rules, drawn)}
            best = max(rules, key=lambda rule: recalls[rule].value)
            rest = {rule: own("recall", rule=rule, budget=budget, tokens=TOKENS[1]).plain for rule in (*rules, drawn)}
            each = [f"{WORDS.get(rule, rule)} {one:.3f} ({rises[rule].plain:+.3f} nats)" for rule, one in rest.items()]
            lines += [
                f"Of the attention in the best {budget} keys, {WORDS.get(best, best)} recalls {recalls[best]:.3f}, the "
                f"most (mean over heads), and with it in every head the loss changes by {rises[best]:+.3f} nats; drawn "
                f"keys recall {recalls[drawn]:.3f} and change it by {rises[drawn]:+.3f}.",
                f"Recall of the best {budget} keys without the attention to the first key, and the change of the loss "
                f"with the rule in every head: {', '.join(each)}.",
            ]
        return lines

    def table(self, own: Numbers) -> pd.DataFrame:
        """Return a row a rule and budget: recall, with the first key and without, and the rise of the loss."""
        columns = {
            "recall": own.array("recall"),
            "recall without the first key": own.array("recall", tokens=TOKENS[1]),
            "rise of the loss": own.array("rise"),
        }
        return own.frame(columns, *CELL)


def _recalls_of(
    capture: LayerCapture,
    calibration: tuple[Sequence[int], Means],
    seed: int,
    rule: Sequence[str],
    budget: Sequence[int],
) -> dict[str, Tensor]:
    """Return means over the queries that see more than the budget, and R^2 over all: "mass" and "recall" [tokens, rule,
    budget, head], without the attention to the first key in the second place, "r2" [rule, head].

    NaN where no query sees more than the budget.

    Args:
        capture: with its pattern.
        rule: all of them, "drawn" and "oracle" too.
        budget: all of them.
    """
    device, n_heads, most = double_device(capture.device), len(capture.heads), max(budget)
    mass, recall = torch.zeros(2, 2, len(rule), len(budget), n_heads, dtype=DOUBLE, device=device)
    n_queries = torch.zeros(len(budget), 1, dtype=DOUBLE, device=device)
    products = torch.zeros(len(rule), 3, n_heads, dtype=DOUBLE, device=device)
    for start in range(0, capture.length, BLOCK):
        stop = min(capture.length, start + BLOCK)
        rows, own = capture.of_rows(start, stop), capture.score_rows(start, stop)
        visible = capture.geometry.sees(distances_of(stop - start, stop, own.device))
        pattern, n_visible = double(capture.pattern_rows(start, stop)), visible.sum(-1).to(device)
        without_first = pattern.clone()
        without_first[..., 0] = 0
        patterns = [  # with what the best 1, 2, .. keys of each query hold
            (one, one.topk(min(most, stop)).values.cumsum(-1).clamp(min=SMALLEST)) for one in (pattern, without_first)
        ]
        smaller = [(at, one) for at, one in enumerate(budget) if one < stop]  # others leave no key of these queries out
        for at, one in smaller:
            n_queries[at] += (n_visible > one).sum()
        for number, name in enumerate(rule):
            scores = ranks_by(name, rows, own, calibration, seed)
            if name in PREDICTING:
                products[number] += squared_correlations(scores, own, visible).to(device)
            ranked = best_keys(scores, visible, most).to(device)
            for tokens, (attention, best) in enumerate(patterns):
                held = attention.gather(-1, ranked).cumsum(-1)
                for at, one in smaller:
                    counted = n_visible > one
                    kept = held[:, counted, one - 1]
                    mass[tokens, number, at] += kept.sum(-1)
                    recall[tokens, number, at] += (kept / best[:, counted, one - 1]).sum(-1)
    product, x, y = products.unbind(1)
    return {"mass": mass / n_queries, "recall": recall / n_queries, "r2": product.square() / (x * y)}

"""Order disturbed in the text, in the position index, or in the features: how fast does the loss rise?"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tl_posgen.collector import Variable
from tl_posgen.errors import InputError
from tl_posgen.measure import Measure, Request
from tl_posgen.models.loss import prompts_of_one_length, token_losses
from tl_posgen.models.model import Model
from tl_posgen.options import Options
from tl_posgen.position.decomposition.option_checks import check_choice, check_share, check_whole
from tl_posgen.position.order import perturbation_figures as figures
from tl_posgen.position.order.changes_by_token import TOKENS, ShownPrompt, shown_ratio
from tl_posgen.position.order.cloze import N_CHOICES, encoded_items, measure_cloze
from tl_posgen.position.order.disturbance import CONDITIONS, REACHES, conditions_for, disturb, draw
from tl_posgen.procedure import Job
from tl_posgen.report.intervals import ENDS, mean_and_ends, with_ends
from tl_posgen.report.sentences import beside, null_of, said, with_interval
from tl_posgen.result import Result
from tl_posgen.summary import NullSummary, Summary

RATIOS = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
TARGETS = ("all", "unmoved", "suffix")
DIMS = ("condition", "reach", "ratio", "draw", "prompt")
FEW, MANY = 0.05, 0.2  # what is said of few and of many: the paper's claim has them on either side of 5 to 10 %


@dataclass(frozen=True)
class Perturbation(Options):
    """change(rho) = loss disturbed - loss, on the same targets, with a share rho of the prompt out of order.

    Conditions: "tokens" and "words" (T: the text itself is swapped, targets move with it), "positions" (P: only the
    position index of queries and keys), "key_positions" (P on keys, which is also F: each key rotated as another
    position), "jitter" (F: pairs see i - j + u), "position_part" (F': the position part f sees the swapped index,
    content and residual do not). One seeded draw of disjoint swaps per prompt, draw and ratio, the same for all
    conditions but words; the swaps of a lower ratio are among those of a higher one. The first token and a suffix are
    never moved. Targets: "all", "unmoved" (places whose token, or position, was not swapped), "suffix" (the clean end).

    Beside the loss stands a cloze made from the text: passages of 40 words, to be finished with their own last word
    among four of their words, the context disturbed under the same conditions, at the widest reach.

    Args:
        ratios: shares of tokens to move, in [0, 1].
        conditions: all that the model can have, if left out: only the text's where scores know no distance.
        reaches: how far the swapped are apart: adjacent, within `window`, anything ("uniform"). A jitter moves by up to
            1, `window`, or the length of the prompt.
        n_draws: draws per prompt.
        window: tokens, of the reach "window".
        clean: share of the prompt left in order at its end.
        n_cloze: cloze items, as many as the text has and the model's context holds; 0 for none.

    Raises:
        InputError: a ratio outside [0, 1], an unknown condition or reach, a window below 1, no draw; later, unusable
            prompts, and swapped text where layers or heads are chosen.
        UnsupportedModelError: a condition asked for that the model cannot have.

    Source: that few swaps hardly matter, and that index and feature level are alike, is claimed by Han & Ji 2025 (arXiv
    2503.13305); their exact definitions are not known, these are ours. Choices are scored as in lm-evaluation-harness.

    Example:
        >>> from tl_posgen.models.tokens import bundled_text
        >>> from tl_posgen.position.order import perturbation
        >>> cut = {"length": 32, "n_prompts": 2, "null_seeds": (), "progress": False}
        >>> options = {"ratios": (0, 0.5), "conditions": ("tokens",), "reaches": ("uniform",), "n_cloze": 0}
        >>> found = perturbation("mini", bundled_text(), **cut, **options)
        >>> change = found.dataset["change"].sel(condition="tokens", reach="uniform", target="all")
        >>> float(change[0]), float(change[1]) > 0
        (0.0, True)
    """

    ratios: Sequence[int | float] = RATIOS
    conditions: Sequence[str] | None = None
    reaches: Sequence[str] = REACHES
    n_draws: int = 2
    window: int = 8
    clean: int | float = 0.25
    n_cloze: int = 40

    def check(self) -> None:
        for name, given, known in (("reach", self.reaches, REACHES), ("condition", self.conditions, CONDITIONS)):
            for one in () if given is None else given:
                check_choice(name, one, known)
            if given is not None and not len(given):
                raise InputError(f"no {name} chosen; choose from {', '.join(known)}")
        if not len(self.ratios):
            raise InputError("ratios: none given; give shares of tokens to move, such as ratios=(0.05, 0.1)")
        for ratio in self.ratios:
            check_share("ratio", ratio)
        if not 0 <= self.clean < 1:
            raise InputError(f"clean {self.clean} is outside [0, 1); it is the share left in order at the prompt's end")
        check_whole("perturbation", 1, window=self.window, n_draws=self.n_draws)
        check_whole("perturbation", 0, n_cloze=self.n_cloze)


def run(model: Model, prompts: Any, request: Request, job: Job) -> Result:
    options = request.options
    assert isinstance(options, Perturbation)
    where: dict[str, Any] = {"layers": job.layers, "heads": job.heads}
    conditions = conditions_for(model, options.conditions, **where)
    tokens = prompts_of_one_length(model, prompts, job.length, job.n_prompts)
    items = encoded_items(model, prompts, options.n_cloze, job.seed)

    axes = {"condition": conditions, "reach": list(options.reaches), "ratio": [float(x) for x in options.ratios]}
    disturbed = len(conditions) * len(options.ratios)
    of_loss = len(tokens) * (1 + disturbed * len(options.reaches) * options.n_draws)
    job.plan(of_loss + len(items) * disturbed * N_CHOICES)

    def of_model(one: Model, label: str, after: Mapping[str, Any]) -> xr.Dataset:
        how: dict[str, Any] = {"window": options.window, "seed": job.seed, "where": where}
        data = measure_loss(one, tokens, axes, n_draws=options.n_draws, clean=options.clean, **how)
        if items:
            data = data.merge(measure_cloze(one, items, axes, reach=widest(options.reaches), **how))
        settings = {"rows": ("condition", "reach", "ratio", "target"), "model": label, "cloze_items": len(items)}
        return data.assign_attrs(settings, window=options.window, clean=options.clean)

    return job.result(request, model, list(tokens), of_model)


def widest(reaches: Sequence[Any]) -> str:
    """Swaps over any distance where those were run."""
    return "uniform" if "uniform" in [str(reach) for reach in reaches] else str(reaches[-1])


def measure_loss(
    model: Model,
    tokens: Int[Tensor, "prompt pos"],
    axes: Mapping[str, Sequence[Any]],
    *,
    n_draws: int,
    window: int,
    clean: int | float,
    seed: int,
    where: Mapping[str, Any],
) -> xr.Dataset:
    """The change of the loss for every condition, reach and ratio of `axes`, every draw, prompt and target."""
    n_prompts, n = tokens.shape
    n_clean = round(clean * n)
    protected = [0, *range(n - n_clean, n)]
    coords = {**axes, "draw": list(range(n_draws)), "prompt": list(range(n_prompts))}
    change = np.full((*(len(coords[dim]) for dim in DIMS), len(TARGETS)), np.nan)
    moved = np.full(change.shape[:-1], np.nan)
    unchanged = token_losses(model, tokens)
    shown = ShownPrompt(widest(axes["reach"]), shown_ratio(axes["ratio"]))
    for place in np.ndindex(moved.shape):
        condition, reach, ratio, number, prompt = (coords[dim][at] for dim, at in zip(DIMS, place, strict=True))
        own = (seed * n_draws + number) * n_prompts + prompt  # every prompt has draws of its own
        drawn = draw(model, tokens[prompt], condition, reach, ratio, seed=own, window=window, protected=protected)
        row, hooks = disturb(model, tokens[prompt], condition, drawn, **where)
        difference = token_losses(model, row[None], hooks)[0] - unchanged[prompt]
        change[place] = changes(difference, drawn.moved, n_clean)
        shown.keep(condition, reach, ratio, number, prompt, row, difference)
        moved[place] = drawn.ratio

    def over_prompts(name: str, values: Float[np.ndarray, "..."]) -> dict[str, Any]:
        return mean_and_ends(name, np.moveaxis(values.mean(axis=3), 3, 0), (*DIMS[:3], "target"))

    data = over_prompts("change", change) | {
        "change_each": ((*DIMS, "target"), change),
        "moved": (DIMS[:3], moved.mean(axis=(3, 4))),
        "loss": float(unchanged.mean()),
    }
    if "positions" in coords["condition"]:
        data |= over_prompts("gap", change - change[list(coords["condition"]).index("positions")])
    return xr.Dataset(data, {**coords, "target": list(TARGETS)}).assign(shown.variables(model))


def changes(difference: Float[Tensor, " target"], moved: Bool[Tensor, " pos"], n_clean: int) -> list[float]:
    """Its mean over all targets, over those at places that were not moved, and over the suffix; NaN over none."""
    suffix = torch.arange(len(difference)) >= len(difference) - n_clean
    return [float(difference[mask].mean()) for mask in (slice(None), ~moved[1:], suffix)]


# What is shown


def summarise(data: xr.Dataset) -> Summary:
    """Changes at the widest reach over all targets; None for conditions that were not run and for no cloze.

    Lists go by `ratios`; `_few`, `_many`, `_most` are at the ratio nearest to 5 %, nearest to 20 %, and the highest.
    """
    reach = widest(data["reach"].values.tolist())
    data, least = data.sel(target="all", reach=reach), data["ratio"].min()
    places = places_of(data)
    conditions = [str(condition) for condition in data["condition"].values]
    summary: dict[str, Any] = {
        "reach": reach,
        "loss": float(data["loss"]),
        "conditions": conditions,
        "ratios": data["ratio"].values.tolist(),
        **{f"ratio_{place}": ratio for place, ratio in places.items()},
        "ratio_least": float(least),
        "fold_proportional": places["many"] / places["few"] if places["few"] else None,
        "cloze_items": int(data.attrs["cloze_items"]),
        "cloze_chance": known(data, "cloze_chance"),
        "cloze_accuracy_least": known(data.sel(ratio=least).mean("condition"), "cloze_accuracy"),
    }
    found = {condition: of_condition(data.sel(condition=condition), places) for condition in conditions}
    not_run = dict.fromkeys(found[conditions[0]])
    for condition in CONDITIONS:
        summary |= {f"{condition}_{name}": value for name, value in found.get(condition, not_run).items()}
    return summary


def of_condition(data: xr.Dataset, places: Mapping[str, float]) -> dict[str, Any]:
    """The summary of one condition."""
    summary: dict[str, Any] = {"change": data["change"].values.tolist()}
    ordered = known(data.sel(ratio=data["ratio"].min()), "cloze_log_likelihood")
    for place, ratio in places.items():
        at = data.sel(ratio=ratio)
        for name, end in product(("change", "gap", "cloze_accuracy"), ENDS):
            summary[f"{name}_{place}{end}"] = known(at, f"{name}{end}")
        summary[f"perplexity_{place}"] = math.exp(summary[f"change_{place}"])
        log_p = known(at, "cloze_log_likelihood")
        summary[f"cloze_log_likelihood_change_{place}"] = None if log_p is None or ordered is None else log_p - ordered
    few, many = summary["change_few"], summary["change_many"]
    return summary | {"fold": many / few if few > 0 and places["few"] < places["many"] else None}


def known(data: xr.Dataset, name: str) -> float | None:
    """A single number, None where it was not measured."""
    return float(data[name]) if name in data else None


def places_of(data: xr.Dataset) -> dict[str, float]:
    """The ratios that are spoken of: those that were run nearest to few and to many, other than 0, and the highest."""
    moved = data["ratio"].where(data["ratio"] > 0, drop=True)
    ratios = moved if moved.size else data["ratio"]
    nearest = {name: float(ratios.sel(ratio=one, method="nearest")) for name, one in (("few", FEW), ("many", MANY))}
    return nearest | {"most": float(ratios.max())}


NAMES = {
    "tokens": "swapping tokens",
    "words": "swapping words",
    "positions": "swapping positions of queries and keys",
    "key_positions": "swapping positions of keys alone (P and F are the same there)",
    "jitter": "seeing pairs at jittered distances",
    "position_part": "swapping positions in the position part alone",
}
TOLD = ("tokens", "words", "positions")


def findings(own: Summary, null: NullSummary | None) -> list[str]:
    conditions = own["conditions"]
    sentences = [how_it_rises(own, null, condition) for condition in TOLD if condition in conditions]
    features = [condition for condition in conditions if condition not in TOLD]
    if "positions" in conditions and features:
        gaps = "; ".join(f"{NAMES[one]} {with_interval(own, f'{one}_gap_many', '+.3f')}" for one in features)
        sentences.append(
            f"Index against features, {own['ratio_many']:.0%} moved: positions "
            f"{beside(own, null, 'positions_change_many', '+.3f')} nats, and against that {gaps}. "
            "An interval that holds 0 means that nothing sets them apart."
        )
    return sentences + cloze_findings(own, null)


def how_it_rises(own: Summary, null: NullSummary | None, condition: str) -> str:
    places = {own[f"ratio_{place}"]: place for place in ("most", "many", "few")}  # one place a ratio
    parts = []
    for ratio, place in sorted(places.items()):
        key = f"{condition}_perplexity_{place}"
        rise = f"{with_interval(own, f'{condition}_change_{place}', '+.3f')} nats; {null_of(null, key, '.2f')}"
        parts.append(f"{own[key]:.2f} at {ratio:.0%} moved ({rise})")
    sentence = f"{NAMES[condition].capitalize()} multiplies perplexity by {', '.join(parts)}."
    if own[f"{condition}_fold"] is None:
        return sentence
    few, many = own["ratio_few"], own["ratio_many"]
    fold = f"{own[f'{condition}_fold']:.1f}-fold (proportional: {own['fold_proportional']:.1f})"
    return f"{sentence} From {few:.0%} to {many:.0%} the rise in nats grows {fold}."


def cloze_findings(own: Summary, null: NullSummary | None) -> list[str]:
    if not own["cloze_items"]:
        return []
    parts = [
        f"{condition.replace('_', ' ')} {with_interval(own, f'{condition}_cloze_accuracy_most', '.0%')}, "
        f"{said(own[f'{condition}_cloze_log_likelihood_change_most'], '+.2f')}"
        for condition in own["conditions"]
    ]
    return [
        f"A cloze of {own['cloze_items']} passages of the text, {own['ratio_least']:.0%} of the context moved: "
        f"accuracy {beside(own, null, 'cloze_accuracy_least', '.0%')}; chance {own['cloze_chance']:.0%}. With "
        f"{own['ratio_most']:.0%} moved, accuracy and change of the right choice's log-likelihood (nats a token): "
        f"{'; '.join(parts)}."
    ]


def table(data: xr.Dataset) -> pd.DataFrame:
    """A row a condition and ratio (few, many, most), widest reach, all targets: the rise in nats, less P's; cloze."""
    wide = data.sel(target="all", reach=widest(data["reach"].values.tolist()))
    names = {"change": "rise", "change_low": "low", "change_high": "high", "gap": "less P", "gap_low": "from"}
    names |= {"gap_high": "to", "cloze_accuracy": "cloze"}
    names = {name: column for name, column in names.items() if name in wide}
    rows = [
        (condition, f"{ratio:.0%}", *(float(wide[name].sel(condition=condition, ratio=ratio)) for name in names))
        for condition in wide["condition"].values
        for ratio in sorted({*places_of(wide).values()})
    ]
    return pd.DataFrame(rows, columns=["condition", "moved", *names.values()])


ROWS, CLOZE = ("condition", "reach", "ratio", "target"), ("condition", "ratio")
OVER_ITEMS = "of the 95 % interval over items, Student's"
RIGHT = "share of items whose right choice has the highest sum of ln p, widest reach"
VARIABLES = {
    **with_ends("change", "rise of the loss", "nats", "loss disturbed - loss, mean over draws and prompts", ROWS),
    "change_each": Variable("rise of the loss", "nats", "of every draw and prompt", (*DIMS, "target")),
    "moved": Variable("share moved", "", "of tokens (jitter: of pairs) that were really moved", DIMS[:3]),
    "loss": Variable("loss", "nats", "per token, nothing moved", ()),
    "token_change": Variable("change of the loss", "nats", "per token, first prompt", ("condition", "shown_target")),
    "token_text": Variable("tokens shown", dims=("condition", "shown_target")),
    "shown_ratio": Variable("share moved of the tokens shown", dims=()),
    **with_ends("gap", "rise less that of P", "nats", "change - change of `positions`, prompt by prompt", ROWS),
    **with_ends("cloze_accuracy", "cloze accuracy", "", RIGHT, CLOZE, OVER_ITEMS),
    **with_ends("cloze_log_likelihood", "ln p of the right choice", "nats", "per token", CLOZE, OVER_ITEMS),
    "cloze_chance": Variable("chance level of the cloze", "", "1 / number of choices", ()),
}

MEASURE = Measure(
    name="perturbation",
    question="How much order does the model need?",
    explanation=(
        "Loss after moving tokens in the text (T), positions of q and k (P), and rotated features (F), by the share of "
        "tokens moved; 95 % intervals over prompts, each the mean over draws. Beside it the accuracy of a "
        "cloze made from the text, with a share of its context moved; intervals over items."
    ),
    source="the claim: Han & Ji 2025 (arXiv 2503.13305); the definitions of the conditions and the cloze: ours",
    options=Perturbation,
    procedure=run,
    matrices=6,
    variables=VARIABLES,
    summarise=summarise,
    findings=findings,
    figures={"curves": figures.curves, "matched": figures.matched},
    drawn=figures.drawn,
    tokens=TOKENS,
    table=table,
    legend=(
        "rise: of the loss, nats; low, high: its 95% interval; less P: less the rise of swapped positions, from and to "
        "its interval; cloze: accuracy."
    ),
)

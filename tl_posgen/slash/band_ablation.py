"""Which frequencies does the running model need? Bands of RoPE dropped, frozen or kept alone in every layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr
from jaxtyping import Int
from torch import Tensor

from tl_posgen.collector import HeadRows, Variable
from tl_posgen.errors import UnsupportedModelError
from tl_posgen.measure import Measure, Request
from tl_posgen.models.capture.capturing import capturing
from tl_posgen.models.layer_table import geometry_of
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.loss import prompts_of_one_length, require_one_length, token_losses
from tl_posgen.procedure import Job
from tl_posgen.report.figures import COLOURS, NULL_COLOUR, Panels, colour_axis, finish, heat, model_label, sides
from tl_posgen.report.intervals import ENDS, mean_and_ends, with_ends
from tl_posgen.report.sentences import NO_NULL, at_most, entry, with_interval
from tl_posgen.result import Result
from tl_posgen.rope.frequency_bands import BANDS
from tl_posgen.slash.ablation_hooks import ablate_bands
from tl_posgen.slash.dominance import Dominance, check_all_reached, dominant_at
from tl_posgen.slash.head_groups import averaged
from tl_posgen.slash.layer_means import at_distance, statistics_of, strongest
from tl_posgen.slash.slash_ablation import WHOLE_KINDS, Condition, Scheme, conditions, in_words
from tl_posgen.summary import NullSummary, Summary

SCHEMES = {"thirds": "A third of the planes", "wavelength": "A band by wavelength"}
N_HEADS = 12  # the strongest, drawn one by one


@dataclass(frozen=True)
class BandAblation(Dominance):
    r"""Loss, and SlashScore(D) at each head's own D, with scores = scale <R' q', R' k'> in all layers at once.

    The conditions are those of `SlashAblation`: each frequency band dropped, frozen or kept alone, Q and K of rank one
    or their means, RoPE removed. There one layer is changed by itself; here the model runs on what is left. Each
    head's own D, and its score with one layer ablated, come from the measures "slash" and "slash_ablation" of the same
    run. Layers and heads that are chosen are those whose slash scores are taken; all are ablated.

    Args:
        schemes: how to make bands, any of "thirds" and "wavelength".
        kappa, distances: what makes a head slash-dominant.

    Raises:
        InputError: unusable prompts, an unknown scheme, kappa outside (0, 1], a distance that no prompt reaches.
        UnsupportedModelError: a model without rotary planes, or whose scores cannot be replaced.

    Source: that medium and high frequencies carry the slash is claimed by Cheng et al. 2026 (arXiv 2601.08297); bands
    and ablations are ours.

    Example:
        >>> from tl_posgen.slash import band_ablation
        >>> options = {"length": 12, "n_prompts": 1, "schemes": ["thirds"], "null_seeds": (), "progress": False}
        >>> result = band_ablation("mini", "Down, down, down. Would the fall never end?", **options)
        >>> result.frame()["condition"].tolist()[:3]
        ['unchanged', 'drop high, thirds', 'drop medium, thirds']
    """

    schemes: Sequence[Scheme] = get_args(Scheme)


def run(model: Any, prompts: Any, request: Request, job: Job) -> Result:
    """Every condition in the running model."""
    options = request.options
    assert isinstance(options, BandAblation)
    tokens = prompts_of_one_length(model, prompts, job.length, job.n_prompts)
    planned = conditions(options.schemes, tokens.shape[1])
    job.plan(len(tokens) * len(planned))

    def of_model(model: Any, label: str, after: Mapping[str, xr.Dataset]) -> xr.Dataset:
        place = after["slash"]["best_distance"]
        running = xr.concat([in_running_model(model, tokens, one, place, job) for one in planned], "condition")
        assert isinstance(running, xr.Dataset)
        names = [condition.label for condition in planned]
        found = compared(running.assign_coords(condition=names), after, options)
        of_condition = {
            name: ("condition", [getattr(one, name) for one in planned]) for name in ("kind", "scheme", "band")
        }
        found["n_planes"] = (("condition", "model_layer"), [planes_of(model, one) for one in planned])
        return found.assign_coords(of_condition).assign_attrs(model=label)

    return job.result(request, model, list(tokens), of_model)


def in_running_model(
    model: Any, tokens: Int[Tensor, "prompt pos"], condition: Condition, place: xr.DataArray, job: Job
) -> xr.Dataset:
    """With one condition in all layers: slash scores [layer head distance], those at each head's own distance
    [prompt layer head], and loss [prompt]."""
    rows = HeadRows()

    def take(layer: LayerCapture) -> None:
        rows.add(layer, score=statistics_of(layer).score)

    planes = condition.planes if condition.band else None
    hooks = [] if condition.kind == "unchanged" else ablate_bands(model, condition.kind, planes)
    with capturing(model, take, needs=frozenset({"pattern"}), layers=job.layers, heads=job.heads):
        losses = token_losses(model, tokens, hooks).mean(-1).numpy()
    score = rows.array("score", "distance")
    found = {"profile": score.mean("prompt"), "score": at_distance(score, place), "loss": ("prompt", losses)}
    return xr.Dataset(found)


def planes_of(model: Any, condition: Condition) -> list[int]:
    """How many planes of each layer a condition is about: those of its band, or all."""
    ropes = [geometry.rope for geometry in geometry_of(model)]
    return [int(condition.planes(rope).sum()) if condition.band else len(rope.inv_freq) for rope in ropes]


def compared(running: xr.Dataset, after: Mapping[str, xr.Dataset], options: BandAblation) -> xr.Dataset:
    """Scores at each head's best distance of the untouched model, and one number per condition."""
    place = after["slash"]["best_distance"]
    alone = at_distance(after["slash_ablation"]["score"].reindex(condition=running["condition"]), place)
    dominant = dominant_at(running["profile"], options)
    before = dominant.isel(condition=0, drop=True)
    chosen = before.any("distance")
    chosen = chosen if chosen.any() else xr.ones_like(chosen)
    of_heads = running["score"].where(chosen).mean(("layer", "head")).transpose("prompt", "condition")
    change = (running["loss"] - running["loss"].isel(condition=0)).transpose("prompt", "condition")
    data: dict[str, Any] = {
        "loss_mean": running["loss"].mean("prompt"),
        **mean_and_ends("loss_change", change.values, OVER),
        **mean_and_ends("slash_score", of_heads.values, OVER, (0.0, 1.0)),
        "slash_heads": dominant.any("distance").sum(("layer", "head")),
        "slash_heads_kept": (dominant & before).any("distance").sum(("layer", "head")),
        "slash_score_alone": alone.where(chosen).mean(("layer", "head")),
        "loss": running["loss"],
        "score": running["score"].mean("prompt"),
        "score_alone": alone,
        "best_distance": place,
        "uniform_score": at_distance(after["slash"]["uniform"], place),
    }
    attrs = {"rows": ["condition"], "kappa": options.kappa, "distances": sorted(set(options.distances))}
    return xr.Dataset(data, {"condition": running["condition"]}, attrs)


def requires(model: Any) -> None:
    """Refuse a model that rotates nothing: there is no band to ablate."""
    if not any(geometry.rope.rotary_dim for geometry in geometry_of(model)):
        raise UnsupportedModelError(
            "no layer of this model has rotary planes, so there is no band to drop; "
            "slash_ablation measures its slash scores with Q and K ablated"
        )


def check_prompts(options: BandAblation, tokens: Sequence[Int[Tensor, " _"]]) -> None:
    """Refuse distances that no prompt reaches, and prompts of different lengths."""
    check_all_reached(options, tokens)
    require_one_length("band_ablation", tokens)


# What is shown


def summarise(data: xr.Dataset) -> Summary:
    measured = [f"{name}{end}" for name in ("loss_change", "slash_score") for end in ENDS]
    return {
        "conditions": data["condition"].values.tolist(),
        "loss": data["loss_mean"].values.tolist(),
        **{name: data[name].values.tolist() for name in (*measured, "slash_heads", "slash_heads_kept")},
        "n_planes": data["n_planes"].mean("model_layer").values.tolist(),
        "largest_loss_change": float(abs(data["loss_change"]).max()),
    }


def of_condition(summary: Summary, key: str, condition: str) -> int | float:
    """A list of the summary at one condition."""
    return summary[key][summary["conditions"].index(condition)]


def findings(own: Summary, null: NullSummary | None) -> list[str]:
    lines, at = [], own["conditions"].index
    for scheme, words in SCHEMES.items():
        dropped = {band: f"drop {band}, {scheme}" for band in BANDS}
        if set(dropped.values()) <= set(own["conditions"]):
            parts = [
                f"{band} {with_interval(entry(own, 'loss_change', at(name)), 'loss_change', '+.3f')} "
                f"({of_condition(own, 'slash_heads_kept', name):g} kept)"
                for band, name in dropped.items()
            ]
            lines.append(f"{words} dropped in every layer, the loss changes by {', '.join(parts)}.")

    def told(kind: str) -> str:
        score = with_interval(entry(own, "slash_score", at(kind)), "slash_score")
        return f"{score} (loss {of_condition(own, 'loss', kind):.3f})"

    whole = [f"{words} {told(kind)}" for kind, words in WHOLE_KINDS.items() if kind != "means_no_rope"]
    random = NO_NULL if null is None else f"random init {averaged(null['slash_heads'][0])}"
    lines.append(
        f"{own['slash_heads'][0]} heads are slash-dominant ({random}), mean score {told('unchanged')}; in the running "
        f"model this becomes: {', '.join(whole)}."
    )
    if null is not None:
        most = at_most(null, "largest_loss_change", digits=4)
        lines.append(f"The random-init model's loss changes by {most} at most.")
    return lines


COLUMNS = {
    "loss_mean": "loss",
    "slash_heads": "slash heads",
    "slash_heads_kept": "kept",
    "slash_score": "score",
    "slash_score_alone": "score, one layer alone",
}


def table(data: xr.Dataset) -> pd.DataFrame:
    """A row per condition, by one scheme where bands were made in two ways: the pictures show the others."""
    frame = data[list(COLUMNS)].to_dataframe().reset_index()
    schemes = [scheme for scheme in frame["scheme"].unique() if scheme]
    frame = frame[frame["scheme"].isin(["", *schemes[:1]])]
    return frame[["condition", *COLUMNS]].rename(columns=COLUMNS).reset_index(drop=True)


def bar(data: xr.Dataset, variable: str, name: str, colour: str, **more: Any) -> go.Bar:
    """A number under every condition."""
    y = [in_words(condition) for condition in data["condition"].values]
    return go.Bar(x=data[variable].values, y=y, orientation="h", name=name, marker_color=colour, **more)


def loss_bars(result: Any) -> go.Figure:
    """The loss under every condition."""
    both = sides(result)
    height = 60 + 24 * result.dataset.sizes["condition"]
    panels = Panels([side for side, _, _ in both], columns=2, row_height=height, shared_yaxes=True)
    for number, (side, data, colour) in enumerate(both):
        panels.add(number, bar(data, "loss_mean", side, colour, texttemplate="%{x:.3f}"))
        unchanged = float(data["loss_mean"][0])
        panels.figure.add_vline(x=unchanged, line_dash="dot", row=1, col=number + 1)  # pyright: ignore[reportArgumentType]
    panels.axes("loss, nats per token").figure.update_yaxes(autorange="reversed", automargin=True)
    panels.figure.update_layout(showlegend=False)
    title = f"Loss without a band of RoPE · {model_label(result.dataset)}"
    return panels.finish(title, "all layers ablated at once; dotted: unchanged")


def slash_bars(result: Any) -> go.Figure:
    """Mean slash score and number of the slash heads under every condition."""
    data, null, height = result.dataset, result.null, 90 + 30 * result.dataset.sizes["condition"]
    titles = ["mean slash score of the slash heads", "slash heads"]
    panels = Panels(titles, columns=2, row_height=height, shared_yaxes=True, horizontal_spacing=0.04)
    panels.add(
        0,
        bar(data, "slash_score", "in the running model", COLOURS[0]),
        bar(data, "slash_score_alone", "one layer alone", COLOURS[5]),
        *([] if null is None else [bar(null, "slash_score", model_label(null), NULL_COLOUR)]),
    )
    panels.add(
        1,
        bar(data, "slash_heads", "slash-dominant", COLOURS[1]),
        bar(data, "slash_heads_kept", "of those before", COLOURS[4]),
        *([] if null is None else [bar(null, "slash_heads", model_label(null), NULL_COLOUR)]),
    )
    panels.figure.update_yaxes(autorange="reversed", automargin=True).update_layout(barmode="group", bargap=0.25)
    subtitle = (
        f"each head at its own distance; dominant: a score of {data.attrs['kappa']} at one of the distances "
        f"{', '.join(str(one) for one in np.atleast_1d(data.attrs['distances']))}"
    )
    return panels.finish(f"Slash heads without a band of RoPE · {model_label(data)}", subtitle)


def strongest_heads(result: Any) -> go.Figure:
    """The strongest heads, condition by condition."""
    data = result.dataset
    heads = {}
    for layer, head in strongest(data["score"].isel(condition=0, drop=True), N_HEADS):
        one = data.sel(layer=layer, head=head)
        heads[f"L{layer} H{head} D{int(one['best_distance'])}"] = one["score"].values
    words = [in_words(condition) for condition in data["condition"].values]
    grid = xr.DataArray(np.stack([*heads.values()], 1), {"condition": words, "head": [*heads]}, ("condition", "head"))
    figure = go.Figure(heat(grid, texttemplate="%{z:.2f}"))
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_layout(coloraxis=colour_axis(0.0, float(grid.max())))
    subtitle = "slash score in the running model, each head at its best distance D of the unchanged one"
    title = f"The strongest slash heads, ablated · {model_label(data)}"
    return finish(figure, title, subtitle, height=160 + 24 * data.sizes["condition"])


OVER, PER_HEAD = ("condition",), ("condition", "layer", "head")
VARIABLES = {
    "loss_mean": Variable("loss", "nats per token", "mean over prompts", OVER),
    "slash_heads": Variable("slash heads", "", "dominant at one of the distances", OVER),
    "slash_heads_kept": Variable("slash heads kept", "", "of those before, at a distance where they were", OVER),
    **with_ends("slash_score", "slash score", "", "mean over the heads dominant before (all where none was)", OVER),
    **with_ends("loss_change", "rise of the loss", "nats per token", "against the unchanged model, by prompt", OVER),
    "slash_score_alone": Variable("slash score, one layer alone", "", "each layer ablated by itself", OVER),
    "loss": Variable("loss", "nats per token", dims=("condition", "prompt")),
    "score": Variable("slash score in the running model", "", "at the best distance", PER_HEAD),
    "score_alone": Variable("slash score, one layer alone", "", "at the best distance", PER_HEAD),
    "best_distance": Variable("best distance", "tokens", "of the unchanged head, over D < N/2"),
    "uniform_score": Variable("slash score of uniform attention", description="at the best distance"),
    "n_planes": Variable("planes in the band", dims=("condition", "model_layer")),
}

MEASURE = Measure(
    name="band_ablation",
    question="Which frequencies does the running model need?",
    explanation=(
        "RoPE planes dropped, frozen (theta = 0) or kept alone in all layers at once, Q and K cut to rank one or to "
        "their means, RoPE removed: the loss, and the slash scores that are left. Thirds: of the planes, fastest "
        "first. Wavelength: high < 32 tokens, medium up to the prompt's length, low above. Alone: each layer ablated "
        "by itself."
    ),
    source="the claim: Cheng et al. 2026 (arXiv 2601.08297); bands and ablations: ours",
    options=BandAblation,
    procedure=run,
    after=("slash", "slash_ablation"),
    requires=requires,
    check_prompts=check_prompts,
    matrices=10,
    variables=VARIABLES,
    summarise=summarise,
    findings=findings,
    figures={"loss": loss_bars, "slash": slash_bars, "heads": strongest_heads},
    table=table,
    legend=(
        "score: mean slash score of the heads that are slash-dominant unchanged; kept: how many of them still are; one "
        "layer alone: with only the head's own layer ablated; rank_one: Q and K cut to rank one; means: replaced by "
        "their means."
    ),
)

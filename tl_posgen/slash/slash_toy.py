"""Does gradient descent make a slash head? A shallow RoPE transformer trained, and its head measured on the way."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import cycle, product
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import torch
import xarray as xr
from tqdm.auto import trange

from tl_posgen.collector import Variable
from tl_posgen.measure import Measure
from tl_posgen.report.figures import COLOURS, Panels, colour_axis, finish, heat, line
from tl_posgen.result import Result
from tl_posgen.slash.slash_scores import uniform_scores
from tl_posgen.slash.toy_model import (
    Planes,
    ShallowTransformer,
    ToySettings,
    draw_prompts,
    measure,
    pattern_of_one_prompt,
)
from tl_posgen.summary import Summary, jsonable

FEATURES = ("trained", "unseen")
EVALUATION_PROMPTS = 256


def slash_toy(
    distance: int = 3,
    planes: Planes | str = "all",
    *,
    seeds: Sequence[int] = (0, 1, 2),
    steps: int = 1500,
    batch: int = 256,
    n_tokens: int = 48,
    n_features: int = 8,
    angle: float = 30.0,
    d_head: int = 32,
    rope_base: float = 10_000.0,
    init_std: float = 0.02,
    learning_rate: float = 0.02,
    every: int = 10,
    snapshots: Sequence[int] | None = None,
    progress: bool = True,
) -> Result:
    r"""Gradient descent on E (w[x_N] - sum_j a_j y_j)^2 makes a head with S_{j,j-D} near 1, on unseen features too.

    A prompt is n_tokens i.i.d. features x_j; the label shown at position j is y_{j-D} = w[x_{j-D}] with w ~ N(0, I)
    drawn per prompt, and w[x_N] is asked for. It can be found only by attending D tokens back (layer 1) and matching
    what is seen there with x_N (layer 2). The embeddings e_k = cos(angle) u + sin(angle) v_k lie on a cone around u.
    That a shallow RoPE transformer under gradient descent learns such heads is the claim of Cheng et al. 2026
    (arXiv 2601.08297); this task and its settings are ours, not the paper's.

    Args:
        distance: D.
        planes: frequency bands (thirds of the planes) that the head keeps: all, high_medium, high, medium or low.
        seeds: one run each, of weights and of data. They are trained together.
        steps, batch, learning_rate: of Adam.
        n_tokens: N.
        n_features: trained features; as many more are only ever used for measuring.
        angle: of the cone, in degrees.
        d_head, rope_base, init_std: of W_Q and W_K; scores are not divided by sqrt(d_head).
        every: measure after so many steps.
        snapshots: steps at which the pattern of one prompt is kept; by default some early ones and the last.
        progress: show a progress bar.

    Returns:
        A Result named "slash_toy", its variables described; `.frame()`: one row per seed.

    Raises:
        InputError: settings that make no task; the message says which.

    Example:
        >>> result = slash_toy(steps=2, batch=4, seeds=(0,), progress=False)
        >>> result.dataset.score.sizes["step"], result.dataset.pattern.sizes["query"]
        (2, 48)
    """
    asked = {name: value for name, value in locals().items() if name != "progress"}
    settings = ToySettings(**asked)
    provenance = {
        "experiment": "slash_toy",
        **jsonable(asdict(settings)),
        "dtype": "float32",
        "torch": torch.__version__,
    }
    return Result("slash_toy", MEASURE.describe(train(settings, progress)), provenance=provenance)


def train(settings: ToySettings, progress: bool) -> xr.Dataset:
    """The shallow transformers of all seeds, side by side, and what is measured of them on the way."""
    generators = [torch.Generator().manual_seed(seed) for seed in settings.seeds]
    model = ShallowTransformer(settings, generators)
    optimiser = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    held_out = draw_prompts(settings, generators, EVALUATION_PROMPTS)
    features, kept_steps = settings.embeddings[0], settings.kept_steps
    moments, patterns = {}, {}
    for step in trange(settings.steps + 1, desc="slash toy", unit="step", disable=not progress):
        if step % settings.every == 0 or step == settings.steps:
            moments[step] = measure(model, *held_out)
        if step in kept_steps:
            patterns[step] = pattern_of_one_prompt(model, held_out[0])
        if step < settings.steps:
            tokens, values = draw_prompts(settings, generators, settings.batch)
            error = model(tokens, values, features) - values[..., -1]
            optimiser.zero_grad()
            # a sum over seeds: each copy gets the gradient of its own mean loss
            error.square().mean(-1).sum().backward()
            optimiser.step()
    over_steps = xr.concat(moments.values(), pd.Index(list(moments), name="step"))
    assert isinstance(over_steps, xr.Dataset)
    curves = over_steps.drop_vars("profile").transpose("features", "seed", "step")
    dims = ("features", "seed", "snapshot", "query", "key")
    dataset = curves.assign(
        profile=over_steps["profile"].isel(step=-1, drop=True),
        uniform=("distance", uniform_scores(settings.n_tokens).numpy()),
        pattern=(dims, torch.stack([*patterns.values()], 2).numpy()),
        token=(("seed", "query"), held_out[0][:, 0].numpy()),
    )
    places = range(settings.n_tokens)
    coords = {"seed": list(settings.seeds), "features": list(FEATURES), "snapshot": list(patterns)}
    dataset = dataset.assign_coords(coords | dict.fromkeys(("distance", "query", "key"), places))
    attrs = {"rows": "seed", "slash_distance": settings.distance, "planes": settings.planes}
    return dataset.assign(of_seeds(dataset)).assign_attrs(attrs)


def of_seeds(dataset: xr.Dataset) -> dict[str, xr.DataArray]:
    """One number per seed: where each curve ends, and when the head and the matching layer formed."""
    first, last = dataset.isel(step=0, drop=True), dataset.isel(step=-1, drop=True)
    growth = last["matching"] - first["matching"]
    grown = (dataset["matching"] - first["matching"] >= growth / 2) & (growth > 0)
    formed = dataset["score"].sel(features="trained", drop=True) >= 0.5
    return {
        "loss_start": first["loss"],
        "loss_end": last["loss"],
        **{f"score_{features}": last["score"].sel(features=features, drop=True) for features in FEATURES},
        "r1_q_end": last["r1_q"],
        "r1_k_end": last["r1_k"],
        # the first measured step at which it was so; NaN where it never was
        "slash_step": dataset["step"].where(formed).min("step"),
        "matching_step": dataset["step"].where(grown).min("step"),
    }


# What is shown

PER_SEED = {
    "loss_start": "loss at start",
    "loss_end": "loss at end",
    "score_trained": "score",
    "score_unseen": "score, unseen",
    "r1_q_end": "r1(Q)",
    "r1_k_end": "r1(K)",
    "slash_step": "formed by step",
}


def summarise(data: xr.Dataset) -> Summary:
    distance = int(data.attrs["slash_distance"])
    ends = data[[name for name in PER_SEED if name != "slash_step"]]
    spread = {f"{name}_mean": float(mean) for name, mean in ends.mean().items()}
    if data.sizes["seed"] > 1:
        spread |= {f"{name}_std": float(std) for name, std in ends.std(ddof=1).items()}
    spread |= {f"score_{features}_least": float(ends[f"score_{features}"].min()) for features in FEATURES}
    formed = data["slash_step"].dropna("seed")
    return {
        "distance": distance,
        "planes": str(data.attrs["planes"]),
        "seeds": data.sizes["seed"],
        "steps": int(data["step"][-1]),
        "uniform": float(data["uniform"].sel(distance=distance)),
        # before any training: the null of this measure
        "score_at_start": float(data["score"].sel(features="trained").isel(step=0).mean()),
        "formed": formed.sizes["seed"],
        "formed_by": int(formed.max()) if formed.sizes["seed"] else None,
        **spread,
    }


def findings(own: Summary, null: Any) -> list[str]:
    steps = "never" if own["formed_by"] is None else f"by step {own['formed_by']}"
    return [
        f"Trained on {planes_in_words(own['planes'])} planes, the slash score at D = {own['distance']} goes from "
        f"{own['score_at_start']:.3f} at initialisation to {spread(own, 'score_trained')}, and "
        f"{spread(own, 'score_unseen')} on unseen features (uniform attention {own['uniform']:.3f}); loss "
        f"{spread(own, 'loss_start')} -> {spread(own, 'loss_end', 4)}. {own['seeds']} seeds, mean ± standard "
        "deviation.",
        f"The head passed one half in {own['formed']} of {own['seeds']} seeds, {steps}; at the end r1(Q) is "
        f"{spread(own, 'r1_q_end')} and r1(K) {spread(own, 'r1_k_end')}.",
    ]


def spread(own: Summary, name: str, digits: int = 3) -> str:
    """'0.998 ± 0.000': mean and standard deviation over seeds; the value alone of a single one."""
    mean, std = f"{own[f'{name}_mean']:.{digits}f}", own.get(f"{name}_std")
    return mean if std is None else f"{mean} ± {std:.{digits}f}"


def table(data: xr.Dataset) -> pd.DataFrame:
    """A row per seed: loss, slash score on trained and unseen features, rank of Q and K, when the head formed."""
    return data[list(PER_SEED)].to_dataframe().reset_index()[["seed", *PER_SEED]].rename(columns=PER_SEED)


PANELS = {
    "loss": "squared loss",
    "score": "slash score at D",
    "r1_q": "r1 of Q before RoPE",
    "matching": "matching layer: diagonal less the rest",
}


def planes_in_words(planes: str) -> str:
    return planes.replace("_", " and ")


def heading(dataset: xr.Dataset) -> str:
    return f"slash toy, D = {dataset.attrs['slash_distance']}, planes: {planes_in_words(dataset.attrs['planes'])}"


def lines(curves: xr.DataArray, along: str) -> list[go.Scatter]:
    """A line a seed, and a dash for each kind of features where there are two."""
    if "features" not in curves.dims:
        curves = curves.expand_dims(features=["trained"])
    looks = {"trained": ("", "solid"), "unseen": (", unseen features", "dot")}
    return [
        line(curves[along].values, curves.sel(features=kind, seed=seed).values, f"seed {seed}{end}", colour, dash=dash)
        for kind, (end, dash) in looks.items()
        if kind in curves["features"]
        for seed, colour in zip(curves["seed"].values, cycle(COLOURS), strict=False)
    ]


def training(result: Any) -> go.Figure:
    """Curves over training, a line a seed."""
    panels = Panels(list(PANELS.values()), columns=2, row_height=250)
    for number, name in enumerate(PANELS):
        panels.add(number, *lines(result.dataset[name], "step"))
    subtitle = "held-out prompts, a line a seed; dotted: features that were never trained on"
    return panels.axes("step").finish(f"Learning · {heading(result.dataset)}", subtitle)


def maps(result: Any) -> go.Figure:
    """Small multiples: a row for each kind of features, a column a snapshot; the first seed."""
    data = result.dataset
    places = list(product(data["features"].values, data["snapshot"].values))
    titles = [f"step {step}" + ("" if kind == "trained" else ", unseen") for kind, step in places]
    panels = Panels(titles, columns=data.sizes["snapshot"], row_height=190, horizontal_spacing=0.01)
    for number, (kind, step) in enumerate(places):
        panels.add(number, heat(data["pattern"].isel(seed=0).sel(features=kind, snapshot=step, drop=True)))
    panels.figure.update_xaxes(showticklabels=False).update_yaxes(showticklabels=False, autorange="reversed")
    panels.figure.update_layout(coloraxis=colour_axis(0.0, 1.0)).update_annotations(font_size=11)
    subtitle = f"attention of one prompt, queries down, keys across; seed {data['seed'].values[0]}"
    return panels.finish(f"Attention over training · {heading(data)}", subtitle)


def profile(result: Any) -> go.Figure:
    """The final slash scores at all distances."""
    data = result.dataset
    uniform = (data["distance"].values, data["uniform"].values, "uniform attention", "black")
    figure = go.Figure([*lines(data["profile"], "distance"), line(*uniform, dash="dash", width=1.2)])
    figure.update_xaxes(title_text="distance").update_yaxes(title_text="slash score")
    return finish(figure, f"Slash score by distance, trained · {heading(data)}", "held-out prompts, at the last step")


CURVE, ENDS = ("seed", "step"), ("seed",)
MEASURE = Measure(
    name="slash_toy",
    question="Does gradient descent make a slash head?",
    explanation=(
        "A shallow RoPE transformer is trained to answer with what was shown D tokens later, on embeddings that lie on "
        "a cone. Its attention head is measured on the features it was trained on and on features it has never seen. "
        "The task and its settings are this project's own."
    ),
    source="the claim: Cheng et al. 2026 (arXiv 2601.08297); task and settings: ours",
    variables={
        "loss": Variable("squared loss", description="of the held-out prompts whose answer was shown", dims=CURVE),
        "score": Variable("slash score at D", dims=("features", "seed", "step")),
        "r1_q": Variable("r1 of Q", description="s_1^2 / sum s^2 of the trained features' queries", dims=CURVE),
        "r1_k": Variable("r1 of K", description="s_1^2 / sum s^2 of the trained features' keys", dims=CURVE),
        "matching": Variable("matching layer", description="mean diagonal of M less the mean off it", dims=CURVE),
        "profile": Variable("slash score", description="at the last step", dims=("features", "seed", "distance")),
        "uniform": Variable("slash score of uniform attention", dims=("distance",)),
        "pattern": Variable("attention of one prompt", dims=("features", "seed", "snapshot", "query", "key")),
        "token": Variable("features of that prompt", dims=("seed", "query")),
        "loss_start": Variable("loss at start", dims=ENDS),
        "loss_end": Variable("loss at end", dims=ENDS),
        "score_trained": Variable("slash score at the end", dims=ENDS),
        "score_unseen": Variable("slash score at the end, unseen features", dims=ENDS),
        "r1_q_end": Variable("r1 of Q at the end", dims=ENDS),
        "r1_k_end": Variable("r1 of K at the end", dims=ENDS),
        "slash_step": Variable("step by which the score passed one half", "steps", "NaN where it never did", dims=ENDS),
        "matching_step": Variable("step by which the matching layer grew half its way", "steps", dims=ENDS),
    },
    summarise=summarise,
    findings=findings,
    figures={"training": training, "maps": maps, "profile": profile},
    table=table,
    legend=(
        "score: slash score at D on the features trained on, and on unseen ones; r1: s_1^2 / sum s^2 of the head's Q "
        "and K; formed by step: when the score passed one half."
    ),
)

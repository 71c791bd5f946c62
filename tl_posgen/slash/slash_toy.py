"""Does gradient descent make a slash head? A shallow RoPE transformer trained, and its head measured on the way."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, product
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
import xarray as xr
from tqdm.auto import trange

from tl_posgen.arithmetic import full_precision
from tl_posgen.core.formatting import counted
from tl_posgen.core.measure import Variable
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import TRAINED, Numbers
from tl_posgen.core.result import Result, joined
from tl_posgen.report.figures import COLOURS, Panels, colour_axis, heat, line
from tl_posgen.slash.numbers.slash_scores import uniform_scores
from tl_posgen.slash.toy_model import (
    Planes,
    ShallowTransformer,
    ToySettings,
    draw_prompts,
    measure,
    pattern_of_one_prompt,
)

FEATURES = ("trained", "unseen")
EVALUATION_PROMPTS = 256
CURVE = ("seed", "step")


def _heading(result: Any) -> str:
    """Return which toy it is."""
    toy = result.measure
    return f"slash toy, D = {toy.distance}, planes: {toy.planes.replace('_', ' and ')}"


def _lines(curves: xr.DataArray, along: str) -> list[go.Scatter]:
    """Return a line a seed, and a dash for each kind of features where there are two."""
    if "features" not in curves.dims:
        curves = curves.expand_dims(features=["trained"])
    looks = {"trained": ("", "solid"), "unseen": (", unseen features", "dot")}
    return [
        line(curves[along].values, curves.sel(features=kind, seed=seed).values, f"seed {seed}{end}", colour, dash=dash)
        for kind, (end, dash) in looks.items()
        if kind in curves["features"]
        for seed, colour in zip(curves["seed"].values, cycle(COLOURS), strict=False)
    ]


def _training(result: Any) -> go.Figure:
    """Draw curves over training, a line a seed."""
    data = result.own
    shown = {
        "squared loss": data["loss"],
        "slash score at D": data["score"],
        "r1 of Q before RoPE": data["r1"].sel(side="q"),
        "matching layer: diagonal less the rest": data["matching"],
    }
    panels = Panels(list(shown), columns=2, row_height=250)
    for number, curves in enumerate(shown.values()):
        panels.add(number, *_lines(curves, "step"))
    subtitle = "held-out prompts, a line a seed; dotted: features that were never trained on"
    return panels.axes("step").finish(f"Learning · {_heading(result)}", subtitle)


def _maps(result: Any) -> go.Figure:
    """Draw small multiples: a row for each kind of features, a column a snapshot; the first seed."""
    data = result.own
    places = list(product(data["features"].values, data["snapshot"].values))
    titles = [f"step {step}" + ("" if kind == "trained" else ", unseen") for kind, step in places]
    panels = Panels(titles, columns=data.sizes["snapshot"], row_height=190, horizontal_spacing=0.01)
    for number, (kind, step) in enumerate(places):
        panels.add(number, heat(data["pattern"].isel(seed=0).sel(features=kind, snapshot=step, drop=True)))
    panels.figure.update_xaxes(showticklabels=False).update_yaxes(showticklabels=False, autorange="reversed")
    panels.figure.update_layout(coloraxis=colour_axis(0.0, 1.0)).update_annotations(font_size=11)
    subtitle = f"attention of one prompt, queries down, keys across; seed {data['seed'].values[0]}"
    return panels.finish(f"Attention over training · {_heading(result)}", subtitle)


@dataclass(frozen=True)
class SlashToy(ToySettings):
    r"""Gradient descent on E (w[x_N] - sum_j a_j y_j)^2 makes a head with S_{j,j-D} near 1, on unseen features too.

    A shallow RoPE transformer is trained to answer with what was shown D tokens later, on embeddings that lie on a
    cone. Its attention head is measured on the features it was trained on and on features it has never seen. The task
    and its settings are this project's own.

    Its result is made by the function `slash_toy`, which says what the settings are.

    Source: the claim: Cheng et al. 2026 (arXiv 2601.08297); task and settings: ours
    """

    question = "Does gradient descent make a slash head?"
    rows = ("seed",)
    variables = {
        "loss": Variable("squared loss", "", "of the held-out prompts whose answer was shown", CURVE),
        "score": Variable("slash score at D", dims=("features", *CURVE)),
        "r1": Variable("r1 of Q and K", "", "s_1^2 / sum s^2 of the trained features", ("side", *CURVE)),
        "matching": Variable("matching layer", "", "mean diagonal of M less the mean off it", CURVE),
        "uniform": Variable("slash score of uniform attention", dims=("distance",)),
        "pattern": Variable("attention of one prompt", dims=("features", "seed", "snapshot", "query", "key")),
    }
    legend = (
        "score: slash score at D on the features trained on, and on unseen ones; r1: s_1^2 / sum s^2 of the head's Q "
        "and K; formed by step: when the score passed one half."
    )
    figures = {"training": _training, "maps": _maps}

    def findings(self, own: Numbers) -> list[str]:
        formed = self.formed(own.data).dropna("seed")
        steps = f"by step {int(formed.max())}" if formed.size else "never"
        start = own("score", features="trained", step=0)
        trained, unseen = (self.at_end(own, "score", features=features).with_interval for features in FEATURES)
        loss, end = self.over_seeds(own.array("loss", step=0)), self.at_end(own, "loss")
        r1_q, r1_k = (self.at_end(own, "r1", side=side).with_interval for side in "qk")
        seeds = own.data.sizes["seed"]
        return [
            f"Trained on {self.planes.replace('_', ' and ')} planes, the slash score at D = {self.distance} goes from "
            f"{start.plain:.3f} at initialisation to {trained:.3f}, and {unseen:.3f} on unseen features (uniform "
            f"attention {own('uniform', distance=self.distance).plain:.3f}); loss {loss.with_interval:.3f} -> "
            f"{end.with_interval:.4f}. {counted(seeds, 'seed')}{', mean ± standard deviation' if seeds > 1 else ''}.",
            f"The head passed one half in {formed.size} of {counted(seeds, 'seed')}, {steps}; at the end r1(Q) is "
            f"{r1_q:.3f} and r1(K) {r1_k:.3f}.",
        ]

    def formed(self, data: xr.Dataset) -> xr.DataArray:
        """Return the first measured step at which the score had passed one half; NaN where it never did."""
        passed = data["score"].sel(features="trained", drop=True) >= 0.5
        return data["step"].where(passed).min("step")

    def at_end(self, own: Numbers, name: str, **labels: str) -> Number:
        """Return the mean over seeds at the last step, and their standard deviation."""
        return self.over_seeds(own.array(name, **labels).isel(step=-1))

    def over_seeds(self, array: xr.DataArray) -> Number:
        """Return the mean over seeds and their standard deviation; none of a single seed."""
        values = array.values.ravel()
        return Number(float(np.mean(values)), spread=float(np.std(values, ddof=1)) if len(values) > 1 else None)

    def table(self, own: Numbers) -> pd.DataFrame:
        """Return a row per seed: where each curve ends, and when the head formed."""
        start, end = (own.dataset.isel(step=step, drop=True) for step in (0, -1))
        columns = {
            "loss at start": start["loss"],
            "loss at end": end["loss"],
            "score": end["score"].sel(features="trained"),
            "score, unseen": end["score"].sel(features="unseen"),
            "r1(Q)": end["r1"].sel(side="q"),
            "r1(K)": end["r1"].sel(side="k"),
            "formed by step": self.formed(own.dataset),
        }
        return own.frame(columns, "seed")


@full_precision()
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
        A Result named "slash_toy"; `.table()`: one row per seed.

    Raises:
        InputError: settings that make no task; the message says which.

    Example:
        >>> result = slash_toy(steps=2, batch=4, seeds=(0,), progress=False)
        >>> result.own["score"].sizes["step"], result.own["pattern"].sizes["query"]
        (2, 48)
    """
    settings = SlashToy(**{name: value for name, value in locals().items() if name != "progress"})
    described = {"experiment": "slash_toy", **settings.options()}
    provenance = {**described, "options": settings.options(), "dtype": "float32", "torch": torch.__version__}
    with torch.device("cpu"):  # whatever torch's default device is: tensors this small are slower anywhere else
        trained = _train(settings, progress)
    return Result(settings, joined(settings, {TRAINED: trained}, ["toy"]), provenance)


def _train(settings: ToySettings, progress: bool) -> xr.Dataset:
    """Train the shallow transformers of all seeds, side by side, and measure them on the way."""
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
    dims = ("features", "seed", "snapshot", "query", "key")
    dataset = over_steps.transpose("side", "features", "seed", "step").assign(
        uniform=("distance", uniform_scores(settings.n_tokens).numpy()),
        pattern=(dims, torch.stack([*patterns.values()], 2).numpy()),
    )
    places = range(settings.n_tokens)
    coords = {"seed": list(settings.seeds), "features": list(FEATURES), "side": list("qk"), "snapshot": list(patterns)}
    return dataset.assign_coords(coords | dict.fromkeys(("distance", "query", "key"), places))

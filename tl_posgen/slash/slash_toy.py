"""Does gradient descent make a slash head? A shallow RoPE transformer trained, and its head measured on the way."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
import xarray as xr
from tqdm.auto import trange

from tl_posgen.arithmetic import full_precision
from tl_posgen.core.formatting import counted
from tl_posgen.core.measure import Variable
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import TRAINED, Numbers
from tl_posgen.core.result import Result, joined
from tl_posgen.slash.numbers.slash_scores import uniform_scores
from tl_posgen.slash.slash_toy_figures import maps, profile, training
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
        "profile": Variable("slash score", "", "at the last step", ("features", "seed", "distance")),
        "uniform": Variable("slash score of uniform attention", dims=("distance",)),
        "pattern": Variable("attention of one prompt", dims=("features", "seed", "snapshot", "query", "key")),
        "token": Variable("features of that prompt", dims=("seed", "query")),
        "slash_step": Variable("step by which the score passed one half", "steps", "NaN: it never did", ("seed",)),
        "matching_step": Variable("step by which the matching layer grew half its way", "steps", "", ("seed",)),
    }
    legend = (
        "score: slash score at D on the features trained on, and on unseen ones; r1: s_1^2 / sum s^2 of the head's Q "
        "and K; formed by step: when the score passed one half."
    )
    figures = {"training": training, "maps": maps, "profile": profile}

    def findings(self, own: Numbers) -> list[str]:
        formed = own.data["slash_step"].dropna("seed")
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
            "formed by step": own.dataset["slash_step"],
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
        trained = train(settings, progress)
    return Result(settings, joined(settings, {TRAINED: trained}, ["toy"]), provenance)


def train(settings: ToySettings, progress: bool) -> xr.Dataset:
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
    curves = over_steps.drop_vars("profile").transpose("side", "features", "seed", "step")
    dims = ("features", "seed", "snapshot", "query", "key")
    dataset = curves.assign(
        profile=over_steps["profile"].isel(step=-1, drop=True),
        uniform=("distance", uniform_scores(settings.n_tokens).numpy()),
        pattern=(dims, torch.stack([*patterns.values()], 2).numpy()),
        token=(("seed", "query"), held_out[0][:, 0].numpy()),
    )
    places = range(settings.n_tokens)
    coords = {"seed": list(settings.seeds), "features": list(FEATURES), "side": list("qk"), "snapshot": list(patterns)}
    dataset = dataset.assign_coords(coords | dict.fromkeys(("distance", "query", "key"), places))
    return dataset.assign(formation(dataset))


def formation(dataset: xr.Dataset) -> dict[str, xr.DataArray]:
    """Return the first measured step at which the head, and the matching layer, had formed; NaN where never."""
    grown = dataset["matching"] - dataset["matching"].isel(step=0, drop=True)
    growth = grown.isel(step=-1, drop=True)
    formed = {
        "slash_step": dataset["score"].sel(features="trained", drop=True) >= 0.5,
        "matching_step": (grown >= growth / 2) & (growth > 0),
    }
    return {name: dataset["step"].where(when).min("step") for name, when in formed.items()}

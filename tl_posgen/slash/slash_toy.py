"""Does gradient descent make a slash head? A shallow RoPE transformer trained, and its head measured on the way."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import embedding, one_hot
from tqdm.auto import trange

from tl_posgen.arithmetic import full_precision
from tl_posgen.core.formatting import counted
from tl_posgen.core.inits import joined
from tl_posgen.core.measure import Measure, Variable
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import TRAINED, Numbers
from tl_posgen.core.options import Count, Each, Positive, Real, Whole, Within
from tl_posgen.core.result import Result
from tl_posgen.errors import InputError
from tl_posgen.report.kinds import lines
from tl_posgen.rope.frequency_bands import BANDS, bands_by_thirds
from tl_posgen.rope.rotation import Rope, inverse_frequencies, rotate
from tl_posgen.rope.spectra import rank_one_share
from tl_posgen.slash.numbers.ablations import keep
from tl_posgen.slash.numbers.slash_scores import slash_statistics, uniform_scores
from tl_posgen.slash.slash_toy_figure import DESCRIPTION, draw_maps

FEATURES = ("trained", "unseen")
_EVALUATION_PROMPTS = 256
_SNAPSHOTS = (0, 10, 20, 30, 50, 100, 300, 1000)
_CURVE = ("seed", "step")


@dataclass(frozen=True)
class SlashToy(Measure):
    r"""Gradient descent on E (w[x_N] - sum_j a_j y_j)^2 makes a head with S_{j,j-D} near 1, on unseen features too.

    A shallow RoPE transformer is trained to answer with what was shown D tokens later, on embeddings that lie on a
    cone. Its attention head is measured on the features it was trained on and on features it has never seen. The task
    and its settings are this project's own.

    A prompt is n_tokens i.i.d. features x_j; the label shown at position j is y_{j-D} = w[x_{j-D}] with w ~ N(0, I)
    drawn per prompt, and w[x_N] is asked for. It can be found only by attending D tokens back (layer 1) and matching
    what is seen there with x_N (layer 2). The embeddings e_k = cos(angle) u + sin(angle) v_k lie on a cone around u.
    Its result is made by the function `slash_toy`.

    Args:
        distance: D.
        planes: frequency bands (thirds of the planes) that the head keeps: all, high_medium, high, medium or low.
        steps: how many, of Adam.
        batch: prompts a step.
        learning_rate: the step size of Adam.
        n_tokens: N.
        n_features: trained features; as many more are only ever used for measuring.
        angle: of the cone, in degrees.
        d_head: columns of W_Q and W_K; scores are not divided by its root.
        rope_base: the base of the wavelengths of RoPE.
        init_std: standard deviation of the entries of W_Q and W_K at step 0.
        seeds: one run each, of weights and of data. They are trained together.
        every: measure after so many steps.
        snapshots: steps at which the pattern of one prompt is kept; by default some early ones and the last.

    Raises:
        InputError: settings that make no task; the message says which.

    Source: that a shallow RoPE transformer under gradient descent learns such heads is claimed by Cheng et al. 2026
    (arXiv 2601.08297); this task and its settings are ours, not the paper's.
    """

    distance: Whole = 3
    planes: Literal["all", "high_medium", "high", "medium", "low"] = "all"
    steps: Count = 1500
    batch: Count = 256
    n_tokens: Count = 48
    n_features: Count = 8
    angle: Annotated[Real, Within(words="a number of degrees")] = 30.0
    d_head: Count = 32
    rope_base: Positive = 10_000.0
    init_std: Positive = 0.02
    learning_rate: Positive = 0.02
    seeds: Annotated[Sequence[Whole], Each()] = (0, 1, 2)
    every: Count = 10
    snapshots: Sequence[int] | None = None

    question = "Does gradient descent make a slash head?"
    rows = ("seed", "step")
    variables = {
        "loss": Variable("squared loss", "", "of the held-out prompts whose answer was shown", _CURVE),
        "score": Variable("slash score at D", dims=("features", *_CURVE)),
        "r1": Variable("r1 of Q and K", "", "s_1^2 / sum s^2 of the trained features", ("side", *_CURVE)),
        "matching": Variable("matching layer", "", "mean diagonal of M less the mean off it", _CURVE),
        "uniform": Variable("slash score of uniform attention", dims=("distance",)),
        "pattern": Variable("attention of one prompt", dims=("features", "seed", "snapshot", "query", "key")),
    }
    legend = "score: slash score at D by features; formed by step: when the score passed one half."
    figures = {
        "training": lines(
            {
                "squared loss": [("loss", "loss")],
                "slash score at D": [
                    (f"{features} features", "score", {"features": features}) for features in FEATURES
                ],
                "r1 before RoPE": [(side.upper(), "r1", {"side": side}) for side in "qk"],
                "matching layer: diagonal less the rest": [("M", "matching")],
            },
            "step",
            title="Learning",
            subtitle=f"{DESCRIPTION}; held-out prompts, means over seeds",
            columns=2,
        ),
        "maps": draw_maps,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.distance > self.n_tokens - 3:
            raise InputError(
                f"distance {self.distance}: prompts of {self.n_tokens} tokens allow 0..{self.n_tokens - 3}"
            )
        if self.d_head % 2:
            raise InputError(f"d_head = {self.d_head}: give an even number, as planes are of two")
        if not self.kept_steps or self.kept_steps[0] < 0 or self.kept_steps[-1] > self.steps:
            raise InputError(f"snapshots {self.kept_steps}: choose steps in 0..{self.steps}")

    @property
    def kept_steps(self) -> list[int]:
        """Return the steps at which a pattern is kept: the chosen snapshots, or some early steps and the last."""
        early = {step for step in _SNAPSHOTS if step < self.steps}
        return sorted(early | {self.steps} if self.snapshots is None else set(self.snapshots))

    @property
    def rope(self) -> Rope:
        return Rope(inverse_frequencies(self.d_head, self.rope_base))

    @property
    def kept(self) -> Bool[Tensor, " plane"]:
        names = BANDS if self.planes == "all" else self.planes.split("_")
        return bands_by_thirds(self.d_head // 2)[[BANDS.index(name) for name in names]].any(0)

    @property
    def embeddings(self) -> Float[Tensor, "features=2 feature d_model"]:
        """e_k = cos(a) u + sin(a) v_k in the standard basis, u first; trained features, then unseen ones."""
        angle, size = math.radians(self.angle), 2 * self.n_features
        around = math.sin(angle) * torch.eye(size)
        return torch.cat([torch.full((size, 1), math.cos(angle)), around], dim=1).view(2, self.n_features, size + 1)

    def findings(self, numbers: Numbers) -> list[str]:
        start = numbers("score", features="trained", step=0)
        trained, unseen = (self.at_end(numbers, "score", features=features).with_interval for features in FEATURES)
        loss, end = self.over_seeds(numbers.array("loss", step=0)), self.at_end(numbers, "loss")
        r1_q, r1_k = (self.at_end(numbers, "r1", side=side).with_interval for side in "qk")
        seeds = numbers.data.sizes["seed"]
        return [
            f"Trained on {self.planes} planes, the slash score at D = {self.distance} goes from "
            f"{start.plain:.3f} at initialisation to {trained:.3f}, and {unseen:.3f} on unseen features (uniform "
            f"attention {numbers('uniform', distance=self.distance).plain:.3f}); loss {loss.with_interval:.3f} -> "
            f"{end.with_interval:.4f}; at the end r1(Q) is {r1_q:.3f} and r1(K) {r1_k:.3f}. {counted(seeds, 'seed')}"
            f"{', mean ± standard deviation' if seeds > 1 else ''}."
        ]

    def at_end(self, numbers: Numbers, name: str, **labels: str) -> Number:
        """Return the mean over seeds at the last step, and their standard deviation."""
        return self.over_seeds(numbers.array(name, **labels).isel(step=-1))

    def over_seeds(self, array: xr.DataArray) -> Number:
        """Return the mean over seeds and their standard deviation; none of a single seed."""
        values = array.values.ravel()
        return Number(float(np.mean(values)), spread=float(np.std(values, ddof=1)) if len(values) > 1 else None)

    def table(self, numbers: Numbers) -> pd.DataFrame:
        """Return a row per seed: where each curve ends, and when the head formed."""
        start, end = (numbers.dataset.isel(step=step, drop=True) for step in (0, -1))
        columns = {"loss at start": start["loss"], "loss at end": end["loss"]}
        columns |= {f"score, {features}": end["score"].sel(features=features) for features in FEATURES}
        columns |= {f"r1({side.upper()})": end["r1"].sel(side=side) for side in "qk"}
        passed = numbers.dataset["score"].sel(features="trained", drop=True) >= 0.5
        return numbers.frame({**columns, "formed by step": numbers.dataset["step"].where(passed).min("step")}, "seed")


class ShallowTransformer(torch.nn.Module):
    """Transformer of two layers, with one independent copy per seed, trained side by side.

    Layer 1: one head, pattern S = softmax_i(<R_j W_Q' e(x_j), R_i W_K' e(x_i)>), output c_j = sum_i S_ji onehot(x_i).
    Layer 2: a = softmax_j(onehot(x_N)' M c_j) over j = D .. N-2, prediction sum_j a_j y_j.
    """

    def __init__(self, settings: SlashToy, generators: Sequence[torch.Generator]):
        super().__init__()
        self.settings, self.rope, self.kept = settings, settings.rope, settings.kept
        shape = (2, settings.embeddings.shape[-1], settings.d_head)
        drawn = torch.stack([torch.randn(shape, generator=generator) for generator in generators])
        self.w_q, self.w_k = (torch.nn.Parameter(settings.init_std * w) for w in drawn.unbind(1))
        self.matching = torch.nn.Parameter(0.5 * torch.eye(settings.n_features).repeat(len(generators), 1, 1))
        future = torch.ones(settings.n_tokens, settings.n_tokens).triu(1).bool()
        self.mask = torch.zeros(future.shape).masked_fill(future, -torch.inf)

    def projected(
        self, weight: Float[Tensor, "seed d_model d_head"], features: Float[Tensor, "feature d_model"]
    ) -> Float[Tensor, "seed feature d_head"]:
        """Return the query or key of each feature before RoPE, with the kept planes only."""
        return keep(features @ weight, self.rope, self.kept)

    def pattern(
        self, tokens: Int[Tensor, "seed prompt pos"], features: Float[Tensor, "feature d_model"], first_query: int = 0
    ) -> Float[Tensor, "seed prompt query pos"]:
        """Return S of the queries from `first_query` on; tokens are indices into the given features."""
        n_seeds, n_prompts, n = tokens.shape
        positions = torch.arange(n)
        row = (torch.arange(n_seeds)[:, None, None] * len(features) + tokens) * n + positions

        def looked_up(weight: Tensor) -> Tensor:
            # few features: rotate each once at every position, then look the tokens up
            table = self.projected(weight, features)[:, :, None].expand(-1, -1, n, -1)
            return embedding(row, rotate(table, positions, self.rope).reshape(-1, weight.shape[-1])).flatten(0, 1)

        q, k = looked_up(self.w_q)[:, first_query:], looked_up(self.w_k)
        return torch.baddbmm(self.mask[first_query:], q, k.mT).softmax(-1).view(n_seeds, n_prompts, -1, n)

    def forward(
        self,
        tokens: Int[Tensor, "seed prompt pos"],
        values: Float[Tensor, "seed prompt pos"],
        features: Float[Tensor, "feature d_model"],
    ) -> Float[Tensor, "seed prompt"]:
        """Return the prediction of values[..., -1]; position j shows the value of position j - D."""
        distance, n_features = self.settings.distance, len(features)
        context = self.pattern(tokens, features, distance)[:, :, :-1] @ one_hot(tokens, n_features).float()
        last_tokens = tokens[..., -1:].expand(-1, -1, n_features)
        attention = (context @ self.matching.gather(1, last_tokens)[..., None])[..., 0].softmax(-1)
        return (attention * values[..., : attention.shape[-1]]).sum(-1)


def draw_prompts(
    settings: SlashToy, generators: Sequence[torch.Generator], n_prompts: int
) -> tuple[Int[Tensor, "seed prompt pos"], Float[Tensor, "seed prompt pos"]]:
    """Draw tokens x_j and their values w[x_j], with a new w per prompt; every seed has its own generator."""
    shape, n = (n_prompts, settings.n_tokens), settings.n_features
    tokens = torch.stack([torch.randint(n, shape, generator=generator) for generator in generators])
    weights = torch.stack([torch.randn(n_prompts, n, generator=generator) for generator in generators])
    return tokens, weights.gather(2, tokens)


@full_precision()
def slash_toy(distance: int = 3, planes: str = "all", *, progress: bool = True, **settings: Any) -> Result:
    r"""Gradient descent on E (w[x_N] - sum_j a_j y_j)^2 makes a head with S_{j,j-D} near 1, on unseen features too.

    Args:
        distance, planes, settings: the options of `SlashToy`, which says what the task is.
        progress: show a progress bar.

    Returns:
        A Result named "slash_toy"; `.table()`: one row per seed.

    Raises:
        InputError: settings that make no task; the message says which.

    Source: see `SlashToy`

    Example:
        >>> result = slash_toy(steps=2, batch=4, seeds=(0,), progress=False)
        >>> result.trained["score"].sizes["step"], result.trained["pattern"].sizes["query"]
        (2, 48)
    """
    toy = SlashToy.with_options({"distance": distance, "planes": planes, **settings})
    assert isinstance(toy, SlashToy)
    described = {"experiment": "slash_toy", **toy.options()}
    provenance = {**described, "options": toy.options(), "dtype": "float32", "torch": torch.__version__}
    with torch.device("cpu"):  # whatever torch's default device is: tensors this small are slower anywhere else
        trained = _trained(toy, progress)
    return Result(toy, joined(toy, {TRAINED: trained}, ["toy"]), provenance)


def _trained(toy: SlashToy, progress: bool) -> xr.Dataset:
    """Train the shallow transformers of all seeds, side by side, and measure them on the way."""
    generators = [torch.Generator().manual_seed(seed) for seed in toy.seeds]
    model, embeddings = ShallowTransformer(toy, generators), toy.embeddings
    optimiser = torch.optim.Adam(model.parameters(), lr=toy.learning_rate)
    tokens, values = draw_prompts(toy, generators, _EVALUATION_PROMPTS)
    # if x_N never occurred before, its value was never shown: a few such prompts would dominate the loss
    answer_shown = (tokens[..., : -1 - toy.distance] == tokens[..., -1:]).any(-1)
    off_diagonal = ~torch.eye(toy.n_features, dtype=torch.bool)

    def slash_score(features: Tensor) -> Tensor:
        # prompts take the place of heads: one score per prompt, then their mean
        statistics = slash_statistics(model.pattern(tokens, features).flatten(0, 1), entropy=False)
        return statistics.score[0, :, toy.distance].view(tokens.shape[:2]).mean(1)

    measured, patterns = {}, {}
    for step in trange(toy.steps + 1, desc="slash toy", unit="step", disable=not progress):
        with torch.no_grad():
            if step % toy.every == 0 or step == toy.steps:
                error = (model(tokens, values, embeddings[0]) - values[..., -1]).square()
                ranks = [rank_one_share(model.projected(weight, embeddings[0])) for weight in (model.w_q, model.w_k)]
                measured[step] = {
                    "loss": (error * answer_shown).sum(-1) / answer_shown.sum(-1),
                    "score": torch.stack([slash_score(features) for features in embeddings]),
                    "r1": torch.stack(ranks),
                    "matching": model.matching.diagonal(0, 1, 2).mean(-1) - model.matching[:, off_diagonal].mean(-1),
                }
            if step in toy.kept_steps:
                patterns[step] = torch.stack([model.pattern(tokens[:, :1], features)[:, 0] for features in embeddings])
        if step < toy.steps:
            drawn, labels = draw_prompts(toy, generators, toy.batch)
            error = model(drawn, labels, embeddings[0]) - labels[..., -1]
            optimiser.zero_grad()
            # a sum over seeds: each copy gets the gradient of its own mean loss
            error.square().mean(-1).sum().backward()
            optimiser.step()
    curves = {name: torch.stack([at_step[name] for at_step in measured.values()], -1) for name in measured[0]}
    curves |= {"uniform": uniform_scores(toy.n_tokens), "pattern": torch.stack([*patterns.values()], 2)}
    arrays = {name: (toy.variables[name].dims, curve.double().numpy()) for name, curve in curves.items()}
    coords = {"seed": list(toy.seeds), "features": list(FEATURES), "side": list("qk"), "snapshot": list(patterns)}
    places = dict.fromkeys(("distance", "query", "key"), range(toy.n_tokens))
    return xr.Dataset(arrays, {**coords, **places, "step": list(measured)})

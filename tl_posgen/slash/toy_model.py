"""Shallow RoPE transformer that learns a slash head: the model, its task, and the measurements of one training step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import embedding, one_hot

from tl_posgen.arithmetic import double
from tl_posgen.core.measure import Measure
from tl_posgen.core.options import Count, Each, Positive, Real, Whole, Within
from tl_posgen.errors import InputError
from tl_posgen.rope.frequency_bands import BANDS, bands_by_thirds
from tl_posgen.rope.rotation import Rope, inverse_frequencies, rotate
from tl_posgen.rope.spectra import rank_one_share
from tl_posgen.slash.numbers.ablations import keep
from tl_posgen.slash.numbers.slash_scores import slash_statistics

Planes = Literal["all", "high_medium", "high", "medium", "low"]
SNAPSHOTS = (0, 10, 20, 30, 50, 100, 300, 1000)


@dataclass(frozen=True)
class ToySettings(Measure):
    """Settings of one training run; see `slash_toy`."""

    distance: Whole = 3
    planes: Planes = "all"
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
        early = {step for step in SNAPSHOTS if step < self.steps}
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


class ShallowTransformer(torch.nn.Module):
    """Transformer of two layers, with one independent copy per seed, trained side by side.

    Layer 1: one head, pattern S = softmax_i(<R_j W_Q' e(x_j), R_i W_K' e(x_i)>), output c_j = sum_i S_ji onehot(x_i).
    Layer 2: a = softmax_j(onehot(x_N)' M c_j) over j = D .. N-2, prediction sum_j a_j y_j.
    """

    def __init__(self, settings: ToySettings, generators: Sequence[torch.Generator]):
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
        asked = tokens[..., -1:].expand(-1, -1, n_features)
        attention = (context @ self.matching.gather(1, asked)[..., None])[..., 0].softmax(-1)
        return (attention * values[..., : attention.shape[-1]]).sum(-1)


def draw_prompts(
    settings: ToySettings, generators: Sequence[torch.Generator], n_prompts: int
) -> tuple[Int[Tensor, "seed prompt pos"], Float[Tensor, "seed prompt pos"]]:
    """Draw tokens x_j and their values w[x_j], with a new w per prompt; every seed has its own generator."""
    shape, n = (n_prompts, settings.n_tokens), settings.n_features
    tokens = torch.stack([torch.randint(n, shape, generator=generator) for generator in generators])
    weights = torch.stack([torch.randn(n_prompts, n, generator=generator) for generator in generators])
    return tokens, weights.gather(2, tokens)


@torch.no_grad()
def measure(
    model: ShallowTransformer, tokens: Int[Tensor, "seed prompt pos"], values: Float[Tensor, "seed prompt pos"]
) -> xr.Dataset:
    """Return all measurements of one training step, by seed; slash scores also by trained and unseen features."""
    trained, _ = embeddings = model.settings.embeddings
    n_seeds, n_prompts, _ = tokens.shape
    scores = []
    for features in embeddings:
        # prompts take the place of heads: one score per prompt, then their mean
        found = slash_statistics(model.pattern(tokens, features).flatten(0, 1), entropy=False)
        scores.append(found.score[0, :, model.settings.distance].view(n_seeds, n_prompts).mean(1))
    off_diagonal = ~torch.eye(len(trained), dtype=torch.bool)
    error = (model(tokens, values, trained) - values[..., -1]).square()
    # if x_N never occurred before, its value was never shown: a few such prompts would dominate the loss
    shown = (tokens[..., : -1 - model.settings.distance] == tokens[..., -1:]).any(-1)
    numbers = {
        "loss": (error * shown).sum(-1) / shown.sum(-1),
        "matching": model.matching.diagonal(0, 1, 2).mean(-1) - model.matching[:, off_diagonal].mean(-1),
    }
    r1 = torch.stack([rank_one_share(model.projected(weight, trained)) for weight in (model.w_q, model.w_k)])
    by_seed: dict[str, Any] = {name: ("seed", double(one).numpy()) for name, one in numbers.items()}
    by_seed["r1"] = (("side", "seed"), double(r1).numpy())
    return xr.Dataset({**by_seed, "score": (("features", "seed"), torch.stack(scores).numpy())})


@torch.no_grad()
def pattern_of_one_prompt(model: ShallowTransformer, tokens: Tensor) -> Float[Tensor, "features=2 seed query key"]:
    return torch.stack([model.pattern(tokens[:, :1], features)[:, 0] for features in model.settings.embeddings])

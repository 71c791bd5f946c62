"""A shallow RoPE transformer that learns a slash head, with everything the theory speaks of recorded on the way."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal, get_args

import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import embedding, one_hot
from tqdm.auto import trange

from tl_posgen.errors import InputError
from tl_posgen.maths.bands import BANDS, bands_by_thirds, keep
from tl_posgen.maths.rope import Rope, inverse_frequencies, rotate
from tl_posgen.maths.slash import slash_statistics, uniform_baseline
from tl_posgen.maths.spectra import spectrum
from tl_posgen.results import Result

Planes = Literal["all", "high_medium", "high", "medium", "low"]

FEATURES = ("trained", "unseen")
SNAPSHOTS = (0, 10, 20, 30, 50, 100, 300, 1000)
EVALUATION_PROMPTS = 256


@dataclass(frozen=True)
class ToySettings:
    """What one training run is; see `slash_toy`."""

    distance: int
    planes: str
    steps: int
    batch: int
    n_tokens: int
    n_features: int
    angle: float
    d_head: int
    rope_base: float
    init_std: float
    learning_rate: float

    def __post_init__(self) -> None:
        if self.planes not in get_args(Planes):
            raise InputError(f"planes {self.planes!r}: choose one of {', '.join(get_args(Planes))}")
        if not 0 <= self.distance <= self.n_tokens - 3:
            raise InputError(
                f"distance {self.distance}: prompts of {self.n_tokens} tokens allow 0..{self.n_tokens - 3}"
            )
        if self.d_head % 2 or min(self.d_head, self.steps, self.batch, self.n_features) < 1:
            raise InputError("steps, batch, n_features and d_head must be positive, and d_head even")

    @property
    def rope(self) -> Rope:
        return Rope(inverse_frequencies(self.d_head, self.rope_base))

    @property
    def kept(self) -> Bool[Tensor, " plane"]:
        names = BANDS if self.planes == "all" else self.planes.split("_")
        return bands_by_thirds(self.d_head // 2)[[BANDS.index(name) for name in names]].any(0)

    @property
    def embeddings(self) -> Float[Tensor, "features=2 feature d_model"]:
        """e_k = cos(a) u + sin(a) v_k on the standard basis, u first; trained features, then unseen ones."""
        angle, size = math.radians(self.angle), 2 * self.n_features
        around = math.sin(angle) * torch.eye(size)
        return torch.cat([torch.full((size, 1), math.cos(angle)), around], dim=1).view(2, self.n_features, size + 1)


class ShallowTransformer(torch.nn.Module):
    """Two layers, one copy per seed, trained side by side: the copies share nothing but the clock.

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
        """The query or key of each feature before RoPE, with the kept planes only."""
        return keep(features @ weight, self.rope, self.kept)

    def pattern(
        self, tokens: Int[Tensor, "seed prompt pos"], features: Float[Tensor, "feature d_model"], first_query: int = 0
    ) -> Float[Tensor, "seed prompt query pos"]:
        """S of the queries from `first_query` on; tokens number the given features."""
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
        """The prediction of values[..., -1]; the value of position j - D is the label shown at position j."""
        distance, n_features = self.settings.distance, len(features)
        context = self.pattern(tokens, features, distance)[:, :, :-1] @ one_hot(tokens, n_features).float()
        asked = tokens[..., -1:].expand(-1, -1, n_features)
        attention = (context @ self.matching.gather(1, asked)[..., None])[..., 0].softmax(-1)
        return (attention * values[..., : attention.shape[-1]]).sum(-1)


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
        A Result named "slash_toy". Over (seed, step), on prompts that are not trained on: loss (of the prompts whose
        answer was shown), score (SlashScore(D), on trained and on unseen features), r1_q and r1_k (s_1^2 / sum s^2 of
        the trained features' queries and keys before RoPE), matching (mean diagonal of M less the mean off it). Also
        profile (the final scores at all distances, beside their baseline), pattern (of one prompt, per snapshot) and
        token (its features).
        `.frame()`: one row per seed, with the first measured step at which the score passed one half (slash_step) and
        at which the matching layer had made half of its growth (matching_step); NaN where it never did.

    Raises:
        InputError: settings that make no task; the message says which.

    Example:
        >>> result = slash_toy(steps=2, batch=4, seeds=(0,), progress=False)
        >>> result.dataset.score.sizes["step"], result.dataset.pattern.sizes["query"]
        (2, 48)
    """
    settings = ToySettings(
        distance, planes, steps, batch, n_tokens, n_features, angle, d_head, rope_base, init_std, learning_rate
    )
    seeds = list(seeds)
    if not seeds or len(set(seeds)) < len(seeds) or every < 1:
        raise InputError(f"seeds {seeds}, every {every}: give different seeds, at least one, and every >= 1")
    chosen = sorted({step for step in SNAPSHOTS if step < steps} | {steps} if snapshots is None else set(snapshots))
    if not chosen or chosen[0] < 0 or chosen[-1] > steps:
        raise InputError(f"snapshots {chosen}: choose steps in 0..{steps}")
    dataset = _train(settings, seeds, every, chosen, progress)
    provenance = {"experiment": "slash_toy", **asdict(settings), "seeds": seeds, "dtype": "float32"}
    return Result("slash_toy", dataset, provenance=provenance | {"torch": torch.__version__})


def _train(
    settings: ToySettings, seeds: Sequence[int], every: int, snapshots: Sequence[int], progress: bool
) -> xr.Dataset:
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    model = ShallowTransformer(settings, generators)
    optimiser = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    held_out = draw_prompts(settings, generators, EVALUATION_PROMPTS)
    trained_features = settings.embeddings[0]
    measured, patterns = {}, {}
    for step in trange(settings.steps + 1, desc="slash toy", unit="step", disable=not progress):
        if step % every == 0 or step == settings.steps:
            measured[step] = measure(model, *held_out)
        if step in snapshots:
            patterns[step] = _one_prompt(model, held_out[0])
        if step < settings.steps:
            tokens, values = draw_prompts(settings, generators, settings.batch)
            error = model(tokens, values, trained_features) - values[..., -1]
            optimiser.zero_grad()
            # a sum over seeds: each copy gets the gradient of its own mean loss
            error.square().mean(-1).sum().backward()
            optimiser.step()
    return _dataset(settings, seeds, measured, patterns, held_out[0])


def draw_prompts(
    settings: ToySettings, generators: Sequence[torch.Generator], n_prompts: int
) -> tuple[Int[Tensor, "seed prompt pos"], Float[Tensor, "seed prompt pos"]]:
    """Tokens x_j, and the value w[x_j] of each, with a new w per prompt; every seed draws from its own generator."""
    shape, n = (n_prompts, settings.n_tokens), settings.n_features
    tokens = torch.stack([torch.randint(n, shape, generator=generator) for generator in generators])
    weights = torch.stack([torch.randn(n_prompts, n, generator=generator) for generator in generators])
    return tokens, weights.gather(2, tokens)


@torch.no_grad()
def measure(
    model: ShallowTransformer, tokens: Int[Tensor, "seed prompt pos"], values: Float[Tensor, "seed prompt pos"]
) -> dict[str, Tensor]:
    """Everything the Result records of one moment; first axis seed, but for profile: trained or unseen, then seed."""
    trained, _ = embeddings = model.settings.embeddings
    n_seeds, n_prompts, _ = tokens.shape
    profiles = []
    for features in embeddings:
        # prompts stand where heads do: one score per prompt, then their mean
        found = slash_statistics(model.pattern(tokens, features).flatten(0, 1), entropy=False)
        profiles.append(found.score.view(n_seeds, n_prompts, -1).mean(1))
    off_diagonal = ~torch.eye(len(trained), dtype=torch.bool)
    error = (model(tokens, values, trained) - values[..., -1]).square()
    # where x_N never came before, its value was never shown: a few prompts in a thousand would drown the rest
    shown = (tokens[..., : -1 - model.settings.distance] == tokens[..., -1:]).any(-1)
    return {
        "loss": (error * shown).sum(-1) / shown.sum(-1),
        "profile": torch.stack(profiles),
        "r1_q": spectrum(model.projected(model.w_q, trained)).r1,
        "r1_k": spectrum(model.projected(model.w_k, trained)).r1,
        "matching": model.matching.diagonal(0, 1, 2).mean(-1) - model.matching[:, off_diagonal].mean(-1),
    }


@torch.no_grad()
def _one_prompt(model: ShallowTransformer, tokens: Tensor) -> Float[Tensor, "features=2 seed query key"]:
    return torch.stack([model.pattern(tokens[:, :1], features)[:, 0] for features in model.settings.embeddings])


def _dataset(
    settings: ToySettings,
    seeds: Sequence[int],
    measured: dict[int, dict[str, Tensor]],
    patterns: dict[int, Tensor],
    tokens: Int[Tensor, "seed prompt pos"],
) -> xr.Dataset:
    moments = list(measured.values())
    curves = {
        name: (("seed", "step"), torch.stack([moment[name] for moment in moments], 1).double().numpy())
        for name in ("loss", "r1_q", "r1_k", "matching")
    }
    score = torch.stack([moment["profile"][..., settings.distance] for moment in moments], -1)
    dataset = xr.Dataset(
        {
            **curves,
            "score": (("features", "seed", "step"), score.numpy()),
            "profile": (("features", "seed", "distance"), moments[-1]["profile"].numpy()),
            "baseline": ("distance", uniform_baseline(settings.n_tokens).numpy()),
            "pattern": (("features", "seed", "snapshot", "query", "key"), torch.stack([*patterns.values()], 2).numpy()),
            "token": (("seed", "query"), tokens[:, 0].numpy()),
        },
        coords={
            "seed": list(seeds),
            "step": list(measured),
            "features": list(FEATURES),
            "distance": range(settings.n_tokens),
            "snapshot": list(patterns),
        },
        attrs={"rows": "seed", "slash_distance": settings.distance, "planes": settings.planes},
    )
    return dataset.assign(_rows(dataset))


def _rows(dataset: xr.Dataset) -> dict[str, xr.DataArray]:
    """One number per seed: where each curve ends, and when the head and the matching layer formed."""
    first, last = dataset.isel(step=0, drop=True), dataset.isel(step=-1, drop=True)
    growth = last.matching - first.matching
    grown = ((dataset.matching - first.matching) >= growth / 2) & (growth > 0)
    return {
        "loss_start": first.loss,
        "loss_end": last.loss,
        **{f"score_{features}": last.score.sel(features=features, drop=True) for features in FEATURES},
        "r1_q_end": last.r1_q,
        "r1_k_end": last.r1_k,
        "slash_step": _first_step(dataset.score.sel(features="trained", drop=True) >= 0.5),
        "matching_step": _first_step(grown),
    }


def _first_step(reached: xr.DataArray) -> xr.DataArray:
    """The first measured step at which it was so; NaN where it never was."""
    return reached.step.where(reached).min("step")

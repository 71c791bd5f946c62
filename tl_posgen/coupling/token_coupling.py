"""Coupling between the tokens of a layer: by their own Jacobians, from one input token, to one output token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
import xarray as xr
from jaxtyping import Int
from torch import Tensor

from tl_posgen.collector import Variable
from tl_posgen.coupling.coupling import check_ks, chosen_of, refuse_heads
from tl_posgen.coupling.coupling_figures import add_squares, grid, of_k
from tl_posgen.coupling.coupling_prompt import Settings
from tl_posgen.coupling.jacobians import DENSE_UP_TO, ResidualJacobian, passes_of, residual_streams
from tl_posgen.errors import InputError
from tl_posgen.measure import Measure, Request
from tl_posgen.models.loss import prompts_of_one_length
from tl_posgen.models.model import Model
from tl_posgen.options import Options
from tl_posgen.procedure import Job
from tl_posgen.report.figures import model_label, sides
from tl_posgen.report.intervals import ENDS, mean_and_ends, with_ends
from tl_posgen.report.sentences import null_of, said, with_interval
from tl_posgen.result import Result
from tl_posgen.summary import NullSummary, Summary

KINDS = {
    "self": "d f(x_t) / d x_t of each token t",
    "same_input": "d f(x_t) / d x_{first} for each output token t",
    "same_output": "d f(x_{last}) / d x_t for each input token t",
}
SPREAD = 3  # tokens, where none are given
CHANCE = "random bases"


@dataclass(frozen=True)
class TokenCoupling(Options):
    r"""coupling = 1 - || |U2' J1 V2| - S1 ||_F / ||S1||_F of two tokens' Jacobians in one layer, as in `Coupling`.

    In three ways: "self" J_tt with J_t't'; "same_input" J_{t1,t} with J_{t1,t'} for the first t1 of `tokens`, the
    identity taken off J_{t1,t1}; "same_output" J_{t,t2} with J_{t',t2} for the last t2. Beside them random orthonormal
    bases with J1's own spectrum. Intervals are 95% over prompts, Student's.

    Args:
        k: numbers of top singular vectors, or one.
        tokens: positions, two at least, counted from 0 or negative from the end; three evenly spread, if left out.
        chance_samples: random bases per Jacobian.
        dense_up_to: d_model up to which Jacobians are built as matrices.

    Raises:
        InputError: as `Coupling` does; fewer than two tokens.

    Source: Aubry, Meng, Sugolov and Papyan, arXiv 2407.07810; chance and intervals are ours.

    Example:
        >>> from tl_posgen.coupling import token_coupling
        >>> from tl_posgen.models.tokens import bundled_text
        >>> found = token_coupling("mini", bundled_text(), length=12, n_prompts=1, k=4, null_seeds=(), progress=False)
        >>> found.dataset.token.values.tolist(), found.dataset.coupling.dims
        ([3, 7, 11], ('kind', 'k', 'layer', 'token', 'token_2'))
    """

    k: int | Sequence[int] = (10,)
    tokens: Sequence[int] | None = None
    chance_samples: int = 10
    dense_up_to: int = DENSE_UP_TO

    def check(self) -> None:
        check_ks(self)
        if self.tokens is not None and len(self.tokens) < 2:
            raise InputError("tokens couple with each other: give two positions at least")

    def places(self, length: int) -> list[int]:
        """The positions in a prompt of this length."""
        if self.tokens is not None:
            return [int(token) for token in self.tokens]
        return sorted({length * part // SPREAD - 1 for part in range(1, SPREAD + 1)} - {-1})


def run(model: Model, prompts: Any, request: Request, job: Job) -> Result:
    assert isinstance(request.options, TokenCoupling)
    refuse_heads(model, job)
    rows = prompts_of_one_length(model, prompts, job.length, job.n_prompts)
    settings = chosen_of(model, rows.shape[1], request.options, request.options.places(rows.shape[1]), job)
    if len(settings.tokens) < 2:
        raise InputError("tokens couple with each other: give two different positions at least, in longer prompts")
    first, *later = settings.tokens
    sources = [*settings.tokens, *(first for _ in later), *settings.tokens[:-1]]
    job.plan(len(rows) * passes_of(rows.shape[1], sources))

    def of_model(model: Model, label: str, after: Mapping[str, xr.Dataset]) -> xr.Dataset:
        return measure(model, rows, settings, label)

    return job.result(request, model, list(rows), of_model)


def measure(model: Model, prompts: Int[Tensor, "prompt pos"], settings: Settings, label: str) -> xr.Dataset:
    """Every prompt through one model: means over prompts, and the intervals of what is said."""
    found = xr.concat([one_prompt(model, prompt, settings) for prompt in prompts], "prompt")
    assert isinstance(found, xr.Dataset)
    different = found["token"] != found["token_2"]
    of_prompts = {
        "mean_coupling": found["coupling"].where(different).mean(("layer", "token", "token_2")),
        "mean_chance": found["chance"].mean(("layer", "token")),
    }
    data = xr.Dataset({"coupling": found["coupling"].mean("prompt")})
    for name, array in of_prompts.items():
        first = array.transpose("prompt", "kind", "k")
        data = data.assign(mean_and_ends(name, first.values, ("kind", "k"), (-np.inf, 1.0)))
    unknown = int(found["coupling"].isnull().any([dim for dim in found["coupling"].dims if dim != "layer"]).sum())
    return data.assign_attrs(rows=("kind", "k"), model=label, d_model=model.cfg.d_model, unknown_layers=unknown)


def one_prompt(model: Model, prompt: Int[Tensor, " pos"], settings: Settings) -> xr.Dataset:
    """Every pair of tokens in each layer, in the three ways."""
    streams, tokens = residual_streams(model, prompt), settings.tokens
    own = [settings.jacobians(model, prompt, (token, token), streams) for token in tokens]

    def take(source: int, target: int) -> list[ResidualJacobian]:
        same = own[tokens.index(source)] if source == target else None
        return same or settings.jacobians(model, prompt, (source, target), streams)

    members = {
        "self": own,
        "same_input": [take(tokens[0], target) for target in tokens],
        "same_output": [take(source, tokens[-1]) for source in tokens],
    }
    layers = {kind: [settings.pairs(of)[0] for of in zip(*of_kind, strict=True)] for kind, of_kind in members.items()}
    couplings, chances = (
        np.stack([np.stack([settings.by_k(pairs, side=of) for pairs in found], 1) for found in layers.values()])
        for of in ("aligned", "chance")
    )
    sizes = torch.stack([torch.stack([pairs.values[:, 0] for pairs in found]) for found in layers.values()])
    known = (sizes > 0).cpu().numpy()[:, None]  # a token outside the layer's window has no Jacobian
    couplings = np.where(known[..., None] & known[..., None, :], couplings, np.nan)
    chances = np.where(known[..., None], chances, np.nan)
    of_tokens = ("kind", "k", "layer", "token")
    return xr.Dataset(
        {"coupling": ((*of_tokens, "token_2"), couplings), "chance": (of_tokens, chances.mean(-1))},
        {"kind": list(members), "k": settings.ks, "layer": settings.layers, "token": tokens, "token_2": tokens},
    )


# What is shown


def summarise(data: xr.Dataset) -> Summary:
    """Means over layers and pairs of different tokens, of each kind: of the first k under its name, then with _k30."""
    ks = [int(k) for k in data["k"].values]
    numbers: dict[str, Any] = {"k": ks, "tokens": data.sizes["token"]}
    numbers["unknown_layers"] = int(data.attrs.get("unknown_layers", 0))
    for kind, k, end in product(KINDS, ks, ENDS):
        at = data.sel(kind=kind, k=k)
        numbers[of_k(kind, k, ks) + end] = float(at[f"mean_coupling{end}"])
        numbers[of_k(f"{kind}_chance", k, ks) + end] = float(at[f"mean_chance{end}"])
    return numbers


def findings(own: Summary, null: NullSummary | None) -> list[str]:
    sentences = []
    for k in own["k"]:
        parts = [
            f"{kind.replace('_', ' ')} {with_interval(own, name)} ({null_of(null, name)}; {CHANCE} "
            f"{said(own[of_k(f'{kind}_chance', k, own['k'])], '.3f')})"
            for kind in KINDS
            for name in [of_k(kind, k, own["k"])]
        ]
        sentences.append(f"Top-{k} coupling over pairs of {own['tokens']} tokens within layers: {'; '.join(parts)}.")
    if own["unknown_layers"]:
        sentences.append(
            f"In {own['unknown_layers']} layers some of the tokens are further apart than the window, and have no "
            "Jacobian: those pairs are left out."
        )
    return sentences


def table(data: xr.Dataset) -> pd.DataFrame:
    """A row a K: each kind with its 95% interval, and random bases."""
    own = summarise(data)
    columns = [(f"{kind}{of}", f"{kind} {words}".strip()) for kind in KINDS for of, words in OF.items()]
    rows = [
        {"K": k, **{label: with_interval(own, of_k(name, k, own["k"])) for name, label in columns}} for k in own["k"]
    ]
    return pd.DataFrame(rows).rename(columns=lambda name: name.replace("_", " "))


OF = {"": "", "_chance": CHANCE}


def of_kind(kind: str):
    """The figure of one kind: a map token x token per layer, a row a K and side."""

    def figure(result: Any) -> go.Figure:
        layers, ks = result.dataset["layer"].values, result.summary["k"]
        rows = list(product(ks, sides(result)))
        panels = grid([f"layer {layer}" for layer in layers], [f"{side}, K = {k}" for k, (side, *_) in rows])
        maps = [
            data["coupling"].sel(kind=kind, k=k, layer=layer).transpose("token", "token_2")
            for (k, (_, data, _)), layer in product(rows, layers)
        ]
        add_squares(panels, maps, "bases at token", "Jacobian at")
        first, last = result.dataset["token"].values[[0, -1]]
        what = KINDS[kind].replace("{first}", str(first)).replace("{last}", str(last))
        title = f"Coupling of tokens, {kind.replace('_', ' ')} · {model_label(result.dataset)}"
        return panels.finish(title, f"{what}; top K, mean over prompts")

    return figure


OF_MEAN = ("kind", "k")
VARIABLES = {
    "coupling": Variable(
        "coupling of tokens",
        "",
        "Jacobian of token in the bases of token_2, mean over prompts",
        ("kind", "k", "layer", "token", "token_2"),
    ),
    **with_ends("mean_coupling", "mean coupling", "", "over layers and pairs of different tokens", OF_MEAN),
    **with_ends("mean_chance", "mean in random bases", "", "over layers, tokens and draws", OF_MEAN),
}

MEASURE = Measure(
    name="token_coupling",
    question="Does a layer act along the same directions at different tokens?",
    explanation=(
        "Coupling of the residual Jacobians of two tokens in one layer, in three ways: each token's own, one input "
        "token to several outputs, several inputs to one output token. 1 for shared singular vectors, about 0 for "
        "unrelated ones; beside it random bases with the same spectra and a random-init model. 95% intervals over "
        "prompts."
    ),
    source="Aubry et al. 2024 (arXiv 2407.07810); chance and intervals: ours",
    options=TokenCoupling,
    procedure=run,
    precise=True,
    matrices=5,
    variables=VARIABLES,
    summarise=summarise,
    findings=findings,
    figures={kind: of_kind(kind) for kind in KINDS},
    table=table,
    legend=(
        "K: number of top singular vectors; in brackets 95% intervals over prompts; random bases: what chance couples."
    ),
)

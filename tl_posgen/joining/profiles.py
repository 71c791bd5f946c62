"""Head profiles: one row a head over the three subjects, with head metrics of other papers as further columns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import plotly.graph_objects as go
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double, double_device
from tl_posgen.core.formatting import counted
from tl_posgen.core.measure import HEAD, Measure, Variable
from tl_posgen.core.numbers import TRAINED, Numbers
from tl_posgen.core.options import Count, Within
from tl_posgen.core.run import Run
from tl_posgen.errors import InputError
from tl_posgen.joining.numbers import (
    concentration,
    frequency_entropy,
    massive_values,
    overlap,
    repeated_prompts,
    repeated_scores,
    slow_mean_energy,
)
from tl_posgen.models.layers.capture import LayerCapture, scores_from
from tl_posgen.models.selection import head_name
from tl_posgen.models.tokens import bos_of
from tl_posgen.position.decomposition.variance import Variance
from tl_posgen.report.figures import Panels, model_label, sides
from tl_posgen.rope.rotation import rotate, to_planes
from tl_posgen.slash.slash import Slash
from tl_posgen.stats.correlations import rank_correlation

PERIOD = 50
SINK = 0.3  # attention to the first token from which a query counts as sunk
N_ROWS, LEAST_KEYS = 8, 4  # queries whose keys are permuted, keys that each sees at least
SIDED = ("side", *HEAD)
FROM_SLASH = {  # variable -> its name there
    "r1": "r1",
    "slash_score": "best_score",
    "slash_distance": "best_distance",
    "first_token": "first_token",
}
FROM_VARIANCE = ("mean_energy", "interaction", "position", "additive_r", "absolute")  # the last, if it was asked for
REPEATED = {  # on repeated random tokens: variable -> label, attention from token i to, short heading
    "previous_token": ("previous token", "i-1", "prev"),
    "duplicate_token": ("duplicate token", "i-T", "dup"),
    "induction": ("induction", "i-T+1", "ind"),
}
METRICS = {  # of other papers: variable -> label, description, dims, bounds, source
    "massive": ("massive values", "max_d / mean_d of |x_{:,d}| over tokens, before RoPE", SIDED, None, "2502.01563"),
    "concentration": ("concentration", "sum_m |E z_m| / sum_m E|z_m|, before RoPE", SIDED, (0, 1), "2604.04921"),
    "slow_mean": (
        *("slow mean", "share of energy in the mean of planes that turn less than once in a prompt", SIDED, (0, 1)),
        "2503.01832",
    ),
    "frequency_entropy": ("entropy over frequencies", "of p_m ~ E|q_m| E|k_m|, over ln M", HEAD, (0, 1), ""),
    "sink_rate": ("sink rate", f"share of queries with S_i0 > {SINK}", HEAD, (0, 1), "2410.10781"),
    "positional": ("positional", "overlap by place with attention to permuted keys", HEAD, (0, 1), "2511.11579"),
    "symbolic": ("symbolic", "overlap by key with attention to permuted keys", HEAD, (0, 1), "2511.11579"),
}
NO_TURN = "nothing rotates, so the interaction is zero by construction."


def scatter(result: Any, x: str = "r1, k", y: str = "slash_score") -> go.Figure:
    """Draw two columns of the heads' table against each other: a point a head, the first null models' beside it.

    Args:
        result: of `Profiles`.
        x, y: columns of `result.frame()`.

    Raises:
        InputError: a column that the table lacks.

    Example:
        >>> cut = {"length": 24, "n_prompts": 1, "null_seeds": (), "progress": False}
        >>> found = Profiles()("mini", "Down, down, down. Would the fall never end?" * 3, **cut)
        >>> [len(one.x) for one in scatter(found, "interaction", "induction").data]
        [16]
    """
    labels = [TRAINED, *(one.labels[0] for one in result.numbers.by_null.values())]
    panels, rho = Panels([""], columns=1, row_height=420), None
    for (side, _, colour), label in reversed(list(zip(sides(result), labels, strict=True))):
        table = result.frame(init=label)
        for name in (x, y):
            if name not in table.columns[2:]:
                raise InputError(f"profiles: no column {name!r}; it has {', '.join(map(repr, table.columns[2:]))}")
        names = [head_name(*place) for place in zip(table["layer"], table["head"], strict=True)]
        points = go.Scatter(x=table[x], y=table[y], text=names, name=side, mode="markers", marker={"color": colour})
        panels.add(0, points.update(hovertemplate="%{text}<br>%{x:.3f}, %{y:.3f}<extra></extra>"))
        rho = rank_correlation(*(torch.from_numpy(table[name].to_numpy(float).copy()) for name in (x, y)))
    assert rho is not None
    words = f"a point a head; Spearman's rho over heads {rho.r:.2f} [{rho.low:.2f}, {rho.high:.2f}], heads independent"
    return panels.axes(x, y).finish(f"{y} by {x} · {model_label(result.own)}", words)


@dataclass(frozen=True)
class Profiles(Measure):
    r"""One row a head: r1 and constancy of Q and K, interaction, slash, attention on repeated tokens.

    One row a head over the three subjects: how near rank one and how constant its queries and keys are, how much of its
    scores is interaction, its slash, and where it attends on repeated random tokens.

    From the results of the same run: r1 of Q and K before RoPE, the highest slash score and its distance,
    attention to the first token (`slash`); |E x|^2 / E|x|^2 of queries and keys, shares of interaction and position,
    additive r (`variance`), the first token left out; with Variance(absolute=True) among the measures, the share of the
    key's place too. On random tokens of which a block stands twice: mean attention to the previous token, to the
    earlier occurrence of the same token, and to the token after it.

    Args:
        period: length of the random block; 50 if left out, less where the context or the vocabulary is shorter.
        n_repeated: prompts of repeated tokens.
        metrics: "literature" adds head metrics of other papers as columns, one more pass a prompt: massive values and
            concentration of queries and keys, their mean in slow planes, entropy over frequencies, sink rate, and how
            far attention is positional (it keeps its places when the keys are permuted) or symbolic (it goes with
            the keys).

    Raises:
        InputError: prompts of different lengths; a period that does not fit.

    Source: induction score: Olsson et al. 2022; slash score: Cheng et al. 2026; the split: Han & Ji 2025; the
    table: ours. Reconstructed from abstracts and public text: massive values after arXiv 2502.01563, concentration (as
    a mean resultant length) after TriAttention (arXiv 2604.04921), the mean in slow planes after rotary offset features
    (arXiv 2503.01832), positional and symbolic after arXiv 2511.11579 (overlaps, and permutations of the keys before
    RoPE, are ours). Sink rate: Gu et al. 2024 (arXiv 2410.10781), their threshold, by query. Entropy over frequencies:
    ours, of a quantity several of them use.

    Example:
        >>> cut = {"length": 24, "n_prompts": 1, "null_seeds": (), "progress": False}
        >>> found = Profiles()("mini", "Down, down, down. Would the fall never end?" * 3, **cut)
        >>> found.frame().columns[2:5].tolist()
        ['previous_token', 'duplicate_token', 'induction']
    """

    period: Annotated[int, Within(2, words="a whole number, 2 or more")] | None = None
    n_repeated: Count = 4
    metrics: Literal["own", "literature"] = "own"

    usual_prompts = 8
    question = "What kind of head is it?"
    after = (Slash, Variance)
    one_length = True
    matrices = 2
    whole_rows = True
    variables = {
        "r1": Variable("r1 of Q and K", "", "before RoPE, all tokens, see `slash`", SIDED),
        "mean_energy": Variable(
            "energy share of the mean", "", "|E x|^2 / E|x|^2 of queries or keys, first token left out", SIDED
        ),
        "interaction": Variable("interaction share", "", "see `variance`"),
        "position": Variable("position share", "", "see `variance`"),
        "additive_r": Variable("additive r", "", "see `variance`"),
        "absolute": Variable("share of the key's place", "", "see `variance`"),
        "slash_score": Variable("slash score", "", "highest over D < N/2"),
        "slash_distance": Variable("slash distance", "tokens", "the D of the highest slash score"),
        "first_token": Variable("attention to the first token", "", "E_i S_i0"),
        **{
            name: Variable(
                *(label, "", f"S_{{i, {place}}}, mean attention on repeated random tokens"), headline=name, short=short
            )
            for name, (label, place, short) in REPEATED.items()
        },
        **{
            name: Variable(label, "", f"{what}; {f'reconstructed, arXiv {paper}' if paper else 'ours'}", dims, bounds=b)
            for name, (label, what, dims, b, paper) in METRICS.items()
        },
    }
    figures = {"scatter": scatter}
    caveats = dict.fromkeys(("absolute", "alibi", "none"), NO_TURN)

    def prepare(self, model: Any, tokens: Sequence[Tensor]) -> "Profiles":
        n_first, context, vocabulary = len(_first_tokens(model)), int(model.cfg.n_ctx), int(model.cfg.d_vocab)
        period = self.period or min(PERIOD, (context - n_first) // 2, vocabulary)
        if period > vocabulary or n_first + 2 * period > context:
            raise InputError(
                f"profiles: period={period}: two blocks of different tokens do not fit into a vocabulary of "
                f"{vocabulary} and a context of {context}; give a shorter one"
            )
        return replace(self, period=period)

    def passes(self, run: Run) -> int:
        return self.n_repeated + (len(run.rows) if self.metrics == "literature" else 0)

    def of_model(self, run: Run) -> xr.Dataset:
        slash = run.found(Slash).sel(tokens="all", drop=True)
        variance = run.found(Variance).sel(tokens="without first", drop=True)
        first, period = _first_tokens(run.model), self.period
        assert period is not None

        def on_repeated(layer: LayerCapture) -> Mapping[str, Any]:
            assert layer.pattern is not None
            return vars(repeated_scores(layer.pattern, len(first), period))

        repeated = repeated_prompts(first, period, run.model.cfg.d_vocab, self.n_repeated, run.seed)
        data = xr.Dataset({name: slash[source] for name, source in FROM_SLASH.items()})
        data = data.merge(variance[[name for name in FROM_VARIANCE if name in variance]])
        data = data.merge(_means_of(run, on_repeated, repeated))
        if self.metrics == "literature":
            data = data.merge(_means_of(run, lambda layer: literature_metrics(layer, run.seed)))
        return xr.Dataset({name: one.transpose(*self.variables[str(name)].dims) for name, one in data.items()})

    def findings(self, own: Numbers) -> list[str]:
        n_heads = int(own.data["interaction"].notnull().sum())
        on_text, *on_repeated = (
            f"{self.variables[name].label} {own.extreme(name):.2f}"
            f"{own.number(own.array(name).max(HEAD)).null_in_brackets:.2f}"
            for name in ("slash_score", *REPEATED)
        )
        return [
            f"Of {counted(n_heads, 'head')}, highest: {on_text}; on repeated random tokens {', '.join(on_repeated)}."
        ]


def _means_of(run: Run, values: Callable[[LayerCapture], Mapping[str, Any]], rows: Any = None) -> xr.Dataset:
    """Return means over prompts (or other rows of token ids) of values of each layer, which has its pattern."""
    sums = run.sums()
    run.capture(lambda layer: sums.add_layer(layer, values(layer)), needs=frozenset({"pattern"}), rows=rows)
    return sums.means()


def _first_tokens(model: Any) -> Int[Tensor, " start"]:
    """Return what prompts of repeated tokens begin with: a BOS token, where the tokenizer puts one."""
    return torch.tensor([] if model.tokenizer is None else bos_of(model.tokenizer), dtype=torch.int64)


def literature_metrics(layer: LayerCapture, seed: int) -> dict[str, Any]:
    """Return `METRICS` of one layer of one prompt, the first token left out where moments are taken.

    Args:
        layer: with its pattern.
        seed: of the permutations, drawn anew for each prompt; heads share them.
    """
    assert layer.pattern is not None
    rope, tokens = layer.geometry.rope, (layer.q[:, 1:], layer.k[:, 1:])
    q, k = planes = [to_planes(x, rope) for x in tokens]
    unknown = torch.full((len(layer.heads),), torch.nan, dtype=DOUBLE, device=double_device(layer.device))
    found = {
        "massive": torch.stack([massive_values(x) for x in tokens]),
        "concentration": torch.stack([unknown, unknown]),
        "slow_mean": torch.stack([unknown, unknown]),
        "frequency_entropy": unknown,
        "sink_rate": double((layer.pattern[:, 1:, 0] > SINK).float()).mean(1),
    }
    if q.shape[-1]:
        found["concentration"] = torch.stack([concentration(z) for z in planes])
        found["slow_mean"] = torch.stack([slow_mean_energy(z, rope.inv_freq, layer.length) for z in planes])
        found["frequency_entropy"] = frequency_entropy(q, k)
    found["positional"], found["symbolic"] = permuted_overlaps(layer, np.random.default_rng([seed, layer.prompt]))
    return found


def permuted_overlaps(
    layer: LayerCapture, generator: np.random.Generator
) -> tuple[Float[Tensor, " head"], Float[Tensor, " head"]]:
    """overlap(S'_i, S_i) by place and by key, S' the attention of query i once the keys that it sees are permuted.

    Means over `N_ROWS` queries, spread from those that see LEAST_KEYS keys to the last. A head that knows the distance
    alone has 1 by place, one that knows the key alone 1 by key. Vectors are those before RoPE, so a moved key is
    rotated as its new place asks.
    """
    found = []
    for row in np.unique(np.linspace(min(LEAST_KEYS, layer.length) - 1, layer.length - 1, N_ROWS).round().astype(int)):
        place = torch.tensor([int(row)], device=layer.device)
        seen = layer.geometry.sees(place[:, None] - layer.positions[: row + 1])[0].nonzero()[:, 0]
        moved = layer.positions[: row + 1].clone()
        moved[seen] = seen[torch.from_numpy(generator.permutation(len(seen))).to(seen.device)]
        keys = rotate(layer.k[:, moved], layer.positions[: row + 1], layer.geometry.rope)
        query = layer.rotated_q[:, row : row + 1]
        own, other = (
            double(scores_from(query, k, layer.geometry, layer.heads, place)[:, 0]).softmax(-1)
            for k in (layer.rotated_k[:, : row + 1], keys)
        )
        found.append(torch.stack([overlap(other, own), overlap(other, own[:, moved])]))
    by_place, by_key = torch.stack(found).mean(0)
    return by_place, by_key

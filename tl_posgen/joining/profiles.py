"""Head profiles: one row a head over the three subjects, with head metrics of other papers as further columns."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
import plotly.graph_objects as go
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double, double_device
from tl_posgen.core.measure import HEAD, Measure, Variable
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.options import Count, Within
from tl_posgen.core.run import Run
from tl_posgen.errors import InputError
from tl_posgen.frequencies.numbers.copies import copied_rows
from tl_posgen.joining.numbers import (
    concentration,
    frequency_entropy,
    massive_values,
    repeated_scores,
    slow_mean_energy,
)
from tl_posgen.models.layers.capture import LayerCapture, scores_from
from tl_posgen.models.session import Session
from tl_posgen.models.tokens import start_of_texts
from tl_posgen.position.decomposition.variance import Variance
from tl_posgen.report.kinds import points
from tl_posgen.rope.rotation import rotate, to_planes
from tl_posgen.slash.slash import Slash

_PERIOD = 50
SINK = 0.3  # attention to the first token from which a query counts as sunk
N_ROWS, LEAST_KEYS = 8, 4  # queries whose keys are permuted, keys that each sees at least
_SIDED = ("side", *HEAD)
_FROM_SLASH = ("r1", "slash_score", "slash_distance", "first_token")
_FROM_VARIANCE = ("mean_energy", "interaction", "position", "additive_r", "absolute")  # the last, if it was asked for
_REPEATED = {"previous_token": ("i-1", "prev"), "duplicate_token": ("i-T", "dup"), "induction": ("i-T+1", "ind")}
_METRICS = {  # of other papers: variable -> what it is, dims, paper
    "massive": ("max_d / mean_d of |x_{:,d}| over tokens, before RoPE", _SIDED, "arXiv 2502.01563"),
    "concentration": ("sum_m |E z_m| / sum_m E|z_m|, before RoPE", _SIDED, "arXiv 2604.04921"),
    "slow_mean": ("share of energy in the mean of planes that turn less than once", _SIDED, "arXiv 2503.01832"),
    "frequency_entropy": ("of p_m ~ E|q_m| E|k_m|, over ln M", HEAD, "ours"),
    "sink_rate": (f"share of queries with S_i0 > {SINK}", HEAD, "arXiv 2410.10781"),
    "positional": ("overlap by place with attention to permuted keys", HEAD, "arXiv 2511.11579"),
    "symbolic": ("overlap by key with attention to permuted keys", HEAD, "arXiv 2511.11579"),
}
NO_TURN = "nothing rotates, so the interaction is zero by construction."


def scatter(result: Any, x: str = "r1, k", y: str = "slash_score") -> go.Figure:
    """Draw two columns of the heads' table against each other: a point a head, the first null models' beside them.

    Args:
        result: of `Profiles`.
        x, y: columns of `result.frame()`.

    Raises:
        InputError: a column that the table lacks.

    Example:
        >>> cut = {"length": 24, "n_prompts": 1, "nulls": 0, "progress": False}
        >>> found = Profiles()("mini", "Down, down, down. Would the fall never end?" * 3, **cut)
        >>> [len(one.x) for one in scatter(found, "interaction", "induction").data]
        [16]
    """
    columns = result.frame().columns[2:]
    for name in (x, y):
        if name not in columns:
            raise InputError(f"profiles: no column {name!r}; it has {', '.join(map(repr, columns))}")
    (x_name, _, x_side), (y_name, _, y_side) = x.partition(", "), y.partition(", ")
    x_at, y_at = ({"side": side} if side else {} for side in (x_side, y_side))
    of_side, labels = {"": "", "q": " of queries", "k": " of keys"}, {n: v.label for n, v in Profiles.variables.items()}
    x, y = labels[x_name] + of_side[x_side], labels[y_name] + of_side[y_side]
    numbers = result.numbers
    rho = numbers.correlation(numbers.array(x_name, **x_at), numbers.array(y_name, **y_at), ranks=True)
    subtitle = f"Spearman's rho over heads {rho:.2f}, heads independent"
    return points((x_name, x_at), (y_name, y_at), title=f"{y} by {x}", subtitle=subtitle, x_title=x, y_title=y)(result)


@dataclass(frozen=True)
class Profiles(Measure):
    r"""One row a head: r1 and constancy of Q and K, interaction, slash, attention on repeated tokens.

    The table has one row a head over the three subjects: how near its queries and keys are to rank one and how
    constant, how much of its scores is interaction, its slash score, and where it attends on repeated random tokens.

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
        >>> cut = {"length": 24, "n_prompts": 1, "nulls": 0, "progress": False}
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
        "r1": Variable("r1", "", "before RoPE, all tokens, see `slash`", _SIDED),
        "mean_energy": Variable(
            "energy share of the mean", "", "|E x|^2 / E|x|^2 of queries or keys, first token left out", _SIDED
        ),
        "interaction": Variable("interaction share", "", "see `variance`"),
        "position": Variable("position share", "", "see `variance`"),
        "additive_r": Variable("additive r", "", "see `variance`"),
        "absolute": Variable("share of the key's place", "", "see `variance`"),
        "slash_score": Variable("slash score", "", "highest over D < N/2"),
        "slash_distance": Variable("slash distance", "tokens", "D of slash_score", whole=True),
        "first_token": Variable("attention to the first token", "", "E_i S_i0 over all queries, the first itself too"),
        **{
            name: Variable(
                name.replace("_", " "),
                description=f"S_{{i, {place}}}, mean attention on repeated random tokens",
                headline=name,
                short=short,
            )
            for name, (place, short) in _REPEATED.items()
        },
        **{
            name: Variable(name.replace("_", " "), "", f"{what}; {paper}", dims)
            for name, (what, dims, paper) in _METRICS.items()
        },
    }
    figures = {"scatter": scatter}
    caveats = dict.fromkeys(("absolute", "alibi", "none"), NO_TURN)

    def prepare(self, session: Session, tokens: Sequence[Tensor]) -> "Profiles":
        n_first = len(start_of_texts(session))
        context, vocabulary = int(session.model.cfg.n_ctx), int(session.model.cfg.d_vocab)
        period = self.period or min(_PERIOD, (context - n_first) // 2, vocabulary)
        if period > vocabulary or n_first + 2 * period > context:
            raise InputError(
                f"profiles: period={period}: two blocks of different tokens do not fit into a vocabulary of "
                f"{vocabulary} and a context of {context}; give a shorter one"
            )
        return replace(self, period=period)

    def of_model(self, run: Run) -> xr.Dataset:
        slash = run.dataset_of(Slash).sel(tokens="all", drop=True)
        variance = run.dataset_of(Variance).sel(tokens="without first", drop=True)
        first, period = torch.tensor(start_of_texts(run.session), dtype=torch.int64), self.period
        assert period is not None
        repeated, on_text, pattern = run.sums(), run.sums(), frozenset({"pattern"})

        def add_repeated(layer: LayerCapture) -> None:
            assert layer.pattern is not None
            repeated.add_layer(layer, repeated_scores(layer.pattern, len(first), period))

        vocabulary = torch.arange(run.model.cfg.d_vocab)
        rows = copied_rows(vocabulary, first, period, self.n_repeated, run.seed)
        run.capture(add_repeated, pattern, rows)
        if self.metrics == "literature":
            run.capture(lambda layer: on_text.add_layer(layer, _literature_metrics(layer, run.seed)), pattern)
        data = xr.Dataset({name: slash[name] for name in _FROM_SLASH})
        data = data.merge(variance[[name for name in _FROM_VARIANCE if name in variance]])
        data = data.merge(repeated.means()).merge(on_text.means())
        return xr.Dataset({name: array.transpose(*self.variables[str(name)].dims) for name, array in data.items()})

    def findings(self, numbers: Numbers) -> list[str]:
        on_text, *on_repeated = (
            f"{self.variables[name].label} {numbers.extreme(name):.2f}"
            f"{numbers.number(numbers.array(name).max(HEAD)).null_in_brackets:.2f}"
            for name in ("slash_score", *_REPEATED)
        )
        return [f"Highest: {on_text}; on repeated random tokens {', '.join(on_repeated)}."]


def _literature_metrics(layer: LayerCapture, seed: int) -> dict[str, Any]:
    """Return the metrics of other papers of one layer of one prompt, the first token left out where moments are taken.

    Args:
        layer: with its pattern.
        seed: of the permutations, drawn anew for each prompt; heads share them.
    """
    assert layer.pattern is not None
    rope, tokens = layer.geometry.rope, (layer.q[:, 1:], layer.k[:, 1:])
    q, k = planes = [to_planes(x, rope) for x in tokens]
    unknown = torch.full((len(layer.heads),), torch.nan, dtype=DOUBLE, device=double_device(layer.device))
    metrics = {
        "massive": torch.stack([massive_values(x) for x in tokens]),
        "concentration": torch.stack([unknown, unknown]),
        "slow_mean": torch.stack([unknown, unknown]),
        "frequency_entropy": unknown,
        "sink_rate": double((layer.pattern[:, 1:, 0] > SINK).float()).mean(1),
    }
    if q.shape[-1]:
        metrics["concentration"] = torch.stack([concentration(z) for z in planes])
        metrics["slow_mean"] = torch.stack([slow_mean_energy(z, rope.inv_freq, layer.length) for z in planes])
        metrics["frequency_entropy"] = frequency_entropy(q, k)
    metrics["positional"], metrics["symbolic"] = _permuted_overlaps(layer, np.random.default_rng([seed, layer.prompt]))
    return metrics


def _permuted_overlaps(
    layer: LayerCapture, generator: np.random.Generator
) -> tuple[Float[Tensor, " head"], Float[Tensor, " head"]]:
    """sum_j min(S'_ij, S_ij) by place and by key, S' the attention of query i once the keys that it sees are permuted.

    Means over `N_ROWS` queries, spread from those that see LEAST_KEYS keys to the last. A head that knows the distance
    alone has 1 by place, one that knows the key alone 1 by key. Vectors are those before RoPE, so a moved key is
    rotated as its new place asks.
    """
    overlaps = []
    for row in np.unique(np.linspace(min(LEAST_KEYS, layer.length) - 1, layer.length - 1, N_ROWS).round().astype(int)):
        place = torch.tensor([int(row)], device=layer.device)
        seen = layer.geometry.sees(place[:, None] - layer.positions[: row + 1])[0].nonzero()[:, 0]
        moved = layer.positions[: row + 1].clone()
        moved[seen] = seen[torch.from_numpy(generator.permutation(len(seen))).to(seen.device)]
        keys = rotate(layer.k[:, moved], layer.positions[: row + 1], layer.geometry.rope)
        query = layer.rotated_q[:, row : row + 1]
        attention, permuted = (
            layer.attention(double(scores_from(query, k, layer.geometry, layer.heads, place)))[:, 0]
            for k in (layer.rotated_k[:, : row + 1], keys)
        )
        overlaps.append(
            torch.stack([torch.minimum(permuted, expected).sum(-1) for expected in (attention, attention[:, moved])])
        )
    by_place, by_key = torch.stack(overlaps).mean(0)
    return by_place, by_key

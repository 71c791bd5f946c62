"""What planes of RoPE do in scores: diagonals, decay with distance, places and contents of keys."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.core.measure import HEAD, Measure, Variable
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.run import Run
from tl_posgen.core.sums import Sums
from tl_posgen.errors import InputError
from tl_posgen.frequencies.numbers.roles import (
    N_NEXT,
    contrast_at,
    correlation_with_mean_curve,
    scores_at,
    swap_scores,
)
from tl_posgen.frequencies.plane_use import SETTLED
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.session import Session
from tl_posgen.report.kinds import lines
from tl_posgen.rope.planes import along_distances, turning_factors
from tl_posgen.rope.rotation import complex_planes, turns_at

NEAR = (0, 1)  # distances of diagonal and previous-token heads
_N_CURVE, _FARTHEST = 24, 0.75  # distances at which a query is held against the mean curve, up to this share of n
_N_ROWS, _N_PAIRS = 8, 256  # queries, and pairs of keys of each, whose contents change places


@dataclass(frozen=True)
class PlaneRoles(Measure):
    r"""s_m(D) - 1/3 sum_{a=1..3} s_m(D + a), with s_m(D) = E_i scale Re z^q_im conj(z^k_{i-D,m}) e^{i theta_m D}.

    What do planes do in the scores? Which make the diagonals, the token itself and the one before it, stand out; how
    the mean score changes with distance; how far attention goes with the places of keys, and how far with their
    contents; and whether the mean query and the mean key foretell the scores of single queries.

    Attention at a distance is a mean over queries from 8 on. Mean scores are taken at D = 1, 2, 4, .. below half of the
    prompt, from the same queries of the second half. The mean curve is held against each query's scores at 24 distances
    up to three quarters of the prompt, by Pearson's r. For places and contents, two keys of a query change theirs, see
    `tl_posgen.frequencies.numbers.roles.swap_scores`: 256 pairs of each of 8 queries, the same draws in every analysis,
    weighted by how unlike the attention to the two is. The first token is left out as a key. A soft cap is not in these
    scores. A layer whose window is below five tokens is NaN.

    Raises:
        InputError: no prompt of 10 tokens.
        UnsupportedModelError: a model, or a choice of layers, without RoPE (learned absolute positions, ALiBi).

    Source: claims of others, as we read them: diagonals Barbero et al. 2024 (arXiv 2410.06205), places and contents
    Urrutia et al. 2026 (arXiv 2511.11579), the mean curve TriAttention (arXiv 2604.04921); how each is measured: ours

    Example:
        >>> data = PlaneRoles()("mini", "Down, down, down. Would the fall never end?", nulls=0).trained
        >>> data["contrast"].dims
        ('near', 'layer', 'head', 'plane')
    """

    question = "Which planes make diagonals, and do heads go by place or by content?"
    needs = frozenset({"pattern"})
    variables = {
        "diagonal": Variable.share("attention at D", "E_i S_{i, i-D}", ("near", *HEAD)),
        "contrast": Variable(
            "lift of a diagonal",
            "logits",
            "s_m(D) less the mean at the next three distances, by plane",
            dims=("near", *HEAD, "plane"),
            interval=True,
        ),
        "positional": Variable.share(
            "positional score", "1: attention stays when two keys change contents", HEAD, "positional", "place"
        ),
        "symbolic": Variable.share(
            "symbolic score", "1: attention goes with the contents", HEAD, "symbolic", "content"
        ),
        "curve_r": Variable.correlation(
            "r with the mean curve", "of a query's scores over distance", HEAD, "curve_r", "curve r", judged=True
        ),
        "mean_score": Variable("mean score", "logits", "at D = 1, 2, 4, ..", (*HEAD, "doubling"), interval=True),
        "spread": Variable("std within rows", "logits", "of the scores of a query over its keys", HEAD, interval=True),
    }
    figures = {
        "diagonals": lines(
            {f"at D = {near}": [("lift, logits", "contrast", {"near": near})] for near in NEAR},
            "plane",
            title="Which planes make diagonals",
            subtitle="by how much each lifts a diagonal above the next three distances; mean over heads, fastest first",
        ),
        "decay": lines(
            {
                "mean score / std within rows": [
                    ("scores", lambda numbers: numbers.array("mean_score") / numbers.array("spread"))
                ]
            },
            "doubling",
            title="Scores over distance",
            subtitle="mean over queries of the second half and over heads",
            x_title="log2 of the distance",
        ),
    }
    curves = ("mean_score",)

    def labels(self) -> Mapping[str, Sequence[Any]]:
        return {"near": NEAR}

    def requires(self, session: Session) -> None:
        session.require_rope(self.name)

    def refuse(self, run: Run) -> None:
        run.session.require_rope(self.name, run.heads)

    def prepare(self, session: Session, tokens: Sequence[Tensor]) -> "PlaneRoles":
        if (n := max(map(len, tokens))) < SETTLED + 2:
            raise InputError(f"{self.name}: the longest prompt has {n} tokens; give {SETTLED + 2} tokens at least")
        return self

    def of_layer(self, layer: LayerCapture) -> Mapping[str, Any]:
        geometry, n = layer.geometry, layer.length
        rope, scale = geometry.rope, geometry.scale
        reach = geometry.reach(n)
        if not rope.rotary_dim or n < SETTLED + 2 or reach <= NEAR[-1] + N_NEXT:
            return {}
        z = [complex_planes(double(x), rope) for x in (layer.q, layer.k)]
        q, k = (complex_planes(double(x), rope) for x in (layer.rotated_q, layer.rotated_k))
        rows = torch.arange(SETTLED, n, device=q.device)
        late = torch.arange(n // 2 + 1, n, device=q.device)
        doubled = [2**power for power in range(n.bit_length()) if 2**power < min(n / 2 + 1, reach)]
        farthest = min(int(_FARTHEST * n), reach - 1)
        distances = sorted({round(float(distance)) for distance in np.geomspace(1, farthest, _N_CURVE)})
        turn = turning_factors(torch.tensor(distances, device=q.device), rope, geometry.d_head)
        mean_curve = along_distances(z[0][:, 1:].mean(1) * z[1][:, 1:].mean(1).conj(), turn)
        far = torch.arange(farthest + 1, n, device=q.device)
        curve_r = correlation_with_mean_curve(q, k, mean_curve, distances, far)
        positional, symbolic, spread = _swapped(layer, scale * q, z[1])
        return {
            "diagonal": _attention_at(layer, NEAR),
            "contrast": scale * torch.stack([contrast_at(q, k, rows, distance) for distance in NEAR]),
            "positional": positional,
            "symbolic": symbolic,
            "curve_r": curve_r,
            "mean_score": scale * torch.stack([scores_at(q, k, late, d).sum(-1).mean(1) for d in doubled], -1),
            "spread": spread,
        }

    def of_sums(self, sums: Sums) -> Any:
        return sums.means().reindex(layer=sorted(sums.layers))  # NaN of layers without RoPE

    def findings(self, numbers: Numbers) -> list[str]:
        itself, before = (numbers("diagonal", near=near) for near in NEAR)
        return [
            f"Attention to the token itself is {itself:.2f}, to the one before it {before:.2f}. Where two keys change "
            f"contents, their attention has a cosine of {numbers('positional'):.2f} with that before by place, and of "
            f"{numbers('symbolic'):.2f} by content; both are near 1 where scores hardly vary.",
            f"The curve of the mean query and the mean key over distance correlates with the scores of single queries "
            f"at r = {numbers('curve_r'):.2f}.",
        ]


def _attention_at(layer: LayerCapture, distances: Sequence[int]) -> Float[Tensor, "near head"]:
    """Return E_i S_{i, i-D} over the queries from SETTLED on, at each distance."""
    diagonals = []
    for start, stop in layer.query_blocks():
        block, rows = layer.pattern_rows(start, stop), torch.arange(start, stop, device=layer.device)
        for distance in distances:
            keys = (rows - distance).clamp(min=0)[None, :, None].expand(len(block), -1, 1)
            diagonals.append(block.gather(-1, keys)[..., 0])
    by_distance = [torch.cat(diagonals[near :: len(distances)], 1) for near in range(len(distances))]
    return double(torch.stack(by_distance)[..., SETTLED:]).mean(-1)


def _swapped(layer: LayerCapture, q: Tensor, contents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return positional and symbolic scores of the heads, and the std of their scores within rows."""
    geometry, n, device = layer.geometry, layer.length, q.device
    turns = torch.cat(
        [
            turns_at(torch.arange(n), geometry.rope),
            torch.ones(n, contents.shape[-1] - len(geometry.rope.inv_freq), dtype=contents.dtype),
        ],
        -1,
    ).to(device)
    generator = torch.Generator().manual_seed(1_000_003 * layer.prompt + 101 * layer.layer)
    swaps, variances = [], []
    for row in torch.linspace(n // 2, n - 1, _N_ROWS).long().unique().tolist():
        first = 1 if geometry.window is None else max(1, row - geometry.window + 1)
        scores = (q[:, row, None] * (contents[:, first : row + 1] * turns[first : row + 1]).conj()).real.sum(-1)
        variances.append(scores.var(-1, correction=0))
        pairs = torch.randint(first, row + 1, (_N_PAIRS, 2), generator=generator)
        pairs = pairs[pairs[:, 0] != pairs[:, 1]].to(device)
        attention = layer.attention(scores[:, None])[:, 0]
        weights = (attention[:, pairs[:, 0] - first] - attention[:, pairs[:, 1] - first]).abs()
        swaps.append((swap_scores(q[:, row], contents, turns, pairs, weights), weights.sum(-1)))
    total = torch.stack([weight for _, weight in swaps])
    means = [torch.stack([row_means[side].nan_to_num() for row_means, _ in swaps]) for side in (0, 1)]
    positional, symbolic = ((mean * total).sum(0) / total.sum(0) for mean in means)
    return positional, symbolic, torch.stack(variances).mean(0).sqrt()

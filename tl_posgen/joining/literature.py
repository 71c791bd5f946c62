"""Head metrics of other papers, as columns of the head profiles."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double, double_device
from tl_posgen.core.measure import HEAD, Variable
from tl_posgen.joining.numbers.literature_metrics import (
    concentration,
    frequency_entropy,
    massive_values,
    overlap,
    slow_mean_energy,
)
from tl_posgen.models.layers.capture import LayerCapture, scores_from
from tl_posgen.rope.rotation import rotate, to_planes

SINK = 0.3  # attention to the first token from which a query counts as sunk
N_ROWS, LEAST_KEYS = 8, 4  # queries whose keys are permuted, keys that each sees at least
SIDED = ("side", *HEAD)
METRICS = {  # name -> label, description, dims, bounds, source
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
LITERATURE = {
    name: Variable(label, "", f"{what}; {f'reconstructed, arXiv {paper}' if paper else 'ours'}", dims, bounds=bounds)
    for name, (label, what, dims, bounds, paper) in METRICS.items()
}


def literature_metrics(layer: LayerCapture, seed: int) -> dict[str, Any]:
    """Return `LITERATURE` of one layer of one prompt, the first token left out where moments are taken.

    Args:
        layer: with its pattern.
        seed: of the permutations, drawn anew for each prompt; heads share them.
    """
    assert layer.pattern is not None
    rope, sides = layer.geometry.rope, {"q": layer.q[:, 1:], "k": layer.k[:, 1:]}
    planes = {side: to_planes(x, rope) for side, x in sides.items()}
    turned = planes["q"].shape[-1] > 0
    unknown = torch.full((len(layer.heads),), torch.nan, dtype=DOUBLE, device=double_device(layer.device))
    found = {"massive": torch.stack([massive_values(x) for x in sides.values()])}
    for name, of_planes in (
        ("concentration", concentration),
        ("slow_mean", lambda z: slow_mean_energy(z, rope.inv_freq, layer.length)),
    ):
        found[name] = torch.stack([of_planes(z) if turned else unknown for z in planes.values()])
    found["frequency_entropy"] = frequency_entropy(planes["q"], planes["k"]) if turned else unknown
    found["sink_rate"] = double((layer.pattern[:, 1:, 0] > SINK).float()).mean(1)
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

"""Provenance of a result: names for pictures, and what is needed to run it again."""

import hashlib
import math
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double, double_device
from tl_posgen.models.session import Session

SAME_WEIGHTS = ", the model's own weights"  # of a null whose seed also made the model


def null_label(init: int | str) -> str:
    """Return the name of a null model by its label along the dim init: a random init's seed, or "shuffled 0"."""
    kind, _, seed = str(init).rpartition(" ")
    return f"{'shuffled weights' if kind else 'random init'} (seed {seed})"


_PACKAGES = ("tl-posgen", "transformer-lens", "torch", "transformers")


@cache
def versions() -> dict[str, str]:
    """Return the versions of packages that a result may depend on."""
    return {name: version(name) for name in _PACKAGES}


PART = 2**22  # entries of a tensor that are taken to float64 at once


def fingerprint(session: Session) -> str:
    """Return sixteen letters that other weights hardly share: of each parameter's sum, norm, and some 4,096 entries."""
    weights = sorted(session.model.named_parameters())
    digest = hashlib.sha256()
    for (name, weight), (sums, norms, some) in zip(weights, _numbers_of([one for _, one in weights]), strict=True):
        total, norm = sum(sums.tolist()), math.hypot(*norms.tolist())
        digest.update(f"{name} {tuple(weight.shape)} {total} {norm}".encode() + some.numpy().tobytes())
    return digest.hexdigest()[:16]


def _numbers_of(weights: Sequence[Tensor]) -> list[tuple[Float[Tensor, " part"], Float[Tensor, " part"], Tensor]]:
    """Return the sums and norms of the parts of each weight, and some of its entries: float64, on the CPU.

    The host waits once for each device, and only a part at a time is held in float64.
    """
    steps = [max(1, one.numel() // 4096) for one in weights]  # between the entries that are looked at
    parts = [
        [-(-one.numel() // PART)] * 2 + [len(range(0, one.numel(), step))]
        for one, step in zip(weights, steps, strict=True)
    ]
    found: list[Any] = [()] * len(weights)
    for device in {one.device for one in weights}:
        places = [place for place, one in enumerate(weights) if one.device == device]
        sizes = [size for place in places for size in parts[place]]
        together = torch.empty(sum(sizes), dtype=DOUBLE, device=double_device(device))
        views = together.split(sizes)
        for number, place in enumerate(places):
            flat = weights[place].detach().flatten()
            sums, norms, some = views[3 * number : 3 * number + 3]
            some.copy_(double(flat[:: steps[place]]))
            for at, part in enumerate(flat.split(PART)):
                exact = double(part)
                sums[at], norms[at] = exact.sum(), torch.linalg.vector_norm(exact)
                del exact
        read = together.cpu().split(sizes)
        for number, place in enumerate(places):
            found[place] = read[3 * number : 3 * number + 3]
    return found


def provenance_of(
    session: Session,
    tokens: Sequence[Int[Tensor, " _"]],
    null_seeds: Sequence[int] = (),
    shuffled_seeds: Sequence[int] = (),
    seed: int | None = None,
) -> dict[str, Any]:
    """Return what is needed to run the same analysis again, JSON-ready."""
    origin = session.origin
    lengths = sorted({len(prompt) for prompt in tokens})
    digest = hashlib.sha256(repr([len(prompt) for prompt in tokens]).encode())
    for prompt in tokens:
        digest.update(prompt.to(torch.int64).cpu().numpy().tobytes())
    return {
        "model": session.label,
        "revision": origin.revision,
        "backend": origin.backend,
        "dtype": str(session.model.cfg.dtype).removeprefix("torch."),
        "dequantised_from": origin.dequantised_from,
        "initialisation": origin.initialisation,
        "encoding": session.encoding,
        "prompts": len(tokens),
        "length": lengths[0] if len(lengths) == 1 else lengths,
        "tokens_sha256": digest.hexdigest() if tokens else None,
        "weights": fingerprint(session),
        "parameters": session.backend.n_parameters(),
        "seed": seed,
        "null_seeds": list(null_seeds),
        "shuffled_seeds": list(shuffled_seeds),
        "mask": "causal, and the window of each layer that has one",
        "versions": dict(versions()),
    }

"""Provenance of a result: names for pictures, and what is needed to run it again."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tl_posgen.arithmetic import double, double_device
from tl_posgen.models.session import Session
from tl_posgen.models.tokens import first_token_in_words

SAME_WEIGHTS = ", the model's own weights"  # of a null whose seed also made the model


@cache
def versions() -> dict[str, str]:
    """Return the versions of packages that a result may depend on."""
    return {name: version(name) for name in ("tl-posgen", "transformer-lens", "torch", "transformers")}


PART = 2**18  # entries of a tensor that are taken to float64 at once


def fingerprint(session: Session) -> str:
    """Return sixteen letters that other weights hardly share: of each parameter's sum, norm, and some 4,096 entries, in
    float64. The host waits once for all of them."""
    device, digest, found = double_device(session.device), hashlib.sha256(), list[Tensor]()
    # a HookedTransformer with ALiBi has W_pos too: memory that is neither set nor used
    unused = "pos_embed.W_pos" if getattr(session.model.cfg, "positional_embedding_type", "") == "alibi" else ""
    weights = sorted(one for one in session.model.named_parameters() if one[0] != unused)
    for _, weight in weights:
        flat = weight.detach().flatten()
        parts = [torch.stack([x.sum(), torch.linalg.vector_norm(x)]) for x in map(double, flat.split(PART))]
        found.append(torch.cat([*parts, double(flat[:: max(1, len(flat) // 4096)])]).to(device))
    read = torch.cat(found).cpu().split([len(one) for one in found])
    for (name, weight), numbers in zip(weights, read, strict=True):
        n = 2 * max(1, -(-weight.numel() // PART))
        total, norm = sum(numbers[:n:2].tolist()), math.hypot(*numbers[1:n:2].tolist())
        digest.update(f"{name} {tuple(weight.shape)} {total} {norm}".encode() + numbers[n:].numpy().tobytes())
    return digest.hexdigest()[:16]


def provenance_of(
    session: Session,
    tokens: Sequence[Int[Tensor, " _"]],
    null_seeds: Mapping[str, Sequence[int]] = MappingProxyType({}),
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
        "first_token": first_token_in_words(session, tokens),
        "tokens_sha256": digest.hexdigest() if tokens else None,
        "weights": fingerprint(session),
        "parameters": session.backend.n_parameters(),
        "seed": seed,
        **{name: list(seeds) for name, seeds in null_seeds.items()},
        "mask": "causal, and the window of each layer that has one",
        "versions": dict(versions()),
    }

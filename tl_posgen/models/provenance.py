"""What a result says of where it came from: names for pictures, and what is needed to run it again."""

import hashlib
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tl_posgen.models.origin import origin_of
from tl_posgen.models.probe import Probed, probe


def model_label(model: Any) -> str:
    """The model's name as pictures and tables show it: of a directory, the last part."""
    origin = origin_of(model)
    return Path(origin.directory).name if origin.directory else origin.name


def null_label(seed: int) -> str:
    return f"random init (seed {seed})"


def encoding_of(model: Any) -> str:
    """How the layers know positions: "rotary", "alibi", "absolute", "none"; several joined by ", ", "" if unknown."""
    found = [layer.geometry.encoding for layer in probe(model) if isinstance(layer, Probed)]
    return ", ".join(dict.fromkeys(found))


def provenance_of(model: Any, tokens: Sequence[Int[Tensor, " _"]], null_seed: int | None) -> dict[str, Any]:
    """What is needed to run the same analysis again, JSON-ready."""
    origin = origin_of(model)
    lengths = sorted({len(prompt) for prompt in tokens})
    digest = hashlib.sha256(b"".join(prompt.to(torch.int64).cpu().numpy().tobytes() for prompt in tokens))
    return {
        "model": model_label(model),
        "revision": origin.revision,
        "backend": origin.backend,
        "dtype": str(model.cfg.dtype).removeprefix("torch."),
        "initialisation": origin.initialisation,
        "encoding": encoding_of(model),
        "prompts": len(tokens),
        "length": lengths[0] if len(lengths) == 1 else lengths,
        "tokens_sha256": digest.hexdigest(),
        "null_seed": null_seed,
        "mask": "causal, and the window of each layer that has one",
        "versions": {name: version(name) for name in ("tl-posgen", "transformer-lens", "torch", "transformers")},
    }

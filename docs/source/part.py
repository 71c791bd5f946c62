"""One part of what README and docs show, and the models and texts that parts are measured on."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tl_posgen

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared"
BUILD = ROOT / "build"  # not in the repository
KEPT = BUILD / "numbers"  # a second run goes on from it, pictures are drawn from it
EXAMPLES = ROOT / "examples"
REAL = Path(os.environ.get("TL_POSGEN_REAL_MODELS", BUILD / "real_models"))
TRAINED = BUILD / "seeds"  # examples/mini_model/train.py --work build/seeds/SEED --until 1251 --seed SEED
CUT: dict[str, Any] = {"length": 256, "n_prompts": 4, "seed": 0, "progress": False}
NULL: dict[str, Any] = {"null_seeds": (0,)}
CHECKPOINTS = sorted((EXAMPLES / "mini_model" / "checkpoints").iterdir())
MODELS = {
    "mini": (None, None),
    "stories260K": ("models/stories260K", "text/tinystories.txt"),
    "babyllama105": ("models/babyllama105", "text/tinystories.txt"),
    "atome_vanilla_1m": ("models/atome_vanilla_1m", "text/tinystories.txt"),
    "SmolLM2-135M-Instruct": ("SmolLM2-135M-Instruct.Q4_1.gguf", "text/wikitext2.txt"),
    "Gemma 3 270M": ("gemma-3-270m-q4_k_m.gguf", "text/wikitext2.txt"),
}
TEXTS = {
    None: "Alice's Adventures in Wonderland",
    "text/tinystories.txt": "TinyStories",
    "text/wikitext2.txt": "WikiText-2",
}


@dataclass(frozen=True)
class Part:
    """One piece of measuring: what is asked of one model, and a function that gives the results by name.

    Attributes:
        model: of `MODELS`; "" where none is needed.
        settings: what stands in the pages beside its numbers; another setting is another part.
        make: from the settings to results by name, or to JSON values.
        more: from the results to further numbers and words.
    """

    model: str
    settings: Mapping[str, Any]
    make: Callable[["Part"], Mapping[str, Any]]
    more: Callable[[Any], Mapping[str, Any]] = lambda results: {}

    @property
    def file(self) -> str:
        """The name of what is kept of it: other settings are another file."""
        settings = json.dumps([self.model, dict(self.settings)], sort_keys=True, default=str)
        return hashlib.sha256(settings.encode()).hexdigest()[:10]

    @property
    def missing(self) -> str:
        """What lies outside the repository and is not there; "" where nothing lacks."""
        needed = [path_of(self.model)] if self.model and MODELS[self.model][0] else []
        needed += [TRAINED / str(seed) for seed in self.settings.get("training_seeds", ())]
        return ", ".join(str(one) for one in needed if not one.exists())


def path_of(name: str) -> Path:
    """Return where a model that is not bundled lies: what `make real-models` made, or the shared directory."""
    inside = str(MODELS[name][0])
    return next(REAL.rglob(inside), REAL / inside) if inside.endswith(".gguf") else SHARED / inside


@cache
def model_of(name: str) -> Any:
    return tl_posgen.load_model(str(path_of(name)) if MODELS[name][0] else name)


@cache
def text_of(name: str) -> str:
    from tl_posgen.models.tokens import bundled_text, read_text

    path = MODELS[name][1]
    return read_text(SHARED / path) if path else bundled_text()

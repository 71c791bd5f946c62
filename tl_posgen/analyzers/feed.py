"""One forward pass per prompt, every captured layer handed to every analyzer."""

from collections.abc import Sequence
from typing import Any

import xarray as xr
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posgen.analyzers.base import Analyzer
from tl_posgen.errors import InputError
from tl_posgen.models.capture import LayerCapture
from tl_posgen.models.hooks import run_capture
from tl_posgen.models.provenance import model_label


def measure(
    model: Any,
    tokens: Sequence[Int[Tensor, " _"]],
    analyzers: Sequence[Analyzer],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    progress: bool = True,
    label: str | None = None,
) -> dict[str, xr.Dataset]:
    """Feed every prompt through the model once and hand each layer to each analyzer; datasets by analyzer name."""
    feed = Feed(analyzers)
    name = label or model_label(model)
    for prompt in tqdm(tokens, desc=name, unit="prompt", disable=not progress):
        feed.first_prompt = len(feed.prompts)
        run_capture(model, prompt[None], feed, needs=feed.needs, layers=layers, heads=heads)
    return feed.datasets(name)


class Feed:
    """Hands every captured layer to every analyzer, and remembers the prompts."""

    def __init__(self, analyzers: Sequence[Analyzer]):
        self.analyzers = list(analyzers)
        self.needs = frozenset().union(*(analyzer.needs for analyzer in self.analyzers))
        self.prompts: dict[int, Int[Tensor, " pos"] | None] = {}
        self.first_prompt = 0

    def __call__(self, capture: LayerCapture) -> None:
        capture.prompt += self.first_prompt
        self.prompts.setdefault(capture.prompt, capture.tokens)
        for analyzer in self.analyzers:
            analyzer.update(capture)

    def known_prompts(self) -> list[Int[Tensor, " _"]]:
        return [tokens for tokens in self.prompts.values() if tokens is not None]

    def datasets(self, label: str) -> dict[str, xr.Dataset]:
        if not self.prompts:
            raise InputError("no forward pass was captured: run the model on tokens inside the `with` block")
        return {analyzer.name: analyzer.result().assign_attrs(model=label) for analyzer in self.analyzers}

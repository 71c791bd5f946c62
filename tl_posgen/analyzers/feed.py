"""One forward pass per prompt, every captured layer handed to every analyzer."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posgen.analyzers.base import Analyzer
from tl_posgen.errors import InputError
from tl_posgen.models.capture import LayerCapture
from tl_posgen.models.hooks import run_capture
from tl_posgen.models.provenance import model_label
from tl_posgen.models.tokens import token_strings


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
    require_prompts(analyzers, len(tokens))
    feed = Feed(analyzers)
    name = label or model_label(model)
    for prompt in tqdm(tokens, desc=name, unit="prompt", disable=not progress):
        feed.first_prompt = len(feed.prompts)
        run_capture(model, prompt[None], feed, needs=feed.needs, layers=layers, heads=heads)
    return feed.datasets(name, model)


def require_prompts(analyzers: Sequence[Analyzer], n: int) -> None:
    """Refuse too few prompts for an analyzer that compares prompts (`min_prompts`), before anything runs."""
    for analyzer in analyzers:
        if n < (least := getattr(analyzer, "min_prompts", 1)):
            raise InputError(f"{analyzer.name} compares prompts: {least} at least, not {n}; give n_prompts={least}")


def with_token_texts(dataset: xr.Dataset, model: Any) -> xr.Dataset:
    """The dataset with the text of its tokens beside each variable that holds token ids: `<name>_text`."""
    texts: dict[str, tuple] = {}
    for name, array in dataset.variables.items():
        if array.attrs.get("holds") != "token ids":
            continue
        ids, place = np.unique(array.values, return_inverse=True)
        known = ids[ids >= 0]  # -1 fills up where there are fewer than elsewhere
        words = [""] * (len(ids) - len(known)) + token_strings(model, torch.from_numpy(known))
        texts[f"{name}_text"] = (array.dims, np.array(words, dtype=object)[place].reshape(array.shape))
    return dataset.assign(texts)


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

    def datasets(self, label: str, model: Any = None) -> dict[str, xr.Dataset]:
        """What every analyzer found, by name; with the model, token ids get their texts beside them."""
        if not self.prompts:
            raise InputError("no forward pass was captured: run the model on tokens inside the `with` block")
        found = {analyzer.name: analyzer.result().assign_attrs(model=label) for analyzer in self.analyzers}
        return found if model is None else {name: with_token_texts(data, model) for name, data in found.items()}

"""The forward passes that measures share: every layer of every prompt, captured once, handed to every collector."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.errors import InputError
from tl_posgen.measure import Request
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.layers.capture import EditedCapture, LayerCapture
from tl_posgen.models.selection import select_heads
from tl_posgen.models.tokens import token_strings
from tl_posgen.prompt_groups import PromptGroups


def one_pass(
    model: Any,
    tokens: Sequence[Int[Tensor, " _"]],
    requests: Sequence[Request],
    *,
    layers: Sequence[int] | None = None,
    heads: Any = None,
    seed: int = 0,
    label: str,
    intervals: bool = False,
) -> dict[str, xr.Dataset]:
    """Every prompt through the model once, each layer handed to each collector; datasets by measure name.

    Args:
        intervals: whether they have intervals over prompts, see `Variable.interval`.
    """
    feed = Feed(requests, seed, intervals)
    for prompt in tokens:
        feed.first_prompt = len(feed.prompts)
        logits = run_capture(model, prompt[None], feed, needs=feed.needs, layers=layers, heads=heads)
        if logits is not None:
            feed.finish(prompt, logits[0])
    return feed.datasets(model, label, len(select_heads(model, layers, heads)))


class Feed:
    """Hands every captured layer to every collector, and remembers the prompts."""

    def __init__(self, requests: Sequence[Request], seed: int = 0, intervals: bool = True):
        self.takers = [PromptGroups(request, seed, intervals) for request in requests]
        self.finishing = [one for one in self.takers if "logits" in one.request.measure.needs]
        self.needs = frozenset[str]().union(*(request.measure.needs for request in requests))
        self.prompts: dict[int, Int[Tensor, " pos"] | None] = {}
        self.layers: dict[int, int] = {}  # prompt -> how many of its layers were captured
        self.edits: dict[int, str] = {}  # layer -> how its scores differ from those of its queries and keys
        self.edited_patterns: set[int] = set()  # layers whose pattern is not the softmax of its scores
        self.of_patterns = {request.name for request in requests if "pattern" in request.measure.needs}
        self.proved = True
        self.first_prompt = 0
        self.lengths: dict[int, int] = {}

    def __call__(self, capture: LayerCapture) -> None:
        capture.prompt += self.first_prompt
        self.prompts.setdefault(capture.prompt, capture.tokens)
        self.lengths.setdefault(capture.prompt, capture.length)
        self.proved &= capture.proved
        if isinstance(capture, EditedCapture):
            self.edits.setdefault(capture.layer, capture.why)
        if capture.edited_pattern:
            self.edited_patterns.add(capture.layer)
        self.layers[capture.prompt] = self.layers.get(capture.prompt, 0) + 1
        for groups in self.takers:
            groups.of(capture.prompt).update(capture)

    def finish(self, tokens: Int[Tensor, " pos"], logits: Float[Tensor, "pos vocabulary"]) -> None:
        """Hand the logits of a whole prompt to the collectors that need them."""
        for groups in self.finishing:
            collector = groups.of(self.first_prompt)
            collector.prompt = self.first_prompt
            collector.finish(tokens, logits)

    def counted(self) -> dict[str, Any]:
        """What the provenance says of all prompts, whether or not their token ids are known."""
        lengths = sorted(set(self.lengths.values()))
        return {"prompts": len(self.prompts), "length": lengths[0] if len(lengths) == 1 else lengths}

    def captured_prompts(self) -> list[Int[Tensor, " _"]]:
        """All prompts; zeros for token ids that are not known."""
        rows = self.prompts.items()
        return [torch.zeros(self.lengths[n], dtype=torch.long) if ids is None else ids for n, ids in rows]

    def known_prompts(self) -> list[Int[Tensor, " _"]]:
        return [tokens for tokens in self.prompts.values() if tokens is not None]

    def datasets(self, model: Any, label: str, n_layers: int | None = None) -> dict[str, xr.Dataset]:
        """What every collector found, by name; token ids have their texts beside them.

        Args:
            n_layers: how many layers were asked for of each prompt; as many as any had, if left out.
        """
        if not self.prompts:
            raise InputError("no forward pass was captured: run the model on tokens inside the `with` block")
        whole = max(self.layers.values()) if n_layers is None else n_layers
        if short := [prompt for prompt, layers in self.layers.items() if layers < whole]:
            raise InputError(
                f"prompt {short[0]} was captured in {self.layers[short[0]]} of {whole} layers: its forward pass ended "
                "early (an error, or stop_at_layer), and is in the averages of those layers; attach anew"
            )
        said: dict[str, Any] = {"model": label} | ({} if self.proved else {"unproved": 1})
        if self.edits:
            layers = sorted(self.edits)
            said |= {"edited_layers": layers, "edited": self.edits[layers[0]]}
        found = {one.request.name: one.dataset(self.prompts).assign_attrs(said) for one in self.takers}
        for name in self.of_patterns if self.edited_patterns else ():
            found[name] = found[name].assign_attrs(edited_patterns=sorted(self.edited_patterns))
        return {name: with_token_texts(dataset, model) for name, dataset in found.items()}


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

"""The forward passes that measures share: each layer of each prompt, captured once, goes to every measure."""

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.core.formatting import counted
from tl_posgen.core.measure import Measure, with_token_variants
from tl_posgen.core.sums import PromptGroups
from tl_posgen.errors import InputError
from tl_posgen.models.capture.capturing import TRIMMED, run_capture
from tl_posgen.models.layers.capture import NEEDED, EditedCapture, LayerCapture
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.models.memory import trim
from tl_posgen.models.selection import select_heads
from tl_posgen.models.session import Session

# heads x tokens of layers that `of_layers` is given at once: on a CPU as many as fit its cache (measured)
WAITING, WAITING_ON_ACCELERATOR = 2**15, 2**19


def one_pass(
    session: Session,
    rows: Sequence[Int[Tensor, " _"]],
    measures: Sequence[Measure],
    *,
    layers: Any = None,
    heads: Any = None,
    label: str,
    intervals: bool = False,
    seed: int = 0,
) -> dict[str, xr.Dataset]:
    """Run the model once on every prompt, and return the dataset of each measure by name.

    Args:
        intervals: whether numbers are also computed without each group of prompts, for intervals.
        seed: of draws.
    """
    feed = Feed(measures, intervals, seed)
    for row in rows:
        feed.first_prompt = len(feed.prompts)
        logits = run_capture(session, row[None], feed, needs=feed.needs, layers=layers, heads=heads)
        if logits is not None:
            feed.add_logits(row, logits[0], session)
    return feed.datasets(label, len(select_heads(session, layers, heads)))


class _LayerKey(NamedTuple):
    """Layer and prompt that values belong to, without what was captured of them."""

    layer: int
    geometry: LayerGeometry
    heads: list[int]
    prompt: int
    length: int


def on_host(value: Any, *, wait: bool = True) -> Any:
    """Return a value with the tensors in it, and in mappings, lists and dataclasses in it, copied to the host; CUDA may
    be waited for later."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", non_blocking=value.is_cuda and not wait)
    if isinstance(value, Mapping):
        return {name: on_host(item, wait=wait) for name, item in value.items()}
    if isinstance(value, list):
        return [on_host(item, wait=wait) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        held = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        return replace(value, **on_host(held, wait=wait))
    return value


class Feed:
    """Gives every captured layer to every measure, and adds up what they compute in groups of prompts.

    Attributes:
        needs: what the measures need of a layer beyond q and k.
        prompts: token ids by number, None where they are not known.
        lengths: tokens of every prompt.
        first_prompt: number of the first prompt of the pass that is captured.
    """

    def __init__(self, measures: Sequence[Measure], intervals: bool = True, seed: int = 0):
        self.measures = measures
        self.needs = frozenset[str]().union(*(measure.needs for measure in measures))
        self.prompts: dict[int, Int[Tensor, " pos"] | None] = {}
        self.first_prompt = 0
        self._groups = {measure.name: PromptGroups(measure, intervals, seed) for measure in measures}
        self.lengths: dict[int, int] = {}
        self._n_layers: dict[int, int] = {}  # whose values were added, of each prompt
        self._edits: dict[int, str] = {}  # layer -> how its scores differ from those of its queries and keys
        self._edited_patterns: set[int] = set()  # layers whose pattern is not the softmax of its scores
        self._proved = True
        self._waiting = defaultdict[tuple[str, torch.device], list[tuple[_LayerKey, Any]]](list)  # by name
        self._copies: list[tuple[str, _LayerKey, Mapping[str, Any]]] = []  # on their way to the host
        self._copied: dict[torch.device, Any] = {}  # the event after the last of them

    def __call__(self, capture: LayerCapture) -> None:
        capture.prompt += self.first_prompt
        self.prompts.setdefault(capture.prompt, capture.tokens)
        self.lengths.setdefault(capture.prompt, capture.length)
        self._proved &= capture.proved
        if isinstance(capture, EditedCapture):
            self._edits.setdefault(capture.layer, capture.why)
        if capture.edited_pattern:
            self._edited_patterns.add(capture.layer)
        by_measure = {
            measure.name: _of_layer(measure, capture)
            for measure in self.measures
            if type(measure).of_layer is not Measure.of_layer
        }
        self._add_copies()
        place = _LayerKey(capture.layer, capture.geometry, list(capture.heads), capture.prompt, capture.length)
        self._n_layers[place.prompt] = self._n_layers.get(place.prompt, 0) + 1
        for name, layer_values in by_measure.items():
            self._waiting[name, capture.device].append((place, layer_values))
        self._complete(WAITING if capture.device.type == "cpu" else WAITING_ON_ACCELERATOR)
        if not self._copied:  # nothing to wait for
            self._add_copies()

    def _complete(self, enough: int = 0) -> None:
        """Compute the values of the layers that wait, for each measure that has enough of them (heads x tokens), and
        start to copy these to the host."""
        measures = {measure.name: measure for measure in self.measures}
        for (name, device), waiting in self._waiting.items():
            measure = measures[name]
            waits = type(measure).of_layers is not Measure.of_layers
            if not waiting or (waits and sum(len(key.heads) * key.length for key, _ in waiting) < enough):
                continue
            keys, layer_values = zip(*waiting, strict=True)
            if len(of_layers := list(measure.of_layers(layer_values))) != len(keys):
                raise InputError(
                    f"{measure.name}: of_layers gives {counted(len(of_layers), 'value')} of "
                    f"{counted(len(keys), 'layer')}; give one of each, in their order"
                )
            values = [_checked(measure, *pair) for pair in zip(keys, of_layers, strict=True)]
            self._copies += [
                (measure.name, key, on_host(value, wait=False)) for key, value in zip(keys, values, strict=True)
            ]
            waiting.clear()
            if device.type == "cuda":  # which copies into pinned memory while it computes
                self._copied[device] = torch.cuda.current_stream(device).record_event()

    def _add_copies(self) -> None:
        """Add the values that were copied to the host while the next layer was computed."""
        for copied in self._copied.values():  # they are there already, once the host has waited for a later result
            copied.synchronize()
        for name, place, values in self._copies:
            self._groups[name].sums_of(place.prompt).add_layer(place, values)
        self._copies, self._copied = [], {}

    def add_logits(
        self, tokens: Int[Tensor, " pos"], logits: Float[Tensor, "pos vocabulary"], session: Session
    ) -> None:
        """Give the logits of a whole prompt to the measures that need them."""
        for measure in self.measures:
            if "logits" in measure.needs:
                values = measure.of_logits(tokens, logits, session)
                sums = self._groups[measure.name].sums_of(self.first_prompt)
                sums.add(self.first_prompt, len(tokens), values)

    def datasets(self, label: str, n_layers: int = 0) -> dict[str, xr.Dataset]:
        """Return the dataset of every measure by name.

        Args:
            n_layers: how many layers were asked for of each prompt, at least.

        Raises:
            InputError: no pass was captured, or one that ended early.
        """
        if not self.prompts:
            raise InputError("no forward pass was captured: run the model on tokens inside the `with` block")
        self._complete()
        self._add_copies()
        if short := [prompt for prompt in self.prompts if self._n_layers.get(prompt, 0) < n_layers]:
            n = self._n_layers.get(short[0], 0)
            raise InputError(
                f"prompt {short[0]} was captured in {n} of {n_layers} layers: its forward "
                "pass ended early (an error, or stop_at_layer), and is in the averages of those layers; attach anew"
            )
        attrs: dict[str, Any] = {"model": label} | ({} if self._proved else {"unproved": 1})
        if self._edits:
            layers = sorted(self._edits)
            attrs |= {"edited_layers": layers, "edited": self._edits[layers[0]]}
        datasets = {}
        for measure in self.measures:
            data = self._groups[measure.name].dataset().assign_attrs(attrs)
            if self._edited_patterns and "pattern" in measure.needs:
                data = data.assign_attrs(edited_patterns=sorted(self._edited_patterns))
            datasets[measure.name] = data
            trim(every=TRIMMED)
        return datasets


def _of_layer(measure: Measure, capture: LayerCapture) -> Any:
    """Return what a measure gives of a layer; refuse one that fails where it reads what no measure needs, which is
    None."""
    try:
        return measure.of_layer(capture)
    except (AttributeError, TypeError) as error:
        if "NoneType" not in str(error) or not (missing := _read_as_none(measure, capture)):
            raise
        raise InputError(
            f"{measure.name}: of_layer reads {', '.join(missing)}, which a layer has for measures that need it "
            f"({error}); declare needs = frozenset({{{', '.join(map(repr, missing))}}})"
        ) from error


def _read_as_none(measure: Measure, capture: LayerCapture) -> list[str]:
    """Return the parts of a layer that `of_layer` reads and that are None."""
    missing: dict[str, None] = {}

    class Watched(type(capture)):
        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if name in NEEDED and value is None:
                missing[name] = None
            return value

    watched = copy.copy(capture)
    watched.__class__ = Watched
    with suppress(Exception):
        measure.of_layer(watched)
    return [*missing]


def _checked(measure: Measure, key: _LayerKey, layer_values: Any) -> Mapping[str, Any]:
    """Return the values of a layer, both token variants in one; refuse another shape than that of the dims declared."""
    values, n_heads = with_token_variants(layer_values), len(key.heads)
    for name, value in values.items():
        if name not in measure.variables:
            if type(measure).of_sums is Measure.of_sums:
                raise InputError(
                    f"{measure.name}: of_layer gives {name!r}, which is none of its variables: "
                    f"{', '.join(measure.variables)}"
                )
            continue
        dims = [dim for dim in measure.variables[name].dims if dim not in ("layer", "prompt")]
        shape = list(getattr(value, "shape", ()))
        if len(shape) != len(dims) or ("head" in dims and shape[dims.index("head")] != n_heads):
            remedy = 'with the dim "tokens" give a pair of mappings, of all tokens and without the first one'
            raise InputError(
                f"{measure.name}: of_layer gives {name} with the shape {shape}, and the dims of its Variable are "
                f"[{', '.join(dims)}], {n_heads} heads in layer {key.layer}; {remedy}, else one mapping"
            )
    return values

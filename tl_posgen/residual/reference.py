"""Reference: the mean query, the mean key and the distances of every head over a text that is not the prompt."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double, full_precision
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.models.loading.load import open_model
from tl_posgen.models.selection import Layers, check_indices
from tl_posgen.models.session import Session, session_of
from tl_posgen.models.tokens import bundled_text, spread, text_ids, to_prompts
from tl_posgen.residual.residual_sources import (
    ROUNDING,
    ResidualSources,
    Side,
    SourceReader,
    frozen_layer,
    require_small,
)
from tl_posgen.rope.splits import DistanceDistribution, attention_profile

Distances = Literal["uniform", "causal", "attention"]
USUAL_LENGTH, USUAL_PROMPTS = 256, 8
BUNDLED = "the bundled book, Alice's Adventures in Wonderland"


@dataclass(frozen=True)
class LayerReference:
    """Means of all heads of one layer, before RoPE and after qk-norm, float64.

    Attributes:
        mean_query, mean_key: the first token of every prompt left out; the mean key is repeated for grouped heads.
        mean_turn: ubar_m = E_p[u_m(d)], one complex number a plane.
        sources: names of what earlier layers wrote, and of biases, by side, "query" and "key"; empty if not asked for.
        source_means: side -> what each adds to the mean query or key; they add up to it.
    """

    mean_query: Float[Tensor, "head d_head"]
    mean_key: Float[Tensor, "head d_head"]
    mean_turn: Complex[Tensor, "head plane_and_rest"]
    sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    source_means: Mapping[str, Float[Tensor, "source head d_head"]] = field(default_factory=dict)


@dataclass(frozen=True)
class Reference:
    """Means over a reference text, by layer; `reference_of` makes one.

    Attributes:
        model: name of the model that read it.
        text: the text, in words for titles.
        n_prompts, length: how many prompts, and the tokens of the longest.
        distances: p(d), over which ubar is the mean.
        layers: layer -> its means.
    """

    model: str
    text: str
    n_prompts: int
    length: int
    distances: str
    layers: Mapping[int, LayerReference] = field(repr=False)

    @property
    def label(self) -> str:
        """The text, its prompts and p(d), in words."""
        prompts = f"{self.n_prompts} prompt{'s' if self.n_prompts > 1 else ''} of {self.length} tokens"
        return f"{self.text}, {prompts}, first token left out, {self.distances} distances"

    def of_layer(self, geometry: LayerGeometry) -> LayerReference:
        """Return the means of a layer; InputError where there are none, or those of other shapes."""
        layer, shape = geometry.layer, [geometry.n_heads, geometry.d_head]
        if layer not in self.layers:
            raise InputError(
                f"the reference has no layer {layer}, only {sorted(self.layers)}; make it with "
                f"reference_of(model, text, layers=[{layer}]), or of all layers"
            )
        found = self.layers[layer]
        if list(found.mean_key.shape) != shape:
            raise InputError(
                f"layer {layer}: the reference, of {self.model}, has heads x d_head {list(found.mean_key.shape)}, and "
                f"this model has {shape}; make the reference by the model that is explained"
            )
        return found


@dataclass
class _Sums:
    """Sums over prompts of one layer."""

    capture: LayerCapture  # of the last prompt
    n: int = 0
    query: Any = 0.0
    key: Any = 0.0
    profile: Any = 0.0  # how much attention goes d tokens back
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of sources, by side
    sources: dict[str, Tensor] = field(default_factory=dict)

    def add(self, capture: LayerCapture) -> None:
        self.capture, self.n = capture, self.n + capture.length - 1
        self.query = self.query + double(capture.q[:, 1:]).sum(1)
        self.key = self.key + double(capture.k[:, 1:]).sum(1)
        if capture.pattern is not None:
            pattern = double(capture.pattern[:, 1:, 1:])
            weights = attention_profile(pattern).weights * pattern.sum((1, 2))[:, None]
            longer = max(weights.shape[-1], 0 if isinstance(self.profile, float) else self.profile.shape[-1])
            both = [x for x in (weights, self.profile) if isinstance(x, Tensor)]
            self.profile = sum(torch.nn.functional.pad(x, (0, longer - x.shape[-1])) for x in both)

    def add_sources(self, session: Session, capture: LayerCapture, written: ResidualSources) -> None:
        """Add what each source gives to the queries and keys of a prompt."""
        sides: dict[Side, Tensor] = {"query": capture.q, "key": capture.k}
        for side, whole in sides.items():
            frozen, n = frozen_layer(session, capture, side), capture.length - 1
            means, names = frozen.mean_vectors(written.values), frozen.names(written.names)
            rest = double(whole[:, 1:]).mean(1) - means.sum(0)
            require_small(rest, whole, session.dtype)
            if session.dtype.itemsize < torch.float32.itemsize:
                means, names = torch.cat([means, rest[None]]), (*names, ROUNDING)
            if self.names.setdefault(side, names) != names:
                raise UnsupportedModelError(f"layer {capture.layer}: prompts of the reference differ in their sources")
            self.sources[side] = n * means + self.sources.get(side, 0)

    def means(self, n_distances: int, kind: str) -> LayerReference:
        geometry = self.capture.geometry
        p = distance_weights(min(n_distances, geometry.window or n_distances), kind, self.profile)
        turn = p.mean_turn(geometry.rope, geometry.d_head).to(self.key.device)
        means = {side: total / self.n for side, total in self.sources.items()}
        return LayerReference(self.query / self.n, self.key / self.n, turn.expand(len(self.key), -1), self.names, means)


def distance_weights(n: int, kind: str, profile: Any = None) -> DistanceDistribution:
    """p(d) on the distances 0 .. n - 1: 1 / n, or proportional to n - d as in a text, or to a profile [head, distance].

    Example:
        >>> distance_weights(2, "causal").weights.mul(3).tolist()
        [2.0, 1.0]
    """
    if kind == "attention":
        profile = double(profile)[:, :n]
        return DistanceDistribution(torch.arange(profile.shape[1]), profile / profile.sum(-1, keepdim=True))
    weights = torch.ones(n, dtype=DOUBLE)
    weights = weights if kind == "uniform" else weights.cumsum(0).flip(0)
    return DistanceDistribution(torch.arange(n), weights / weights.sum())


@full_precision()
def reference_of(
    model: Any,
    text: Any = None,
    *,
    layers: Layers = None,
    length: int | None = None,
    n_prompts: int = USUAL_PROMPTS,
    distances: Distances | str = "uniform",
    sources: bool = True,
) -> Reference:
    """E q, E k and ubar = E_p[u(d)] of every head over the prompts of a text, the first token of each left out.

    Args:
        model: a model, or its name or directory.
        text: a text, or whatever `to_prompts` takes; the bundled book if left out.
        layers: which; all if left out.
        length: tokens of each prompt; 256, or what the model takes, if left out. A shorter text is one prompt.
        n_prompts: at most so many, spread over the text.
        distances: p(d) over 0 .. length - 1, or a layer's window: "uniform", as in the measure `variance`; "causal": as
            often as they occur in a prompt; "attention": as often as each head attends so far back.
        sources: whether the means are also split by what earlier layers wrote, as `explain` shows it. `split` needs
            none, and some architectures cannot be split so.

    Raises:
        InputError: a text, layer or option that cannot be used.
        UnsupportedModelError: a layer whose scores cannot be recomputed from its q and k.

    Example:
        >>> import tl_posgen
        >>> reference = reference_of("mini", layers=[3], n_prompts=2)
        >>> reference.n_prompts, reference.length, tuple(reference.layers[3].mean_key.shape)
        (2, 256, (4, 32))
    """
    if distances not in ("uniform", "causal", "attention"):
        raise InputError(f"distances {distances!r}: choose uniform, causal or attention")
    session = session_of(open_model(model))
    rows = _reference_prompts(session, bundled_text() if text is None else text, length, n_prompts)
    sums: dict[int, _Sums] = {}

    indices = check_indices(layers, session.model.cfg.n_layers, "layer")
    needs = ({"pattern"} if distances == "attention" else set()) | ({"resid", "inputs"} if sources else set())
    for row in rows:
        reading, captures = SourceReader(session, max(indices) if sources else 0), list[LayerCapture]()
        with reading.attached(), _naming_remedy(sources):
            run_capture(session, row[None], captures.append, needs, layers=indices)
        for capture in captures:
            one = sums.setdefault(capture.layer, _Sums(capture))
            one.add(capture)
            if sources and capture.resid is not None:
                one.add_sources(session, capture, reading.sources(capture.layer, capture.resid.to(capture.device)))
    longest = max(map(len, rows))
    found = {layer: one.means(longest, distances) for layer, one in sums.items()}
    return Reference(session.label, _name_of_text(text), len(rows), longest, distances, found)


@contextmanager
def _naming_remedy(sources: bool) -> Iterator[None]:
    """Say, where queries and keys cannot be traced, that means alone need no sources."""
    try:
        yield
    except UnsupportedModelError as error:
        if not sources or "traced" not in str(error):
            raise
        raise UnsupportedModelError(f"{error}; means alone: reference_of(..., sources=False)") from error


def _reference_prompts(session: Session, text: Any, length: int | None, n_prompts: int) -> Sequence[Int[Tensor, " _"]]:
    """Return the prompts of a reference text, spread over it; the text as it is, where it is shorter than one."""
    if length is None:
        length = session.limit.cut(USUAL_LENGTH)
        if isinstance(text, str) and len(text_ids(session.model.tokenizer, text)) < length:
            return to_prompts(session, text)
    return spread(to_prompts(session, text, length), n_prompts)


def _name_of_text(text: Any) -> str:
    """Return a text as titles quote it."""
    if text is None:
        return BUNDLED
    if not isinstance(text, str):
        return "given prompts"
    words = " ".join(text.split())
    return f"“{words}”" if len(words) <= 40 else f"“{words[:40]}…”"


def given_reference(model: Any, reference: Any, layers: Sequence[int], *, sources: bool = False) -> Reference:
    """Return a Reference as it is, or the one of a text (None: the bundled book) at these layers."""
    if isinstance(reference, Reference):
        return reference
    if reference is not None and not isinstance(reference, str):
        raise InputError(
            f"reference={type(reference).__name__}: give a text, what reference_of(model, text) returned, or None for "
            "the bundled book"
        )
    return reference_of(model, reference, layers=list(layers), sources=sources)

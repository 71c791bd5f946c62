"""Reference: the mean query, the mean key and the distances of every head over a text that is not the prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from jaxtyping import Complex, Float
from torch import Tensor
from torch.nn.functional import pad

from tl_posgen.arithmetic import double, full_precision
from tl_posgen.errors import InputError, UnsupportedModelError, check_choice, check_whole
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.models.loading.load import AnyModel, open_session
from tl_posgen.models.provenance import fingerprint
from tl_posgen.models.selection import Layers, check_indices
from tl_posgen.models.session import Session
from tl_posgen.models.tokens import bundled_text, spread, text_ids, to_prompts
from tl_posgen.residual.numbers import SourceSums
from tl_posgen.residual.residual_sources import Side, SourceVectors, read_prompts
from tl_posgen.rope.bilinear_sums import sums_along_diagonals
from tl_posgen.rope.splits import DistanceDistribution, triangle, uniform

SIDES: tuple[Side, Side] = ("q", "k")
Distances = Literal["uniform", "causal", "attention"]
USUAL_LENGTH, USUAL_PROMPTS = 256, 8
_MOST_CHARACTERS = 64  # of a token, on average over a text
BUNDLED = "the bundled book, Alice's Adventures in Wonderland"


@dataclass(frozen=True)
class LayerReference:
    """Means of all heads of one layer, before RoPE and after qk-norm, float64.

    Attributes:
        mean_query, mean_key: the first token of every prompt left out; the mean key is repeated for grouped heads.
        mean_turn: ubar_m = E_p[u_m(d)], one complex number a plane.
        sources: side, "q" or "k" -> sums of what each source gives, whose `means` add up to the mean query or key;
            empty if not asked for.
    """

    mean_query: Float[Tensor, "head d_head"]
    mean_key: Float[Tensor, "head d_head"]
    mean_turn: Complex[Tensor, "head plane_and_rest"]
    sources: Mapping[Side, SourceSums] = field(default_factory=dict)


@dataclass(frozen=True)
class Reference:
    """Means over a reference text, by layer; `reference_of` makes one.

    Attributes:
        model: name of the model that read it; weights: their fingerprint.
        text: the text, in words for titles.
        n_prompts, length: how many prompts, and the tokens of the longest.
        distances: p(d), over which ubar is the mean.
        layers: layer -> its means.
    """

    model: str
    weights: str
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

    def of_layer(self, layer: int) -> LayerReference:
        """Return the means of a layer; InputError where there are none."""
        if layer not in self.layers:
            raise InputError(
                f"the reference has no layer {layer}, only {sorted(self.layers)}; make it with "
                f"reference_of(model, text, layers=[{layer}]), or of all layers"
            )
        return self.layers[layer]


@full_precision()
def reference_of(
    model: AnyModel,
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
    check_choice("distances", distances, get_args(Distances))
    check_whole("reference_of", 1, n_prompts=n_prompts)
    session, prompts = open_session(model), bundled_text() if text is None else text
    usual, tokenizer = session.limit.cut(USUAL_LENGTH), session.model.tokenizer
    is_book = isinstance(prompts, str) and len(prompts) > _MOST_CHARACTERS * usual  # whose tokens need not be counted
    if length is None and isinstance(prompts, str) and not is_book and len(text_ids(tokenizer, prompts)) < usual:
        rows = to_prompts(session, prompts)  # one, as it is
    else:
        rows = spread(to_prompts(session, prompts, usual if length is None else length), n_prompts)
    longest, sums, geometries = max(map(len, rows)), dict[int, dict[str, Any]](), dict[int, LayerGeometry]()
    indices = check_indices(layers, session.model.cfg.n_layers, "layer")
    needs = [*(["pattern"] if distances == "attention" else []), *(["resid", "inputs"] if sources else [])]
    try:
        for capture, reader in read_prompts(session, rows, needs=needs, layers=indices):
            added: dict[str, Any] = {"n": capture.length - 1}
            added |= {"q": double(capture.q[:, 1:]).sum(1), "k": double(capture.k[:, 1:]).sum(1)}
            if capture.pattern is not None:
                profile = sums_along_diagonals(double(capture.pattern[:, 1:, 1:]))
                added["profile"] = pad(profile, (0, longest - profile.shape[-1]))
            if sources:
                written = reader.of_capture(capture)
                for side in SIDES:
                    added[f"{side} by source"] = SourceVectors.of_capture(session, capture, written, side).sums()
            before = sums.setdefault(capture.layer, {})
            sums[capture.layer] = {name: before[name] + value if before else value for name, value in added.items()}
            geometries[capture.layer] = capture.geometry
    except UnsupportedModelError as error:
        if not sources or "traced" not in str(error):
            raise
        raise UnsupportedModelError(f"{error}; means alone: reference_of(..., sources=False)") from error
    means = {}
    for layer, layer_sums in sums.items():
        geometry, n = geometries[layer], layer_sums["n"]
        reach = geometry.reach(longest)
        p = uniform(reach) if distances == "uniform" else triangle(reach)
        if distances == "attention":
            profile = double(layer_sums["profile"])[:, :reach]
            p = DistanceDistribution(torch.arange(reach), profile / profile.sum(-1, keepdim=True))
        turn = p.mean_turn(geometry.rope, geometry.d_head).to(layer_sums["k"].device).expand(geometry.n_heads, -1)
        by_source: dict[Side, SourceSums] = {side: layer_sums[f"{side} by source"] for side in SIDES if sources}
        means[layer] = LayerReference(layer_sums["q"] / n, layer_sums["k"] / n, turn, by_source)
    flat_text = " ".join(text.split()) if isinstance(text, str) else ""
    quoted = f"“{flat_text}”" if len(flat_text) <= 40 else f"“{flat_text[:40]}…”"
    name = BUNDLED if text is None else quoted if isinstance(text, str) else "given prompts"
    return Reference(session.label, fingerprint(session), name, len(rows), longest, str(distances), means)


def given_reference(session: Session, reference: Any, layers: Sequence[int], *, sources: bool = False) -> Reference:
    """Return a Reference as it is, or the one of a text (None: the bundled book) at these layers; InputError for one
    that other weights gave."""
    if isinstance(reference, Reference):
        if reference.weights != fingerprint(session):
            raise InputError(
                f"the reference was read by another model, {reference.model}, or before the weights of this one were "
                "changed; make it with reference_of(model, text) by the model that is explained"
            )
        return reference
    if reference is not None and not isinstance(reference, str):
        raise InputError(
            f"reference={type(reference).__name__}: give a text, what reference_of(model, text) returned, or None for "
            "the bundled book"
        )
    return reference_of(session, reference, layers=list(layers), sources=sources)

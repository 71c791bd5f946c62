"""Other frequencies of RoPE: the rules of context extension, and hooks that rotate queries and keys by them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, Literal, TypeAlias, cast

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, MOST_DISTANCES, double
from tl_posgen.core.options import Count, NonNegative, Positive, check_options, fits
from tl_posgen.editing.printed_hooks import HookList, printing_call
from tl_posgen.editing.replace_scores import replace_scores
from tl_posgen.editing.score_functions import RowByRow, finished
from tl_posgen.errors import InputError
from tl_posgen.models.conversion.hugging_face import TransformersRule, scaled_frequencies
from tl_posgen.models.layer_table import rotating_layers
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.models.model import Model
from tl_posgen.models.selection import Heads, Layers, select_heads
from tl_posgen.models.session import Session, session_of
from tl_posgen.rope.rotation import Rope, inverse_frequencies, rotate

__all__ = ["FrequencyRule", "with_frequencies"]

RuleName = Literal["linear", "ntk", "yarn", "longrope", "llama3", "p_rope", "given"]
_USUAL_BASE = 10_000.0


@dataclass(frozen=True)
class FrequencyRule:
    """theta_m -> theta'_m: what a rule of context extension makes of the frequencies that a layer has.

    The rules of transformers are transformers' own functions, see
    `tl_posgen.models.conversion.hugging_face.scaled_frequencies`. What a rule does to powers of the layer's base it
    does to the layer's own frequencies, plane by plane, and its factor on rotated q and k comes on top of theirs: on
    plain RoPE the result is transformers' own, on RoPE that is scaled already the rule comes on top.

    Args:
        name: "linear" (position interpolation), "ntk" (a larger base), "yarn", "longrope", "llama3", "p_rope" (of the
            planes only the share 1 / factor that turns fastest turns), or "given".
        factor: how many times the training length the rule is meant for.
        training_length: tokens of the training context, which "yarn", "longrope" and "llama3" depend on; that of the
            model if left out.
        values: of "longrope" the factors that frequencies are divided by, of "given" the frequencies themselves, in
            radians per token; one a plane.

    Raises:
        InputError: an unknown rule, a factor below 1, values where none are needed or that are missing, "longrope" with
            values that are not above 0 or a training length of 1; when it is called: other planes than there are
            values, "ntk" with fewer than two planes, a rule that depends on the training length without one.

    Source: those of transformers; "p_rope" Barbero et al. 2024 (arXiv 2410.06205).

    Example:
        >>> from tl_posgen.rope.rotation import inverse_frequencies
        >>> plain = Rope(inverse_frequencies(rotary_dim=4, base=100.0))
        >>> FrequencyRule("linear", 2)(plain).inv_freq.tolist(), FrequencyRule("p_rope", 2)(plain).inv_freq.tolist()
        ([0.5, 0.05], [1.0, 0.0])
    """

    name: RuleName
    factor: Positive = 2
    training_length: Count | None = None
    values: Sequence[NonNegative] = field(default=())

    def __post_init__(self) -> None:
        check_options(self, "FrequencyRule")
        if self.factor < 1:
            raise InputError(
                f"FrequencyRule: factor = {self.factor!r}: give how many times longer texts become, 1 or more"
            )
        if bool(len(self.values)) != (self.name in ("longrope", "given")):
            needed = "one value a plane" if not len(self.values) else "no values, which longrope and given alone have"
            raise InputError(f"FrequencyRule: {self.name} needs {needed}")
        if not all(isfinite(value * MOST_DISTANCES) for value in self.values):
            raise InputError(f"FrequencyRule: values = {list(self.values)}: give numbers that angles can be made of")
        if self.name == "longrope" and (self.training_length == 1 or not all(value > 0 for value in self.values)):
            raise InputError(
                "FrequencyRule: longrope divides by its values, and by the logarithm of the training length: give "
                f"values above 0 and a training length of 2 or more, not {list(self.values)} and {self.training_length}"
            )

    def of_model(self, n_ctx: int) -> "FrequencyRule":
        """Return the rule with a model's training length, where it has none."""
        return self if self.training_length else replace(self, training_length=n_ctx)

    def __call__(self, rope: Rope) -> Rope:
        """Return the frequencies and the scaling of a layer under the rule; a layer without planes as it is."""
        theta = rope.inv_freq
        if not rope.rotary_dim:
            return rope
        if self.name == "p_rope":  # as many planes as transformers' rule "proportional" counts: none of 49 at 1 / 49
            fastest = theta.argsort(descending=True, stable=True)[: int(1 / self.factor * len(theta))]
            turning = torch.zeros_like(theta, dtype=torch.bool).index_fill(0, fastest, value=True)
            return replace(rope, inv_freq=torch.where(turning, theta, 0))
        values = _one_a_plane(torch.tensor(self.values, dtype=DOUBLE), rope, self.name) if len(self.values) else theta
        if self.name == "given":
            return replace(rope, inv_freq=values)
        base, name = _base_of(rope), cast(TransformersRule, self.name)
        if name == "ntk" and rope.rotary_dim < 4:
            raise InputError(f"ntk: {len(rope.inv_freq)} RoPE plane has no base to enlarge; choose another rule")
        if self.training_length is None and name not in ("linear", "ntk"):
            raise InputError(
                f"{name} depends on the training length: give FrequencyRule({name!r}, training_length=...)"
            )
        arguments = rope.rotary_dim, base, self.training_length or 2**20
        try:
            changed, scaling = scaled_frequencies(name, self.factor, *arguments, tuple(map(float, self.values)))
        except OverflowError as error:
            raise InputError(f"{name}: factor = {self.factor!r} is too large to compute with") from error
        except ZeroDivisionError as error:
            raise InputError(f"{name}: frequencies that are all alike have no base; choose another rule") from error
        plain, _ = scaled_frequencies("linear", 1, *arguments)
        ratio = (changed / plain).to(theta)
        return replace(rope, inv_freq=theta * ratio, scaling=rope.scaling * scaling)


Frequencies: TypeAlias = FrequencyRule | Callable[[Rope], Rope] | Float[Tensor, " plane"] | Sequence[int | float]


@printing_call
def with_frequencies(
    model: Model | Session, frequencies: Frequencies, *, layers: Layers = None, heads: Heads = None
) -> HookList:
    """score_ij <- scale <R'_i q_i, R'_j k_j>, R' rotating plane m by theta'_m per token, with the rule's own scaling.

    Args:
        frequencies: a `FrequencyRule`; theta', one a plane, in radians per token; or
            a function from a layer's `Rope` to another. Layers without RoPE are not changed.
        layers, heads: chosen layers and heads; all if left out. Query heads that share a key may differ.

    Returns:
        Hooks, see `replace_scores`. With the model's own frequencies they change nothing.

    Raises:
        InputError: another number of frequencies than a chosen layer has planes; a function that gives no `Rope` of
            that many, or one whose scaling is not above 0.
        UnsupportedModelError: see `replace_scores`; also if no chosen layer has RoPE.

    Source: ours; the rules are those of the papers that `FrequencyRule` names.

    Example:
        >>> import torch
        >>> from tl_posgen import load_model
        >>> from tl_posgen.hooks import FrequencyRule
        >>> model, tokens = load_model("mini"), torch.arange(12)[None]
        >>> plain = model(tokens)
        >>> same, other = (
        ...     model.run_with_hooks(tokens, fwd_hooks=with_frequencies(model, FrequencyRule("linear", factor)))
        ...     for factor in (1, 2)
        ... )
        >>> torch.allclose(same, plain, atol=1e-4), torch.allclose(other, plain, atol=1e-4)
        (True, False)
    """
    session = session_of(model)
    selected = select_heads(session, layers, heads)
    geometries = rotating_layers(session, list(selected), "frequencies to change")
    if isinstance(frequencies, FrequencyRule):
        frequencies = frequencies.of_model(int(session.model.cfg.n_ctx))
    ropes = {geometry.layer: _changed_rope(geometry, frequencies) for geometry in geometries}

    def scores_of(capture: LayerCapture) -> Float[Tensor, "head query key"]:
        rope = ropes[capture.layer]
        q, k = rotate(capture.q, capture.query_positions, rope), rotate(capture.k, capture.positions, rope)
        return finished(capture.geometry.scale * q @ k.mT, capture)

    rotating = [(layer, head) for layer in ropes for head in selected[layer]]
    return replace_scores(session, RowByRow(scores_of), heads=rotating)


def _changed_rope(geometry: LayerGeometry, frequencies: Any) -> Rope:
    """Return a layer's RoPE with other frequencies; InputError, with the layer, for such as it cannot have."""
    original = rope = geometry.rope
    theta = frequencies
    try:
        if callable(frequencies):
            rope = frequencies(original)
            if not isinstance(rope, Rope):
                raise InputError(f"frequencies gave {rope!r}: let the function give a Rope")
            theta = rope.inv_freq
        try:
            theta = torch.as_tensor(theta)
            if theta.dtype == torch.bool or theta.is_complex():
                raise TypeError
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(
                f"frequencies={theta!r}: give a FrequencyRule, one number a plane, or a function"
            ) from error
        if not fits(rope.scaling, Positive):
            raise InputError(f"frequencies gave a scaling of {rope.scaling!r}: give a number above 0")
        return replace(rope, inv_freq=_one_a_plane(theta.to(DOUBLE), original, "frequencies"), pairing=original.pairing)
    except InputError as error:
        raise InputError(f"layer {geometry.layer}: {error}") from error


def _base_of(rope: Rope) -> float:
    """Return the base of the frequencies theta_0 base^(-m / n_planes), a whole number where it is one to rounding.

    Of frequencies that no base has (scaled already) it is that of the two fastest planes, and 10,000 where fewer than
    two planes turn.

    Example:
        >>> _base_of(Rope(torch.tensor([1.0, 0.1])))
        100.0
    """
    theta, n = double(rope.inv_freq), len(rope.inv_freq)
    if n < 2 or not (theta[:2] > 0).all():
        return _USUAL_BASE
    for last in (n - 1, 1):  # the slowest plane says it to the most digits
        base = float((theta[0] / theta[last]) ** (n / last))
        if last == 1 or torch.allclose(theta[0] * inverse_frequencies(2 * n, base).to(theta), theta, rtol=1e-5, atol=0):
            break
    return float(round(base)) if abs(base - round(base)) < 1e-6 * base else base


def _one_a_plane(values: Float[Tensor, " plane"], rope: Rope, name: str) -> Float[Tensor, " plane"]:
    """Return values of which there is one finite number a plane, on the device of the frequencies; refuse others."""
    if values.ndim != 1 or len(values) != len(rope.inv_freq) or not values.isfinite().all():
        raise InputError(
            f"{name}: {list(values.shape)} values for {len(rope.inv_freq)} RoPE planes; give one finite number a plane"
        )
    return values.to(rope.inv_freq)

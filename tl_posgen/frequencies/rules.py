"""Rules that change the frequencies of RoPE, by name and factor."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, MOST_DISTANCES
from tl_posgen.core.options import Count, NonNegative, Positive, check_options
from tl_posgen.errors import InputError
from tl_posgen.frequencies.numbers.changed_frequencies import base_of, fastest_alone, one_a_plane
from tl_posgen.models.conversion.rope_rules import TransformersRule, scaled_frequencies
from tl_posgen.rope.rotation import Rope

RuleName = Literal["linear", "ntk", "yarn", "longrope", "llama3", "p_rope", "given"]


@dataclass(frozen=True)
class FrequencyRule:
    """theta_m -> theta'_m: what a rule of context extension makes of the frequencies that a layer has.

    The rules of transformers are transformers' own functions, see
    `tl_posgen.models.conversion.rope_rules.scaled_frequencies`. What a rule does to powers of the layer's base it does
    to the layer's own frequencies, plane by plane, and its factor on rotated q and k comes on top of theirs: on plain
    RoPE the result is transformers' own, on RoPE that is scaled already the rule comes on top.

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

    @property
    def label(self) -> str:
        """Its name as a label: "yarn 4"; "given" has no factor."""
        return self.name if self.name == "given" else f"{self.name} {self.factor:.12g}"

    def __call__(self, rope: Rope) -> Rope:
        """Return the frequencies and the scaling of a layer under the rule; a layer without planes as it is."""
        theta = rope.inv_freq
        if not rope.rotary_dim:
            return rope
        if self.name == "p_rope":
            return replace(rope, inv_freq=fastest_alone(theta, 1 / self.factor))
        given = one_a_plane(torch.tensor(self.values, dtype=DOUBLE), rope, self.name) if len(self.values) else theta
        if self.name == "given":
            return replace(rope, inv_freq=given)
        ratio, scaling = self.ratios(rope)
        return replace(rope, inv_freq=theta * ratio.to(theta), scaling=rope.scaling * scaling)

    def ratios(self, rope: Rope) -> tuple[Float[Tensor, " plane"], float]:
        """Return theta'_m / theta_m on powers of the layer's base, and the rule's factor on rotated q and k."""
        base, name = base_of(rope), cast(TransformersRule, self.name)
        if name == "ntk" and rope.rotary_dim < 4:
            raise InputError(f"ntk: {len(rope.inv_freq)} RoPE plane has no base to enlarge; choose another rule")
        if self.training_length is None and name not in ("linear", "ntk"):
            raise InputError(
                f"{name} depends on the training length: give FrequencyRule({name!r}, training_length=...)"
            )
        where = rope.rotary_dim, base, self.training_length or 2**20
        try:
            changed, scaling = scaled_frequencies(name, self.factor, *where, tuple(map(float, self.values)))
        except OverflowError as error:
            raise InputError(f"{name}: factor = {self.factor!r} is too large to compute with") from error
        except ZeroDivisionError as error:
            raise InputError(f"{name}: frequencies that are all alike have no base; choose another rule") from error
        plain, _ = scaled_frequencies("linear", 1, *where)
        return changed / plain, scaling

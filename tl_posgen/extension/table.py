"""Every rule of context extension by name: what comparisons of rules run. A rule is its name and a row here."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal, NamedTuple

from tl_posgen.editing.printed_hooks import HookList
from tl_posgen.extension.frequency_rules import FrequencyRule, with_frequencies
from tl_posgen.extension.held_planes import hold_planes
from tl_posgen.extension.windows import interpolate_positions, lm_infinite, retrieve_blocks, self_extend
from tl_posgen.models.session import Session

ContextRuleName = Literal[
    "hold_planes",
    "quarter_turns",
    "hold_all",
    "lm_infinite",
    "retrieval",
    "self_extend",
    "interpolation",
    "ntk",
    "yarn",
]


@dataclass(frozen=True)
class ExtensionSettings:
    """What rules of context extension are made for.

    Attributes:
        trained: L, the training context in tokens.
        factor: how many times L the texts are long.
        planes, at: which planes are held, and at which distance; half of L if left out.
        n_global: first tokens that every query sees within windows.
        block, n_blocks: tokens of a block that is retrieved, and how many each query retrieves.
    """

    trained: int
    factor: int | float
    planes: Sequence[int] | Literal["partial", "all"] = "partial"
    at: int | float | None = None
    n_global: int = 10
    block: int = 16
    n_blocks: int = 4

    @property
    def held_at(self) -> int | float:
        """The distance at which planes are held."""
        return self.trained / 2 if self.at is None else self.at

    @property
    def near(self) -> int:
        """Tokens that keep their own distance where others share positions: a quarter of L."""
        return self.trained // 4

    @property
    def group(self) -> int:
        """How many far tokens share a position, so that L reaches over `factor` L."""
        return max(1, ceil((self.factor * self.trained - self.near) / (self.trained - self.near)))


class ContextRule(NamedTuple):
    """A rule of context extension: its words in sentences, and its hooks on a model, at chosen layers and heads."""

    words: str
    make: Callable[[Session, ExtensionSettings, Mapping[str, Any]], HookList]


def _with_rule(name: Literal["ntk", "yarn"]) -> Callable[[Session, ExtensionSettings, Mapping[str, Any]], HookList]:
    return lambda model, to, where: with_frequencies(model, FrequencyRule(name, to.factor, to.trained), **where)


CONTEXT_RULES: dict[ContextRuleName, ContextRule] = {
    "hold_planes": ContextRule(
        "planes held",
        lambda model, to, where: hold_planes(model, to.planes, at=to.held_at, context=to.trained, **where),
    ),
    "quarter_turns": ContextRule(
        "planes held, each at its quarter turn",
        lambda model, to, where: hold_planes(model, to.planes, at="quarter turn", context=to.trained, **where),
    ),
    "hold_all": ContextRule(
        "all planes held", lambda model, to, where: hold_planes(model, "all", at=to.held_at, **where)
    ),
    "lm_infinite": ContextRule(
        "LM-Infinite", lambda model, to, where: lm_infinite(model, to.trained, to.n_global, **where)
    ),
    "retrieval": ContextRule(
        "block retrieval",
        lambda model, to, where: retrieve_blocks(
            model, to.trained, to.n_global, block=to.block, n_blocks=to.n_blocks, **where
        ),
    ),
    "self_extend": ContextRule("Self-Extend", lambda model, to, where: self_extend(model, to.near, to.group, **where)),
    "interpolation": ContextRule(
        "position interpolation", lambda model, to, where: interpolate_positions(model, 1 / to.factor, **where)
    ),
    "ntk": ContextRule("NTK", _with_rule("ntk")),
    "yarn": ContextRule("YaRN", _with_rule("yarn")),
}
WORDS = {name: rule.words for name, rule in CONTEXT_RULES.items()}


def hooks_of(rule: ContextRuleName, model: Session, settings: ExtensionSettings, where: Mapping[str, Any]) -> HookList:
    """Return the hooks of a rule by its name.

    Args:
        settings: what it is made for.
        where: {"layers": ..., "heads": ...}, all if empty.

    Raises:
        InputError, UnsupportedModelError: as the hooks of `tl_posgen.hooks` that its row names.
    """
    return CONTEXT_RULES[rule].make(model, settings, where)

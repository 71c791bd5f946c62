"""Every rule of context extension by name: what comparisons of rules run. A rule is one row here."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal, NamedTuple

from tl_posgen.editing.printed_hooks import HookList
from tl_posgen.extension.frequency_rules import FrequencyRule, with_frequencies
from tl_posgen.extension.held_planes import hold_planes
from tl_posgen.extension.windows import interpolate_positions, lm_infinite, retrieve_blocks, self_extend
from tl_posgen.models.session import Session

RuleName = Literal[
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
class Extended:
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


class Rule(NamedTuple):
    """A rule of context extension: its words in sentences, and its hooks on a model, at chosen layers and heads."""

    words: str
    make: Callable[[Session, Extended, Mapping[str, Any]], HookList]


def _with_rule(name: Literal["ntk", "yarn"]) -> Callable[[Session, Extended, Mapping[str, Any]], HookList]:
    return lambda model, of, where: with_frequencies(model, FrequencyRule(name, of.factor), **where)


RULES: dict[RuleName, Rule] = {
    "hold_planes": Rule("planes held", lambda model, of, where: hold_planes(model, of.planes, at=of.held_at, **where)),
    "quarter_turns": Rule(
        "planes held, each at its quarter turn",
        lambda model, of, where: hold_planes(model, of.planes, at="quarter turn", **where),
    ),
    "hold_all": Rule("all planes held", lambda model, of, where: hold_planes(model, "all", at=of.held_at, **where)),
    "lm_infinite": Rule("LM-Infinite", lambda model, of, where: lm_infinite(model, of.trained, of.n_global, **where)),
    "retrieval": Rule(
        "block retrieval",
        lambda model, of, where: retrieve_blocks(
            model, of.trained, of.n_global, block=of.block, n_blocks=of.n_blocks, **where
        ),
    ),
    "self_extend": Rule("Self-Extend", lambda model, of, where: self_extend(model, of.near, of.group, **where)),
    "interpolation": Rule(
        "position interpolation", lambda model, of, where: interpolate_positions(model, 1 / of.factor, **where)
    ),
    "ntk": Rule("NTK", _with_rule("ntk")),
    "yarn": Rule("YaRN", _with_rule("yarn")),
}


def hooks_of(rule: RuleName, model: Session, of: Extended, where: Mapping[str, Any]) -> HookList:
    """Return the hooks of a rule by its name.

    Args:
        of: what it is made for.
        where: {"layers": ..., "heads": ...}, all if empty.

    Raises:
        InputError, UnsupportedModelError: as the hooks of `tl_posgen.hooks` that its row names.
    """
    return RULES[rule].make(model, of, where)

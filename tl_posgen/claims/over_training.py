"""What claims say of a number over checkpoints of training."""

from collections.abc import Callable
from typing import Any

from tl_posgen.claims.judging import Criterion, Group
from tl_posgen.core.result import Result


def fewer_steps(name: str, n: int, why: str) -> Callable[[Result], str]:
    """Return what says why a number that was measured at fewer than n checkpoints cannot be judged."""
    return lambda emergence: "" if len(emergence.measure.at_steps(emergence.numbers, name)) >= n else why


def over_training(name: str, quantity: str, sign: int = 1) -> dict[str, Any]:
    """Return what a claim says of a number that rises during training, with the sign -1 falls, and ends at the
    threshold `least` or more, if there is one: held where no checkpoint is further than the last. The first is its
    null: step 0, or no random init."""

    def by(emergence: Result, least: float | None = None) -> list[Group]:
        at_steps = emergence.measure.at_steps(emergence.numbers, name)
        (step, first), (to, last) = [*at_steps.items()][:: len(at_steps) - 1]
        beyond, otherwise = {f"step {step}": [first.high if sign > 0 else first.low]}, "detectable" if least else "held"
        at_last = Criterion.of(
            f"{quantity} at step {to}", last, least, beyond=beyond, otherwise=otherwise, sign=sign, digits=3
        )
        is_furthest = max(sign * number.value for number in at_steps.values()) == sign * last.value
        return [Group("partly" if at_last.holds and not is_furthest else at_last.verdict, [at_last])]

    lacks = fewer_steps(name, 2, f"{quantity} was not measured at two checkpoints or more")
    return {"by": by, "lacks": lacks, "options": {"emergence": {"measures": ["coupling"]}}, "own_null": True}

"""Finished results that an analysis takes up: what they must have in common with it."""

from collections.abc import Mapping
from typing import Any

from tl_posgen.core.measure import Measure
from tl_posgen.core.result import Result
from tl_posgen.errors import InputError


def check_after(after: Any) -> dict[str, Result]:
    """Return finished results by name; InputError for anything else."""
    known = {} if after is None else after
    if not isinstance(known, Mapping) or not all(
        isinstance(one, Result) and one.name == name for name, one in known.items()
    ):
        raise InputError("after: give a Report, or a mapping of measure name to its Result")
    return dict(known)


def require_options(measure: Measure, known: Result) -> None:
    """Refuse a finished result of other options than are asked for."""
    then, now = known.provenance.get("options", {}), measure.options()
    if any(then.get(name) != value for name, value in now.items() if value is not None):
        raise InputError(f"after: {measure.name} was measured with {then}, and is asked for with {now}; leave it out")


def require_same(name: str, result: Result, provenance: Mapping[str, Any]) -> None:
    """Refuse a finished result of another model, other prompts or other random inits."""
    for key in ("weights", "backend", "dtype", "tokens_sha256", "null_seeds", "heads", "fwd_hooks", "metric"):
        then, now = (one.get(key, "all" if key == "heads" else "none") for one in (result.provenance, provenance))
        if then != now:
            raise InputError(
                f"after: {name} was measured with another {key} ({then}, now {now}); leave it out to measure it anew"
            )

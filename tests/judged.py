"""Claims judged on results whose numbers are made up, and what each verdict needs."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import xarray as xr
from made_up import beside_itself, result_of

from tl_posgen.claims import PAPERS, judge
from tl_posgen.claims.judging import Judgement
from tl_posgen.core.measure import Measure
from tl_posgen.core.result import Result

CLAIMS = {claim.name: claim for claims in PAPERS.values() for claim in claims}
NAN = float("nan")
FAR = "far"
COUNTS = {"position 6", "slash 1", "slash 5", "slash 6"}  # without an interval over prompts


@dataclass(frozen=True)
class MadeUp:
    """Numbers of each claim of a paper such that it is held.

    Attributes:
        made: by claim, each measure and what makes its dataset, without arguments such that the claim is held; and the
            arguments of a null that is far from it, None for a claim that has its own.
    """

    made: Mapping[str, tuple[Sequence[tuple[Measure, Callable[..., xr.Dataset]]], dict[str, Any] | None]]

    def results(
        self,
        name: str,
        own: Mapping[str, Any] | None = None,
        nulls: Any = FAR,
        change: Callable[[xr.Dataset], xr.Dataset] = lambda data: data,
        **provenance: Any,
    ) -> dict[str, Result]:
        """Results of what the claim needs, with these numbers, and the far null or nulls of these."""
        measures, far = self.made[name]
        inits = ([] if far is None else [far]) if nulls == FAR else nulls
        return {
            measure.name: result_of(
                measure, change(builder(**(own or {}))), *(builder(**one) for one in inits), **provenance
            )
            for measure, builder in measures
        }

    def judged(self, name: str, own: Mapping[str, Any] | None = None, nulls: Any = FAR, **how: Any) -> Judgement:
        return judge(CLAIMS[name], self.results(name, own, nulls, **how))


def at_each(edges: Iterable[tuple[str, str, Mapping[Any, str]]]) -> list[tuple[str, dict[str, Any], str, str]]:
    """Of (claim, a number of the model, verdict by its value): claim, numbers, the far null, and verdict of each."""
    return [(name, {key: value}, FAR, verdict) for name, key, at in edges for value, verdict in at.items()]


def without_intervals(result: Result, *inits: str) -> Result:
    """The result as if these models, or all, had fewer prompts than an interval takes."""

    def values_alone(one):
        return one.where((one["end"] == "value") | ~one["init"].isin(inits or one["init"].values))

    data = result.dataset if inits or "prompt" not in result.dataset.dims else result.dataset.isel(prompt=slice(3))
    data = data.map(lambda one: values_alone(one) if "end" in one.dims else one, keep_attrs=True)
    data = data.isel(group=slice(1)) if "group" in data.dims and not inits else data
    return replace(result, dataset=data)


# What every verdict needs


def no_null_that_does_as_well(paper: MadeUp, name: str) -> None:
    assert paper.judged(name).verdict == "held"
    results = paper.results(name)
    for label, kind in {"0": "random init", "shuffled 0": "shuffled"}.items() if paper.made[name][1] else ():
        found = judge(CLAIMS[name], {key: beside_itself(one, label) for key, one in results.items()})
        assert found.verdict == "not held"
        assert kind in found.margin
        assert found.null.startswith(f"{kind}: ")


def a_number(paper: MadeUp, name: str) -> None:
    def lost(data):
        return data.map(lambda one: one * NAN if one.dtype.kind == "f" else one)

    assert paper.judged(name, change=lost).verdict == "open"


def an_interval(paper: MadeUp, name: str) -> None:
    results = {key: without_intervals(one) for key, one in paper.results(name).items()}
    assert judge(CLAIMS[name], results).verdict == "open"


def a_null(paper: MadeUp, name: str) -> None:
    found = paper.judged(name, nulls=[])
    assert (found.verdict, found.null) == ("open", "")


def needs_of(paper: MadeUp) -> list[tuple[Callable[[MadeUp, str], None], str]]:
    """What each verdict of a paper needs; a claim that is lacking there has no such need: counts have no interval, and
    what has a null of its own has no null model."""
    lacking = {
        a_number: {"slash 6"},
        an_interval: COUNTS,
        a_null: {name for name, (_, far) in paper.made.items() if not far},
    }
    needs = (no_null_that_does_as_well, a_number, an_interval, a_null)
    return [(need, name) for need in needs for name in paper.made if name not in lacking.get(need, ())]

"""What is said of a result named slash."""

import xarray as xr

from tl_posgen.report.phrases import head_with
from tl_posgen.results import Result

TITLE = "Which heads attend at a fixed distance?"
QUESTION = (
    "Slash score: mean attention along the D-th sub-diagonal, beside that of uniform attention over the visible keys. "
    "A head is slash-dominant at D when its score reaches kappa; D = 1 is the previous token."
)


def found(result: Result) -> list[str]:
    data = result.dataset
    reach = ", ".join(str(distance) for distance in data["short_distance"].values)

    def dominant(dataset: xr.Dataset) -> int:
        return int(dataset["dominant"].any("short_distance").sum())

    null = "no null measured" if result.null is None else f"random init {dominant(result.null)}"
    return [
        f"{dominant(data)} of {data['best_score'].size} heads ({null}) are slash-dominant at one of the distances "
        f"{reach}, with kappa = {data.attrs['kappa']}. Strongest at D below half the prompt: "
        f"{head_with(data, 'best_score', largest=True)}; at the previous token: "
        f"{head_with(data, 'previous_token', largest=True)}."
    ]

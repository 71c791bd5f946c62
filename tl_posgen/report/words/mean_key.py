"""What is said of a result named mean_key."""

from tl_posgen.report.phrases import beside
from tl_posgen.results import Result

TITLE = "Does one mean key carry the position part?"
QUESTION = (
    "The head's mean key stands in for every key in the position part; the rest is read at one dummy distance. Our "
    "reconstruction of the two-axis split."
)


def found(result: Result) -> list[str]:
    d0 = result.dataset.attrs.get("d0")
    return [f"The mean-key split at dummy distance {d0} correlates with the scores at {beside(result, 'mean_key_r')}."]

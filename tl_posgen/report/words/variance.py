"""What is said of a result named variance."""

from tl_posgen.report.phrases import beside, head_with
from tl_posgen.results import Result

TITLE = "How much is position, how much is meaning, how much is neither?"
QUESTION = (
    "Exact variance decomposition over every triple (query, key, distance): each query meets each key at each "
    "distance, first token left out. Scores split into position f(q, d) + meaning g(q, k) exactly when the shares kd "
    "and qkd are zero."
)


def found(result: Result) -> list[str]:
    parts = [f"{name} {beside(result, name, '{:.0%}')}" for name in ("position", "meaning", "interaction")]
    return [
        f"Of the score variance that softmax can see: {', '.join(parts)}. Most position: "
        f"{head_with(result.dataset, 'position', largest=True)}; most interaction: "
        f"{head_with(result.dataset, 'interaction', largest=True)}."
    ]

"""What is said of a result named three_axis."""

from tl_posgen.report.phrases import beside, head_with
from tl_posgen.results import Result

TITLE = "Are the scores position + query + key?"
QUESTION = (
    "Least-squares fit of every head's pre-softmax scores to a(i-j) + b(i) + c(j) over all visible pairs. b moves "
    "whole rows, which softmax cannot see, so the correlation within rows stands beside r. The first token often "
    "draws attention whatever the text, so everything is shown without it too."
)


def found(result: Result) -> list[str]:
    data = result.dataset
    return [
        f"Scores correlate with position + query + key at r = {beside(result, 'r')}, mean over "
        f"{data['r'].size} heads; without the first token {beside(result, 'r_no_first')}.",
        f"Within rows, which is all that softmax sees, r = {beside(result, 'r_visible')}. Highest: "
        f"{head_with(data, 'r_visible', largest=True)}; lowest: {head_with(data, 'r_visible', largest=False)}.",
    ]

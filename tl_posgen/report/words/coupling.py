"""What is said of a result named coupling."""

from tl_posgen.report.phrases import beside, mean
from tl_posgen.results import Result

TITLE = "Do the layers act along the same directions?"
QUESTION = (
    "Coupling of the residual Jacobians of two layers at the last token: 1 - || |A| - S || / ||S|| (Frobenius), top K "
    "singular vectors. Beside it random bases with the same spectra and a random-init model."
)


def found(result: Result) -> list[str]:
    k = int(result.dataset["k"].values[0])
    lines = [
        f"Top-{k} coupling over pairs of layers is {beside(result, 'mean_coupling')}; random bases with the same "
        f"spectra reach {mean(result.dataset, 'mean_chance'):.3f}."
    ]
    straight = float(result.dataset["line_shape_score"].median())
    null = "" if result.null is None else f" (random init {float(result.null['line_shape_score'].median()):.2f})"
    return [*lines, f"Median line-shape score of token trajectories: {straight:.2f}{null}; 1 is a straight line."]

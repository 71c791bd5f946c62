"""What was found, in words: a sentence with the number, and the null's number beside it."""

from collections.abc import Callable, Mapping

import xarray as xr

from tl_posgen.results import Result

QUESTIONS = {
    "three_axis": (
        "Are the scores position + query + key?",
        "Least-squares fit of every head's pre-softmax scores to a(i-j) + b(i) + c(j) over all visible pairs. "
        "b moves whole rows, which softmax cannot see, so the correlation within rows stands beside r. The first token "
        "often draws attention whatever the text, so everything is shown without it too.",
    ),
    "variance": (
        "How much is position, how much is meaning, how much is neither?",
        "Exact variance decomposition over every triple (query, key, distance): each query meets each key at each "
        "distance, first token left out. Scores split into position f(q, d) + meaning g(q, k) exactly when the shares "
        "kd and qkd are zero.",
    ),
    "mean_key": (
        "Does one mean key carry the position part?",
        "The head's mean key stands in for every key in the position part; the rest is read at one dummy distance. "
        "Our reconstruction of the two-axis split.",
    ),
    "slash": (
        "Which heads attend at a fixed distance?",
        "Slash score: mean attention along the D-th sub-diagonal, beside that of uniform attention over the visible "
        "keys. A head is slash-dominant at D when its score reaches kappa; D = 1 is the previous token.",
    ),
    "substitution": (
        "Does the model run on position + meaning?",
        "All attention scores are replaced in the running model, and the loss is measured. Recovered: share of the way "
        "from uniform attention (0) to the untouched model (1). A high correlation alone would not tell.",
    ),
    "perturbation": (
        "How much order does the model need?",
        "Loss after moving tokens in the text (T), positions of q and k (P), and rotated features (F), by the share "
        "of tokens moved; 95 % bootstrap intervals over prompts and seeds.",
    ),
    "emergence": (
        "When does the split form?",
        "Every measure over training checkpoints, from step 0.",
    ),
    "coupling": (
        "Do the layers act along the same directions?",
        "Coupling of the residual Jacobians of two layers at the last token: 1 - || |A| - S || / ||S|| (Frobenius), "
        "top K singular vectors. Beside it random bases with the same spectra and a random-init model.",
    ),
    "attention_examples": (
        "What does the additive fit get right in the attention itself?",
        "Softmax of the true scores, softmax of the additive fit, and their difference, for the heads with the highest "
        "and lowest correlation within rows. Hover a cell for its value; first 128 tokens of the first prompt.",
    ),
}


def findings(results: Mapping[str, Result]) -> list[str]:
    """One sentence or more per result that has words of its own, in the order of the results."""
    return [sentence for name, result in results.items() if name in _WORDS for sentence in _WORDS[name](result)]


def mean(dataset: xr.Dataset, variable: str) -> float:
    return float(dataset[variable].mean())


def _beside(result: Result, variable: str, form: str = "{:.3f}") -> str:
    """'0.917 (random init 0.323)'"""
    value = form.format(mean(result.dataset, variable))
    null = "no null measured" if result.null is None else "random init " + form.format(mean(result.null, variable))
    return f"{value} ({null})"


def _head(dataset: xr.Dataset, variable: str, *, largest: bool) -> str:
    series = dataset[variable].to_series().dropna()
    if series.empty:
        return "none"
    place = int(series.to_numpy().argmax() if largest else series.to_numpy().argmin())
    layer, head = series.index.to_list()[place]
    return f"layer {layer} head {head} ({series.iloc[place]:.3f})"


def _three_axis(result: Result) -> list[str]:
    data = result.dataset
    return [
        f"Scores correlate with position + query + key at r = {_beside(result, 'r')}, mean over "
        f"{data['r'].size} heads; without the first token {_beside(result, 'r_no_first')}.",
        f"Within rows, which is all that softmax sees, r = {_beside(result, 'r_visible')}. Highest: "
        f"{_head(data, 'r_visible', largest=True)}; lowest: {_head(data, 'r_visible', largest=False)}.",
    ]


def _variance(result: Result) -> list[str]:
    parts = [f"{name} {_beside(result, name, '{:.0%}')}" for name in ("position", "meaning", "interaction")]
    return [
        f"Of the score variance that softmax can see: {', '.join(parts)}. Most position: "
        f"{_head(result.dataset, 'position', largest=True)}; most interaction: "
        f"{_head(result.dataset, 'interaction', largest=True)}."
    ]


def _mean_key(result: Result) -> list[str]:
    d0 = result.dataset.attrs.get("d0")
    return [f"The mean-key split at dummy distance {d0} correlates with the scores at {_beside(result, 'mean_key_r')}."]


def _slash(result: Result) -> list[str]:
    data = result.dataset
    reach = ", ".join(str(distance) for distance in data["short_distance"].values)

    def dominant(dataset: xr.Dataset) -> int:
        return int(dataset["dominant"].any("short_distance").sum())

    null = "no null measured" if result.null is None else f"random init {dominant(result.null)}"
    return [
        f"{dominant(data)} of {data['best_score'].size} heads ({null}) are slash-dominant at one of the distances "
        f"{reach}, with kappa = {data.attrs['kappa']}. Strongest at D below half the prompt: "
        f"{_head(data, 'best_score', largest=True)}; at the previous token: "
        f"{_head(data, 'previous_token', largest=True)}."
    ]


def _coupling(result: Result) -> list[str]:
    k = int(result.dataset["k"].values[0])
    lines = [
        f"Top-{k} coupling over pairs of layers is {_beside(result, 'mean_coupling')}; random bases with the same "
        f"spectra reach {mean(result.dataset, 'mean_chance'):.3f}."
    ]
    straight = float(result.dataset["line_shape_score"].median())
    null = "" if result.null is None else f" (random init {float(result.null['line_shape_score'].median()):.2f})"
    return [*lines, f"Median line-shape score of token trajectories: {straight:.2f}{null}; 1 is a straight line."]


_WORDS: dict[str, Callable[[Result], list[str]]] = {
    "three_axis": _three_axis,
    "variance": _variance,
    "mean_key": _mean_key,
    "slash": _slash,
    "coupling": _coupling,
}

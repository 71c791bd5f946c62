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


_WORDS: dict[str, Callable[[Result], list[str]]] = {
    "three_axis": _three_axis,
    "variance": _variance,
    "mean_key": _mean_key,
}

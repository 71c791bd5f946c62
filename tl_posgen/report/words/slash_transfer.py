"""What is said of a result named slash_transfer."""

import pandas as pd
import xarray as xr

from tl_posgen.results import Result

TITLE = "Do slash heads belong to the model or to the text?"
QUESTION = (
    "The same heads on text and on i.i.d. uniform random tokens, per distance D, with and without the first token. "
    "Then q and k of one layer at a time are changed and the softmax taken anew: a slash of RoPE alone survives Q "
    "and K replaced by their means, and is lost when nothing turns."
)


def found(result: Result) -> list[str]:
    data = result.dataset
    # the distance at which most heads are dominant on text
    place = int(data["n_natural"].sel(variant="all").argmax("at"))
    at = data.sel(variant="all").isel(at=place)
    null = "no null measured" if result.null is None else f"random init {_r(result.null, place):.3f}"
    lines = [
        f"At D = {int(at['at'])} slash scores on random tokens follow those on text over heads with r = "
        f"{_r(data, place):.3f} ({null}; without the first token {_r(data, place, 'without_first'):.3f}); "
        f"{int(at['n_natural'])} heads are dominant on text, {int(at['n_random'])} on random tokens, overlap "
        f"(Jaccard) {float(at['jaccard']):.2f}."
    ]
    return [*lines, _strongest(data, result.null), *_without_planes(data)]


def _r(dataset: xr.Dataset, place: int, variant: str = "all") -> float:
    return float(dataset["pearson"].sel(variant=variant).isel(at=place))


def _strongest(dataset: xr.Dataset, null: xr.Dataset | None) -> str:
    """The strongest head under each ablation, and how strong a head of the random init ever is."""
    of_head = dataset.isel(dataset["natural"].argmax(("layer", "head")))
    layer, head = int(of_head["layer"]), int(of_head["head"])
    names = {"no_rope": "RoPE removed", "means": "Q and K their means", "means_no_rope": "both"}
    parts = [f"{name} {float(of_head[f'ablated_{k}']):.3f}" for k, name in names.items() if f"ablated_{k}" in of_head]
    parts.append(f"uniform attention {float(of_head['baseline_score']):.3f}")
    random = "" if null is None else f" (strongest of the random init {float(null['natural'].max()):.3f})"
    return (
        f"The strongest, layer {layer} head {head} at D = {int(of_head['best_distance'])}, scores "
        f"{float(of_head['natural']):.3f} on text{random}; {', '.join(parts)}."
    )


def _without_planes(dataset: xr.Dataset) -> list[str]:
    left_out = dataset.attrs.get("left_out")
    if not left_out:
        return []
    return [
        f"No layer of this model has rotary planes, so ablations of RoPE mean nothing and are left out ({left_out})."
    ]


def table(dataset: xr.Dataset) -> pd.DataFrame:
    """A row per distance: agreement over heads, with the first token and without, and how many are dominant."""
    whole, rest = (dataset.sel(variant=variant) for variant in ("all", "without_first"))
    return pd.DataFrame(
        {
            "D": dataset["at"].values,
            "r": whole["pearson"].values,
            "r no first": rest["pearson"].values,
            "Spearman": whole["spearman"].values,
            "on text": whole["n_natural"].values,
            "on random": whole["n_random"].values,
            "Jaccard": whole["jaccard"].values,
            "Jaccard no first": rest["jaccard"].values,
        }
    )

"""What is said of a result named substitution."""

import pandas as pd
import xarray as xr

from tl_posgen.results import Result

TITLE = "Does the model run on position + meaning?"
QUESTION = (
    "All attention scores are replaced in the running model, and the loss is measured. Recovered: share of the way "
    "from uniform attention (0) to the untouched model (1). A high correlation alone would not tell."
)
CONTROLS = ("base", "uniform", "position", "meaning")


def found(result: Result) -> list[str]:
    data, null = result.dataset, result.null
    splits = data["recovered"].drop_sel(arm=[*CONTROLS, "three_axis"])
    best = str(splits["arm"].values[int(splits.values.argmax())])
    gap = f"of the {_gap(data):.3f} nats between the untouched model and uniform attention"
    chance = "no null measured" if null is None else f"random init: {_gap(null):.4f} nats"
    return [
        f"Position + meaning ({best}) recovers {_share(data, best)} {gap} ({chance}); position alone "
        f"{_share(data, 'position')}, meaning alone {_share(data, 'meaning')}.",
        _belief(data, best),
        *_searches(data),
    ]


def _belief(data: xr.Dataset, best: str) -> str:
    """What the correlation alone would have made one believe."""
    r = data["r"].mean(("layer", "head"))
    n = data.sizes["arm"] - 2
    return (
        f"What the correlation alone would have made one believe: a(i-j) + b(i) + c(j) is close to the scores, r = "
        f"{float(r.sel(arm='three_axis')):.3f}; in their place it recovers {_share(data, 'three_axis')} of the loss. "
        f"{best}, at r = {float(r.sel(arm=best)):.3f}, recovers {_share(data, best)}. Over {n} stand-ins the rank "
        f"correlation of r with the share recovered is {float(data['r_rank']):.2f}; that of the attention KL is "
        f"{float(data['kl_rank']):.2f}."
    )


def _searches(data: xr.Dataset) -> list[str]:
    if "search_loss" not in data:
        return []

    def says(family: str) -> str:
        one = data.sel(family=family)
        share, low, high = (float(one[name]) for name in ("search_recovered", "search_low", "search_high"))
        return f"{share:.1%} ({low:.1%} to {high:.1%})"

    kl = {name: float(data["search_prediction_kl"].sel(family=name)) for name in ("triangle", "free", "imitating")}
    return [
        f"Chosen on {data.attrs['search_prompts']} prompts, reported on {data.attrs['held_out_prompts']} others: one "
        f"triangle for the model (width {data.attrs['search_width']:g}) recovers {says('triangle')}, a law of distance "
        f"per head {says('law')}, Rbar and reference key per head {says('free')}. With the same freedom position alone "
        f"recovers {says('position')}, meaning alone {says('meaning')}.",
        f"A loss may be recovered by other predictions: their KL from the untouched model's is {kl['triangle']:.3f} "
        f"nats for the triangle and {kl['free']:.3f} for the split chosen by loss; chosen by that KL instead it is "
        f"{kl['imitating']:.3f}, and {says('imitating')} of the loss is recovered.",
    ]


def table(dataset: xr.Dataset) -> pd.DataFrame:
    """One row an arm, and below them the searched splits, held out."""
    arms = {
        "loss": dataset["loss_mean"].values,
        "recovered": dataset["recovered"].values,
        "low": dataset["recovered_low"].values,
        "high": dataset["recovered_high"].values,
        "r": dataset["r"].mean(("layer", "head")).values,
        "attention KL": dataset["attention_kl"].mean(("layer", "head")).values,
    }
    frame = pd.DataFrame({"arm": dataset["arm"].values, **arms})
    if "search_loss" not in dataset:
        return frame
    names = {"loss": "search_loss", "recovered": "search_recovered", "low": "search_low", "high": "search_high"}
    searched = {column: dataset[name].values for column, name in names.items()}
    rows = pd.DataFrame({"arm": [f"searched: {name}" for name in dataset["family"].values], **searched})
    return pd.concat([frame, rows], ignore_index=True)


def _share(data: xr.Dataset, arm: str) -> str:
    return f"{float(data['recovered'].sel(arm=arm)):.1%}"


def _gap(data: xr.Dataset) -> float:
    return float(data["loss_mean"].sel(arm="uniform") - data["loss_mean"].sel(arm="base"))

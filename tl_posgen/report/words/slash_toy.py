"""What is said of a result named slash_toy."""

import pandas as pd
import xarray as xr

from tl_posgen.results import Result

TITLE = "Does gradient descent make a slash head?"
QUESTION = (
    "A shallow RoPE transformer is trained to answer with what was shown D tokens later, on embeddings that lie on a "
    "cone. Its attention head is measured on the features it was trained on and on features it has never seen. The "
    "task and its settings are this project's own."
)


def found(result: Result) -> list[str]:
    data = result.dataset
    distance = int(data.attrs["slash_distance"])
    uniform = float(data["baseline"].sel(distance=distance))
    formed = data["slash_step"].dropna("seed")
    steps = f"by step {int(formed.max())}" if formed.sizes["seed"] else "never"
    return [
        f"Trained on {data.attrs['planes'].replace('_', ' and ')} planes, the slash score at D = {distance} goes from "
        f"{_start(data):.3f} at initialisation to {spread(data['score_trained'])}, and {spread(data['score_unseen'])} "
        f"on unseen features (uniform attention {uniform:.3f}); loss {spread(data['loss_start'])} -> "
        f"{spread(data['loss_end'], 4)}. {data.sizes['seed']} seeds, mean ± standard deviation.",
        f"The head passed one half in {formed.sizes['seed']} of {data.sizes['seed']} seeds, {steps}; at the end r1(Q) "
        f"is {spread(data['r1_q_end'])} and r1(K) {spread(data['r1_k_end'])}.",
    ]


def _start(dataset: xr.Dataset) -> float:
    """Before any training: the null of this measure."""
    return float(dataset["score"].sel(features="trained").isel(step=0).mean())


def spread(values: xr.DataArray, digits: int = 3) -> str:
    """'0.998 ± 0.000': mean and standard deviation over seeds; the value alone of a single one."""
    mean = f"{float(values.mean()):.{digits}f}"
    return mean if values.sizes["seed"] == 1 else f"{mean} ± {float(values.std(ddof=1)):.{digits}f}"


def table(dataset: xr.Dataset) -> pd.DataFrame:
    """A row per seed: loss, slash score on trained and unseen features, rank of Q and K, when the head formed."""
    names = {
        "loss_start": "loss at start",
        "loss_end": "loss at end",
        "score_trained": "score",
        "score_unseen": "score, unseen",
        "r1_q_end": "r1(Q)",
        "r1_k_end": "r1(K)",
        "slash_step": "formed by step",
    }
    return dataset[list(names)].to_dataframe().reset_index()[["seed", *names]].rename(columns=names)

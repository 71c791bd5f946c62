"""What is said of a result named any_distance."""

import pandas as pd
import xarray as xr

from tl_posgen.results import Result

TITLE = "Could RoPE entangle position and meaning?"
QUESTION = (
    "Planes at the frequencies 2 pi m / N give a head any function of distance, even one of its own for every pair of "
    "tokens. So what the architecture allows is set against the best fit with the model's own frequencies, and against "
    "what its heads have learned: scores that are nearly f(q, d) + g(q, k)."
)
EXACT = "inverse DFT"


def found(result: Result) -> list[str]:
    data = result.dataset
    exact = data.sel(planes=EXACT)
    name = str(exact["two_axis_r"].to_series().idxmin())
    lines = [
        f"A head made by inverse DFT takes on each of {data.sizes['function']} functions of "
        f"{data.attrs['n_distances']} distances, relative error at most {float(exact['error'].max()):.0e}; "
        f"for '{name}', which takes {int(exact['n_planes'].sel(function=name))} planes, the correlation "
        f"with f(q, d) + g(q, k) is {float(exact['two_axis_r'].sel(function=name)):.2f}."
    ]
    for planes in data["planes"].values[1:]:
        fit = data.sel(planes=planes)
        ratio = fit["largest_logit"] / fit["largest_value"]
        lines.append(
            f"With the model's own {int(fit['n_planes'].max())} planes ({planes}) the relative error is "
            f"{float(fit['error'].min()):.2f} to {float(fit['error'].max()):.2f}, with planes that add up to as much "
            f"as {float(ratio.max()):.2g} times the largest value."
        )
    null = "no null measured" if result.null is None else f"random init {_heads(result.null)}"
    lines.append(f"Of the model's own heads that correlation is {_heads(data)}, mean over heads ({null}).")
    return lines


def table(dataset: xr.Dataset) -> pd.DataFrame:
    """A row per function and kind of planes, the first 20; of the null, which has only heads, a row per layer."""
    if "error" not in dataset:
        heads = dataset["head_two_axis_r"]
        return pd.DataFrame({"head_two_axis_r": heads.mean("head").to_series()}).reset_index().head(20)
    frame = dataset[["n_planes", "error", "largest_logit", "largest_value", "two_axis_r"]].to_dataframe().reset_index()
    # from 1e-15 to 1e9: three decimals would not do
    frame = frame.assign(**{name: frame[name].map("{:.2g}".format) for name in ("error", "largest_logit")})
    return frame.head(20)


def _heads(dataset: xr.Dataset) -> str:
    return f"{float(dataset['head_two_axis_r'].mean()):.3f}"

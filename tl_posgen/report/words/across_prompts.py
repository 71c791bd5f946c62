"""What is said of a result named across_prompts."""

import pandas as pd
import xarray as xr

from tl_posgen.report.phrases import beside, head_with
from tl_posgen.results import Result

TITLE = "How much of the scores is the same in every prompt?"
QUESTION = (
    "Scores within rows, prompt by prompt: what is the same at the same query and key position in all of them is "
    "position, the rest is content. Needs no RoPE, so it means the same for every encoding. Corrected for what chance "
    "leaves in a mean over few prompts."
)
COLUMNS = {
    "position_no_first": "position",
    "by_distance_no_first": "by distance",
    "by_key_no_first": "by key position",
    "by_either_no_first": "by either",
    "chance_no_first": "chance",
    "position": "with 1st token",
}


def found(result: Result) -> list[str]:
    data = result.dataset

    def share(name: str) -> str:
        return beside(result, name, "{:.1%}")

    return [
        f"Position, the same in all {data.attrs['prompts']} prompts, is {share('position_no_first')} of the score "
        f"variance within rows, first token left out (with it {share('position')}). Most: "
        f"{head_with(data, 'position_no_first', largest=True)}.",
        f"A function of distance alone holds {share('by_distance_no_first')} of that variance, one of the key's "
        f"position alone {share('by_key_no_first')}, both together {share('by_either_no_first')}; a straight line, "
        f"{share('by_line_no_first')}, is in each, since within a row distance and key position are one line.",
    ]


def table(dataset: xr.Dataset) -> pd.DataFrame:
    """Per layer, means over heads."""
    frame = dataset[list(COLUMNS)].mean("head").to_dataframe().reset_index()
    return frame.rename(columns=COLUMNS)[["layer", *COLUMNS.values()]]

"""Write real.csv, a row a model and quantity, from a finished run of real.toml.

tl-posgen sweep examples/studies/real.toml --out runs
python examples/studies/real_table.py runs
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

import tl_posgen
from tl_posgen.core.number import Number

QUANTITIES = {
    "variance": ("interaction", "position", "content", "additive_r", "size"),
    "plane_use": ("partial", "at_half_turn", "sine", "amplitude"),
    "three_axis": ("r",),
    "coupling": ("coupling", "chance"),
    "bias_pairs": ("of_biases",),
}


def row_of(model: str, parameters: float, quantity: str, number: Number) -> dict[str, object]:
    nulls = {kind.replace(" ", "_"): sum(values) / len(values) for kind, values in number.by_null.items() if values}
    ends = {"value": number.value, "low": number.low, "high": number.high}
    return {"model": model, "parameters": parameters, "quantity": quantity, **ends, **nulls}


def numbers_of(report: tl_posgen.Report) -> Iterator[tuple[str, Number]]:
    """Yield the name and number of every quantity that a report has."""
    for measure in filter(report.results.__contains__, QUANTITIES):
        yield from ((name, report[measure].numbers(name)) for name in QUANTITIES[measure])
    slash = report["slash"].numbers
    yield "dominant", slash.number(slash.array("dominant", short_distance=None).max("short_distance"))
    gap = report["gap"].numbers
    for task in ("text", "copy"):
        loss = gap.array("loss", condition="unchanged", task=task, gap=None)
        yield f"{task}_near", gap.number(loss.isel(gap=0))
        yield f"{task}_far", gap.number(loss.isel(gap=-1))
    ends = report["gap"].table().iloc[0]
    for name in ("reads", "lost", "harm"):
        yield name, Number(float(ends[name]))


def main(runs: Path) -> None:
    study = tl_posgen.open_study(runs)
    rows = []
    for model in study["model"].values.tolist():
        (path,) = (runs / "jobs").glob(f"{model.replace(' ', '-')}-*.nc")
        report = tl_posgen.load(path)
        parameters = float(study["parameters"].sel(model=model).max())
        rows += [row_of(model, parameters, name, number) for name, number in numbers_of(report)]
    pd.DataFrame(rows).round(4).sort_values(["parameters", "quantity"]).to_csv(
        Path(__file__).with_name("real.csv"), index=False
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Write real.csv, a row a model and quantity, from a finished run of real.toml.

tl-posgen sweep examples/studies/real.toml --out runs
python examples/studies/real_table.py runs
"""

import sys
from pathlib import Path

import pandas as pd

import tl_posgen
from tl_posgen.core.number import Number

QUANTITIES = {
    "variance": ("interaction", "position", "content", "additive_r", "size"),
    "plane_use": ("partial", "at_half_turn", "sine", "amplitude"),
    "three_axis": ("r",),
}


def row_of(model: str, parameters: float, quantity: str, number: Number) -> dict[str, object]:
    nulls = {kind.replace(" ", "_"): sum(values) / len(values) for kind, values in number.by_null.items() if values}
    ends = {"value": number.value, "low": number.low, "high": number.high}
    return {"model": model, "parameters": parameters, "quantity": quantity, **ends, **nulls}


def main(runs: Path) -> None:
    study = tl_posgen.open_study(runs)
    rows = []
    for model in study["model"].values.tolist():
        (path,) = (runs / "jobs").glob(f"{model.replace(' ', '-')}-*.nc")
        report = tl_posgen.load(path)
        parameters = float(study["parameters"].sel(model=model).max())
        for measure, names in QUANTITIES.items():
            rows += [row_of(model, parameters, name, report[measure].numbers(name)) for name in names]
        slash = report["slash"].numbers
        dominant = slash.array("dominant", short_distance=None).max("short_distance")
        rows.append(row_of(model, parameters, "dominant", slash.number(dominant)))
        if "bias_pairs" in report.results:
            rows.append(row_of(model, parameters, "of_biases", report["bias_pairs"].numbers("of_biases")))
    pd.DataFrame(rows).round(4).sort_values(["parameters", "quantity"]).to_csv(
        Path(__file__).with_name("real.csv"), index=False
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Coupling of residual Jacobians: the claims of Aubry et al. 2024 (arXiv 2407.07810), and what they are read off."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xarray as xr

from tl_posgen.claims.base import Claim, Finding, Procedure, both
from tl_posgen.experiments import coupling, coupling_emergence
from tl_posgen.models.backend import Model
from tl_posgen.models.origin import origin_of
from tl_posgen.results import Result


def procedures(
    model: Model, text: str, cut: Mapping[str, Any], checkpoints: Sequence[str | Path]
) -> dict[str, Procedure]:
    """What the claims need, by name."""
    every: dict[str, Procedure] = {"coupling": lambda: [coupling(model, text, **cut)]}
    if checkpoints:
        tokenizer = origin_of(model).directory
        every["coupling_emergence"] = lambda: [coupling_emergence(checkpoints, text, tokenizer=tokenizer, **cut)]
    return every


def number(data: xr.Dataset, name: str) -> float:
    """A headline at the first K."""
    found = data[f"mean_{name}"]
    return float(found.isel(k=0)) if "k" in found.dims else float(found)


def alignment(coupling: Result) -> Finding:
    def say(data: xr.Dataset) -> str:
        low, high = number(data, "coupling_low"), number(data, "coupling_high")
        return (
            f"coupling {number(data, 'coupling'):.3f} [{low:.3f}, {high:.3f}], random bases "
            f"{number(data, 'chance'):.3f}, left with right {number(data, 'swapped'):.3f}"
        )

    data, null = coupling.dataset, coupling.null
    floor = max(number(data, "chance"), number(null, "coupling_high") if null is not None else 0.0)
    low = number(data, "coupling_low")
    verdict = "held" if low >= max(0.2, floor) else "partly" if low > floor else "not held"
    return Finding(verdict, *both(say, coupling))


def straightness(coupling: Result) -> Finding:
    def say(data: xr.Dataset) -> str:
        return f"line-shape score {number(data, 'line_shape_score'):.2f} over {data.sizes['state'] - 1} layers"

    value = number(coupling.dataset, "line_shape_score")
    random = None if coupling.null is None else number(coupling.null, "line_shape_score")
    verdict = "held" if value <= 1.25 else "partly" if random is not None and value < random else "not held"
    return Finding(verdict, *both(say, coupling))


def growth(coupling: Result) -> Finding:
    def say(data: xr.Dataset) -> str:
        r2, distance = number(data, "growth_r2"), number(data, "expodistance")
        return f"R² of ln |x| against depth {r2:.2f}, expodistance {distance:.2f}"

    value = number(coupling.dataset, "growth_r2")
    random = 0.0 if coupling.null is None else number(coupling.null, "growth_r2")
    verdict = "held" if value >= 0.9 and value > random else "partly" if value >= 0.9 else "not held"
    return Finding(verdict, *both(say, coupling))


def training(coupling_emergence: Result) -> Finding:
    data = coupling_emergence.dataset
    values = data["coupling"].values
    top = int(values.argmax())
    steps = data["step"].values
    measured = ", ".join(f"{values[at]:.3f} at step {steps[at]}" for at in sorted({0, top, len(values) - 1}))
    risen = float(data["coupling_low"][-1]) > float(data["coupling_high"][0])
    verdict = "held" if risen and top == len(values) - 1 else "partly" if risen else "not held"
    return Finding(verdict, f"coupling {measured}", f"step {steps[0]} is the random initialisation")


CLAIMS = [
    Claim(
        "coupling",
        1,
        "Top singular vectors of residual Jacobians align across layers, left with right; not at random init.",
        "95 % interval above random bases and above random init: partly; and coupling at least .2: held",
        ("coupling",),
        alignment,
    ),
    Claim(
        "coupling",
        2,
        "Token trajectories are close to straight lines; not at random init.",
        "line-shape score at most 1.25: held; below random init: partly",
        ("coupling",),
        straightness,
    ),
    Claim(
        "coupling",
        3,
        "Norms grow exponentially with depth; not at random init.",
        "R² of the exponential at least .9 and above random init: held; the first alone: partly",
        ("coupling",),
        growth,
    ),
    Claim(
        "coupling",
        4,
        "Coupling rises during training.",
        "95 % interval of the last checkpoint above that of the first: partly; and no checkpoint higher: held",
        ("coupling_emergence",),
        training,
    ),
]

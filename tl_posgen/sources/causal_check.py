"""The check of position shares: slash scores without the constant that a source writes into the keys."""

from typing import Any

import torch
import xarray as xr

from tl_posgen.arithmetic import DOUBLE, double
from tl_posgen.core.measure import TOKENS, Variable
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.run import Run
from tl_posgen.core.sums import Sums
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.residual.numbers.frozen_map import REST
from tl_posgen.residual.residual_sources import ResidualSources
from tl_posgen.rope.rotation import rotate
from tl_posgen.slash.layer_means import statistics_from_qk
from tl_posgen.sources.source_sums import SourcedSide, SourceSums
from tl_posgen.sources.sources_figures import OF_SOURCE, PREDICTORS
from tl_posgen.stats.rank_correlation import rank_correlation

UNTOUCHED = "untouched"
CHECKED = {
    "fall": Variable(
        "fall of the slash score",
        "",
        "1 - score without the source's constant in the keys / score, at the head's best D < N/2",
        OF_SOURCE,
        interval=True,
    ),
    "constant_energy": Variable("energy of the constant", "", "|E k_s|^2", OF_SOURCE),
    "energy": Variable("energy of the source", "", "E |k_s|^2", OF_SOURCE),
    "rho": Variable(
        "Spearman's rho with the fall",
        "",
        "over all heads and sources of layers with several sources",
        ("predictor",),
        interval=True,
        bounds=(-1, 1),
    ),
}


def without_constants(run: Run, capture: LayerCapture, written: ResidualSources, rest: SourceSums) -> dict[str, Any]:
    """Return slash scores of a prompt untouched and without the constant of each source, and energies of sources.

    Args:
        rest: sums over the other prompts of what each source adds to the keys, which give the constants.
    """
    n_distances = max(1, min(map(len, run.rows)) // 2)
    sourced = SourcedSide.of_capture(run.wrapped, capture, written, "k")
    scores = [statistics_from_qk(capture, capture.rotated_q, capture.rotated_k).score[0]]
    for constant in rest.means:
        keys = rotate(capture.k - constant[:, None].to(capture.k), capture.positions, capture.geometry.rope)
        scores.append(statistics_from_qk(capture, capture.rotated_q, keys).score[0])
    names = UNTOUCHED, *rest.names
    return {
        "slash": SourceSums(1, names, double(torch.stack(scores)[..., :n_distances])),
        "energy": SourceSums(capture.length - 1, sourced.names, sourced.energies(REST)),
    }


def checked(sums: Sums, share: xr.DataArray) -> xr.Dataset:
    """Return the fall of the slash score of every head and source, what may predict it, and how well it does.

    Args:
        share: [layer, head, source] of position, keys.
    """
    found = []
    for layer, scores in sums.by_layer("slash").items():
        constants, energies = sums.by_layer(f"k {TOKENS[1]}")[layer], sums.by_layer("energy")[layer]
        names = constants.names
        untouched, *others = scores.of_names([UNTOUCHED, *names]) / scores.n
        best = untouched.argmax(-1, keepdim=True)
        at_best = torch.stack(others).gather(-1, best.expand(len(others), -1, -1))[..., 0]
        values = {
            "fall": 1 - at_best / untouched.gather(-1, best)[:, 0],
            "constant_energy": constants.means.square().sum(-1),
            "energy": energies.of_names(names) / energies.n,
        }
        arrays = {name: (("source", "head"), value.numpy()) for name, value in values.items()}
        found.append(xr.Dataset(arrays, {"layer": layer, "head": sums.layers[layer][1], "source": list(names)}))
    data = sums.join_layers(found).reindex(source=share["source"]).transpose(*OF_SOURCE)
    columns = {"share": share, **data.data_vars}
    fall = spread_of(data["fall"].where(share.notnull().sum("source") > 1))
    rho = [rank_correlation(spread_of(columns[name]), fall).r for name in PREDICTORS.values()]
    return data.assign(rho=xr.DataArray(rho, {"predictor": list(PREDICTORS)}))


def spread_of(array: xr.DataArray) -> torch.Tensor:
    """Return the values at all heads and sources as one column."""
    return torch.tensor(array.transpose(*OF_SOURCE).values.ravel(), dtype=DOUBLE)


def check_sentence(own: Numbers) -> str:
    """Say how well shares and energies order heads and sources by the fall of the slash score."""
    parts = ", ".join(f"{name} {own('rho', predictor=name):.2f}" for name in PREDICTORS)
    return f"Rank correlation with the fall of the slash score without a source's constant: {parts}."

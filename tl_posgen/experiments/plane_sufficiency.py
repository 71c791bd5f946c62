"""Do the planes of a head foretell how additive it is? The bound of its planes against its interaction share."""

from typing import Any

import pandas as pd
import torch
import xarray as xr

from tl_posgen.analyzers.feed import measure
from tl_posgen.analyzers.planes import EPS, Planes
from tl_posgen.maths.agreement import pearson, spearman
from tl_posgen.models.backend import Model
from tl_posgen.models.provenance import model_label, null_label, provenance_of
from tl_posgen.models.random_like import random_like
from tl_posgen.models.shuffled_like import shuffled_label, shuffled_like
from tl_posgen.models.tokens import to_prompts
from tl_posgen.results import Result

WEIGHTS = ("trained", "random init", "shuffled")
POOLED = "pooled"
VARIANTS = {"all": "", "no_first": "_no_first"}
PER_HEAD = (
    *(f"{name}{suffix}" for suffix in VARIANTS.values() for name in ("score_sum", "interaction", "std", "additive")),
    "planes_met",
)


def plane_sufficiency(
    model: Model,
    prompts: Any,
    *,
    length: int | None = 256,
    n_prompts: int | None = 2,
    eps: float = EPS,
    n_distances: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Result:
    r"""corr over heads of sum_m s_m / std(W) with the interaction share kd + qkd, s_m = scale E|q^m| E|k^m - kbar^m| x
    max_d 2|sin(theta_m d / 2)|.

    The sum bounds what the mean-key split can miss, so a small one is sufficient for an additive head; whether it also
    tells heads apart is what this measures. The same on a random initialisation, and on the trained weights shuffled,
    which keep their sizes.

    Args:
        prompts, length, n_prompts: as in `analyze`.
        eps, n_distances: as in `Planes`.
        seed: of the random initialisation and of the shuffle.

    Returns:
        A Result named "plane_sufficiency", one row per (weights, layer, head): `score_sum`, `interaction`, `std`,
        `additive` (the criterion certifies the head), each also `*_no_first`, without the first token, and
        `planes_met`, the share of planes that meet a condition. Over (group, variant): `pearson`, `spearman` and
        `n_heads`, the groups being each kind of weights and all of them pooled, which also holds the difference
        between the kinds. Over (weights, eps): `certified`, the share of heads that the criterion certifies.

    Raises:
        InputError: unusable prompts or options.
        UnsupportedModelError: a model without RoPE.

    Source: the bound, the criterion and this test of it are ours.

    Example:
        >>> from tl_posgen import load_model
        >>> text = "Down, down, down. Would the fall never end?"
        >>> found = plane_sufficiency(load_model("mini"), text, length=None, n_prompts=None, progress=False)
        >>> found.dataset["pearson"].sizes["group"], len(found.frame())
        (4, 48)
    """
    analyzer = {"eps": eps, "n_distances": n_distances}
    Planes(**analyzer)  # bad options are refused here, before work
    tokens = to_prompts(model, prompts, length=length, n_prompts=n_prompts)
    labels = (model_label(model), null_label(seed), shuffled_label(seed))
    makers = (lambda: model, lambda: random_like(model, seed), lambda: shuffled_like(model, seed))
    measured = [
        measure(make(), tokens, [Planes(**analyzer)], progress=progress, label=label)["planes"]
        for make, label in zip(makers, labels, strict=True)
    ]
    index = pd.Index(WEIGHTS, name="weights")
    heads = xr.concat([data[list(PER_HEAD)] for data in measured], index, combine_attrs="override")
    assert isinstance(heads, xr.Dataset)
    certified = [data["additive_by_eps"].mean(("layer", "head")) for data in measured]
    heads["certified"] = xr.concat(certified, index)
    dataset = heads.merge(correlations(heads))
    dataset.attrs |= {"rows": ["weights", "layer", "head"], "seed": seed}
    return Result("plane_sufficiency", dataset, None, provenance_of(model, tokens, seed) | {"seed": seed, "eps": eps})


def correlations(heads: xr.Dataset) -> xr.Dataset:
    """Pearson and Spearman over heads, for each kind of weights and pooled, with the first token and without."""
    groups = {kind: heads.sel(weights=[kind]) for kind in WEIGHTS} | {POOLED: heads}
    by_group = [[correlation(data, suffix) for suffix in VARIANTS.values()] for data in groups.values()]
    coords = {"group": list(groups), "variant": list(VARIANTS)}
    columns = torch.tensor(by_group).movedim(-1, 0).numpy()
    names = ("pearson", "spearman", "n_heads")
    return xr.Dataset({name: (("group", "variant"), x) for name, x in zip(names, columns, strict=True)}, coords)


def correlation(data: xr.Dataset, suffix: str) -> tuple[float, float, int]:
    """Of the heads that have both numbers: a head that never varies, or has no planes, has none."""
    both = data[[f"score_sum{suffix}", f"interaction{suffix}"]].to_dataframe().dropna()
    x, y = (torch.tensor(both[f"{name}{suffix}"].to_numpy()) for name in ("score_sum", "interaction"))
    return float(pearson(x, y)), float(spearman(x, y)), len(both)

"""Every number of every measure is what it was at 0.3.0, on four models and two backends.

What is said to differ stands in `CHANGED`, with the reason; what 0.4 has not, in `GONE`.
"""

from collections.abc import Callable

import numpy as np
import pytest
import xarray as xr
from freeze import GONE as GONE_MEASURES
from freeze import MODELS, OPTIONS, found_now, frozen, frozen_file, machine, model_of
from quick_options import NAMES

from tl_posgen.core.measure import ENDS
from tl_posgen.core.numbers import Numbers
from tl_posgen.position import Substitution

pytestmark = pytest.mark.slow
# of the largest value: rounding of float32 elsewhere, summed by another processor's instructions
HERE, ELSEWHERE = 1e-6, 1e-3
MANY_CONDITIONS = ("substitution", "plane_perturbation", "band_ablation")  # of one model in CI
IN_CI = ("mini_bridge", "stories260K_hooked", "atome_vanilla_1m_bridge")  # `make soak` has the others
CHANGED: dict[tuple[str, str], str] = {  # (measure, variable) -> why its values are others
    ("attention_examples", "pattern"): "the r within rows of the first prompt picks the heads, no longer that of all",
    ("attention_examples", "r_within_rows"): "as pattern",
    ("profiles", "additive_r"): "of what softmax sees, as the headline of variance is",
    ("rules", "rise"): "heads that share a key see the keys of their own rule, no longer each other's too",
}
SHORT = ("cone", "slash_ablation")
GONE = {  # measure -> variables that it no longer has
    # the parts are `three_axis`' b and c; the loss its own measure
    "attention_examples": "key_part query_part loss",
    # told by `Numbers.correlation`, or nothing that the paper asks; `bias_share` says where r1 means nothing
    "cone": "r1_sum axis_share effective_rank effective_rank_plain cosine_spread cosine_share spearman "
    "axis_agreement r1_input",
    # a method tells rho
    "plane_perturbation": "wavelength rho rho_gap rho_positions",
    # what a head's directions are is told by r1; of phases, the means are drawn
    "planes": "mean phase_std relative_phase participation centred_participation rank centred_rank score "
    "planes_met meets",
    # those of `slash_ablation` and `slash`
    "band_ablation": "score_alone best_distance best_uniform",
    # functions of `coupling` give these, or no page and no claim reads them; of paths, the medians are told
    "coupling": "alignment singular_value token_text path triplet_residual growth_slope",
    # over-read one model: see `scatter`
    "profiles": "rho cost joint_cost rank95",
    # no paper and no page asks where it sits: its size and its top direction are told
    "residual": "effective_rank spectrum energy_share energy_ratio abs_residual plane_share rest_share "
    "wavelength pair_token pair_token_text pair_share pair_residual pair_count example_map example_layer "
    "example_head example_share example_token example_token_text",
    # no page and no claim reads them
    "three_axis": "r_per_prompt r_pooled n_distance",
    # of W with its row means, which softmax does not see: `size` without
    "variance": "variance",
    # no page and no claim reads pairs of sources, a prompt of mean tokens, a second size
    "sources": "curve whole_curve pair_share pair_sources of_mean_token energy",
    # heads keep their own keys; recall tells how a rule ranks, and the loss what it costs
    "rules": "plan_recall plan_rise reads group_recall kept mass r2 n_distances",
    # the score at distance 1; rank by r1; the page has every head's patterns
    "slash": "relative_entropy previous_token rank95 pattern token token_text example_layer example_head",
    # told by methods of the measure, from its scores; those of `slash`; the page has every head's patterns
    "slash_transfer": "pearson spearman jaccard n_dominant best_uniform first_token pattern token_text "
    "example_layer example_head",
    # `three_axis` has a; the others are expressions of it and `curve`, or of one prompt, for a picture
    "dummy_distance": "a slope a_slope curve_r table example_head",
    # no paper names them
    "length_extrapolation": "off_axes plane_offset plane_noise",
    # `substitute(residual=, heads=)`: no page and no claim reads them
    "substitution": "dose_loss cost",
    # no page and no claim reads them
    "slash_planes": "predicted_peak score_at_peak same_peak chance_peak",
}


def _perturbed(names: str, dim: str) -> Callable[[xr.Dataset, xr.Dataset], tuple[xr.DataArray, xr.DataArray]]:
    """Return a function to losses under perturbed planes, before and now, whose rises had a dim that names tell now."""

    def losses(before: xr.Dataset, now: xr.Dataset) -> tuple[xr.DataArray, xr.DataArray]:
        rise = before["rise" if dim == "of" else "band_rise"]
        old = (rise + before["loss"]).isel({one: 0 for one in ("edit", "strength") if one in rise.dims}, drop=True)
        conditions = [names.format(label).replace(" of both", "") for label in old[dim].values]
        new = now["loss"].sel(condition=conditions).rename(condition=dim).assign_coords({dim: old[dim].values})
        return old, new

    return losses


def _recovered(name: str, variable: str) -> Callable[[xr.Dataset, xr.Dataset], tuple[xr.DataArray, xr.DataArray]]:
    """Return a function to the shares recovered of a variable with their intervals, stored before, told now."""

    def shares(before: xr.Dataset, now: xr.Dataset) -> tuple[xr.DataArray, xr.DataArray]:
        measure, found = Substitution(), []
        for init in now["init"].values:
            one = now.sel(init=[init]).assign_coords(init=["trained"])
            told = measure.recovered(Numbers(measure, one), variable).values()
            found.append([[one.value, one.low, one.high] for one in told])
        labels = {"init": now["init"], "condition": now["condition"], "end": list(ENDS)}
        now_told = xr.DataArray(found, labels, ("init", "condition", "end"))
        return before[name], now_told

    return shares


def _rank(before: xr.Dataset, now: xr.Dataset) -> tuple[xr.DataArray, xr.DataArray]:
    measure, own = Substitution(), before["rank"].sel(init="trained", drop=True)
    told = [measure.rank(Numbers(measure, now), name).value for name in own["predictor"].values]
    return own, own.copy(data=told)


def _at_distances(name: str, dim: str, words: str) -> Callable[..., tuple[xr.DataArray, xr.DataArray]]:
    """Return a function to losses along a dim of distances, before and now."""

    def losses(before: xr.Dataset, now: xr.Dataset) -> tuple[xr.DataArray, xr.DataArray]:
        names = [words.format(one) for one in before[dim].values]
        new = now["loss"].sel(condition=names).rename(condition=dim).assign_coords({dim: before[dim].values})
        return before[name], new

    return losses


RENAMED: dict[tuple[str, str], Callable[[xr.Dataset, xr.Dataset], tuple[xr.DataArray, xr.DataArray]]] = {
    # (measure, variable) -> function of the frozen and of the new dataset to the two arrays that must be equal
    ("plane_perturbation", "loss"): lambda old, new: (old["loss"], new["loss"].sel(condition="unchanged", cost="edit")),
    ("plane_perturbation", "rise"): _perturbed("shuffle_phases of {}", "of"),
    ("plane_perturbation", "band_rise"): _perturbed("shuffle_phases, {} planes", "band"),
    ("dummy_distance", "loss"): lambda old, new: (old["loss"], new["loss"].sel(condition="unchanged", drop=True)),
    ("dummy_distance", "loss_at"): _at_distances("loss_at", "d0", "at {}"),
    ("dummy_distance", "loss_beyond"): _at_distances("loss_beyond", "limit", "beyond {}"),
    ("substitution", "recovered"): _recovered("recovered", "loss"),
    ("substitution", "kl_recovered"): _recovered("kl_recovered", "kl"),
    ("substitution", "rank"): _rank,
    **{
        (measure, old): lambda before, now, old=old, new=new: (before[old], now[new])
        for measure in ("slash", "slash_planes", "slash_ablation", "slash_transfer", "cone")
        for old, new in (("best_score", "slash_score"), ("best_distance", "slash_distance"))
    },
    ("variance", "additive_r"): lambda old, new: (old["additive_r"], new["additive_r_of_scores"]),
    ("variance", "three_axis_share"): lambda old, new: (
        old["three_axis_share"],
        new["share"].sel(group="all", part=["q", "k", "d"]).sum("part", skipna=False),
    ),
    # "edge", the lift above the diagonals beside the best one, is no question of the paper; bands by wavelength are
    # sums of contributions
    ("slash_planes", "contribution"): lambda old, new: (old["contribution"].drop_sel(at="edge"), new["contribution"]),
    ("slash_planes", "bands"): lambda old, new: (
        old["bands"].drop_sel(at="edge").sel(scheme="thirds", drop=True),
        new["bands"],
    ),
    # products of Jacobians in float32, of weights that lie in another order in memory
    ("coupling", "linearisation"): lambda old, new: (old["linearisation"], new["linearisation"]),
    # sums of float32 in another order, as products leave out the tokens between; in float64 equal to 1e-15
    **{("token_coupling", name): lambda old, new, name=name: (old[name], new[name]) for name in ("coupling", "chance")},
    ("sources", "absolute"): lambda old, new: (
        old["absolute"],
        abs(new["share"]).sum("source", min_count=1),
    ),
    # a fall is 1 - a ratio in float32: its rounding is of the ratio, whatever the largest fall is
    ("sources", "fall"): lambda old, new: (1 - old["fall"], 1 - new["fall"]),
    ("sources", "rho"): lambda old, new: (old["rho"].sel(predictor=new["predictor"].values), new["rho"]),
    ("rules", "recall"): lambda old, new: (old["recall"].isel(budget=0, drop=True), new["recall"]),
    ("rules", "loss"): lambda old, new: (
        old["loss"].isel(budget=0, drop=True),
        new["loss"].sel(condition="unchanged"),
    ),
    # whole curves are those of `slash`; of parts and ablations the scores at the short distances are read
    **{(name, "score"): lambda old, new: (old["score"].sel(distance=new["distance"]), new["score"]) for name in SHORT},
    ("planes", "additive"): lambda old, new: (old["additive"].sel(eps=0.5, drop=True), new["additive"]),
}


def in_ci(model: str, measure: str) -> bool:
    return model in (IN_CI[:1] if measure in MANY_CONDITIONS else IN_CI)


RELABELLED = {  # measure -> dim -> labels then: labels now
    "length_extrapolation": {"condition": {"vanilla": "unchanged"}},
    "attention_examples": {"scores": {"additive": "three-axis fit"}},
}


def relabelled(measure: str, before: xr.Dataset) -> xr.Dataset:
    labels = RELABELLED.get(measure, {})
    now = {
        dim: [of.get(str(one), str(one)) for one in before[dim].values] for dim, of in labels.items() if dim in before
    }
    return before.assign_coords(now)


@pytest.mark.parametrize(
    ("model", "measure"),
    [
        pytest.param(model, measure, marks=() if in_ci(model, measure) else pytest.mark.soak)
        for model in MODELS
        for measure in NAMES
    ],
)
def test_a_measure_finds_its_frozen_numbers(model, measure):
    try:
        model_of(model)
    except FileNotFoundError as absent:
        pytest.skip(str(absent))
    file = frozen(model)
    if measure not in file.children:
        pytest.skip(f"{measure} is younger than the frozen numbers")
    before, now = relabelled(measure, file[measure].to_dataset()), found_now(model, measure)
    assert ("refused" in before.attrs) == ("refused" in now.attrs), now.attrs
    tolerance = HERE if file["prompts"].attrs["machine"] == machine() else ELSEWHERE
    for name, old in before.data_vars.items():
        if (measure, str(name)) in CHANGED or name in GONE.get(measure, "").split():
            continue
        if (measure, str(name)) in RENAMED:
            both = RENAMED[measure, str(name)](before, now)
            if measure == "substitution":  # shares of what is not surely worth .01 nats are not defined any more
                both = both[0].where(both[1].notnull()), both[1]
            # of stored numbers; token_coupling sums in another order, recovered has ends far from its values
            rounded = 20 if measure in ("token_coupling", "substitution") else 1 if name == "fall" else 10
            require_equal(str(name), *both, rounded * tolerance)
            continue
        assert name in now, f"{measure} has no {name}"
        if measure == "substitution" and "init" in old.dims:  # nor null models then run
            old = old.where(now[name].notnull() | (old["init"] == "trained"))
        require_equal(str(name), old, now[name], tolerance)


def require_equal(name: str, old: xr.DataArray, new: xr.DataArray, tolerance: float) -> None:
    """Compare at the labels of the frozen array; a new one may have more."""
    at = {dim: old[dim].values for dim in old.dims if dim in old.coords and dim in new.coords}
    new = new.sel(at).transpose(*old.dims)
    one, other = (np.asarray(array.values, dtype=float) for array in (old, new))
    np.testing.assert_array_equal(np.isnan(one), np.isnan(other), err_msg=name)
    largest = np.nanmax(np.abs(one), initial=0)
    if old.dtype.kind in "iub" and tolerance == ELSEWHERE:  # the largest of almost equal ones may be another
        assert np.mean(one != other) < 0.02, name
        return
    np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * max(largest, 1e-12), err_msg=name)


def test_every_frozen_measure_is_compared():
    assert set(frozen("mini_bridge").children) - {"prompts"} <= {*NAMES, *GONE_MEASURES}


def test_options_are_of_measures_that_exist():
    assert set(OPTIONS) <= set(NAMES)
    assert all(frozen_file(model).exists() for model in MODELS)

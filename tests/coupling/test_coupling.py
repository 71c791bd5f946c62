"""Coupling on a trained model, its null, and tiny random models."""

import json

import numpy as np
import pytest
import torch
from declared import assert_declared
from families import save_family

from tl_posgen.coupling import Coupling, coupling
from tl_posgen.coupling.coupling import HEADLINES, findings
from tl_posgen.coupling.jacobians import residual_jacobians, residual_streams
from tl_posgen.coupling.trajectories import expodistance, line_shape_score
from tl_posgen.errors import InputError
from tl_posgen.models.loading.load import load_model
from tl_posgen.models.loading.random_like import random_like
from tl_posgen.models.loss import prompts_of_one_length
from tl_posgen.result import load
from tl_posgen.summary import jsonable

WHOLE = {"null_seeds": (), "progress": False}
# of the last of 64 tokens: model and random init; line-shape score and expodistance of each
MINI = {
    "coupling": (0.0347, 0.0270),
    "whole": [1.431, 1.203, 2.035, 0.159],
    "without_last": [1.258, 0.944, 1.774, 0.190],
}


@pytest.fixture(scope="module")
def of_stories(stories, tinystories):
    """At the last of the first 64 tokens of TinyStories, beside the null of seed 0."""
    return coupling(stories, tinystories, length=64, n_prompts=1, progress=False)


def test_stories260k_has_the_reference_coupling_beside_its_random_init(of_stories):
    found = of_stories
    assert found.dataset.mean_coupling.item() == pytest.approx(0.058, abs=0.0015)
    assert found.null.mean_coupling.item() == pytest.approx(0.028, abs=0.0015)
    assert found.dataset.mean_chance.item() == pytest.approx(found.null.mean_coupling.item(), abs=0.01)
    assert found.null.attrs["model"] == "random init (seed 0)"


def test_the_mini_model_has_its_coupling_beside_its_random_init(of_mini):
    assert of_mini.dataset.mean_coupling.item() == pytest.approx(MINI["coupling"][0], abs=0.0015)
    assert of_mini.null.mean_coupling.item() == pytest.approx(MINI["coupling"][1], abs=0.0015)
    assert of_mini.dataset.mean_chance.item() == pytest.approx(of_mini.null.mean_coupling.item(), abs=0.01)
    assert of_mini.null.attrs["model"] == "random init (seed 0)"


def paths_of(result, position):
    """Straightness and growth of one token of the model and of its null."""
    names = ("line_shape_score", "expodistance")
    sides = (result.dataset, result.null)
    return [data[name].sel(prompt=0, position=position).item() for data in sides for name in names]


def paths_without_the_last_block(model, text):
    tokens = prompts_of_one_length(model, text, 64, 1)[0]
    streams = [residual_streams(one, tokens)[:-1, -1] for one in (model, random_like(model, 0))]
    return [float(measure(x)) for x in streams for measure in (line_shape_score, expodistance)]


def test_straightness_and_growth_go_to_the_last_block_and_without_it_have_the_reference_values(
    stories, tinystories, of_stories
):
    """The reference values 1.65, .21 and 1.81, .76 leave the last block's output out."""
    assert paths_of(of_stories, 63) == pytest.approx([1.70, 0.20, 2.14, 0.91], abs=0.005)
    assert paths_without_the_last_block(stories, tinystories) == pytest.approx([1.65, 0.21, 1.81, 0.76], abs=0.005)


def test_straightness_and_growth_of_the_mini_model_go_to_the_last_block(mini, alice, of_mini):
    assert paths_of(of_mini, 63) == pytest.approx(MINI["whole"], abs=0.005)
    assert paths_without_the_last_block(mini, alice) == pytest.approx(MINI["without_last"], abs=0.005)


@pytest.mark.slow
def test_a_hooked_model_and_a_bridge_have_the_same_coupling(mini, mini_bridge, alice):
    hooked, bridge = (coupling(one, alice, length=32, n_prompts=1, progress=False) for one in (mini, mini_bridge))
    if hooked.provenance["backend"] != "hooked":
        pytest.skip("this TransformerLens has no HookedTransformer")
    for one, other in ((hooked.dataset, bridge.dataset), (hooked.null, bridge.null)):
        for name in ("coupling", "coupling_swapped", "line_shape_score", "linearisation"):
            np.testing.assert_allclose(one[name], other[name], atol=2e-3, err_msg=name)


def test_a_text_is_cut_into_prompts_and_a_null_is_built_unless_declined(tiny):
    found = coupling(tiny, "once there was a cat " * 20, length=12, n_prompts=2, k=2, progress=False)
    assert found.dataset.sizes["prompt"] == found.null.sizes["prompt"] == 2
    assert found.provenance["null_seeds"] == [0]
    assert found.provenance["options"]["k"] == 2


def test_the_map_is_the_formula_on_dense_jacobians(tiny, prompts):
    found = coupling(tiny, prompts[:1], k=(3,), **WHOLE).dataset.coupling.sel(k=3).values
    first, second = (j.dense() for j in residual_jacobians(tiny, prompts[0], -1))
    u, _, vh = torch.linalg.svd(second)
    values = torch.linalg.svdvals(first)[:3]
    aligned = (u[:, :3].mT @ first @ vh[:3].mT).abs()
    expected = 1 - torch.linalg.matrix_norm(aligned - torch.diag(values)) / values.norm()
    assert found[0, 1] == pytest.approx(expected.item(), abs=1e-5)
    np.testing.assert_allclose(np.diag(found), 1, atol=1e-5)


def test_matrix_free_and_dense_routes_give_the_same_map(tiny, prompts):
    free, dense = (coupling(tiny, prompts[:1], k=(4,), dense_up_to=size, **WHOLE) for size in (0, 64))
    np.testing.assert_allclose(free.dataset.coupling, dense.dataset.coupling, atol=1e-3)
    np.testing.assert_allclose(free.dataset.chance, dense.dataset.chance, atol=1e-5)
    assert free.dataset.triplet_residual.max() < 1e-4


@pytest.mark.parametrize("name", HEADLINES)
def test_every_headline_has_an_interval_that_holds_it(result, name):
    low, mean, high = (result.dataset[f"mean_{name}{end}"] for end in ("_low", "", "_high"))
    assert ((low <= mean) & (mean <= high)).all()


def test_intervals_need_more_than_one_prompt(tiny, prompts, result):
    data = result.dataset
    assert (data.chance_low < data.chance_high).all()
    assert coupling(tiny, prompts[:1], k=(2,), **WHOLE).dataset.mean_coupling_low.isnull().all()


def test_linearisation_is_the_product_of_all_blocks(tiny, prompts, result):
    streams = residual_streams(tiny, prompts[0])
    jacobians = [j.dense() for j in residual_jacobians(tiny, prompts[0], -1)]
    x = streams[0, -1]
    for jacobian in jacobians:
        x = (torch.eye(len(x)) + jacobian) @ x
    expected = torch.nn.functional.cosine_similarity(x, streams[-1, -1], dim=0)
    assert result.dataset.linearisation.sel(prompt=0, token=19).item() == pytest.approx(expected.item(), abs=1e-5)


def test_a_subset_of_layers_is_labelled_with_their_numbers(tiny, prompts):
    found = coupling(tiny, prompts[:1], layers=[1], k=(2,), **WHOLE)
    assert found.dataset.layer.values.tolist() == [1]
    assert "linearisation" not in found.dataset
    assert found.dataset.mean_coupling.isnull().all()
    assert found.kinds == ["trajectories", "growth"]
    assert "coupling over pairs of layers is not defined" in found.findings()[0]
    assert len(found.findings()) == 2  # nothing of a linearisation
    assert "linearisation" not in found.table()


@pytest.mark.slow
def test_a_result_survives_saving_and_draws_every_figure_again(result, tmp_path):
    loaded = load(result.save(tmp_path / "coupling.nc"))["coupling"]
    assert loaded.dataset.equals(result.dataset)
    assert loaded.frame()["k"].tolist() == [2, 5]
    assert loaded.findings() == result.findings()
    assert loaded.kinds == ["map", "chance", "alignment", "spectra", "trajectories", "growth"]
    assert [loaded.plot(kind).to_json() for kind in loaded.kinds] == [
        result.plot(kind).to_json() for kind in result.kinds
    ]


def test_every_variable_is_declared_and_carries_its_label(result):
    assert_declared(result)
    assert result.dataset["mean_trace_low"].attrs["long_name"] == "mean trace, lower end"


def test_the_first_token_is_not_in_the_picture(result):
    data = result.dataset.trajectory
    assert data.sel(position=0).isnull().all()
    assert data.sel(position=slice(1, None)).notnull().all()


def test_the_growth_line_is_fitted_to_the_mean_log_norm(result):
    line, curve = result.dataset.log_norm_line, result.dataset.log_norm
    expected = np.polyval(np.polyfit(curve.state, curve.sel(prompt=0), 1), curve.state)
    np.testing.assert_allclose(line.sel(prompt=0), expected)


def test_the_summary_has_every_k_and_its_coupling_is_the_mean_over_pairs_and_prompts(result):
    for k, key in ((2, "coupling"), (5, "coupling_k5")):
        square = result.dataset.coupling.sel(k=k).values
        assert result.summary[key] == pytest.approx(square[~np.eye(2, dtype=bool)].mean())
    assert json.dumps(jsonable(result.summary), allow_nan=False)


def test_coupling_is_told_with_its_interval_chance_and_the_spread_of_its_nulls(result):
    sentences, own = result.findings(), result.summary
    interval = f"[{own['coupling_k5_low']:.3f}, {own['coupling_k5_high']:.3f}]"
    nulls = [float(null.mean_coupling.sel(k=5)) for null in result.nulls]
    null = f"random init {np.mean(nulls):.3f} ± {np.std(nulls, ddof=1):.3f}"
    assert f"is {own['coupling_k5']:.3f} {interval} ({null})" in sentences[1]
    assert f"random bases with the same spectra reach {own['chance']:.3f}" in sentences[0]
    assert f"cosine of {own['linearisation']:.3f}" in sentences[-1]


def test_without_a_null_the_sentences_say_so(result):
    assert "(no null measured)" in findings(result.summary, None)[0]


def test_the_short_table_has_a_row_a_k_on_both_sides(result):
    for null in (False, True):
        table = result.table(null=null)
        assert table["K"].tolist() == [2, 5]
        assert len(table.columns) == 9
    own = result.summary
    assert result.table()["coupling"][1].startswith(f"{own['coupling_k5']:.3f} [{own['coupling_k5_low']:.3f}, ")


def test_centred_weights_are_refused_with_the_way_to_load(tmp_path, prompts):
    model = load_model(save_family("gpt2", tmp_path), backend="bridge")
    model.enable_compatibility_mode()
    with pytest.raises(InputError, match="center_writing_weights=False"):
        coupling(model, prompts, k=(2,), **WHOLE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": (33,)}, r"k \[33\]: choose from 1 to 32"),
        ({"layers": [0, 7]}, "layer 7 does not exist"),
        ({"tokens": [20]}, r"token \[20\]: choose from -20 to 19"),
        ({"heads": [0]}, "leave heads out"),
    ],
)
def test_bad_choices_are_refused_before_the_model_runs(tiny, prompts, arguments, message):
    with pytest.raises(InputError, match=message):
        coupling(tiny, prompts, **WHOLE, **{"k": (2,), **arguments})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": "10"}, "k = '10'"),
        ({"k": ()}, r"k = \(\)"),
        ({"k": (2, 0)}, r"k = \(2, 0\)"),
        ({"k": 2.5}, "k = 2.5"),
        ({"tokens": "first"}, "tokens = 'first': give one of 'last' or a list"),
        ({"tokens": []}, "give 'last' or a list of positions"),
        ({"tokens": [1.5]}, r"tokens = \[1.5\]: give one of 'last' or a list"),
        ({"chance_samples": 0}, "chance line"),
        ({"chance_samples": None}, "chance_samples = None: give a whole number"),
        ({"dense_up_to": -1}, "dense_up_to = -1"),
    ],
)
def test_bad_options_are_refused_without_a_type_checker_too(options, message, unchecked):
    with pytest.raises(InputError, match=message):
        Coupling(**options)


def test_tokens_are_coloured_by_the_straightness_and_growth_of_their_paths(result):
    straightness, growth = result.measure.tokens.labels(result.dataset)
    assert straightness.startswith("line-shape score by token")
    assert growth.startswith("growth a layer by token")
    assert result.dataset["token_text"].dims == ("prompt", "position")
    for example, name in enumerate(("line_shape_score", "growth_slope")):
        numbers = result.dataset[name].values[0]
        assert f"{float(numbers[3] - np.median(numbers)):.4f}".rstrip("0") in result.show(example).local_src

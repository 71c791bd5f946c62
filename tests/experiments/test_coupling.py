"""The coupling experiment on a trained model, its null, and tiny random models."""

import numpy as np
import pytest
import torch
from families import VOCAB, save_family

from tl_posgen.errors import InputError
from tl_posgen.experiments.coupling import HEADLINES, coupling, headline
from tl_posgen.experiments.loss import prompts_of_one_length
from tl_posgen.maths.trajectories import expodistance, line_shape_score
from tl_posgen.models.jacobians import residual_jacobians, residual_streams
from tl_posgen.models.load import load_model
from tl_posgen.models.random_like import random_like
from tl_posgen.models.tokens import bundled_text, read_text
from tl_posgen.results import load

WHOLE = {"length": None, "n_prompts": None, "null_seed": None, "progress": False}


@pytest.fixture(scope="module")
def stories(shared):
    """(model, coupling at the last of the first 64 tokens of TinyStories, beside the null of seed 0)."""
    model = load_model(shared / "models" / "stories260K", backend="bridge")
    text = read_text(shared / "text" / "tinystories.txt")
    return model, coupling(model, text, length=64, n_prompts=1, progress=False)


def require_hooked():
    try:
        from transformer_lens import HookedTransformer  # noqa: F401
    except ImportError:
        pytest.skip("this TransformerLens has no HookedTransformer")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return load_model(save_family("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def prompts():
    return torch.randint(2, VOCAB, (3, 20), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def result(tiny, prompts):
    return coupling(tiny, prompts, k=(2, 5), tokens=[4, -1], token_wise=True, **WHOLE)


def test_stories260k_has_the_reference_coupling_beside_its_random_init(stories):
    _, found = stories
    assert found.dataset.mean_coupling.item() == pytest.approx(0.058, abs=0.0015)
    assert found.null.mean_coupling.item() == pytest.approx(0.028, abs=0.0015)
    assert found.dataset.mean_chance.item() == pytest.approx(found.null.mean_coupling.item(), abs=0.01)
    assert found.null.attrs["model"] == "random init (seed 0)"


def test_straightness_and_growth_go_to_the_last_block_and_without_it_have_the_reference_values(stories, shared):
    """The reference values 1.65, .21 and 1.81, .76 leave the last block's output out."""
    model, found = stories
    names = ("line_shape_score", "expodistance")
    whole = [data[name].sel(prompt=0, position=63).item() for data in (found.dataset, found.null) for name in names]
    assert whole == pytest.approx([1.70, 0.20, 2.14, 0.91], abs=0.005)
    tokens = prompts_of_one_length(model, read_text(shared / "text" / "tinystories.txt"), 64, 1)[0]
    trained, random = (residual_streams(m, tokens)[:-1, -1] for m in (model, random_like(model, 0)))
    measured = [float(m(x)) for x in (trained, random) for m in (line_shape_score, expodistance)]
    assert measured == pytest.approx([1.65, 0.21, 1.81, 0.76], abs=0.005)


def test_a_hooked_model_and_a_bridge_have_the_same_coupling():
    require_hooked()
    hooked, bridge = (
        coupling(load_model("mini", backend=backend), bundled_text(), length=32, n_prompts=1, progress=False)
        for backend in ("hooked", "bridge")
    )
    for one, other in ((hooked.dataset, bridge.dataset), (hooked.null, bridge.null)):
        for name in ("coupling", "coupling_swapped", "line_shape_score", "linearisation"):
            np.testing.assert_allclose(one[name], other[name], atol=2e-3, err_msg=name)


def test_a_text_is_cut_into_prompts_and_a_null_is_built_unless_declined(tiny):
    found = coupling(tiny, "once there was a cat " * 20, length=12, n_prompts=2, k=[2], progress=False)
    assert found.dataset.sizes["prompt"] == found.null.sizes["prompt"] == 2
    assert found.provenance["null_seed"] == 0


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


def test_intervals_need_two_prompts(tiny, prompts, result):
    data = result.dataset
    assert (data.chance_low < data.chance_high).all()
    assert coupling(tiny, prompts[:1], k=(2,), **WHOLE).dataset.mean_coupling_low.isnull().all()


def test_tokens_are_coupled_in_three_ways_and_agree_where_the_pairs_coincide(result):
    found = result.dataset.token_coupling
    assert list(found.kind.values) == ["self", "same_input", "same_output"]
    for kind in found.kind.values:
        np.testing.assert_allclose(np.diagonal(found.sel(kind=kind), axis1=2, axis2=3), 1, atol=1e-4)
    assert (found.sel(token=4, token_2=19) < 0.9).all()


def test_linearisation_is_the_product_of_all_blocks(tiny, prompts, result):
    streams = residual_streams(tiny, prompts[0])
    jacobians = [j.dense() for j in residual_jacobians(tiny, prompts[0], -1)]
    x = streams[0, -1]
    for jacobian in jacobians:
        x = (torch.eye(len(x)) + jacobian) @ x
    expected = torch.nn.functional.cosine_similarity(x, streams[-1, -1], dim=0)
    assert result.dataset.linearisation.sel(prompt=0, token=19).item() == pytest.approx(expected.item(), abs=1e-5)


def test_a_subset_of_layers_is_labelled_with_their_numbers(tiny, prompts):
    data = coupling(tiny, prompts[:1], layers=[1], k=(2,), **WHOLE).dataset
    assert data.layer.values.tolist() == [1]
    assert "linearisation" not in data
    assert data.mean_coupling.isnull().all()


def test_a_result_survives_saving(result, tmp_path):
    loaded = load(result.save(tmp_path / "coupling.nc"))["coupling"]
    assert loaded.dataset.equals(result.dataset)
    assert loaded.frame()["k"].tolist() == [2, 5]


def test_the_first_token_is_not_in_the_picture(result):
    data = result.dataset.trajectory
    assert data.sel(position=0).isnull().all()
    assert data.sel(position=slice(1, None)).notnull().all()


def test_the_growth_line_is_fitted_to_the_mean_log_norm(result):
    line, curve = result.dataset.log_norm_line, result.dataset.log_norm
    expected = np.polyval(np.polyfit(curve.state, curve.sel(prompt=0), 1), curve.state)
    np.testing.assert_allclose(line.sel(prompt=0), expected)


def test_the_headline_is_the_mean_over_pairs_and_prompts(result):
    square = result.dataset.coupling.sel(k=5).values
    assert headline(result.dataset, 5)["coupling"] == pytest.approx(square[~np.eye(2, dtype=bool)].mean())


def test_centred_weights_are_refused_with_the_way_to_load(tmp_path, prompts):
    model = load_model(save_family("gpt2", tmp_path), backend="bridge")
    model.enable_compatibility_mode()
    with pytest.raises(InputError, match="center_writing_weights=False"):
        coupling(model, prompts, k=(2,), **WHOLE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": (33,)}, r"k \[33\]: choose from 1 to 32"),
        ({"layers": [0, 7]}, r"layer \[7\]: choose from 0 to 1"),
        ({"tokens": [20]}, r"token \[20\]: choose from -20 to 19"),
        ({"tokens": [3], "token_wise": True}, "two positions or more"),
        ({"chance_samples": 0}, "chance line"),
    ],
)
def test_bad_choices_are_refused_before_the_model_runs(tiny, prompts, arguments, message):
    with pytest.raises(InputError, match=message):
        coupling(tiny, prompts, **WHOLE, **{"k": (2,), **arguments})

"""Coupling between tokens: where the three ways coincide, the formula by hand, sentences, pictures, refusals."""

import json

import numpy as np
import pytest
import torch
from declared import assert_declared

from tl_posgen.coupling import TokenCoupling, token_coupling
from tl_posgen.coupling.jacobians import residual_jacobians
from tl_posgen.coupling.token_coupling import KINDS
from tl_posgen.errors import InputError
from tl_posgen.result import load
from tl_posgen.summary import jsonable


@pytest.fixture(scope="module")
def result(tiny, prompts):
    return token_coupling(tiny, prompts, k=(2, 5), tokens=[4, 12, -1], null_seeds=(0, 1), progress=False)


def test_a_jacobian_is_coupled_with_itself_and_hardly_with_others(result):
    found = result.dataset.coupling
    assert list(found.kind.values) == list(KINDS)
    assert found.token.values.tolist() == [4, 12, 19]
    np.testing.assert_allclose(np.diagonal(found.transpose(..., "token", "token_2"), axis1=-2, axis2=-1), 1, atol=1e-4)
    assert (found.sel(token=4, token_2=19) < 0.9).all()


@pytest.mark.parametrize(
    ("kind", "ends"),
    [("self", [(4, 4), (19, 19)]), ("same_input", [(4, 4), (4, 19)]), ("same_output", [(4, 19), (19, 19)])],
)
def test_each_kind_is_the_formula_on_dense_jacobians(tiny, prompts, kind, ends):
    found = token_coupling(tiny, prompts[:1], k=3, tokens=[4, 19], null_seeds=(), progress=False).dataset.coupling
    first, second = (residual_jacobians(tiny, prompts[0], *pair)[1].dense() for pair in ends)
    u, _, vh = torch.linalg.svd(second)
    values = torch.linalg.svdvals(first)[:3]
    aligned = (u[:, :3].mT @ first @ vh[:3].mT).abs()
    expected = 1 - torch.linalg.matrix_norm(aligned - torch.diag(values)) / values.norm()
    assert found.sel(kind=kind, k=3, layer=1, token=4, token_2=19).item() == pytest.approx(expected.item(), abs=1e-4)


def test_the_summary_is_the_mean_over_layers_and_different_tokens(result):
    apart = ~np.eye(3, dtype=bool)
    for kind in KINDS:
        square = result.dataset.coupling.sel(kind=kind, k=5).transpose("layer", "token", "token_2").values
        assert result.summary[f"{kind}_k5"] == pytest.approx(square[:, apart].mean())
        assert result.summary[f"{kind}_k5_low"] <= result.summary[f"{kind}_k5"] <= result.summary[f"{kind}_k5_high"]
    assert json.dumps(jsonable(result.summary), allow_nan=False)


def test_sentences_stand_beside_chance_and_null(result):
    sentences, own = result.findings(), result.summary
    assert len(sentences) == len(result.table()) == 2
    assert f"self {own['self']:.3f} [" in sentences[0]
    assert f"random bases {own['same_input_chance_k5']:.3f}" in sentences[1]
    assert sentences[0].count("random init") == 3


def test_every_variable_is_declared(result):
    assert_declared(result)


@pytest.mark.slow
def test_it_comes_back_from_disk_and_draws_the_same(result, tmp_path):
    loaded = load(result.save(tmp_path / "tokens.nc"))["token_coupling"]
    assert loaded.findings() == result.findings()
    for kind in KINDS:
        assert loaded.plot(kind).to_json() == result.plot(kind).to_json()


@pytest.mark.parametrize("kind", KINDS)
def test_pictures_have_a_map_a_layer_side_and_k(result, kind):
    maps = result.plot(kind=kind).data
    assert len(maps) == 2 * 2 * 2
    expected = result.null.coupling.sel(kind=kind, k=2, layer=0).values
    apart = ~np.eye(3, dtype=bool)
    np.testing.assert_array_equal(maps[2].z[apart], expected[apart])


def test_three_tokens_are_evenly_spread():
    assert TokenCoupling().places(48) == [15, 31, 47]
    assert TokenCoupling().places(2) == [0, 1]


def test_one_token_couples_with_none(tiny, prompts):
    with pytest.raises(InputError, match="two positions at least"):
        TokenCoupling(tokens=[3])
    with pytest.raises(InputError, match="two different positions"):
        token_coupling(tiny, prompts, k=2, tokens=[-1, 19], null_seeds=(), progress=False)
    with pytest.raises(InputError, match="leave heads out"):
        token_coupling(tiny, prompts, k=2, heads=[0], null_seeds=(), progress=False)


def test_tokens_outside_a_window_have_no_jacobian_and_are_left_out(family_model):
    model = family_model("mistral")
    tokens = torch.arange(2, 26)[None]
    found = token_coupling(model, tokens, k=2, tokens=[3, 12, 23], null_seeds=(), progress=False)
    far = found.dataset.coupling.sel(kind="same_input", k=2)
    assert far.sel(token=3, token_2=12).isnull().all()
    assert far.sel(token=12, token_2=3).isnull().all()
    assert found.dataset.coupling.sel(kind="self").notnull().all()
    assert found.findings()[-1].startswith(f"In {found.summary['unknown_layers']} layers some of the tokens")


def test_the_frame_has_a_row_a_kind_and_k(result):
    frame = result.frame()
    assert len(frame) == len(KINDS) * 2
    assert {"kind", "k", "mean_coupling", "mean_chance"} <= set(frame.columns)

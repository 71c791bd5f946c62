"""Coupling between tokens: the formula by hand in all three ways, sentences, pictures, refusals."""

import numpy as np
import pytest
import torch

from tl_posgen.coupling import TokenCoupling
from tl_posgen.coupling.jacobians import residual_jacobians
from tl_posgen.coupling.token_coupling import KINDS

pytestmark = pytest.mark.longer

APART = ~np.eye(3, dtype=bool)


@pytest.fixture(scope="module")
def result(llama, prompts):
    return TokenCoupling(k=(2, 5), tokens=[4, 12, -1])(llama, prompts, nulls=2, progress=False)


@pytest.mark.parametrize(
    ("kind", "ends"),
    [("self", [(4, 4), (19, 19)]), ("same_input", [(4, 4), (4, 19)]), ("same_output", [(4, 19), (19, 19)])],
)
def test_each_kind_is_the_formula_on_dense_jacobians(llama, prompts, kind, ends):
    found = TokenCoupling(k=3, tokens=[4, 19])(llama, prompts[:1], nulls=0, progress=False).trained["coupling"]
    first, second = (residual_jacobians(llama, prompts[0], *pair)[1].dense() for pair in ends)
    u, _, vh = torch.linalg.svd(second)
    values = torch.linalg.svdvals(first)[:3]
    aligned = (u[:, :3].mT @ first @ vh[:3].mT).abs()
    expected = 1 - torch.linalg.matrix_norm(aligned - torch.diag(values)) / values.norm()
    assert found.sel(kind=kind, k=3, layer=1, token=4, token_2=19).item() == pytest.approx(expected.item(), abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_is_the_mean_over_layers_and_different_tokens(result, kind):
    assert result.trained.token.values.tolist() == [4, 12, 19]
    square = result.trained["coupling"].sel(kind=kind, k=5).transpose("prompt", "layer", "token", "token_2").values
    assert np.isnan(square[..., ~APART]).all()
    number = result.numbers("coupling", kind=kind, k=5)
    assert number.value == pytest.approx(square[..., APART].mean())
    assert number.low <= number.value <= number.high
    assert (square[..., 0, 2].mean(0) < 0.9).all()  # different tokens hardly couple


def test_tokens_outside_a_window_have_no_jacobian_and_are_left_out(family_model):
    tokens = torch.arange(2, 26)[None]
    asked = TokenCoupling(k=2, tokens=[3, 12, 23])
    found = asked(family_model("mistral"), tokens, nulls=0, progress=False)
    far, near = (found.trained["coupling"].sel(kind=kind, k=2) for kind in ("same_input", "self"))
    assert far.sel(token=3, token_2=12).isnull().all()
    assert far.sel(token=12, token_2=3).isnull().all()
    assert near.where(near["token"] != near["token_2"], 0).notnull().all()
    assert found.findings()[-1].startswith(f"In {near.sizes['layer']} layers some tokens get no attention")

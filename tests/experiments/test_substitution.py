"""Substituted scores: the reference values of a real model, and the search's honesty."""

import numpy as np
import pytest
import torch

from tl_posgen import load, load_model
from tl_posgen.errors import InputError
from tl_posgen.experiments.substitution import substitution
from tl_posgen.models.tokens import bundled_text

REFERENCE = {
    "base": 1.754,
    "uniform": 4.193,
    "three_axis": 4.186,
    "mean_key_0": 1.962,
    "mean_key_64": 3.268,
    "mean_key_1000": 4.442,
    "triangle_8": 1.870,
    "triangle_256": 4.203,
    "own_profile": 2.117,
    "position": 2.570,
}


@pytest.fixture(scope="module")
def mini():
    return load_model("mini")


@pytest.fixture(scope="module")
def result(mini):
    options = {"length": 24, "n_prompts": 4, "dummy_distances": (0,), "widths": (4,), "search_steps": 2}
    return substitution(mini, bundled_text(), **options, progress=False)


def test_stories260k_has_the_reference_losses(shared):
    model = load_model(shared / "models" / "stories260K")
    text = (shared / "text" / "tinystories.txt").read_text()
    tokens = torch.tensor(model.tokenizer(text[:8000]).input_ids[:1024]).view(4, 256)
    found = substitution(
        model, tokens, length=None, n_prompts=None, search=False, head_costs=False, null_seed=None, progress=False
    ).dataset
    for arm, loss in REFERENCE.items():
        assert float(found.loss_mean.sel(arm=arm)) == pytest.approx(loss, abs=0.01), arm
    assert float(found.loss_mean.sel(arm="meaning")) > 4.2
    assert float(found.recovered.sel(arm="triangle_8")) == pytest.approx(0.95, abs=0.005)
    assert float(found.r.sel(arm="three_axis").mean()) > 0.85  # a good correlation, and yet:
    assert float(found.recovered.sel(arm="three_axis")) < 0.01


def test_shares_run_from_uniform_to_base(result):
    recovered = result.dataset.recovered
    assert float(recovered.sel(arm="base")) == 1
    assert float(recovered.sel(arm="uniform")) == 0


def test_the_untouched_model_has_no_attention_error(result):
    untouched = result.dataset.sel(arm="base")
    np.testing.assert_allclose(untouched.attention_kl, 0, atol=1e-9)
    np.testing.assert_allclose(untouched.r, 1)


def test_wider_scopes_fit_the_prompts_they_were_chosen_on_at_least_as_well(result):
    triangle = result.dataset.search_loss_chosen_on.sel(family="triangle").values
    assert triangle[0] >= triangle[1] >= triangle[2]


def test_laws_are_distributions(result):
    np.testing.assert_allclose(result.dataset.law.sum("law_distance"), 1)


def test_the_null_is_another_model(result):
    assert result.null is not None
    assert abs(float(result.null.loss_mean.sel(arm="base")) - float(result.dataset.loss_mean.sel(arm="base"))) > 0.5


def test_every_head_has_its_costs(result, mini):
    assert result.dataset.residual_cost.shape == (mini.cfg.n_layers, mini.cfg.n_heads)
    assert result.dataset.uniform_cost.notnull().all()


def test_it_can_be_drawn_saved_and_tabulated(result, tmp_path):
    for kind in ("loss", "correlation", "search", "laws", "heads"):
        assert "mini" in result.plot(kind=kind).layout.title.text
    assert {"arm", "loss_mean", "recovered"} <= set(result.frame().columns)
    assert load(result.save(tmp_path / "r.nc"))["substitution"].dataset.identical(result.dataset)


@pytest.mark.parametrize("wrong", [{"gamma": 2}, {"from_layer": 9}, {"widths": ()}, {"n_prompts": 1}, {"length": 9999}])
def test_bad_input_is_refused(mini, wrong):
    with pytest.raises(InputError):
        substitution(mini, bundled_text(), **{"length": 24, "n_prompts": 2, **wrong}, progress=False)

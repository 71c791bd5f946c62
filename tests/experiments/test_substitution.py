"""Substituted scores: the reference values of a real model, and the search's honesty."""

import numpy as np
import pytest
import torch

from tl_posgen import load, load_model
from tl_posgen.errors import InputError
from tl_posgen.experiments.law_search import free_splits
from tl_posgen.experiments.loss import prompts_of_one_length, token_losses
from tl_posgen.experiments.substitution import substitution, two_sets
from tl_posgen.interventions.substitution import by_free_split, by_split, substitute
from tl_posgen.maths.splits import triangle
from tl_posgen.models.tokens import bundled_text
from tl_posgen.report.words import substitution as substitution_words
from tl_posgen.views.substitution import drawable

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
    "query_profile": 1.793,
    "position": 2.570,
}


@pytest.fixture(scope="module")
def mini():
    return load_model("mini")


@pytest.fixture(scope="module")
def result(mini):
    options = {"length": 24, "n_prompts": 4, "dummy_distances": (0,), "widths": (4,)}
    return substitution(mini, bundled_text(), **options, search_steps=3, search_prompts=4, progress=False)


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


def test_descent_lowers_the_loss_it_descends_on(result):
    chosen_on = result.dataset.search_loss_chosen_on
    assert float(chosen_on.sel(family="law")) < float(chosen_on.sel(family="triangle"))
    assert float(chosen_on.sel(family="free")) < float(chosen_on.sel(family="triangle"))


def test_imitation_lowers_the_divergence_of_the_predictions(result):
    divergence = result.dataset.search_prediction_kl
    assert float(divergence.sel(family="imitating")) < float(divergence.sel(family="triangle"))


def test_no_prompt_is_both_searched_and_reported_on(mini):
    rows = prompts_of_one_length(mini, bundled_text(), 24, 5)
    reported, others = two_sets(mini, rows, None, 2, 32)
    assert torch.equal(reported, rows[:2])
    assert torch.equal(others, rows[2:])
    everything, none = two_sets(mini, rows, None, None, 32)
    assert torch.equal(everything, rows)
    assert none is None  # then `substitution` keeps one half to report on


def test_a_short_text_is_searched_on_one_half(mini):
    rows = prompts_of_one_length(mini, bundled_text(), 24, 4)
    options = {"search_steps": 0, "head_costs": False, "null_seed": None, "progress": False}
    found = substitution(mini, rows, length=None, n_prompts=None, **options)
    assert (found.dataset.attrs["held_out_prompts"], found.dataset.attrs["search_prompts"]) == (2, 2)


def test_the_free_split_of_a_triangle_is_that_triangles(mini):
    tokens = prompts_of_one_length(mini, bundled_text(), 24, 2)
    free = token_losses(mini, tokens, substitute(mini, by_free_split(free_splits(mini, 5.0))))
    fixed = token_losses(mini, tokens, substitute(mini, by_split(triangle(5))))
    torch.testing.assert_close(free, fixed, atol=1e-5, rtol=1e-5)


def test_the_law_is_a_distribution_per_head(result):
    np.testing.assert_allclose(result.dataset.law.sum("law_distance"), 1)


def test_doses_run_from_the_stand_in_to_the_untouched_model(result, mini):
    dose, loss = result.dataset.dose_loss.sel(stand_in="triangle_4"), result.dataset.loss_mean
    assert float(dose.sel(residual_share=0)) == float(loss.sel(arm="triangle_4"))
    assert float(dose.sel(residual_share=1)) == float(loss.sel(arm="base"))
    half = substitute(mini, by_split(triangle(4)), residual=0.5)
    tokens = prompts_of_one_length(mini, bundled_text(), 24, 4)
    assert float(dose.sel(residual_share=0.5)) == pytest.approx(float(token_losses(mini, tokens, half).mean()))


def test_the_interval_holds_the_share(result):
    data = result.dataset
    assert (data.recovered_low <= data.recovered).all()
    assert (data.recovered <= data.recovered_high).all()


def test_the_authors_settings_leave_early_layers_and_high_scores_alone(mini, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": mini.cfg.d_vocab, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=6, initializer_range=0.3)).save_pretrained(tmp_path)
    mini.tokenizer.save_pretrained(tmp_path)
    deep = load_model(tmp_path)
    tokens = torch.arange(24).view(2, 12) + 1
    options = {"gamma": 0.97, "from_layer": 4, "dummy_distances": (1000,), "head_costs": False}
    found = substitution(deep, tokens, length=None, n_prompts=None, search=False, progress=False, **options)
    r = found.dataset.r.sel(arm="mean_key_1000")
    assert r.isel(layer=slice(4)).isnull().all()
    assert r.isel(layer=slice(4, None)).notnull().all()
    everything = substitution(
        deep, tokens, length=None, n_prompts=None, search=False, progress=False, **(options | {"gamma": 1.0})
    )
    kl = [float(x.dataset.attention_kl.sel(arm="mean_key_1000").mean()) for x in (found, everything)]
    assert 0 < kl[0] < kl[1]
    assert found.null is not None


def test_the_null_is_another_model(result):
    assert result.null is not None
    assert abs(float(result.null.loss_mean.sel(arm="base")) - float(result.dataset.loss_mean.sel(arm="base"))) > 0.5


def test_every_head_has_its_costs(result, mini):
    assert result.dataset.residual_cost.shape == (mini.cfg.n_layers, mini.cfg.n_heads)
    assert result.dataset.uniform_cost.notnull().all()


def test_it_can_be_drawn_saved_and_tabulated(result, tmp_path):
    for kind in drawable(result.dataset):
        assert "mini" in result.plot(kind=kind).layout.title.text
    assert {"arm", "loss_mean", "recovered"} <= set(result.frame().columns)
    assert load(result.save(tmp_path / "r.nc"))["substitution"].dataset.identical(result.dataset)


def test_the_words_say_what_a_correlation_would_have_made_one_believe(result):
    said = " ".join(substitution_words.found(result))
    data = result.dataset
    assert f"r = {float(data.r.sel(arm='three_axis').mean()):.3f}" in said
    assert f"{float(data.recovered.sel(arm='three_axis')):.1%} of the loss" in said
    assert f"{float(data.search_recovered.sel(family='free')):.1%}" in said
    assert "random init" in said


def test_the_table_ends_with_the_searched_splits(result):
    table = substitution_words.table(result.dataset)
    assert table["arm"].iloc[-1] == "searched: meaning"
    assert table.set_index("arm")["loss"]["base"] == float(result.dataset.loss_mean.sel(arm="base"))


@pytest.mark.parametrize("wrong", [{"gamma": 2}, {"from_layer": 9}, {"widths": ()}, {"length": 9999}])
def test_bad_input_is_refused(mini, wrong):
    with pytest.raises(InputError):
        substitution(mini, bundled_text(), **{"length": 24, "n_prompts": 2, **wrong}, progress=False)


def test_a_search_needs_two_prompts(mini):
    with pytest.raises(InputError, match="two"):
        substitution(mini, torch.arange(24)[None], length=None, n_prompts=1, progress=False)

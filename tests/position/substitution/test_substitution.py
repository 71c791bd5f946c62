"""Substituted scores: the reference values of real models, and shares recovered."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from made_up import dataset_of, result_of

from tl_posgen.errors import InputError
from tl_posgen.hooks import authors_split, by_split, point_mass, substitute, triangle
from tl_posgen.models.loading.random_init import random_like
from tl_posgen.models.loss import token_losses
from tl_posgen.models.tokens import prompts_of_one_length
from tl_posgen.position.decomposition.numbers.three_axis_fit import LONGEST
from tl_posgen.position.substitution import Substitution

pytestmark = pytest.mark.slow

QUIET = {"progress": False, "nulls": 0}
STORIES = {
    **{"unchanged": 1.754, "uniform_attention": 4.193, "three_axis": 4.186, "mean_key_64": 3.268},
    **{"three_axis_near_8": 2.585, "three_axis_attention": 3.170, "mean_query_8": 2.479, "k_q_simplify": 4.358},
    **{"triangle_8": 1.870, "own_profile": 2.117, "query_profile": 1.793, "position": 2.570},
}
REFERENCES = ["unchanged", "uniform_attention"]
FEW = {"widths": (4,), "dummy_distances": (0,)}


@pytest.fixture(scope="session")
def result(mini, alice):
    return Substitution(**FEW)(mini, alice, length=24, n_prompts=4, nulls=2, progress=False)


def test_stories260k_has_the_reference_losses(stories, tinystories):
    tokens = torch.tensor(stories.tokenizer(tinystories[:8000]).input_ids[:1024]).view(4, 256)
    numbers = Substitution(widths=(8,), dummy_distances=(64,))(stories, tokens, **QUIET).numbers
    for condition, loss in STORIES.items():
        assert numbers("loss", condition=condition).value == pytest.approx(loss, abs=0.01), condition
    assert numbers("loss", condition="content").value > 4.2
    share = numbers.measure.recovered(numbers)
    assert share["triangle_8"].value == pytest.approx(0.95, abs=0.005)
    assert numbers("r", condition="three_axis").value > 0.85  # a good correlation, and yet:
    assert share["three_axis"].value < 0.01
    assert share["three_axis_near_8"].value > 0.6  # the same form, other weights


def test_shares_run_from_uniform_to_unchanged(result):
    shares, unchanged = result.measure.recovered(result.numbers), result.trained.sel(condition="unchanged")
    for name, expected in (("unchanged", 1), ("uniform_attention", 0)):  # the interval has no width
        assert [shares[name].value, shares[name].low, shares[name].high] == [expected] * 3
    assert all(one.low <= one.value <= one.high <= max(one.value, 1) for one in shares.values())
    np.testing.assert_allclose(unchanged["attention_kl"], 0, atol=1e-9)
    np.testing.assert_allclose(unchanged["r"], 1)
    table = result.table()
    assert dict(zip(table["condition"], table["recovered"], strict=True)) == {
        name: one.value for name, one in shares.items()
    }


def test_where_attention_is_worth_nothing_there_is_no_share(result):
    random_init = result.dataset.sel(init=["0"]).assign_coords(init=["trained"])
    found = replace(result, dataset=random_init)
    (sentence,) = found.findings()
    assert sentence.endswith("] nats, not surely more than nothing: shares of it are not defined.")
    assert found.table()[["recovered", "recovered_low", "recovered_high"]].isna().all(axis=None)
    assert set(found.plot("recovered").data[0].text) == {""}
    assert "nan" not in found.plot("correlation").layout.title.text


def shares(losses, unchanged, uniform):
    """`recovered` of rows of losses by prompt: value, low and high."""
    names = [*REFERENCES, *map(str, range(len(losses)))]
    of_prompts = {"loss": (("condition", "prompt"), [unchanged, uniform, *losses])}
    numbers = result_of(Substitution(), dataset_of(of_prompts, condition=names, prompt=range(len(unchanged)))).numbers
    return [[one.value, one.low, one.high] for one in [*numbers.measure.recovered(numbers).values()][2:]]


@pytest.mark.parametrize("worth", [0.0, 0.009, -0.5])
@pytest.mark.parametrize("n", [2, 5])
def test_a_share_of_nothing_is_no_number(worth, n):
    losses, unchanged = np.ones((3, n)), np.ones(n)
    assert np.isnan(shares(losses, unchanged, unchanged + worth)).all()
    np.testing.assert_allclose(np.array(shares(losses, unchanged, unchanged + 0.011))[:, 0], 1)


def test_a_share_of_what_may_be_nothing_is_no_number():
    unchanged = np.ones(4)
    for spread, is_defined in ((0.5, True), (2.5, False)):  # .0138 +- .04 nats gave a share of 1.36
        uniform = unchanged + 0.0138 * (1 + spread * np.array([-1, 1, -1, 1]))
        if is_defined:
            uniform = uniform + 0.1
        assert np.isfinite(shares(np.ones((1, 4)) - 0.005, unchanged, uniform)).all() == is_defined


def test_what_is_so_by_definition_has_no_width_and_a_mixture_has_its_own():
    unchanged, uniform = np.array([1.0, 2.0, 4.0, 2.5]), np.array([3.0, 3.5, 4.5, 4.0])
    mixed = [share * unchanged + (1 - share) * uniform for share in (1.0, 0.0, 0.25)]
    np.testing.assert_allclose(shares(mixed, unchanged, uniform), np.tile([[1], [0], [0.25]], 3), atol=1e-12)
    [(value, low, high)] = shares([[1.0, 3.0, 4.1, 2.6]], unchanged, uniform)
    assert low < value < high
    [one_pays] = shares(np.ones((1, 4)), np.full(4, 2.0), [2.08, 2, 2, 2])
    assert np.isnan(one_pays).all()


def test_the_fit_by_attention_is_left_out_of_long_prompts():
    conditions = [list(Substitution().stand_ins(length)) for length in (LONGEST, LONGEST + 1)]
    assert [name for name in conditions[0] if name not in conditions[1]] == ["three_axis_attention"]


def test_one_prompt_is_enough(mini):
    found = Substitution(**FEW)(mini, torch.arange(16)[None] + 300, **QUIET)
    assert found.table()[["recovered_low", "recovered_high"]].isna().all(axis=None)
    assert found.table()["recovered"].notnull().all()
    assert len(found.findings()) == 3


def test_the_authors_settings_leave_early_layers_and_high_scores_alone(mini, alice):
    options = {**FEW, "dummy_distances": (1000,), "from_layer": 2}
    cut = {"length": 16, "n_prompts": 2, **QUIET}
    found = [Substitution(**options, gamma=gamma)(mini, alice, **cut).trained for gamma in (0.97, 1)]
    some, every = (one.sel(condition="mean_key_1000") for one in found)
    assert some["r"].sel(layer=[0, 1]).isnull().all()
    assert some["r"].sel(layer=[2, 3]).notnull().all()
    assert 0 < some["attention_kl"].mean() < every["attention_kl"].mean()


def test_the_authors_split_is_that_of_the_mean_key_with_their_settings(mini, stories):
    tokens = torch.arange(3, 27)[None]
    by, how = by_split(point_mass(1000)), {"gamma": 0.97, "threshold": "layer", "layers": [4]}
    found = token_losses(stories, tokens, authors_split(stories))
    assert torch.equal(found, token_losses(stories, tokens, substitute(stories, by, **how)))
    assert not torch.equal(found, token_losses(stories, tokens))
    with pytest.raises(InputError, match="from_layer 4 leaves no layer"):
        authors_split(mini)


def test_chosen_heads_are_replaced_alone(mini, alice):
    chosen, cut = [(1, 0), (1, 3), (2, 2)], {"length": 16, "n_prompts": 2}
    data = Substitution(**FEW, from_layer=1)(mini, alice, heads=chosen, **cut, **QUIET).trained
    known = data.r.sel(condition="triangle_4").transpose("layer", "head").notnull().values
    assert np.argwhere(known).tolist() == [list(x) for x in chosen]
    hooks = substitute(mini, by_split(triangle(4)), heads=[(1, 0), (1, 3)])
    hooks += substitute(mini, by_split(triangle(4)), heads=(2, 2))
    losses = token_losses(mini, prompts_of_one_length(mini, alice, 16, 2), hooks).mean(1)
    np.testing.assert_allclose(data.loss.sel(condition="triangle_4"), losses, rtol=1e-6)


@pytest.mark.parametrize(("name", "encoding"), [("gpt2", "absolute"), ("bloom", "alibi")])
def test_what_holds_by_construction_without_rope_is_said_and_nothing_else(family_model, name, encoding):
    model = family_model(name, "bridge")
    tokens = torch.randint(0, model.cfg.d_vocab, (2, 12), generator=torch.Generator().manual_seed(0))
    found = Substitution(widths=(4,), dummy_distances=(2,))(model, tokens, **QUIET)
    assert found.provenance["encoding"] == encoding
    loss = found.trained["loss"].mean("prompt")
    for split in ("mean_key_2", "triangle_4", "own_profile", "query_profile"):
        assert float(loss.sel(condition=split)) == pytest.approx(float(loss.sel(condition="unchanged")), abs=1e-4)
    assert found.findings() == [found.caveat]
    assert "by construction" in found.caveat


def test_random_inits_of_worthless_attention_run_only_what_tells_so(result, mini, alice, monkeypatch):
    measured = result.null["loss"].notnull().any("prompt")
    assert [str(one) for one in measured["condition"].values[measured.values]] == REFERENCES
    assert result.null["r"].sel(condition="triangle_4").notnull().all()
    monkeypatch.setattr("tl_posgen.position.substitution.substitution.LEAST_COST", -1)
    whole = Substitution(**FEW)(mini, alice, length=24, n_prompts=4, nulls=1, progress=False).null
    assert whole["loss"].notnull().all()
    np.testing.assert_allclose(
        whole["loss"].sel(condition=REFERENCES), result.null["loss"].sel(condition=REFERENCES), rtol=1e-6
    )


def test_random_inits_have_their_own_losses_and_no_share(result, mini, alice):
    assert all(abs(one) < 0.01 for one in result.measure.worth(result.numbers).inits)
    shares = result.measure.recovered(result.numbers).values()
    assert all(one and np.isnan(one.inits).all() for one in shares)
    expected = token_losses(random_like(mini, 1), prompts_of_one_length(mini, alice, 24, 4)).mean(1)
    np.testing.assert_allclose(result.nulls[1]["loss"].sel(condition="unchanged"), expected)

"""Dummy distances on the bundled model."""

import numpy as np
import pytest
import torch
from dense_fit import design, entries
from drawn import normal
from hypothesis import given, settings
from hypothesis import strategies as st
from rotated_heads import captures_of, true_distances

from tl_posgen.core.engine import analyze
from tl_posgen.errors import UnsupportedModelError
from tl_posgen.hooks import at_dummy_distance
from tl_posgen.models.loss import token_losses
from tl_posgen.models.session import session_of
from tl_posgen.models.tokens import to_prompts
from tl_posgen.position.decomposition.numbers.causal_pairs import CausalPairs
from tl_posgen.position.decomposition.numbers.pair_moments import pair_moments_from_scores
from tl_posgen.position.decomposition.numbers.three_axis_fit import fit_three_axis
from tl_posgen.position.distance import DummyDistance
from tl_posgen.position.distance.dummy_distance import curve_under_intervention, refit_r, same_key_part
from tl_posgen.position.distance.hooks import scores_at_distance
from tl_posgen.position.distance.numbers import table_energies

pytestmark = pytest.mark.longer

CUT = {"length": 40, "n_prompts": 2, "progress": False}
WITHOUT_FIRST = {"tokens": "without first"}


@pytest.fixture(scope="session")
def result(mini, alice):
    return DummyDistance(distances=(0, 64, 7), limits=(1, 40))(mini, alice, nulls=1, **CUT)


def test_the_curve_is_the_mean_score_with_every_pair_at_that_distance(mini):
    (capture,) = captures_of(mini, torch.arange(20)[None], layers=[1])
    below = torch.ones(20, 20).tril().bool()
    curve = curve_under_intervention(capture)
    for d in (0, 7, 19):
        brute = scores_at_distance(capture, d, None)[:, below].mean(1)
        torch.testing.assert_close(curve[:, d].float(), brute, atol=1e-4, rtol=1e-4)


def test_without_the_first_token_is_the_same_of_the_rest(mini, result, alice):
    expected = np.zeros((4, 4))
    for one in captures_of(mini, to_prompts(mini, alice, length=40, n_prompts=2)):
        energies = table_energies(one.q[:, 1:], one.k[:, 1:], one.geometry.rope, 1.0, torch.arange(40)).sum(-1)
        expected[one.layer] += (energies[1] / energies[1:].sum(0)).sqrt().numpy() / 2
    np.testing.assert_allclose(result.trained["key_part_r"].sel(WITHOUT_FIRST), expected, rtol=1e-5)


def test_distances_are_those_below_the_training_length_unless_given(mini, alice):
    found = DummyDistance(limits=(8,))(mini, alice, heads=(0, 0), nulls=0, **CUT)
    assert found.trained["d0"].values.tolist() == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert found.measure.longest == mini.cfg.n_ctx == 512


def test_no_distance_is_compared_that_a_window_hides(family_model):
    model = family_model("mistral", "bridge")
    found = DummyDistance(distances=(0, 3, 64))(model, torch.arange(2, 26)[None], nulls=0, progress=False)
    [window] = {session_of(model).layer(0).geometry.window}
    assert 3 < window <= 64
    assert found.trained["refit_r"].sel(d0=64).isnull().all()
    assert found.trained["key_agreement"].sel(d0=64).isnull().all()
    assert found.trained["key_agreement"].sel(d0=0, other_d0=3).notnull().all()


def test_freezing_beyond_the_prompt_changes_nothing_and_one_distance_for_all_costs_loss(result):
    loss = result.trained["loss"]
    np.testing.assert_allclose(loss.sel(condition="beyond 40"), loss.sel(condition="unchanged"), atol=1e-5)
    rises = result.measure.rises(result.numbers)
    assert min(rises[f"at {d0}"].value for d0 in (0, 64, 7)) > 0.05


def test_shares_and_correlations_are_in_range(result):
    for data in (result.trained, *result.nulls):
        np.testing.assert_allclose(data["share"].sum("part"), 1)
        assert data["share"].sel(part="distance × key").min() >= 0
        assert 0 <= float(data["additive_r"].min()) <= float(data["additive_r"].max()) <= 1
        matrix = data["key_agreement"]
        np.testing.assert_allclose(np.diagonal(matrix, axis1=-2, axis2=-1), 1)
        np.testing.assert_allclose(matrix, matrix.transpose(..., "other_d0", "d0").values)


def test_chosen_heads_alone_are_measured_and_edited(mini, alice, result):
    measure = DummyDistance(distances=(3,), limits=(8,))
    data = measure(mini, alice, heads=(1, 2), nulls=0, **CUT).trained
    assert (data["layer"].values.tolist(), data["head"].values.tolist()) == ([1], [2])
    np.testing.assert_allclose(data["additive_r"], result.trained["additive_r"].sel(layer=[1], head=[2]))
    tokens = torch.stack(to_prompts(mini, alice, length=40, n_prompts=2))
    expected = token_losses(mini, tokens, at_dummy_distance(mini, 3, heads=(1, 2))).mean(-1)
    np.testing.assert_allclose(data["loss"].sel(condition="at 3"), expected)


def test_a_model_without_distances_is_skipped_if_asked(family_model):
    model, tokens = family_model("gpt2", "bridge"), torch.arange(2, 26)[None]
    how = {"nulls": 0, "progress": False, "skip_unsupported": True}
    assert list(analyze(model, tokens, measures=["dummy_distance", "variance"], **how)) == ["variance"]
    both = r"dummy_distance cannot be had: .* know no distance.*; planes cannot"
    with pytest.raises(UnsupportedModelError, match=both):
        analyze(model, tokens, measures=["dummy_distance", "planes"], **how)


def test_what_holds_by_construction_with_slopes_is_said(family_model):
    bloom, tokens = family_model("bloom", "bridge"), torch.arange(2, 26)[None]
    found = DummyDistance(distances=(0, 16), limits=(4,))(bloom, tokens, nulls=0, progress=False)
    np.testing.assert_allclose(found.trained["additive_r"], 1)
    for name in ("key_agreement", "key_part_r", "refit_r"):
        np.testing.assert_allclose(found.trained[name], 1)
    assert abs(np.diff(found.trained["curve"])).min() > 0
    assert "1 by construction" in found.findings()[-1]


def key_part(scores: torch.Tensor) -> torch.Tensor:
    """c of one head's least-squares fit to a_{i-j} + b_i + c_j over j <= i, without mean and linear trend."""
    n, pairs = len(scores), CausalPairs(len(scores))
    x, y = torch.from_numpy(design(pairs).toarray()), torch.from_numpy(entries(scores[None], pairs)).mT
    c = torch.linalg.lstsq(x, y, driver="gelsd").solution[2 * n :, 0]
    line = torch.stack([torch.ones(n), torch.arange(n)], 1).double()
    return c - line @ torch.linalg.lstsq(line, c[:, None]).solution[:, 0]


@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom"])
def test_the_fit_made_again_against_least_squares(family_model, name):
    (capture,) = captures_of(family_model(name, "bridge"), torch.arange(2, 16)[None], layers=[1])
    found = refit_r(capture, torch.tensor([0.0, 5.0]))
    for first, of_variant in enumerate(found):
        for at, d0 in enumerate((0, 5)):
            for head in range(2):
                two = [x[head, first:, first:] for x in (capture.scores(), scores_at_distance(capture, d0, None))]
                expected = torch.corrcoef(torch.stack([key_part(scores) for scores in two]))[0, 1]
                torch.testing.assert_close(of_variant[head, at], expected, atol=1e-4, rtol=1e-4)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**16))
def test_neither_levels_nor_slopes_of_the_scores_matter(seed):
    """Adding any a_d, b_i and straight line in j to the scores leaves what is compared as it is."""
    scores, (a, b) = normal(2, 9, 9, seed=seed), normal(2, 9, seed=seed + 1)
    moved = scores + a[true_distances(9)] + b[:, None] + 3.0 * torch.arange(9)
    one, other = (fit_three_axis(pair_moments_from_scores(x)) for x in (scores, moved))
    torch.testing.assert_close(same_key_part(one, other), torch.ones(2, dtype=torch.float64))


def test_fits_of_as_many_parameters_as_pairs_say_nothing():
    fit = fit_three_axis(pair_moments_from_scores(torch.randn(2, 3, 3)))
    assert same_key_part(fit, fit).isnan().all()

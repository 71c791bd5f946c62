"""The residual explorer against dense least squares, on synthetic heads and on real models."""

import json
import re

import numpy as np
import pytest
import torch
import xarray as xr

import tl_posgen
from tl_posgen.analyzers import residual as analyzer_module
from tl_posgen.analyzers.residual import Residual
from tl_posgen.errors import InputError
from tl_posgen.maths.residual import top_token_pairs
from tl_posgen.maths.rope import complex_planes
from tl_posgen.models.capture import LayerCapture
from tl_posgen.models.geometry import LayerGeometry
from tl_posgen.models.hooks import run_capture
from tl_posgen.models.tokens import bundled_text, to_prompts, token_strings
from tl_posgen.report.words import residual as words
from tl_posgen.views import residual as view

N = 64
VISIBLE = torch.ones(N, N).tril().bool()


@pytest.fixture(scope="module")
def mini():
    return tl_posgen.load_model("mini")


@pytest.fixture(scope="module")
def report(mini):
    analyzers = [Residual(), "three_axis"]
    return tl_posgen.analyze(
        mini, bundled_text(), analyzers=analyzers, length=N, n_prompts=1, examples=0, progress=False
    )


@pytest.fixture(scope="module")
def result(report):
    return report["residual"]


@pytest.fixture(scope="module")
def capture(mini):
    """Layer 1 on the same prompt."""
    kept = []
    run_capture(mini, to_prompts(mini, bundled_text(), length=N, n_prompts=1)[0][None], kept.append, layers=[1])
    return kept[0]


@pytest.fixture(scope="module")
def left(capture):
    """[head, query, key]: what dense least squares on a_{i-j} + b_i + c_j leaves."""
    return dense_residual(capture.scores().double(), VISIBLE)


def dense_residual(scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    query, key = visible.nonzero(as_tuple=True)
    eye = torch.eye(len(visible), dtype=torch.float64)
    design = torch.cat([eye[query - key], eye[query], eye[key]], 1)
    target = scores[:, query, key].mT
    found = torch.zeros_like(scores)
    found[:, query, key] = (target - design @ torch.linalg.lstsq(design, target, driver="gelsd").solution).mT
    return found


def within_rows(scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    scores = scores.masked_fill(~visible, 0)
    return (scores - scores.sum(-1, keepdim=True) / visible.sum(-1, keepdim=True)).masked_fill(~visible, 0)


def test_the_share_is_what_r_within_rows_leaves(report):
    r = report["three_axis"].dataset
    np.testing.assert_allclose(report["residual"].dataset["share"], 1 - r["r_visible"] ** 2, atol=1e-6)
    np.testing.assert_allclose(
        report["residual"].dataset["share_no_first"], 1 - r["r_visible_no_first"] ** 2, atol=1e-6
    )


def test_the_share_is_that_of_dense_least_squares(result, capture, left):
    within = within_rows(capture.scores().double(), VISIBLE).square().sum((1, 2))
    np.testing.assert_allclose(result.dataset["share"].sel(layer=1), left.square().sum((1, 2)) / within, rtol=1e-5)


def test_leaving_out_the_first_token_fits_the_rest_alone(result, capture):
    rest = dense_residual(capture.scores().double()[:, 1:, 1:], VISIBLE[1:, 1:])
    expected = rest[:, VISIBLE[1:, 1:]].square().mean(-1).sqrt()
    np.testing.assert_allclose(result.dataset["std_no_first"].sel(layer=1), expected, rtol=1e-5)


def test_the_spectrum_is_that_of_the_residual_with_hidden_pairs_at_zero(result, left):
    share = torch.linalg.svdvals(left) ** 2
    share = share / share.sum(-1, keepdim=True)
    found = result.dataset.sel(layer=1)
    np.testing.assert_allclose(found["spectrum"], share[:, :8], atol=1e-5)
    np.testing.assert_allclose(found["effective_rank"], 1 / share.square().sum(-1), rtol=1e-4)


def test_distances_are_those_of_the_diagonals(result, left):
    found = result.dataset.sel(layer=1)
    for distance in (0, 3, N - 1):
        diagonal = left.diagonal(-distance, 1, 2)
        np.testing.assert_allclose(
            found["distance_abs"].sel(distance=distance), diagonal.abs().mean(-1), rtol=1e-4, atol=1e-5
        )
        ratio = diagonal.square().mean(-1) / left[:, VISIBLE].square().mean(-1)
        np.testing.assert_allclose(found["distance_ratio"].sel(distance=distance), ratio, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(found["distance_share"].sum("distance"), 1, rtol=1e-6)


def test_plane_shares_are_those_of_one_fit_a_plane(result, capture, left):
    zq, zk = (complex_planes(x.double(), capture.geometry.rope) for x in (capture.rotated_q, capture.rotated_k))
    plane = capture.geometry.scale * (zq[..., 2, None] * zk[..., 2].conj()[:, None]).real
    own = dense_residual(plane, VISIBLE)
    expected = (own * left).sum((1, 2)) / left.square().sum((1, 2))
    np.testing.assert_allclose(result.dataset["plane_share"].sel(layer=1, plane=2), expected, atol=1e-5)
    within = within_rows(capture.scores().double(), VISIBLE)
    expected = (within_rows(plane, VISIBLE) * within).sum((1, 2)) / within.square().sum((1, 2))
    np.testing.assert_allclose(result.dataset["score_plane_share"].sel(layer=1, plane=2), expected, atol=1e-5)


@pytest.mark.parametrize("name", ["plane_share", "score_plane_share"])
@pytest.mark.parametrize("suffix", ["", "_no_first"])
def test_plane_shares_and_the_rest_add_up_to_one(result, name, suffix):
    rest = result.dataset[name.replace("plane", "rest") + suffix]
    np.testing.assert_allclose(result.dataset[name + suffix].sum("plane") + rest, 1, atol=1e-4)


def test_token_pairs_are_those_whose_mean_explains_most(result, capture, left):
    pairs = top_token_pairs(left[2], VISIBLE, capture.tokens, N**2)
    explained = pairs.count * pairs.mean.square() / left[2].square().sum()
    order = explained.argsort(descending=True)[:10]
    found = result.dataset.sel(layer=1, head=2)
    np.testing.assert_allclose(found["pair_share"], explained[order], rtol=1e-3)
    np.testing.assert_allclose(found["pair_mean"], pairs.mean[order], rtol=1e-3)
    assert found["query_token"].values.tolist() == pairs.query_token[order].tolist()
    assert found["pair_count"].values.tolist() == pairs.count[order].tolist()


def test_token_ids_have_their_texts_beside_them(result, mini):
    found = result.dataset.sel(layer=3, head=1)
    texts = token_strings(mini, torch.tensor(found["key_token_no_first"].values))
    assert found["key_token_no_first_text"].values.tolist() == texts


def test_rows_of_an_example_sum_to_zero(result):
    example = result.dataset["example_residual"]
    assert float(abs(example).max()) > 0.1
    np.testing.assert_allclose(example.sum("key"), 0, atol=1e-4)
    np.testing.assert_allclose(example.sum("query"), 0, atol=1e-4)


def test_examples_are_the_heads_that_leave_most(result):
    data = result.dataset
    ranked = data["share_no_first"].to_series().sort_values(ascending=False)
    heads = [(int(layer), int(head)) for layer, head in zip(data["example_layer"], data["example_head"], strict=True)]
    assert heads == ranked.index[:2].to_list()
    np.testing.assert_allclose(data["example_share"], ranked.iloc[:2], rtol=1e-5)


def test_the_trained_model_leaves_less_than_its_null(result):
    assert result.dataset["share_no_first"].mean() < result.null["share_no_first"].mean() - 0.1


def test_energies_of_prompts_add_up(mini):
    prompts = torch.stack(to_prompts(mini, bundled_text(), length=24, n_prompts=2))

    def run(tokens: torch.Tensor) -> xr.Dataset:
        options = {"null_seed": None, "progress": False, "layers": [2]}
        return tl_posgen.analyze(mini, tokens, analyzers=[Residual()], **options)["residual"].dataset

    both, one, other = run(prompts), run(prompts[:1]), run(prompts[1:])
    np.testing.assert_allclose(2 * both["std"] ** 2, one["std"] ** 2 + other["std"] ** 2, rtol=1e-6)
    np.testing.assert_allclose(2 * both["spectrum"], one["spectrum"] + other["spectrum"], rtol=1e-6)


def test_heads_taken_a_few_at_a_time_are_the_same(mini, result, monkeypatch):
    monkeypatch.setattr(analyzer_module, "ENTRIES", 3 * N**2)
    tokens = to_prompts(mini, bundled_text(), length=N, n_prompts=1)[0][None]
    again = tl_posgen.analyze(mini, tokens, analyzers=[Residual()], null_seed=None, progress=False)["residual"].dataset
    assert again["query_token_no_first"].equals(result.dataset["query_token_no_first"])
    np.testing.assert_allclose(again["share"], result.dataset["share"], rtol=1e-6)


def head_of(scores: torch.Tensor, tokens: torch.Tensor | None = None) -> LayerCapture:
    """A head without RoPE whose scores are the matrix given: key j is the j-th unit vector."""
    heads, n, _ = scores.shape
    geometry = LayerGeometry(0, "none", heads, heads, n, 1.0)
    return LayerCapture(geometry, range(heads), 0, tokens, scores, torch.eye(n).expand(heads, -1, -1))


def test_an_additive_head_leaves_nothing_and_has_no_shape():
    i = torch.arange(12.0)
    analyzer = Residual()
    analyzer.update(head_of((torch.cos(i[:, None] - i) + 3 * i[:, None].sin() - i.sqrt())[None]))
    found = analyzer.result()
    assert found["share"].item() < 1e-10
    assert found[["top_share", "effective_rank"]].to_array().isnull().all()


def test_a_head_of_constant_rows_has_no_share():
    analyzer = Residual()
    analyzer.update(head_of(torch.arange(12.0)[None, :, None].expand(1, 12, 12)))
    assert analyzer.result()["share"].isnull().all()


def test_without_token_ids_there_are_no_token_pairs():
    analyzer = Residual(examples=0)
    analyzer.update(head_of(torch.randn(1, 12, 12, generator=torch.Generator().manual_seed(0))))
    found = analyzer.result()
    assert not {"query_token", "example_residual", "plane_share"} & set(found)
    assert not {"tokens", "planes"} & set(view.drawable(found))


@pytest.mark.parametrize("wrong", [{"n_pairs": 0}, {"components": 0}, {"examples": -1}])
def test_settings_that_find_nothing_are_refused(wrong):
    with pytest.raises(InputError):
        Residual(**wrong)


def test_a_prompt_that_any_fit_fits_is_refused(mini):
    with pytest.raises(InputError, match="5 tokens at least"):
        tl_posgen.analyze(mini, torch.arange(4)[None], analyzers=[Residual()], progress=False)


def test_it_comes_back_from_disk(result, tmp_path):
    loaded = tl_posgen.load(result.save(tmp_path / "residual.nc"))["residual"]
    xr.testing.assert_equal(loaded.dataset, result.dataset)


def test_the_map_shows_trained_and_null_shares(result):
    maps = result.plot(kind="map").data
    np.testing.assert_array_equal(maps[1].z, result.dataset["share_no_first"])
    np.testing.assert_array_equal(maps[4].z, result.null["share_no_first"])


@pytest.mark.parametrize("kind", ["spectrum", "distances"])
def test_curves_have_a_line_a_head_and_its_null(result, kind):
    assert len(result.plot(kind=kind).data) == 2 * 16


def test_the_planes_of_residual_and_scores_stand_side_by_side(result):
    maps = result.plot(kind="planes").data
    shares = [result.dataset, result.null]
    np.testing.assert_array_equal(np.array(maps[0].z).reshape(4, 4, -1), shares[0]["plane_share_no_first"])
    np.testing.assert_array_equal(np.array(maps[3].z).reshape(4, 4, -1), shares[1]["score_plane_share_no_first"])


def test_token_bars_are_the_pairs_of_the_heads_that_leave_most(result):
    bars = result.plot(kind="tokens").data
    layer, head = result.dataset["share_no_first"].to_series().sort_values(ascending=False).index[0]
    np.testing.assert_array_equal(bars[0].x, result.dataset["pair_mean_no_first"].sel(layer=layer, head=head))


def test_the_token_page_draws_both_signs_on_one_scale(result):
    page = result.show(example=1).local_src
    props = json.loads(re.search(r"CircuitsVis\.AttentionHeads,\s*(\{.*\})\s*\)", page, re.S).group(1))
    drawn = np.array(props["attention"])
    example = result.dataset.isel(example=1)
    np.testing.assert_allclose(drawn[0], example["example_residual"], atol=1e-4)
    np.testing.assert_allclose(drawn[0] + drawn[1], example["example_scores"], atol=2e-4)
    assert props["minValue"] == -props["maxValue"] < 0
    assert len(view.examples(result.dataset)) == 2


def test_the_words_give_the_share_and_that_of_the_null(result):
    first = words.found(result)[0]
    share, null = (float(data["share_no_first"].mean()) for data in (result.dataset, result.null))
    assert f"first token {share:.0%} (random init {null:.0%})" in first


def test_the_table_names_the_strongest_pair_of_the_heads_that_leave_most(result):
    table = words.table(result.dataset)
    assert len(table) == 12
    assert table["left"].is_monotonic_decreasing
    row = table.iloc[0]
    here = result.dataset.sel(layer=row["layer"], head=row["head"]).isel(rank=0)
    assert row["query token"] == repr(here["query_token_no_first_text"].item())
    assert row["share"] == pytest.approx(float(here["pair_share_no_first"]))

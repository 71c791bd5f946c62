"""The residual against dense least squares, on synthetic heads and on real models."""

import dataclasses

import numpy as np
import pytest
import torch
import xarray as xr
from dense_fit import dense_residual
from hypothesis import given, settings
from hypothesis import strategies as st
from rotated_heads import attention_of

from tl_posgen.core.engine import analyze
from tl_posgen.core.result import Result, joined
from tl_posgen.errors import InputError
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.models.tokens import token_strings
from tl_posgen.position.decomposition import Residual, residual
from tl_posgen.position.decomposition.residual import residual_sums
from tl_posgen.position.decomposition.three_axis import fit_capture
from tl_posgen.rope.rotation import complex_planes

N = 64
OUT = {"tokens": "without first"}
VISIBLE = torch.ones(N, N).tril().bool()


@pytest.fixture(scope="module")
def data(single):
    """Of the first prompt alone."""
    return single["residual"].own


@pytest.fixture(scope="module")
def full(data):
    """Of layer 1 of the first prompt, all tokens."""
    return data.sel(tokens="all", layer=1)


@pytest.fixture(scope="module")
def result(report):
    """Of four prompts, beside its null."""
    return report["residual"]


@pytest.fixture(scope="module")
def scores(capture):
    return capture.scores().double()


@pytest.fixture(scope="module")
def left(scores):
    return dense_residual(scores, VISIBLE)


def within_rows(scores: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    scores = scores.masked_fill(~visible, 0)
    return (scores - scores.sum(-1, keepdim=True) / visible.sum(-1, keepdim=True)).masked_fill(~visible, 0)


# Against dense least squares


def test_the_share_is_that_of_dense_least_squares_and_what_r_within_rows_leaves(single, data, full, scores, left):
    np.testing.assert_allclose(data["share"], 1 - single["three_axis"].own["r_within_rows"] ** 2, atol=1e-6)
    within = within_rows(scores, VISIBLE).square().sum((1, 2))
    np.testing.assert_allclose(full["share"], left.square().sum((1, 2)) / within, rtol=1e-5)


def test_leaving_out_the_first_token_fits_the_rest_alone(data, scores):
    rest = dense_residual(scores[:, 1:, 1:], VISIBLE[1:, 1:])
    expected = rest[:, VISIBLE[1:, 1:]].square().mean(-1).sqrt()
    np.testing.assert_allclose(data["std"].sel(OUT).sel(layer=1), expected, rtol=1e-5)


def test_the_spectrum_is_that_of_the_residual_with_hidden_pairs_at_zero(full, left):
    share = torch.linalg.svdvals(left) ** 2
    share = share / share.sum(-1, keepdim=True)
    np.testing.assert_allclose(full["spectrum"].transpose("head", "component"), share[:, :8], atol=1e-5)
    np.testing.assert_allclose(full["effective_rank"], 1 / share.square().sum(-1), rtol=1e-4)


def test_distances_are_those_of_the_diagonals(full, left):
    for distance in (0, 3, N - 1):
        diagonal, here = left.diagonal(-distance, 1, 2), full.sel(distance=distance)
        np.testing.assert_allclose(here["abs_residual"], diagonal.abs().mean(-1), rtol=1e-4, atol=1e-5)
        ratio = diagonal.square().mean(-1) / left[:, VISIBLE].square().mean(-1)
        np.testing.assert_allclose(here["energy_ratio"], ratio, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(full["energy_share"].sum("distance"), 1, rtol=1e-6)


def test_plane_shares_are_those_of_one_fit_a_plane_and_add_up_to_one(data, full, capture, scores, left):
    np.testing.assert_allclose(data["plane_share"].sum("plane") + data["rest_share"], 1, atol=1e-4)
    zq, zk = (complex_planes(x.double(), capture.geometry.rope) for x in (capture.rotated_q, capture.rotated_k))
    plane = capture.geometry.scale * (zq[..., 2, None] * zk[..., 2].conj()[:, None]).real
    within = within_rows(scores, VISIBLE)
    for name, own, whole in (
        ("residual", dense_residual(plane, VISIBLE), left),
        ("scores", within_rows(plane, VISIBLE), within),
    ):
        expected = (own * whole).sum((1, 2)) / whole.square().sum((1, 2))
        np.testing.assert_allclose(full["plane_share"].sel(of=name, plane=2), expected, atol=1e-5)


def test_token_pairs_are_those_whose_mean_explains_most(full, capture, left):
    kinds = {}
    for i, j in VISIBLE.nonzero().tolist():
        kinds.setdefault((int(capture.tokens[i]), int(capture.tokens[j])), []).append(float(left[2, i, j]))
    explained = {kind: len(e) * np.mean(e) ** 2 / float(left[2].square().sum()) for kind, e in kinds.items()}
    order = sorted(kinds, key=lambda kind: -explained[kind])[:10]
    found = full.sel(head=2)
    np.testing.assert_allclose(found["pair_share"], [explained[kind] for kind in order], rtol=1e-3)
    np.testing.assert_allclose(found["pair_residual"], [np.mean(kinds[kind]) for kind in order], rtol=1e-3)
    assert list(map(tuple, found["pair_token"].values)) == order
    assert found["pair_count"].values.tolist() == [len(kinds[kind]) for kind in order]


def test_token_ids_have_their_texts_beside_them(data, mini):
    found = data.sel(OUT).sel(layer=3, head=1, side="k")
    texts = token_strings(mini, torch.tensor(found["pair_token"].values))
    assert found["pair_token_text"].values.tolist() == texts


def test_examples_are_the_heads_that_leave_most_and_their_rows_sum_to_zero(data):
    ranked = data["share"].sel(OUT).to_series().sort_values(ascending=False)
    heads = [(int(layer), int(head)) for layer, head in zip(data["example_layer"], data["example_head"], strict=True)]
    assert heads == ranked.index[:2].to_list()
    np.testing.assert_allclose(data["example_share"], ranked.iloc[:2], rtol=1e-5)
    example = data["example_map"].sel(of="residual")
    assert float(abs(example).max()) > 0.1
    for dim in ("key", "query"):
        np.testing.assert_allclose(example.sum(dim), 0, atol=1e-4)


def test_the_trained_model_leaves_less_than_its_null(result):
    left = result.numbers("share", **OUT)
    assert left.value < left.of_inits.value - 0.1


def test_energies_of_prompts_add_up(mini, prompts):
    def run(tokens: torch.Tensor) -> xr.Dataset:
        return Residual()(mini, tokens[:, :24], layers=[2], null_seeds=(), progress=False).own

    both, one, other = run(prompts[:2]), run(prompts[:1]), run(prompts[1:2])
    np.testing.assert_allclose(2 * both["std"] ** 2, one["std"] ** 2 + other["std"] ** 2, rtol=1e-6)
    np.testing.assert_allclose(2 * both["spectrum"], one["spectrum"] + other["spectrum"], rtol=1e-6)


def test_heads_taken_a_few_at_a_time_are_the_same(capture, collected, data, monkeypatch):
    monkeypatch.setattr(residual, "ENTRIES", 3 * N**2)
    again, whole = collected(Residual(), capture), data.sel(layer=[1])
    np.testing.assert_array_equal(again["pair_token"], whole["pair_token"])
    for name in ("share", "spectrum", "plane_share"):
        np.testing.assert_allclose(again[name], whole[name], rtol=1e-6, atol=1e-9)


# Heads made by hand


@pytest.fixture
def of_scores(collected):
    """(scores [query, key], options) -> the result of such a head without RoPE: key j is the j-th unit vector."""

    def result_of(scores: torch.Tensor, **options) -> Result:
        n, measure = len(scores), Residual(**options)
        capture = LayerCapture(
            LayerGeometry(0, "none", 1, 1, n, 1.0), range(1), 0, None, scores[None], torch.eye(n)[None]
        )
        return Result(measure, joined(measure, {"trained": collected(measure, capture)}, ["made up"]))

    return result_of


def test_an_additive_head_leaves_nothing_and_has_no_shape(of_scores):
    i = torch.arange(12.0)
    found = of_scores(torch.cos(i[:, None] - i) + 3 * i[:, None].sin() - i.sqrt()).sel(tokens="all")
    assert found["share"].item() < 1e-10
    assert found[["top_share", "effective_rank"]].to_array().isnull().all()


def test_a_head_of_constant_rows_has_no_share(of_scores):
    found = of_scores(torch.arange(12.0)[:, None].expand(12, 12))
    assert found.own["share"].isnull().all()
    assert "not defined" in found.findings()[0]


def test_without_token_ids_there_are_no_token_pairs_and_examples_are_shown_by_position(of_scores):
    noise = torch.randn(12, 12, generator=torch.Generator().manual_seed(0))
    result, with_examples = of_scores(noise, examples=0), of_scores(noise)
    assert not {"pair_token", "example_map", "plane_share"} & set(result.own)
    assert result.kinds == ["map", "spectrum", "distances"]
    assert result.token_labels() == []
    assert len(result.findings()) == 2
    np.testing.assert_array_equal(result.table()["share"], result.sel(tokens="all")["share"].values.ravel())
    assert with_examples.own["example_token"].values.tolist() == list(range(12))
    assert '"11"' in with_examples.show(0).local_src


def test_a_prompt_that_any_fit_fits_is_refused_before_anything_runs(mini, of_scores):
    with pytest.raises(InputError, match="4 tokens leaves none; give 5 tokens at least"):
        analyze(mini, torch.arange(4)[None], measures=["residual"], progress=False)
    with pytest.raises(InputError, match="5 tokens at least"):  # what somebody else's forward pass feeds
        of_scores(torch.ones(4, 4))


# Pictures, tables and sentences


def test_maps_show_trained_and_null_shares(result):
    maps, planes = (result.plot(kind).data for kind in ("map", "planes"))
    np.testing.assert_array_equal(maps[1].z, result.own["share"].sel(OUT))
    np.testing.assert_array_equal(maps[4].z, result.null["share"].sel(OUT))
    for drawn, data, of in ((planes[0], result.own, "residual"), (planes[3], result.null, "scores")):
        shares = data["plane_share"].sel(OUT | {"of": of})
        np.testing.assert_array_equal(np.array(drawn.z).reshape(4, 4, -1), shares)


@pytest.mark.parametrize(("kind", "name", "last"), [("spectrum", "spectrum", 7), ("distances", "energy_ratio", 31)])
def test_curves_have_a_line_a_head_and_its_null(result, kind, name, last):
    traces = result.plot(kind).data
    assert len(traces) == 2 * 4 + 16
    shown = traces[2].x.astype(int) - 1
    np.testing.assert_allclose(traces[2].y, result.own[name].sel(OUT).sel(layer=0, head=0).values[shown])
    assert shown[-1] == last


def test_token_bars_are_the_pairs_of_the_heads_that_leave_most(result):
    bars = result.plot("tokens").data
    layer, head = result.own["share"].sel(OUT).to_series().sort_values(ascending=False).index[0]
    assert len(bars) == 3 * 4
    here = result.sel(layer=layer, head=head, **OUT)
    np.testing.assert_array_equal(bars[0].x, here["pair_residual"])
    assert bars[0].text[0] == f"×{float(here['pair_count'][0]):.0f}, {float(here['pair_share'][0]):.1%}"


def test_the_token_page_draws_both_signs_on_one_scale(result):
    props = attention_of(result.show(example=1).local_src)
    drawn = np.array(props["attention"])
    example = result.own["example_map"].isel(example=1)
    np.testing.assert_allclose(drawn[0], example.sel(of="residual"), atol=1e-4)
    np.testing.assert_allclose(drawn[0] + drawn[1], example.sel(of="scores"), atol=2e-4)
    assert props["minValue"] == -props["maxValue"] < 0
    assert len(result.token_labels()) == 2


def test_the_table_names_the_strongest_pair_of_the_heads_that_leave_most(result):
    rows = result.table()
    assert len(rows) == 12
    assert rows["left"].is_monotonic_decreasing
    row = rows.iloc[0]
    here = result.sel(layer=row["layer"], head=row["head"], rank=1, **OUT)
    assert row["query token"] == repr(here["pair_token_text"].sel(side="q").item())
    assert row["share"] == pytest.approx(float(here["pair_share"]))
    of_null = result.table("random init")
    assert of_null["left"][0] == pytest.approx(float(result.null["share"].sel(OUT).max()))


QUIET = {"null_seeds": (), "progress": False}
SHARES = ("top_share", "effective_rank", "spectrum", "energy_share", "pair_share")


@pytest.mark.parametrize(
    "family", ["llama", "bloom", "smollm3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("phi", "gemma2"))]
)
@pytest.mark.longer
def test_of_a_text_of_one_token_the_fit_leaves_nothing(family_model, family):
    """Its queries and keys are all alike, so scores are a function of distance, or of nothing (NoPE)."""
    result = Residual()(family_model(family, "bridge"), torch.full((1, 40), 5), **QUIET)
    data = result.own
    shares = SHARES + (("plane_share", "rest_share") if "plane_share" in data else ())
    assert bool((data["share"].fillna(0) == 0).all())
    assert all(bool(data[name].sel(of="residual").isnull().all()) for name in shares if "of" in data[name].dims)
    assert all(bool(data[name].isnull().all()) for name in SHARES)
    assert "the fit leaves no more than float32 rounds" in result.findings()[2]
    assert len(result.findings()) == 3 + bool(result.caveat)  # nothing of planes or token pairs
    assert result.kinds == ["map"]
    assert "example_share" not in data
    if family == "smollm3":  # its second layer does not rotate
        assert bool(data["share"].sel(layer=1).isnull().all())
        assert "in 4 heads scores are constant within rows" in result.findings()[2]


@pytest.mark.longer
def test_layers_that_rotate_and_layers_that_do_not_stand_in_one_result(family_model):
    tokens = torch.randint(2, 60, (1, 20), generator=torch.Generator().manual_seed(0))
    result = Residual()(family_model("smollm3", "bridge"), tokens, **QUIET)
    data = result.own
    for name in ("wavelength", "plane_share"):
        assert bool(data[name].sel(layer=0).notnull().all())
        assert bool(data[name].sel(layer=1).isnull().all())
    assert "planes" in result.kinds
    result.plot("planes")


@settings(deadline=None, max_examples=10)
@given(st.floats(-12, 0), st.integers(0, 1000))
@pytest.mark.longer
def test_planes_share_a_small_residual_as_float64_says(capture, magnitude, seed):
    """A residual of 10^magnitude of the scores: the shares are right, or there are none."""
    draw = torch.Generator().manual_seed(seed)
    n, heads = 24, len(capture.heads)
    same = [torch.randn(heads, 1, capture.q.shape[-1], generator=draw).expand(-1, n, -1) for _ in "qk"]
    q, k = (x + 10 ** (magnitude / 2) * torch.randn(x.shape, generator=draw) for x in same)
    part = dataclasses.replace(capture, q=q, k=k, tokens=None)
    exact = dataclasses.replace(capture, q=q.double(), k=k.double(), tokens=None)
    for one in (part, exact):
        vars(one).pop("rotated_q", None)
    e, truth = (residual_sums(one, fit_capture(one)[0])[0].corner for one in (part, exact))
    error, size = (x.square().sum((1, 2)).sqrt() for x in (e - truth, truth))
    scale = part.geometry.scale * part.q.norm(dim=-1).mul(1.0).max() * part.k.norm(dim=-1).max()
    assert bool((error <= 1e-6 * scale * n + 1e-9 * size).all())
    query, key = torch.ones(n, n).tril().nonzero(as_tuple=True)
    for rows in (query - key, query, key):  # at right angles to every fit
        sums = torch.zeros(heads, n, dtype=torch.float64).index_add(1, rows, e[:, query, key])
        assert float((sums.abs().amax(1) / (e.square().sum((1, 2)).sqrt() + 1e-300)).max()) < 1e-8

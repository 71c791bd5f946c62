"""Slash scores on real models."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import xarray as xr
from rotated_heads import captures_of, true_distances

import tl_posgen
from tl_posgen.models.tokens import to_prompts
from tl_posgen.slash import Slash, SlashTransfer, slash_heads
from tl_posgen.slash.dominance import slash_distance, statistics_from_qk, statistics_of
from tl_posgen.slash.numbers.slash_scores import uniform_scores

MEASURE = "slash"

pytestmark = pytest.mark.longer

CUT = {"length": 64, "n_prompts": 2}


@pytest.fixture(scope="module")
def data(result):
    """Of all tokens."""
    return result.sel(tokens="all")


def test_numbers_are_those_of_patterns_and_of_queries_and_keys_before_rope_over_prompts(mini, alice, data):
    captures = [captures_of(mini, [tokens], "pattern") for tokens in to_prompts(mini, alice, **CUT)]
    for layer, of_layer in enumerate(zip(*captures, strict=True)):
        pattern, at = torch.stack([one.pattern for one in of_layer]).double(), data.sel(layer=layer)
        for distance in (0, 1, 5, 63):
            diagonal = pattern.diagonal(-distance, -2, -1).mean(-1).mean(0)
            np.testing.assert_allclose(at.score.sel(distance=distance), diagonal, atol=1e-6)
        expected = (pattern * true_distances(64)).sum(-1).mean((0, 2))
        np.testing.assert_allclose(at.attention_distance, expected, rtol=1e-5)
        np.testing.assert_allclose(at.first_token, pattern[..., 0].mean((0, 2)), rtol=1e-5)
        for side in "qk":
            values = torch.stack([torch.linalg.svdvals(getattr(one, side).double()) for one in of_layer]) ** 2
            np.testing.assert_allclose(at.sel(side=side).r1, (values[..., 0] / values.sum(-1)).mean(0), rtol=1e-6)


def test_the_best_distance_is_where_the_score_is_highest_in_the_first_half(data):
    np.testing.assert_allclose(data.slash_score, data.score.isel(distance=slice(32)).max("distance"))
    np.testing.assert_allclose(data.slash_score, data.score.sel(distance=data.slash_distance))
    np.testing.assert_allclose(data.best_uniform, data.uniform.sel(distance=data.slash_distance))
    np.testing.assert_allclose(data.uniform[0], uniform_scores(64))
    assert data.slash_distance.dtype.kind == "i"


def test_the_best_heads_stand_with_their_distances(result, data):
    heads = result.heads(3)
    assert heads.columns.tolist() == ["layer", "head", "slash_score", "slash_distance"]
    for row in heads.to_dict("records"):
        own = data.sel(layer=row["layer"], head=row["head"])
        assert float(own["score"].sel(distance=row["slash_distance"])) == pytest.approx(row["slash_score"])


def test_dominant_heads_reach_kappa(mini, alice):
    slash = Slash(kappa=0.3, distances=[1, 0, 500], kappa_long=0.0128)
    whole = slash(mini, alice, length=112, n_prompts=1, nulls=0, progress=False)  # long is 50 and more
    data = whole.sel(tokens="all")
    assert data.short_distance.values.tolist() == [0, 1]
    np.testing.assert_array_equal(data.dominant, data.score.sel(distance=[0, 1]) >= 0.3)
    assert 0 < int(data.dominant.sum()) < data.dominant.size
    long = data.sel(distance=slice(50, 56))
    assert 0 < int((long.uniform[0] < 0.0128).sum()) < long.sizes["distance"]
    for tokens in ("all", "without first"):
        far = whole.sel(tokens=tokens, distance=slice(50, 56))
        expected = far.score >= xr.where(far.uniform < 0.0128, 0.0128, 2 * far.uniform)
        n_long = whole.sel(tokens=tokens)["n_long"]
        np.testing.assert_array_equal(n_long, expected.sum("distance").transpose("layer", "head"))


def test_maps_are_of_different_numbers_on_a_scale_of_their_own(result, data):
    maps = result.plot("map")
    values = [np.asarray(one.z, float) for one in maps.data]
    assert not any(np.array_equal(one, other) for one, other in pairwise(values))
    assert maps.layout.coloraxis.cmax == max(map(np.nanmax, values)) < 1


def test_a_score_that_equals_kappa_is_dominant():
    score = xr.DataArray([[[0.25, 0.24999]]], dims=("layer", "head", "distance"), coords={"distance": [0, 1]})
    measure = Slash(kappa=0.25, distances=[0, 1])
    assert measure.dominant_at(score, xr.zeros_like(score)).values.tolist() == [[[True, False]]]
    assert not measure.dominant_at(score, xr.full_like(score, 0.25)).any()  # twice that of uniform attention


def test_no_head_of_a_prompt_of_two_tokens_is_dominant_and_the_sentence_says_why(mini, alice):
    n = 2
    report = tl_posgen.analyze(
        mini, alice, measures=["slash", SlashTransfer(distances=[0])], length=n, n_prompts=2, progress=False
    )
    result = report["slash"]
    assert float(result.sel(tokens="all")["score"].max()) > 0.5
    assert not result.dataset["dominant"].any()
    transfer = report["slash_transfer"]
    assert not transfer.measure.n_dominant(transfer.numbers, 0, "natural").value
    assert slash_heads(report).empty
    assert report.leading_table() is None
    (sentence,) = result.findings()
    distances = ", ".join(map(str, range(n)))
    assert sentence.startswith(f"Slash-dominant at any of the distances {distances}, with kappa = 0.1: 0 of 16 heads ")
    assert f"At D = {distances} uniform attention itself reaches kappa, as queries see few keys" in sentence


@pytest.mark.parametrize(
    ("measures", "explained"),
    [
        (["slash"], ["slash score", "ratio"]),
        (["slash", SlashTransfer(distances=[0, 1])], ["slash score", "ratio", "on random tokens"]),
    ],
)
def test_the_table_of_slash_heads_explains_the_columns_that_it_has(mini, alice, measures, explained):
    settings = {"length": 64, "n_prompts": 2, "nulls": 0, "progress": False}
    report = tl_posgen.analyze(mini, alice, measures=measures, **settings)
    table = slash_heads(report)
    assert table.columns.tolist() == ["layer", "head", "distance", *explained]
    assert [part.partition(":")[0] for part in table.attrs["legend"].split("; ")] == explained
    finds = tl_posgen.find_slash_heads(mini, alice, **settings).set_index(["layer", "head", "distance"])
    assert len(table)
    for _, row in table.iterrows():
        place = row["layer"], row["head"], row["distance"]
        assert row[["slash score", "ratio"]].tolist() == pytest.approx(finds.loc[place].tolist())


def test_the_best_distance_is_below_half_of_what_the_prompts_reach_with_and_without_the_first_token():
    score = np.zeros((2, 1, 2, 6))
    score[..., 2], score[..., 3], score[1, ..., 5] = 0.5, 0.9, np.nan
    score[0, 0, 1] = np.nan
    dims = ("tokens", "layer", "head", "distance")
    found = slash_distance(xr.DataArray(score, {"distance": range(6)}, dims))
    np.testing.assert_array_equal(found.squeeze("layer"), [[2, np.nan], [0, 0]])  # D < 3, and D < 2 of five


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "bloom"])  # a window, soft caps, slopes
def test_a_layers_own_queries_and_keys_have_the_statistics_of_its_pattern(family_model, name):
    for layer in captures_of(family_model(name, "bridge"), [torch.arange(2, 42)], "pattern"):
        own, found = statistics_of(layer), statistics_from_qk(layer, layer.rotated_q, layer.rotated_k)
        for part in ("score", "uniform", "attention_distance", "first_token"):
            torch.testing.assert_close(getattr(found, part), getattr(own, part), atol=1e-5, rtol=1e-4, equal_nan=True)

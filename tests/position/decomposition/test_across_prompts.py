"""What is the same in every prompt: known answers, and real models."""

import re

import numpy as np
import pytest
import torch
import xarray as xr

import tl_posgen
from tl_posgen.core.engine import analyze
from tl_posgen.core.result import Result
from tl_posgen.errors import InputError
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.position.decomposition import AcrossPrompts
from tl_posgen.position.decomposition.numbers.position_shares import row_centred

pytestmark = pytest.mark.longer

N = 14
OUT = {"tokens": "without first"}
QUIET = {"null_seeds": (), "progress": False}
I = torch.arange(float(N))  # noqa: E741


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def found(collected):
    """(scores [head, query, key] of each prompt) -> shares of such heads, all tokens: key j is the j-th unit vector."""

    def shares_of(*prompts: torch.Tensor, window: int | None = None) -> xr.Dataset:
        captures = []
        for number, scores in enumerate(prompts):
            heads, n, _ = scores.shape
            geometry = LayerGeometry(0, "none", heads, heads, n, 1.0, window=window)
            keys = torch.eye(n).expand(heads, -1, -1)
            captures.append(LayerCapture(geometry, range(heads), number, None, scores, keys))
        data = collected(AcrossPrompts(), *captures).sel(tokens="all")
        of_functions = {f"by_{name}": data["share"].sel(function=name, drop=True) for name in data["function"].values}
        return data.assign(of_functions)

    return shares_of


def matrix(name: str) -> torch.Tensor:
    distance = I[:, None] - I
    return {
        "distance": (0.7 * distance).cos(),
        "key": (0.9 * I).sin().expand(N, N),
        "line": (-0.2 * distance),
        "both": distance.clamp(min=0).sqrt() + (0.9 * I).sin(),
        "neither": (0.5 * I[:, None] * I).cos(),
    }[name][None] + 5 * noise(1, N, 1)


@pytest.mark.parametrize(
    ("name", "of_distance", "of_key", "of_either"),
    [
        *(("distance", 1, None, 1), ("key", None, 1, 1), ("line", 1, 1, 1)),
        *(("both", None, None, 1), ("neither", None, None, None)),
    ],
)
def test_the_same_function_in_every_prompt_is_all_position_of_its_kind(found, name, of_distance, of_key, of_either):
    data = found(matrix(name), matrix(name)).squeeze()
    for kind, share in (("position", 1), ("by_distance", of_distance), ("by_key", of_key), ("by_either", of_either)):
        if share is None:
            assert data[kind] < 0.97
        else:
            assert float(data[kind]) == pytest.approx(share, abs=1e-6)
    assert name != "neither" or data["by_either"] < 0.5


def test_what_moves_whole_rows_counts_nothing(found):
    still = found(matrix("distance"), matrix("distance"))
    moved = found(matrix("distance") + 9 * noise(1, N, 1, seed=1), matrix("distance"))
    xr.testing.assert_allclose(still, moved, atol=1e-5)


def test_shares_are_unbiased_for_few_prompts(found):
    """400 heads, each with its own noise: position is 1/4 of the variance within rows, and all of it by distance."""
    visible = torch.ones(N, N).tril().bool()
    position = row_centred(matrix("distance"), visible)
    strength = (position.square().sum() / (visible.sum() - N) * 3).sqrt().float()
    data = found(*(position.float() + strength * noise(400, N, N, seed=seed) for seed in (1, 2, 3)))
    for name in ("position", "by_distance", "chance"):  # chance: 3/4 of content over 3 prompts
        assert float(data[name].mean()) == pytest.approx(0.25, abs=0.01)


def test_content_alone_is_no_position(found):
    data = found(*(noise(400, N, N, seed=seed) for seed in (1, 2)))
    for name in ("position", "by_either"):
        assert abs(float(data[name].mean())) < 0.01
    assert float(data["part_of_position"].sel(function="distance").isnull().mean()) > 0.9


def test_one_prompt_is_refused_before_anything_runs_and_in_hooks_too(mini):
    with pytest.raises(InputError, match="2 at least, not 1"):
        analyze(mini, "Down, down, down.", measures=["across_prompts"], progress=False)
    with tl_posgen.attach(mini, ["across_prompts"]) as run:
        mini(torch.arange(8)[None])
    with pytest.raises(InputError, match="n_prompts=2"):
        run.report()


def test_texts_of_different_lengths_are_refused_before_anything_runs_unless_cropped_alike(mini):
    texts = ["The cat sat on the mat, and sat.", "A dog ran."]
    with pytest.raises(InputError, match="cannot be compared pair by pair; give length="):
        AcrossPrompts()(mini, texts, **QUIET)
    assert AcrossPrompts(crop=3)(mini, texts, **QUIET).own.attrs["prompts"] == 2


@pytest.mark.parametrize(("n", "window", "message"), [(9, None, "8 and 9 tokens"), (8, 1, "sees itself alone")])
def test_other_lengths_and_rows_of_a_single_key_are_refused(found, n, window, message):
    with pytest.raises(InputError, match=message):
        found(noise(1, 8, 8), noise(1, n, n), window=window)


def test_a_share_below_zero_is_said_to_be_noise(result):
    data = result.dataset.copy(deep=True)
    data["share"].loc[{"function": "key", "init": "trained"}] = -0.119
    data["position"].loc[{"init": result.numbers.inits}] = -0.01
    shown = Result(result.measure, data, result.provenance)
    sentences = " ".join(shown.findings())
    assert "key's position alone not resolved (random init " in sentences
    assert "(random init not resolved, shuffled not resolved) of the score variance" in sentences
    chance = float(result.sel(**OUT)["chance"].mean())
    assert f"Not resolved: chance leaves {chance:.1%} in a mean over so few prompts" in sentences
    assert not re.search(r"-\d", sentences)
    assert "random init not resolved" not in " ".join(result.findings())


@pytest.fixture(scope="module")
def result(report):
    return report["across_prompts"]


def test_a_trained_model_has_position_that_rope_makes_a_matter_of_distance_and_its_null_hardly_any(result):
    position = result.numbers("position", **OUT)
    assert position.value > 0.2
    assert abs(position.inits[0]) < 0.1
    data = result.sel(**OUT)
    strong = data["part_of_position"].sel(function="distance").where(data["position"] > 0.3)
    assert float(strong.min()) > 0.9


def test_a_crop_measures_the_beginnings_of_the_prompts(mini, prompts):
    cropped = AcrossPrompts(crop=20)(mini, prompts, layers=[1], **QUIET).own
    beginnings = AcrossPrompts(examples=0)(mini, prompts[:, :20], layers=[1], **QUIET)
    assert beginnings.kinds == ["map", "parts"]  # without examples no maps
    for name, array in beginnings.own.items():
        np.testing.assert_allclose(cropped[name], array, rtol=1e-4, atol=1e-4)


def test_the_maps_are_the_means_of_the_heads_with_most_position(result):
    data = result.own
    top = data["position"].sel(OUT).to_series().sort_values(ascending=False).index[:3].to_list()
    assert list(zip(data["example_layer"].values, data["example_head"].values, strict=True)) == top
    np.testing.assert_allclose(data["example_position"].sum("key"), 0, atol=1e-4)
    drawn = result.plot("maps")
    below = np.tril_indices(64)
    np.testing.assert_array_equal(drawn.data[0].z[below], data["example_position"].values[0][below])
    share = float(data["position"].sel(OUT).sel(layer=top[0][0], head=top[0][1]))
    assert drawn.layout.annotations[0].text == f"L{top[0][0]}H{top[0][1]}, position {share:.0%} · mini"


def test_pictures_and_table_show_the_shares(result):
    maps = result.plot("parts").data
    np.testing.assert_array_equal(maps[0].z, result.own["share"].sel(OUT | {"function": "distance"}))
    np.testing.assert_array_equal(maps[5].z, result.null["share"].sel(OUT | {"function": "either"}))
    np.testing.assert_array_equal(result.plot("map").data[0].z, result.own["position"].sel(tokens="all"))
    distance = result.sel(function="distance", **OUT)["share"]
    np.testing.assert_allclose(result.table()["by distance"], distance.mean("head"))

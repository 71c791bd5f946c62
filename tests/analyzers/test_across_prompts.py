"""What is the same in every prompt: known answers, brute force, and real models."""

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

import tl_posgen
from tl_posgen.analyzers.across_prompts import AcrossPrompts
from tl_posgen.errors import InputError
from tl_posgen.maths.across_prompts import PARTS, PositionParts, position_shares, row_centred
from tl_posgen.models.capture import LayerCapture
from tl_posgen.models.geometry import LayerGeometry
from tl_posgen.models.tokens import bundled_text, to_prompts
from tl_posgen.report.words import across_prompts as words

N = 14
I = torch.arange(float(N))  # noqa: E741


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def found(*prompts: torch.Tensor, window: int | None = None, **options) -> xr.Dataset:
    """The result for heads with the scores [head, query, key] of each prompt: key j is the j-th unit vector."""
    analyzer = AcrossPrompts(**options)
    for number, scores in enumerate(prompts):
        heads, n, _ = scores.shape
        geometry = LayerGeometry(0, "none", heads, heads, n, 1.0, window=window)
        analyzer.update(LayerCapture(geometry, range(heads), number, None, scores, torch.eye(n).expand(heads, -1, -1)))
    return analyzer.result()


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
    [("distance", 1, None, 1), ("key", None, 1, 1), ("line", 1, 1, 1), ("both", None, None, 1)],
)
def test_the_same_function_in_every_prompt_is_all_position_of_its_kind(name, of_distance, of_key, of_either):
    data = found(matrix(name), matrix(name)).squeeze()
    for kind, share in (("position", 1), ("by_distance", of_distance), ("by_key", of_key), ("by_either", of_either)):
        if share is None:
            assert data[kind] < 0.97
        else:
            assert float(data[kind]) == pytest.approx(share, abs=1e-6)


def test_a_function_of_both_positions_is_position_of_neither_kind():
    data = found(matrix("neither"), matrix("neither")).squeeze()
    assert float(data["position"]) == pytest.approx(1)
    assert data["by_either"] < 0.5


def test_what_moves_whole_rows_counts_nothing():
    still = found(matrix("distance"), matrix("distance"))
    moved = found(matrix("distance") + 9 * noise(1, N, 1, seed=1), matrix("distance"))
    xr.testing.assert_allclose(still, moved, atol=1e-5)


def test_shares_are_unbiased_for_few_prompts():
    """400 heads, each with its own noise: position is 1/4 of the variance within rows, and all of it by distance."""
    visible = torch.ones(N, N).tril().bool()
    position = row_centred(matrix("distance"), visible)
    strength = (position.square().sum() / (visible.sum() - N) * 3).sqrt().float()
    data = found(*(position.float() + strength * noise(400, N, N, seed=seed) for seed in (1, 2, 3)))
    assert float(data["position"].mean()) == pytest.approx(0.25, abs=0.01)
    assert float(data["by_distance"].mean()) == pytest.approx(0.25, abs=0.01)
    assert float(data["chance"].mean()) == pytest.approx(0.25, abs=0.01)  # 3/4 of content over 3 prompts


def test_content_alone_is_no_position():
    data = found(*(noise(400, N, N, seed=seed) for seed in (1, 2)))
    assert abs(float(data["position"].mean())) < 0.01
    assert abs(float(data["by_either"].mean())) < 0.01
    assert float(data["distance_of_position"].isnull().mean()) > 0.9


@settings(max_examples=15, deadline=None)
@given(window=st.integers(2, N), first=st.booleans(), seed=st.integers(0, 99))
def test_energies_are_those_of_dense_least_squares(window, first, seed):
    distance = (I[:, None] - I).long()
    visible = (distance >= 0) & (distance < window) & (first | ((I > 0) & (I[:, None] > 0)))
    w = row_centred(noise(1, N, N, seed=seed), visible)
    query, key = visible.nonzero(as_tuple=True)
    eye = torch.eye(N, dtype=torch.float64)
    axes = {"distance": eye[query - key], "key": eye[key], "line": I.double()[key, None]}
    axes["either"] = torch.cat([axes["distance"], axes["key"]], 1)
    target = w[0][visible]
    energy = dict(zip(PARTS, PositionParts(visible).energy(w)[0].tolist(), strict=True))
    assert energy["all"] == pytest.approx(float(target @ target))
    for name, columns in axes.items():
        design = torch.cat([columns, eye[query]], 1)
        fitted = design @ torch.linalg.lstsq(design, target, driver="gelsd").solution
        assert energy[name] == pytest.approx(float(fitted @ target), abs=1e-8), name


def test_one_prompt_is_refused_before_anything_runs(mini):
    with pytest.raises(InputError, match="2 at least, not 1"):
        tl_posgen.analyze(mini, "Down, down, down.", analyzers=[AcrossPrompts()], progress=False)


def test_one_prompt_is_refused_in_hooks_too(mini):
    with tl_posgen.attach(mini, [AcrossPrompts()]) as run:
        mini(torch.arange(8)[None])
    with pytest.raises(InputError, match="n_prompts=2"):
        run.report()


def test_one_prompt_has_no_shares():
    with pytest.raises(InputError, match="at least 2"):
        position_shares(torch.ones(1, 5), torch.ones(1, 5), 1, 10)


def test_prompts_of_different_lengths_are_refused():
    with pytest.raises(InputError, match="9 and 8 tokens"):
        found(noise(1, 8, 8), noise(1, 9, 9))


def test_rows_of_a_single_key_are_refused():
    with pytest.raises(InputError, match="no query sees two keys"):
        found(noise(1, 8, 8), noise(1, 8, 8), window=1)


@pytest.mark.parametrize("wrong", [{"crop": 2}, {"examples": -1}])
def test_settings_that_find_nothing_are_refused(wrong):
    with pytest.raises(InputError):
        AcrossPrompts(**wrong)


@pytest.fixture(scope="module")
def mini():
    return tl_posgen.load_model("mini")


@pytest.fixture(scope="module")
def prompts(mini):
    return torch.stack(to_prompts(mini, bundled_text(), length=64, n_prompts=4))


@pytest.fixture(scope="module")
def result(mini, prompts):
    analyzers = [AcrossPrompts()]
    return tl_posgen.analyze(mini, prompts, analyzers=analyzers, examples=0, progress=False)["across_prompts"]


def test_a_trained_model_has_position_and_its_null_hardly_any(result):
    assert float(result.dataset["position_no_first"].mean()) > 0.2
    assert abs(float(result.null["position_no_first"].mean())) < 0.1


def test_rope_makes_position_a_matter_of_distance(result):
    strong = result.dataset.where(result.dataset["position_no_first"] > 0.3)
    assert float(strong["distance_of_position_no_first"].min()) > 0.9


def test_a_crop_measures_the_beginnings_of_the_prompts(mini, prompts):
    def run(tokens: torch.Tensor, crop: int) -> xr.Dataset:
        options = {"null_seed": None, "progress": False, "layers": [1, 2]}
        return tl_posgen.analyze(mini, tokens, analyzers=[AcrossPrompts(crop=crop)], **options)[
            "across_prompts"
        ].dataset

    cropped = run(prompts, 20).drop_attrs()
    xr.testing.assert_allclose(cropped, run(prompts[:, :20], 64).drop_attrs(), rtol=1e-4, atol=1e-4)


def test_the_maps_are_the_means_of_the_heads_with_most_position(result):
    data = result.dataset
    top = data["position_no_first"].to_series().sort_values(ascending=False).index[:3].to_list()
    assert list(zip(data["example_layer"].values, data["example_head"].values, strict=True)) == top
    np.testing.assert_allclose(data["example_position"].sum("key"), 0, atol=1e-4)
    drawn = result.plot(kind="maps").data
    below = np.tril_indices(64)
    np.testing.assert_array_equal(drawn[0].z[below], data["example_position"].values[0][below])


def test_the_pictures_show_trained_and_null_shares(result):
    maps = result.plot(kind="parts").data
    np.testing.assert_array_equal(maps[0].z, result.dataset["by_distance_no_first"])
    np.testing.assert_array_equal(maps[5].z, result.null["by_either_no_first"])
    np.testing.assert_array_equal(result.plot(kind="map").data[0].z, result.dataset["position"])


def test_the_words_give_position_and_that_of_the_null(result):
    position, null = (float(data["position_no_first"].mean()) for data in (result.dataset, result.null))
    assert f"{position:.1%} (random init {null:.1%})" in words.found(result)[0]


def test_the_table_has_a_row_a_layer(result):
    table = words.table(result.dataset)
    assert len(table) == 4
    np.testing.assert_allclose(table["by distance"], result.dataset["by_distance_no_first"].mean("head"))


def test_it_comes_back_from_disk(result, tmp_path):
    loaded = tl_posgen.load(result.save(tmp_path / "across.nc"))["across_prompts"]
    xr.testing.assert_equal(loaded.dataset, result.dataset)

"""The planes behind a slash, on real models: against brute force over the recomputed logits."""

import numpy as np
import pytest
import torch
import xarray as xr
from families import save_family

import tl_posgen
from tl_posgen.analysis import Feed
from tl_posgen.analyzers.slash_planes import NEAR, SlashPlanes
from tl_posgen.errors import InputError
from tl_posgen.models.hooks import run_capture
from tl_posgen.models.tokens import bundled_text, to_prompts

N = 80
LAYER = 3
OPTIONS = {"length": N, "n_prompts": 1, "progress": False}


@pytest.fixture(scope="module")
def mini():
    return tl_posgen.load_model("mini")


@pytest.fixture(scope="module")
def result(mini):
    return tl_posgen.analyze(mini, bundled_text(), analyzers=[SlashPlanes()], **OPTIONS)["slash_planes"]


@pytest.fixture(scope="module")
def logits(mini):
    """[head, query, key] of one layer of the same prompt, float64, -inf where invisible."""
    kept = []
    run_capture(mini, to_prompts(mini, bundled_text(), length=N, n_prompts=1)[0][None], kept.append, layers=[LAYER])
    return kept[0].scores().double()


def analysed(family: str, tmp_path, backend: str = "bridge") -> xr.Dataset:
    model = tl_posgen.load_model(save_family(family, tmp_path), backend=backend)
    tokens = torch.randint(2, 64, (1, 24), generator=torch.Generator().manual_seed(0))
    report = tl_posgen.analyze(model, tokens, analyzers=[SlashPlanes()], null_seed=None, progress=False)
    return report["slash_planes"].dataset


@pytest.mark.parametrize(("variant", "first"), [("all", 0), ("without_first", 1)])
def test_contributions_add_up_to_the_lift_of_the_diagonal(result, logits, variant, first):
    s = logits[:, first:, first:]
    mean = s.masked_fill(s.isinf(), 0).sum((1, 2)) / (~s.isinf())[0].sum()
    total = result.dataset["contribution"].sel(variant=variant, layer=LAYER).sum("plane")
    for distance in (0, 1, 4):
        expected = s.diagonal(-distance, -2, -1).mean(-1) - mean
        np.testing.assert_allclose(total.sel(at=str(distance)), expected, atol=1e-4)


def test_the_edge_is_the_lift_above_near_diagonals(result, logits):
    data = result.dataset.sel(variant="all", layer=LAYER)
    means = np.stack([logits.diagonal(-distance, -2, -1).mean(-1) for distance in range(N)], axis=-1)
    for head, best in enumerate(data["best_distance"].values):
        near = [d for d in range(max(0, best - NEAR), best + NEAR + 1) if d != best]
        expected = means[head, best] - means[head, near].mean()
        np.testing.assert_allclose(data["contribution"].sel(head=head, at="edge").sum(), expected, atol=1e-4)


def test_bands_hold_every_plane_once(result):
    bands = result.dataset["bands"]
    whole = result.dataset["contribution"].sum("plane")
    for scheme in ("thirds", "wavelength"):
        np.testing.assert_allclose(bands.sel(scheme=scheme).sum("band").transpose(*whole.dims), whole, atol=1e-9)


def test_bands_by_wavelength_end_at_32_tokens_and_at_the_prompt(result):
    data = result.dataset.sel(variant="all", layer=LAYER, head=0, at="best")
    wavelength = data["wavelength"]
    chosen = {"high": wavelength < 32, "medium": (wavelength >= 32) & (wavelength <= N), "low": wavelength > N}
    for band, planes in chosen.items():
        expected = data["contribution"].where(planes).sum()
        np.testing.assert_allclose(data["bands"].sel(scheme="wavelength", band=band), expected)


def test_what_is_not_rotated_is_a_band_of_its_own(tmp_path):
    data = analysed("neox", tmp_path)
    plain = data["contribution"].where(np.isinf(data["wavelength"])).sum("plane").sel(at="best")
    unrotated = data["bands"].sel(scheme="thirds", band="unrotated", at="best")
    assert 0 < int(np.isinf(data["wavelength"]).sum()) < data["wavelength"].size
    np.testing.assert_allclose(unrotated.transpose(*plain.dims), plain)


def test_a_model_of_absolute_positions_turns_nothing(tmp_path):
    data = analysed("gpt2", tmp_path)
    assert np.isinf(data["wavelength"]).all()
    np.testing.assert_allclose(data["predicted"], data["baseline"])


def test_scores_are_those_of_the_slash_analyzer(mini, result):
    slash = tl_posgen.analyze(mini, bundled_text(), analyzers=["slash"], null_seed=None, **OPTIONS)["slash"].dataset
    ours = result.dataset.sel(variant="all")
    for name in ("score", "best_score", "best_distance"):
        np.testing.assert_allclose(ours[name], slash[name])
    np.testing.assert_array_equal(ours["dominant"], slash["dominant"].any("short_distance"))


def test_the_prediction_is_compared_with_its_own_profile_and_with_those_of_the_other_heads(result):
    data = result.dataset.sel(variant="all").isel(distance=slice(N // 2))
    above = [(data[name] - data["baseline"]).values.reshape(16, -1) for name in ("predicted", "score")]
    between = np.corrcoef(*above)[:16, 16:]
    np.testing.assert_allclose(data["correlation"].values.ravel(), between.diagonal(), atol=1e-6)
    others = (between.sum(1) - between.diagonal()) / 15
    np.testing.assert_allclose(data["chance_correlation"].values.ravel(), others, atol=1e-6)


def test_chance_peaks_count_the_other_heads_that_peak_there(result):
    data = result.dataset.sel(variant="all")
    guess, truth = data["predicted_peak"].values.ravel(), data["best_distance"].values.ravel()
    expected = [np.mean(np.delete(truth, head) == peak) for head, peak in enumerate(guess)]
    np.testing.assert_allclose(data["chance_peak"].values.ravel(), expected)


def test_slashes_of_the_trained_model_are_lifted_and_those_of_its_null_are_not(result):
    trained, null = (
        one["bands"].sel(variant="all", at="best", scheme="thirds") for one in (result.dataset, result.null)
    )
    assert float(trained.sum("band").max()) > 20 * float(abs(null.sum("band")).max())


def test_prompts_of_different_lengths_and_very_short_ones_work(mini):
    feed = Feed([SlashPlanes()])
    for n in (2, 40):
        feed.first_prompt = len(feed.prompts)
        run_capture(mini, torch.arange(n)[None] + 300, feed, feed.needs)
    data = feed.datasets("mini")["slash_planes"]
    alone = tl_posgen.analyze(
        mini, torch.arange(40)[None] + 300, analyzers=[SlashPlanes()], null_seed=None, progress=False
    )
    np.testing.assert_allclose(
        data["contribution"].sel(at="4"), alone["slash_planes"].dataset["contribution"].sel(at="4")
    )


def test_the_frame_has_a_row_a_head_and_choice_of_tokens_and_it_comes_back_from_disk(result, tmp_path):
    frame = result.frame()
    assert len(frame) == 2 * 16
    assert {"best_score", "correlation", "chance_correlation", "same_peak", "dominant"} <= set(frame.columns)
    loaded = tl_posgen.load(result.save(tmp_path / "planes.nc"))["slash_planes"]
    xr.testing.assert_equal(loaded.dataset, result.dataset)


@pytest.mark.parametrize("wrong", [{"kappa": 0.0}, {"distances": ()}, {"distances": (-1, 2)}])
def test_settings_that_find_nothing_are_refused(wrong):
    with pytest.raises(InputError):
        SlashPlanes(**wrong)

"""Bands of RoPE ablated in running models."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from tl_posgen.hooks import ablate_bands
from tl_posgen.models.layer_table import geometry_of
from tl_posgen.models.tokens import to_prompts
from tl_posgen.rope.frequency_bands import bands_by_thirds, bands_by_wavelength
from tl_posgen.slash import BandAblation

MEASURE = "band_ablation"

pytestmark = pytest.mark.longer

CUT = {"length": 64, "n_prompts": 2}


def test_losses_are_those_of_the_hooked_model(mini, alice, result):
    tokens = torch.stack(to_prompts(mini, alice, **CUT))
    hooks = {"unchanged": [], "drop medium, thirds": ablate_bands(mini, "drop", bands_by_thirds(16)[1])}
    for condition, hooked in hooks.items():
        logits = mini.run_with_hooks(tokens, fwd_hooks=hooked).detach()
        expected = [float(cross_entropy(row[:-1], ids[1:])) for row, ids in zip(logits, tokens, strict=True)]
        np.testing.assert_allclose(result.trained.loss.sel(condition=condition), expected, rtol=1e-5)


def test_scores_are_those_of_slash_and_of_slash_ablation_until_what_went_before_shows(report, result):
    data, slash, ablated = result.trained, report["slash"].trained, report["slash_ablation"].trained
    unchanged, running = data.sel(condition="unchanged"), data.score.mean("prompt")
    np.testing.assert_allclose(unchanged.score.mean("prompt"), slash["slash_score"], rtol=1e-12)
    np.testing.assert_array_equal(unchanged.dominant, slash["dominant"])
    np.testing.assert_allclose(running.sel(condition="means_no_rope"), ablated.best_uniform, atol=1e-5)
    away = abs(running - ablated["slash_score"].sel(condition=data.condition))
    assert away.sel(layer=0).max() < 1e-5
    assert away.sel(layer=3, condition="no_rope").max() > 1e-4


@pytest.mark.slow
def test_bands_by_wavelength_go_by_each_layers_own_frequencies(family_model):
    model = family_model("gemma3", "bridge")
    tokens = torch.randint(2, 64, (1, 100), generator=torch.Generator().manual_seed(0))
    data = BandAblation(schemes=["wavelength"])(model, tokens, nulls=0, progress=False).trained
    expected = [int(bands_by_wavelength(one.rope, 100)[2].sum()) for one in geometry_of(model)]
    assert data.n_planes.sel(condition="keep low, wavelength").values.tolist() == expected
    assert expected[0] != expected[1]


def test_intervals_are_over_prompts_of_scores_and_of_what_each_prompt_loses(family_model, alice):
    few = {"length": 24, "n_prompts": 4, "nulls": 0, "progress": False}
    model, measure = family_model("llama"), BandAblation(schemes=["thirds"])
    result = measure(model, alice, **few)
    band, own = result.measure, result.numbers
    for condition in ("no_rope", "drop high, thirds"):
        loss = result.trained["loss"]
        change = loss.sel(condition=condition) - loss.sel(condition="unchanged")
        half = 3.1824 * float(change.std(ddof=1)) / 2
        found = band.rises(own)[condition]
        assert [found.low, found.high] == pytest.approx(
            [float(change.mean()) + side * half for side in (-1, 1)], rel=1e-4
        )
        score = band.slash_score(own, condition)
        assert score.low < score.value < score.high
    one = measure(model, alice, **{**few, "n_prompts": 1})
    assert np.isnan(band.slash_score(one.numbers).low)

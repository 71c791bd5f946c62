"""The planes behind a slash, on real models: against brute force over the recomputed logits."""

import numpy as np
import pytest
import torch
import xarray as xr
from rotated_heads import captures_of

from tl_posgen.core.formatting import format_bound
from tl_posgen.models.tokens import to_prompts
from tl_posgen.slash import SlashPlanes

MEASURE = "slash_planes"
FROM = "single"

N = 80
LAYER = 3
QUIET = {"nulls": 0, "progress": False}

pytestmark = pytest.mark.longer


@pytest.fixture(scope="module")
def logits(mini, alice):
    """[head, query, key] of one layer of the same prompt, float64, -inf where invisible."""
    [layer] = captures_of(mini, to_prompts(mini, alice, length=N, n_prompts=1), layers=[LAYER])
    return layer.scores().double()


@pytest.fixture(scope="module")
def of_family(family_model):
    """The result of a tiny model on random tokens."""
    tokens = torch.randint(2, 64, (1, 24), generator=torch.Generator().manual_seed(0))
    return lambda family: SlashPlanes()(family_model(family, "bridge"), tokens, **QUIET)


@pytest.mark.parametrize(("tokens", "first"), [("all", 0), ("without first", 1)])
def test_contributions_add_up_to_the_lift_of_the_diagonal(result, logits, tokens, first):
    s = logits[:, first:, first:]
    mean = s.masked_fill(s.isinf(), 0).sum((1, 2)) / (~s.isinf())[0].sum()
    total = result.trained["contribution"].sel(tokens=tokens, layer=LAYER).sum("plane")
    lift = torch.stack([s.diagonal(-distance, -2, -1).mean(-1) - mean for distance in range(s.shape[-1])])
    for distance in (0, 1, 4):
        np.testing.assert_allclose(total.sel(at=str(distance)), lift[distance], atol=1e-4)
    best = result.trained["slash_distance"].sel(tokens=tokens, layer=LAYER).values.astype(int)
    np.testing.assert_allclose(total.sel(at="best"), lift[best, range(len(best))], atol=1e-4)


def test_bands_hold_every_plane_once_the_fastest_third_first(result):
    bands, contribution = result.trained["bands"], result.trained["contribution"]
    whole, plane = contribution.sum("plane"), result.trained["plane"]
    np.testing.assert_allclose(bands.sum("band").transpose(*whole.dims), whole, atol=1e-9)
    assert "unrotated" not in result.plot("bands").data[0].y
    for number, band in enumerate(("high", "medium", "low")):
        planes = 3 * plane // contribution.sizes["plane"] == number
        found = bands.sel(band=band).transpose(*whole.dims)
        np.testing.assert_allclose(found, contribution.where(planes).sum("plane"), atol=1e-9)
    trained, null = (one["bands"].sel(tokens="all", at="best") for one in (result.trained, result.null))
    assert float(trained.sum("band").max()) > 20 * float(abs(null.sum("band")).max())


def test_what_is_not_rotated_is_a_band_of_its_own(of_family):
    result = of_family("neox")
    data = result.trained
    plain = data["contribution"].where(np.isinf(data["wavelength"])).sum("plane").sel(at="best")
    unrotated = data["bands"].sel(band="unrotated", at="best")
    assert 0 < int(np.isinf(data["wavelength"]).sum()) < data["wavelength"].size
    assert "unrotated" in result.plot("bands").data[0].y
    np.testing.assert_allclose(unrotated.transpose(*plain.dims), plain)


def test_the_lift_is_said_beside_the_largest_of_each_kind_of_null_models(result):
    most = abs(result.dataset["bands"].sel(tokens="all", at="best").mean(["layer", "head"])).max("band")
    [told] = [sentence for sentence in result.findings() if "above the mean logit" in sentence]
    assert result.numbers.by_null
    for kind, nulls in result.numbers.by_null.items():
        assert f"{kind} {format_bound(most.sel(init=nulls.labels).values.tolist())}" in told


def test_a_model_of_absolute_positions_turns_nothing_and_says_so(of_family):
    result = of_family("gpt2")
    assert np.isinf(result.trained["wavelength"]).all()
    np.testing.assert_allclose(*xr.broadcast(result.trained["predicted"], result.trained["uniform"]))
    assert any("No plane of this model turns" in sentence for sentence in result.findings())


def test_chance_is_over_the_heads_measured_and_of_one_head_not_defined(mini, alice):
    cut = {"length": 24, "n_prompts": 1, **QUIET}
    two, one = (SlashPlanes()(mini, alice, heads=heads, **cut) for heads in ([(1, 2), (3, 1)], [(3, 1)]))
    data = two.trained.sel(tokens="all").isel(distance=slice(12))
    above = {name: data[name] - data["uniform"] for name in ("predicted", "score")}
    expected = np.corrcoef(above["predicted"].sel(layer=3, head=1), above["score"].sel(layer=1, head=2))[0, 1]
    assert float(data["chance_correlation"].sel(layer=3, head=1)) == pytest.approx(expected)
    [told] = [sentence for sentence in one.findings() if "predicted from rank one" in sentence]
    assert "(with the other heads measured: not defined)" in told

"""Sums over prompts by brute force: prompts of several lengths, layers with other heads, rows of prompts, joining."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from tl_posgen.core.measure import Variable, with_token_variants
from tl_posgen.core.sums import OfFirstPrompt, Sums, Total

VARIABLES = {
    "r": Variable("r", dims=("tokens", "layer", "head")),
    "curve": Variable("curve", dims=("layer", "head", "distance")),
    "loss": Variable("loss", dims=("prompt", "position")),
    "of_prompt": Variable("of prompt", dims=("layer", "head", "prompt")),
    "seconds": Variable("seconds", dims=("layer", "kind")),
}
HEADS = {0: [0, 2], 3: [1, 2]}  # layer -> heads
LABELS = {"kind": ["a", "b", "c"]}


def values_of(prompt, layer, length):
    """What one layer of one prompt gives; NaN at some places."""
    draw = torch.Generator().manual_seed(100 * prompt + layer)
    found = {
        "r": torch.rand(2, 2, generator=draw),
        "curve": torch.rand(2, length, generator=draw),
        "of_prompt": torch.rand(2, generator=draw),
        "seconds": torch.rand(3, generator=draw),
    }
    found["r"][1, prompt % 2] = torch.nan
    return found


def losses(prompt, length):
    return torch.rand(length - 1, generator=torch.Generator().manual_seed(prompt))


def sums_of(lengths):
    """Prompt -> length: their sums."""
    sums = Sums(VARIABLES, LABELS)
    for prompt, length in lengths.items():
        for layer, heads in HEADS.items():
            capture = SimpleNamespace(layer=layer, heads=heads, prompt=prompt, length=length, geometry=None)
            sums.add_layer(capture, values_of(prompt, layer, length))
        sums.add(prompt, length, {"loss": losses(prompt, length)})
    return sums


LENGTHS = {0: 5, 1: 3, 2: 5, 4: 7}


@pytest.fixture(scope="module")
def data():
    return sums_of(LENGTHS).means()


def test_means_are_those_of_the_prompts_that_have_a_value(data):
    for layer, heads in HEADS.items():
        for place, head in enumerate(heads):
            for number, tokens in enumerate(("all", "without first")):
                every = [values_of(one, layer, n)["r"][number, place].item() for one, n in LENGTHS.items()]
                found = data["r"].sel(layer=layer, head=head, tokens=tokens).item()
                assert found == pytest.approx(np.nanmean(every))
            curves = [values_of(one, layer, n)["curve"][place].tolist() for one, n in LENGTHS.items()]
            for distance in range(max(LENGTHS.values())):
                there = [curve[distance] for curve in curves if len(curve) > distance]
                found = data["curve"].sel(layer=layer, head=head).isel(distance=distance).item()
                assert found == pytest.approx(np.mean(there))
        seconds = torch.stack([values_of(one, layer, n)["seconds"] for one, n in LENGTHS.items()]).double().mean(0)
        np.testing.assert_allclose(data["seconds"].sel(layer=layer), seconds)


def test_heads_that_a_layer_lacks_have_no_value_and_rows_of_prompts_are_kept(data):
    assert data["head"].values.tolist() == [0, 1, 2]
    assert data["layer"].values.tolist() == [0, 3]
    for layer, head in ((0, 1), (3, 0)):
        assert data[["r", "curve", "of_prompt"]].sel(layer=layer, head=head).isnull().all().to_array().all()
    assert data["loss"].dims == ("prompt", "position")
    assert data["prompt"].values.tolist() == list(LENGTHS)
    for prompt, length in LENGTHS.items():
        row = data["loss"].sel(prompt=prompt).values
        np.testing.assert_allclose(row[: length - 1], losses(prompt, length))
        assert np.isnan(row[length - 1 :]).all()
        np.testing.assert_allclose(
            data["of_prompt"].sel(prompt=prompt, layer=3, head=[1, 2]), values_of(prompt, 3, length)["of_prompt"]
        )


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(2, 6), min_size=2, max_size=6), st.data())
def test_joining_groups_equals_one_group(lengths, data):
    whole = dict(enumerate(lengths))
    cut = data.draw(st.integers(1, len(lengths) - 1))
    one, other = sums_of(dict(list(whole.items())[:cut])), sums_of(dict(list(whole.items())[cut:]))
    for joined in (one + other, other + one):
        xr.testing.assert_allclose(joined.means(), sums_of(whole).means())
        assert joined.lengths.keys() == whole.keys()


def test_objects_are_added_by_their_own_sum():
    sums = Sums({})
    capture = SimpleNamespace(layer=2, heads=[0], prompt=0, length=3, geometry="g")
    for words in (["a"], ["b"]):
        sums.add_layer(capture, {"words": words, "example": OfFirstPrompt(words)})
    assert sums.by_layer("words") == {2: ["a", "b"]}
    assert sums.by_layer("example")[2].value == ["a"]
    assert "words" in sums
    assert "others" not in sums
    assert (Sums({}, seed=3) + Sums({})).seed == 3
    assert (sums + Sums({})).by_layer("words") == {2: ["a", "b"]}
    assert len(sums.means()) == 0


def test_sums_are_means_times_prompts():
    sums = sums_of(LENGTHS)
    np.testing.assert_allclose(sums.sum("seconds"), sums.mean("seconds") * len(LENGTHS))
    n = np.array([sum(n > distance for n in LENGTHS.values()) for distance in range(7)])
    np.testing.assert_allclose(sums.sum("curve"), sums.mean("curve") * n)


def test_totals_of_other_lengths_are_padded():
    total = Total.from_values(np.array([1.0, np.nan])) + Total.from_values(np.array([3.0, np.nan, 5.0]))
    np.testing.assert_equal(total.mean, [2.0, np.nan, 5.0])


def test_values_with_and_without_the_first_token_are_stacked():
    with_all, rest = torch.rand(3, 4), torch.rand(3, 3)
    both = with_token_variants(({"x": with_all}, {"x": rest}))["x"]
    assert both.shape == (2, 3, 4)
    torch.testing.assert_close(both[0], with_all.double())
    torch.testing.assert_close(both[1, :, :3], rest.double())
    assert both[1, :, 3].isnan().all()
    assert with_token_variants(({"x": with_all, "y": rest}, {"x": rest}))["y"] is rest

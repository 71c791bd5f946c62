"""Frequency bands against the definition, plane by plane."""

import math

import pytest
import torch

from tl_posgen.errors import InputError
from tl_posgen.rope.frequency_bands import BANDS, bands_by_thirds, bands_by_wavelength, planes_of
from tl_posgen.rope.rotation import Rope


def names(bands: torch.Tensor) -> list[str]:
    """Return the band of every plane; each plane must be in exactly one."""
    assert bands.sum(0).tolist() == [1] * bands.shape[1]
    return [BANDS[band] for band in bands.int().argmax(0).tolist()]


@pytest.mark.parametrize("n_planes", [0, 1, 2, 3, 7, 16])
def test_thirds_of_the_planes(n_planes):
    expected = [("high", "medium", "low")[math.floor(3 * m / n_planes)] for m in range(n_planes)]
    assert names(bands_by_thirds(n_planes)) == expected


@pytest.mark.parametrize(
    ("n", "options", "expected"),
    [
        (512, {}, ["high", "medium", "medium", "medium", "low", "low"]),
        (511, {}, ["high", "medium", "medium", "low", "low", "low"]),
        (10, {}, ["high", "medium", "low", "low", "low", "low"]),
        (512, {"shortest": 64.0}, ["high", "high", "medium", "medium", "low", "low"]),
    ],
)
def test_bands_by_wavelength_end_where_they_say(n, options, expected):
    wavelengths = torch.tensor([31.9, 32.0, 64.0, 512.0, 512.5, 1e9], dtype=torch.float64)
    assert names(bands_by_wavelength(Rope(2 * torch.pi / wavelengths), n, **options)) == expected


ROPE = Rope(torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64))


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ([0, 2], [True, False, True]),
        ([True, False, False], [True, False, False]),
        (torch.tensor([False, False, True]), [False, False, True]),
        (lambda rope: rope.inv_freq < 0.5, [False, True, True]),
        (lambda rope: [], [False, False, False]),
    ],
    ids=["numbers", "booleans", "mask", "function", "function of none"],
)
def test_planes_are_chosen_in_every_way_and_a_function_may_choose_none(choice, expected):
    assert planes_of(ROPE, choice).tolist() == expected


@pytest.mark.parametrize("choice", [[], [3], [-1], [True], lambda rope: torch.ones(2, dtype=torch.bool)])
def test_no_planes_and_others_than_there_are_are_refused(choice):
    with pytest.raises(InputError, match="band: "):
        planes_of(ROPE, choice, "band")

"""Ablations of queries, keys and RoPE, against rotation matrices token by token."""

from typing import get_args

import pytest
import torch
from drawn import normal

from tl_posgen.errors import InputError
from tl_posgen.rope.rotation import Rope, inverse_frequencies, rotate
from tl_posgen.slash.numbers.ablations import OF_THE_PROMPT, Ablation, ablate

ROPE = Rope(inverse_frequencies(6, 20.0))  # planes 0, 1, 2 in halves: coordinates m and m + 3
N, D_HEAD = 5, 8  # the last two coordinates do not turn
BAND = torch.tensor([False, True, True])
BANDED = ("drop", "freeze", "keep")


def both() -> tuple[torch.Tensor, torch.Tensor]:
    return 0.4 + normal(2, N, D_HEAD, seed=1), normal(2, N, D_HEAD, seed=2)


def in_band() -> torch.Tensor:
    """Whether each coordinate is one of a plane of the band."""
    return torch.cat([BAND, BAND, torch.zeros(2, dtype=torch.bool)])


def by_hand(kind: str, x: torch.Tensor) -> torch.Tensor:
    """One of q and k after an ablation, rotated token by token."""
    still = {"freeze": in_band(), "no_rope": torch.ones(D_HEAD).bool(), "means_no_rope": torch.ones(D_HEAD).bool()}
    if kind == "drop":
        x = x * ~in_band()
    if kind == "keep":
        x = x * in_band()
    if kind.startswith("means"):
        x = torch.stack([head.mean(0).repeat(N, 1) for head in x])
    if kind == "rank_one":
        u, s, v = torch.linalg.svd(x, full_matrices=False)
        x = s[:, :1, None] * u[:, :, :1] @ v[:, :1]
    turned = torch.stack([rotate(x[:, i], torch.full((2,), i), ROPE) for i in range(N)], 1)
    return torch.where(still.get(kind, torch.zeros(D_HEAD).bool()), x, turned)


@pytest.mark.parametrize("kind", get_args(Ablation))
def test_each_is_its_formula_token_by_token(kind):
    for found, given in zip(ablate(*both(), ROPE, kind, BAND), both(), strict=True):
        torch.testing.assert_close(found, by_hand(kind, given), atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("kind", get_args(Ablation))
def test_those_of_the_prompt_and_no_others_read_later_tokens(kind):
    q, k = both()
    whole, cut = (ablate(*some, ROPE, kind, BAND) for some in ((q, k), (q[:, :3], k[:, :3])))
    same = all(torch.allclose(one[:, :3], other) for one, other in zip(whole, cut, strict=True))
    assert same == (kind not in OF_THE_PROMPT)


@pytest.mark.parametrize("kind", [kind for kind in get_args(Ablation) if kind not in OF_THE_PROMPT])
def test_fewer_queries_than_keys_are_the_last_ones(kind):
    q, k = both()
    few = ablate(q[:, -2:], k, ROPE, kind, BAND)
    for found, whole in zip(few, ablate(q, k, ROPE, kind, BAND), strict=True):
        torch.testing.assert_close(found, whole[:, -found.shape[1] :])


@pytest.mark.parametrize("kind", BANDED)
def test_a_band_is_needed_where_one_is_ablated(kind):
    for band in (None, BAND[:2]):
        with pytest.raises(InputError, match="needs a band: a boolean for each of the 3 planes"):
            ablate(*both(), ROPE, kind, band)


def test_an_unknown_kind_is_refused():
    with pytest.raises(InputError, match="choose one of none, drop, freeze"):
        ablate(*both(), ROPE, "mean")

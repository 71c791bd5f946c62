"""The terms of a layer's scores: whatever `finish` reads, bilinear says whether it does anything."""

from dataclasses import dataclass, replace

import pytest
import torch

from tl_posgen.editing.score_functions import finished
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.layers.fused import finish_of
from tl_posgen.models.layers.geometry import LayerGeometry

PLAIN = LayerGeometry(0, "none", 2, 2, 8, 0.3)
SLOPES = torch.tensor([0.5, 0.25])


class Arctan(LayerGeometry):
    """A cap that the package does not know."""

    def capped(self, products):
        return torch.arctan(products)


@dataclass(frozen=True)
class Weighted(LayerGeometry):
    """A term that is neither a cap nor a bias."""

    weight: float = 1.0

    def finish(self, products, distance, heads=None):
        return super().finish(products, distance, heads) * self.weight


GEOMETRIES = {
    "plain": (PLAIN, True, False),
    "window": (replace(PLAIN, window=5), True, False),
    "soft cap": (replace(PLAIN, soft_cap=2.0), False, True),
    "ALiBi": (replace(PLAIN, alibi_slopes=SLOPES), False, False),
    "both": (replace(PLAIN, soft_cap=2.0, alibi_slopes=SLOPES), False, True),
    "another cap": (Arctan(0, "none", 2, 2, 8, 0.3), False, True),
    "another term": (Weighted(0, "none", 2, 2, 8, 0.3, weight=2.0), False, False),
}


@pytest.mark.parametrize(("geometry", "bilinear", "has_cap"), GEOMETRIES.values(), ids=GEOMETRIES)
def test_edits_and_streamed_passes_finish_scores_as_captures_do(geometry, bilinear, has_cap):
    q, k = torch.randn(2, 2, 9, 8, generator=torch.Generator().manual_seed(0))
    capture = LayerCapture(geometry, range(2), 0, None, q, k)
    products, away = 0.3 * q @ k.mT, torch.arange(9)[:, None] - torch.arange(9)
    seen, finish = geometry.sees(away), finish_of(geometry)
    assert (geometry.bilinear, geometry.has_cap, finish is None) == (bilinear, has_cap, bilinear)
    torch.testing.assert_close(finished(products, capture)[:, seen], capture.scores()[:, seen])
    streamed = products if finish is None else finish(products, away)
    torch.testing.assert_close(streamed[:, seen], capture.scores()[:, seen])
    assert bilinear == torch.equal(capture.scores()[:, seen], products[:, seen])


def test_the_bias_is_added_behind_the_cap():
    geometry, products = GEOMETRIES["both"][0], torch.tensor([[[3.0, -1.0]]])
    found = geometry.finish(products, torch.tensor([[4, 0]]), [1])
    torch.testing.assert_close(found, 2 * (products / 2).tanh() - torch.tensor([1.0, 0.0]))


@pytest.mark.parametrize("window", [None, 1, 5, 9, 12])
def test_a_query_reaches_as_many_keys_as_the_last_row_sees(window):
    geometry = replace(PLAIN, window=window)
    assert geometry.reach(9) == geometry.visible(9)[-1].sum()

"""Numbers are made where their tensors are, and leave them as they are: no accelerator is needed to see it.

The "meta" device holds shapes and no data. Where it is the default, a tensor that a function makes without naming its
input's device is one of them, and cannot meet the input; where it is the inputs', a tensor that stays behind cannot.
"""

import pytest
import torch

from tl_posgen.models.geometry.proof import allowed_error, is_softmax, without_row_offsets
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.position.decomposition.numbers.pair_moments import pair_moments, pair_moments_from_scores
from tl_posgen.position.decomposition.numbers.three_axis_fit import fit_three_axis
from tl_posgen.position.decomposition.numbers.variance_shares import TripleMoments, interaction_share, variance_shares
from tl_posgen.position.distance.numbers import key_agreement
from tl_posgen.position.substitution.numbers import positional_profile, running_mean_key
from tl_posgen.rope.bilinear_sums import sums_over_band
from tl_posgen.rope.frequency_bands import bands_by_wavelength
from tl_posgen.rope.planes import turning_factors
from tl_posgen.rope.rotation import Rope, complex_frequencies, complex_planes, inverse_frequencies, rotate
from tl_posgen.rope.scores_at import scores_at, scores_frozen_beyond
from tl_posgen.rope.spectra import rank_one, rank_one_share
from tl_posgen.rope.splits import attention_profile, split_scores
from tl_posgen.slash.numbers.ablations import drop, keep, without_rotation

ROPE = Rope(inverse_frequencies(4))  # where a model's description is, whatever its device
WEIGHTS, BAND = torch.ones(9), torch.tensor([True, False])
ALIBI = LayerGeometry(0, "alibi", 2, 2, 8, 0.3, alibi_slopes=torch.tensor([0.5, 0.25]))
OF_SHAPES = {
    "rotate": lambda q: rotate(q, torch.arange(20, device=q.device), ROPE),
    "rotate adjacent pairs": lambda q: rotate(
        q, torch.arange(20, device=q.device), Rope(ROPE.inv_freq, "adjacent", 2.0)
    ),
    "complex planes": lambda q: complex_planes(q, ROPE),
    "a band dropped": lambda q: drop(q, ROPE, BAND),
    "a band kept": lambda q: keep(q, ROPE, BAND),
    "a band that does not turn": lambda q: without_rotation(Rope(torch.ones(2, device=q.device)), BAND),
    "turning factors": lambda q: turning_factors(torch.arange(20, device=q.device), ROPE, 8),
    "scores at a distance": lambda q: scores_at(q, q, ROPE, 0.3, 2.5),
    "scores frozen": lambda q: scores_frozen_beyond(q, q, ROPE, 0.3, 3),
    "sums over a window, short": lambda q: sums_over_band(q, q, 5),
    "sums over a window, long": lambda q: sums_over_band(q.repeat(1, 30, 1), q.repeat(1, 30, 1), 5),
    "key agreement": lambda q: key_agreement(q, q, ROPE, torch.arange(4, device=q.device)),
    "rank_one_share": lambda q: rank_one_share(q),
    "rank one": lambda q: rank_one(q),
    "splits": lambda q: split_scores(q, q, ROPE, 0.3, positional_profile(q, q, ROPE, 0.3)),
    "running mean key": lambda q: running_mean_key(q, 5),
    "variance": lambda q: variance_shares(TripleMoments.from_qk(q, q, ROPE), ROPE, 0.3, 9, weights=WEIGHTS),
    "interaction": lambda q: interaction_share(q, q, ROPE),
    "recomputed scores": lambda q: LayerCapture(ALIBI, range(len(q)), 0, None, q, q).scores(),
    "without row offsets": lambda q: without_row_offsets(q @ q.mT, q, q, ALIBI),
    "allowed error": lambda q: allowed_error(q, q, ALIBI, torch.float32),
}
OF_VALUES = {
    "scores at few offsets": lambda q: scores_at(q, q, ROPE, 0.3, lambda distance: distance),
    "scores at any distance": lambda q: scores_at(q, q, ROPE, 0.3, lambda distance: 2 * distance),
    "complex frequencies": lambda q: complex_frequencies(ROPE, 9),
    "bands": lambda q: bands_by_wavelength(ROPE, 20),
    "weighted axes": lambda q: fit_three_axis(pair_moments(q, q, distance_weights=(2.0, 0.001))),
    "three axes": lambda q: fit_three_axis(pair_moments(q, q, window=4)),
    "three axes of scores": lambda q: fit_three_axis(pair_moments_from_scores(q @ q.mT)),
    "attention profile": lambda q: attention_profile((q @ q.mT).softmax(-1)),
    "softmax": lambda q: is_softmax(q @ q.mT, (q @ q.mT).softmax(-1), torch.float32),
}


@pytest.mark.parametrize("function", (OF_SHAPES | OF_VALUES).values(), ids=OF_SHAPES | OF_VALUES)
def test_nothing_is_made_on_the_default_device_and_what_is_given_is_left_as_it_was(function):
    q = torch.randn(2, 20, 8, generator=torch.Generator().manual_seed(0))
    given = q.clone()
    with torch.device("meta"):
        assert "meta" not in repr(function(q))
    assert torch.equal(q, given)


@pytest.mark.parametrize("function", OF_SHAPES.values(), ids=OF_SHAPES)
def test_nothing_stays_behind_on_the_cpu(function):
    function(torch.empty(2, 20, 8, device="meta"))

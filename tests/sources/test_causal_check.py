"""The check of position shares: keys without the constant of a source, taken from the other prompts."""

import numpy as np
import pytest
import torch
from scipy import stats
from source_vectors import source_vectors

from tl_posgen.models.layers.capture import scores_from
from tl_posgen.models.tokens import to_prompts
from tl_posgen.rope.rotation import rotate
from tl_posgen.sources import Sources

pytestmark = pytest.mark.longer

QUIET = {"nulls": 0, "progress": False}
AT = {"tokens": "without first", "side": "k", "term": "position"}


@pytest.fixture(scope="module")
def prompts(mini, alice):
    return torch.stack(to_prompts(mini, alice, length=24, n_prompts=4))


@pytest.fixture(scope="module")
def result(mini, prompts):
    return Sources(check=True)(mini, prompts, **QUIET)


def slash_score(capture, keys, distance):
    rotated = rotate(keys, capture.positions, capture.geometry.rope)
    pattern = scores_from(capture.rotated_q, rotated, capture.geometry, capture.heads).softmax(-1)
    return pattern.diagonal(-distance, 1, 2).mean(-1)


def test_the_fall_is_that_of_scores_without_the_constant_of_the_other_prompts(mini, prompts, result):
    read = [(one, vectors["L0 MLP"]) for one, vectors in (source_vectors(mini, row, 2, "k") for row in prompts)]
    means = [keys[:, 1:].mean(1) for _, keys in read]
    data = result.trained.sel(layer=2, source="L0 MLP")
    scores = [[slash_score(capture, capture.k, distance) for capture, _ in read] for distance in range(12)]
    untouched = torch.stack([torch.stack(one).mean(0) for one in scores])
    best = untouched.argmax(0).tolist()
    for head, distance in enumerate(best):
        scores = []
        for number, (capture, _) in enumerate(read):
            constant = sum(mean for other, mean in enumerate(means) if other != number) / 3
            scores.append(slash_score(capture, capture.k - constant[:, None].float(), distance)[head])
        fall = 1 - torch.stack(scores).mean() / untouched[distance, head]
        np.testing.assert_allclose(data["fall"].sel(head=head), fall, atol=1e-4)
    every = torch.cat([keys[:, 1:] for _, keys in read], 1)
    np.testing.assert_allclose(data["constant_energy"], every.mean(1).square().sum(-1), rtol=1e-5)


def test_correlations_are_over_heads_and_sources_of_layers_with_several(result):
    data = result.trained
    later = data["layer"] > 0
    columns = {"position share": data["share"].sel(AT), "energy of the constant": data["constant_energy"]}
    fall = data["fall"].where(later)
    for name, column in columns.items():
        both = column.where(later).transpose(*fall.dims).values.ravel(), fall.values.ravel()
        expected = stats.spearmanr(*both, nan_policy="omit").statistic
        np.testing.assert_allclose(data["rho"].sel(predictor=name), expected)
    number = result.numbers("rho", predictor="position share")
    assert 0.5 < number.low <= number.value <= number.high <= 1
    assert f"position share {number:.2f}" in result.findings()[-1]

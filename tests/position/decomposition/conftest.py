"""Shared by the tests of this folder: one report of all measures of the mini model."""

import pytest
import torch
from rotated_heads import captures_of

from tl_posgen.core.engine import analyze
from tl_posgen.core.report import Report
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.tokens import to_prompts

MEASURES = ["three_axis", "variance", "mean_key", "residual", "attention_examples"]


@pytest.fixture(scope="session")
def prompts(mini, alice) -> torch.Tensor:
    return torch.stack(to_prompts(mini, alice, length=64, n_prompts=4, consecutive=True))


@pytest.fixture(scope="session")
def report(mini, prompts) -> Report:
    """All measures on four prompts of 64 tokens, beside two random inits."""
    return analyze(mini, prompts, measures=MEASURES, nulls=2, progress=False)


@pytest.fixture(scope="session")
def single(mini, prompts) -> Report:
    """The residual and the fit of the first prompt alone, without random inits."""
    return analyze(mini, prompts[:1], measures=["residual", "three_axis"], nulls=0, progress=False)


@pytest.fixture(scope="session")
def capture(mini, prompts) -> LayerCapture:
    """Layer 1 on the first prompt."""
    return captures_of(mini, prompts[:1], layers=[1])[0]

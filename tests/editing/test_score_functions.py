"""Scores as functions of a capture: the layer's own, made of products."""

import pytest
import torch
from captures import run
from interventions import TOKENS, N

from tl_posgen.editing.score_functions import finished


@pytest.mark.parametrize("name", ["llama", "bloom", "gemma2"])
def test_finished_products_are_the_scores(family_model, name):
    for capture in run(family_model(name), TOKENS[:1]):
        products = capture.geometry.scale * capture.rotated_q @ capture.rotated_k.mT
        below = capture.geometry.visible(N)
        torch.testing.assert_close(finished(products, capture)[:, below], capture.scores()[:, below])

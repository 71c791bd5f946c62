"""Models and results that the tests of coupling share."""

import pandas as pd
import pytest
import torch
from families import VOCAB, save_config
from transformers import LlamaConfig

from tl_posgen.coupling import Coupling, coupling_scores

TEXT = "once there was a cat and a dog who ran " * 6
WIDTHS = (16, 16, 24, 32)


@pytest.fixture(scope="session")
def prompts():
    return torch.randint(2, VOCAB, (4, 20), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="session")
def result(llama, prompts):
    """Two K, three tokens, beside two random inits."""
    return Coupling(k=(2, 5), tokens=[4, 12, -1])(llama, prompts, nulls=2, progress=False)


@pytest.fixture(scope="session")
def of_mini(mini, alice):
    """At the last of the first 64 tokens, beside the null of seed 0."""
    return Coupling()(mini, alice, length=64, n_prompts=1, progress=False)


@pytest.fixture(scope="session")
def score_rows(tmp_path_factory):
    """Four tiny models of three widths, and a score each."""
    root = tmp_path_factory.mktemp("models")
    for number, width in enumerate(WIDTHS):
        sizes = {"hidden_size": width, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        shape = LlamaConfig(vocab_size=64, max_position_embeddings=64, **sizes)
        save_config(shape, root / f"model{number}", seed=number)
    models = [str(root / f"model{number}") for number in range(len(WIDTHS))]
    return pd.DataFrame({"model": models, "score": [0.1, 0.3, 0.2, 0.4]})


@pytest.fixture(scope="session")
def scores(score_rows, tmp_path_factory):
    """Four models against their scores, beside two random inits of each."""
    path = tmp_path_factory.mktemp("scores") / "scores.csv"
    score_rows.to_csv(path, index=False)
    options = {"k": 3, "length": 12, "n_prompts": 4, "widths": (16, 24, 32), "progress": False}
    return coupling_scores(path, TEXT, nulls=2, **options)

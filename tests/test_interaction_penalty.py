"""examples/interaction_penalty: the penalty is the interaction of `variance`, differences are paired by seed."""

import json
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from interaction_penalty import compare, train


@pytest.fixture
def batch():
    return torch.randint(1, 64, (3, 21), generator=torch.Generator().manual_seed(0))


@pytest.mark.longer
@pytest.mark.parametrize("encoding", ["rope", "plain"])
def test_the_penalty_is_the_interaction_of_variance(encoding, batch):
    model = train.new_model(64, encoding, seed=0)
    measured = compare.score_numbers(model, batch[:, :-1])[0]["interaction"]
    loss = train.recipe.mean_loss(model, batch)
    added = train.penalised_loss(model, batch, 2.0) - loss
    assert measured > 0.1
    assert added.item() == pytest.approx(2 * measured, rel=1e-4)


def test_a_step_against_the_penalty_lowers_it(batch):
    model = train.new_model(64, "rope", seed=0)
    before = train.penalised_loss(model, batch, 100.0)
    before.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 1e-4 * parameter.grad
    assert train.penalised_loss(model, batch, 100.0).item() < before.item() - 0.1


def test_differences_are_paired_by_seed():
    numbers = dict.fromkeys((*compare.SCORES, "interaction_at_init", *compare.SETTINGS), 1)
    losses = {("rope", 0): 3.0, ("rope", 1): 5.0, ("split", 0): 4.0, ("split", 1): 6.5, ("split", 2): 9.0}
    rows = [
        {"run": run, "seed": seed, **numbers, **dict.fromkeys(compare.LOSSES, loss)}
        for (run, seed), loss in losses.items()
    ]
    found = compare.summarise(pd.DataFrame(rows))["runs"]
    assert found["split"]["less_rope"]["loss"]["of_seeds"] == [1.0, 1.5]
    assert found["split"]["loss"]["mean"] == 6.5
    assert "less_rope" not in found["rope"]


def test_the_summary_is_that_of_the_rows():
    rows = pd.read_csv(compare.HERE / "results.csv")
    kept = json.loads((compare.HERE / "summary.json").read_text(encoding="utf-8"))
    assert kept == json.loads(json.dumps(compare.summarise(rows)))

"""The loss of the untouched model: against cross-entropy by hand."""

import json

import numpy as np
import pytest
import torch
from declared import assert_declared
from torch.nn.functional import cross_entropy

import tl_posgen
from tl_posgen.errors import InputError
from tl_posgen.loss import MEASURE as loss
from tl_posgen.models.loss import token_losses
from tl_posgen.models.tokens import to_prompts

CUT = {"length": 32, "n_prompts": 3}


@pytest.fixture(scope="module")
def result(mini, alice):
    return loss(mini, alice, **CUT, null_seeds=(0, 1), progress=False)


def test_it_is_the_cross_entropy_of_the_next_token(mini, alice, result):
    tokens = torch.stack(to_prompts(mini, alice, **CUT))
    with torch.no_grad():
        logits = mini(tokens)
    expected = torch.stack(
        [cross_entropy(x[:-1].double(), ids[1:], reduction="none") for x, ids in zip(logits, tokens, strict=True)]
    )
    np.testing.assert_allclose(result.dataset["token_loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(result.dataset["loss"], expected.mean(1), rtol=1e-5)
    np.testing.assert_allclose(result.dataset["token_loss"], token_losses(mini, tokens), rtol=1e-5)
    assert result.dataset["position"].values.tolist() == list(range(1, 32))


def test_both_backends_agree(mini_bridge, alice, result):
    bridge = loss(mini_bridge, alice, **CUT, null_seeds=(), progress=False)
    np.testing.assert_allclose(bridge.dataset["loss"], result.dataset["loss"], rtol=1e-4)


def test_chosen_layers_and_heads_do_not_change_it(mini, alice, result):
    some = loss(mini, alice, **CUT, layers=[1], heads=[(1, 2)], null_seeds=(), progress=False)
    np.testing.assert_allclose(some.dataset["loss"], result.dataset["loss"], rtol=1e-6)


def test_prompts_of_several_lengths_each_have_their_own_mean(mini):
    texts = ["Down, down, down.", "Would the fall never come to an end?"]
    whole = loss(mini, texts, null_seeds=(), progress=False).dataset
    for prompt, text in enumerate(texts):
        alone = loss(mini, text, null_seeds=(), progress=False).dataset
        own = whole["token_loss"].sel(prompt=prompt)
        assert int(own.notnull().sum()) == alone.sizes["position"]
        np.testing.assert_allclose(own.dropna("position"), alone["token_loss"][0], rtol=1e-5)
        assert float(whole["loss"][prompt]) == pytest.approx(float(alone["loss"][0]), rel=1e-5)


def test_the_sentence_and_the_title_tell_the_mean_beside_the_nulls(result):
    own, nulls = float(result.dataset["loss"].mean()), [float(null["loss"].mean()) for null in result.nulls]
    assert result.findings() == [
        f"Loss: {own:.3f} (random init {np.mean(nulls):.3f} ± {np.std(nulls, ddof=1):.3f}) nats per token."
    ]
    assert own < min(nulls) - 1
    assert f"mean over 3 prompts; over all positions {own:.3f}" in result.plot().layout.title.text
    assert json.loads(json.dumps(dict(result.summary))) == {"loss": own, "prompts": 3}


def test_the_curve_is_the_mean_over_prompts(result):
    own, null = result.plot().data
    np.testing.assert_allclose(own.y, result.dataset["token_loss"].mean("prompt"))
    np.testing.assert_allclose(null.y, result.null["token_loss"].mean("prompt"))
    assert own.x.tolist() == list(range(1, 32))
    assert null.name == "random init (seed 0)"


def test_it_is_declared_and_comes_back_from_disk(result, tmp_path):
    assert_declared(result)
    loaded = tl_posgen.load(result.save(tmp_path / "loss.nc"))["loss"]
    assert loaded.frame().equals(result.frame())
    assert loaded.findings() == result.findings()
    assert loaded.plot().to_json() == result.plot().to_json()
    assert len(result.frame()) == 3


def test_hooks_of_somebody_elses_pass_give_no_logits(mini):
    with pytest.raises(InputError, match="logits"), tl_posgen.attach(mini, "loss"):
        mini(torch.arange(12)[None])

"""The loss of the untouched model: against cross-entropy by hand."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from tl_posgen.loss import Loss
from tl_posgen.models import loss as losses
from tl_posgen.models.loss import divergence, normalisers_of, token_losses
from tl_posgen.models.tokens import to_prompts

CUT = {"length": 32, "n_prompts": 3}


@pytest.fixture(scope="module")
def result(mini, alice):
    return Loss()(mini, alice, **CUT, nulls=2, progress=False)


def test_it_is_the_cross_entropy_of_the_next_token(mini, alice, result):
    tokens = torch.stack(to_prompts(mini, alice, **CUT))
    with torch.no_grad():
        logits = mini(tokens)
    expected = torch.stack(
        [cross_entropy(x[:-1].double(), ids[1:], reduction="none") for x, ids in zip(logits, tokens, strict=True)]
    )
    np.testing.assert_allclose(result.trained["token_loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(result.trained["loss"], expected.mean(1), rtol=1e-5)
    np.testing.assert_allclose(result.trained["token_loss"], token_losses(mini, tokens), rtol=1e-5)
    assert result.trained["position"].values.tolist() == list(range(1, 32))


@pytest.mark.parametrize("at_once", [1, 300, 2**21])
def test_probabilities_of_blocks_of_positions_are_those_of_the_whole(monkeypatch, at_once):
    monkeypatch.setattr(losses, "AT_ONCE", at_once)
    logits, others = 5 * torch.randn(2, 3, 9, 40, generator=torch.Generator().manual_seed(0))
    log_p, log_q = (one.double() - one.double().exp().sum(-1, keepdim=True).log() for one in (logits, others))
    normalisers, of_others = normalisers_of(logits), normalisers_of(others)
    torch.testing.assert_close(logits.double() - normalisers[..., None], log_p)
    found = divergence(logits, others, normalisers, of_others)
    torch.testing.assert_close(found, (log_p.exp() * (log_p - log_q)).sum(-1))
    assert not divergence(logits, logits, normalisers, normalisers).any()


def test_chosen_layers_and_heads_do_not_change_it(mini, alice, result):
    some = Loss()(mini, alice, **CUT, layers=[1], heads=[(1, 2)], nulls=0, progress=False)
    np.testing.assert_allclose(some.trained["loss"], result.trained["loss"], rtol=1e-6)


def test_prompts_of_several_lengths_each_have_their_own_mean(mini):
    texts = ["Down, down, down.", "Would the fall never come to an end?"]
    whole = Loss()(mini, texts, nulls=0, progress=False).trained
    for prompt, text in enumerate(texts):
        alone = Loss()(mini, text, nulls=0, progress=False).trained
        own = whole["token_loss"].sel(prompt=prompt)
        assert int(own.notnull().sum()) == alone.sizes["position"]
        np.testing.assert_allclose(own.dropna("position"), alone["token_loss"][0], rtol=1e-5)
        assert float(whole["loss"][prompt]) == pytest.approx(float(alone["loss"][0]), rel=1e-5)


def test_the_sentence_and_the_title_show_the_mean_beside_the_nulls(result):
    own, *nulls, shuffled = (float(one["loss"].mean()) for one in (result.trained, *result.nulls))
    assert result.findings() == [
        f"Loss: {own:.3f} (random init {np.mean(nulls):.3f} ± {np.std(nulls, ddof=1):.3f}, shuffled {shuffled:.3f}) "
        "nats per token."
    ]
    assert own < min(nulls) - 1
    assert f"mean over 3 prompts; over all positions {own:.3f}" in result.plot().layout.title.text


def test_the_curve_is_the_mean_over_prompts(result):
    own, null, shuffled = result.plot().data
    np.testing.assert_allclose(own.y, result.trained["token_loss"].mean("prompt"))
    np.testing.assert_allclose(null.y, result.null["token_loss"].mean("prompt"))
    assert own.x.tolist() == list(range(1, 32))
    assert (null.name, shuffled.name) == ("random init (seed 0)", "shuffled weights (seed 0)")

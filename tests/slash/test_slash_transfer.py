"""Slash-dominant heads kept on random tokens."""

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from tl_posgen.models.tokens import to_prompts
from tl_posgen.slash import Slash
from tl_posgen.slash.slash_transfer import random_prompts

MEASURE = "slash_transfer"

pytestmark = pytest.mark.longer

CUT = {"length": 64, "n_prompts": 2}


def test_random_prompts_keep_first_tokens_and_lengths_and_nothing_else():
    tokens = [torch.arange(50), torch.arange(7, 20)]
    drawn = random_prompts(tokens, 1000, seed=1)
    assert [len(prompt) for prompt in drawn] == [50, 13]
    assert [int(prompt[0]) for prompt in drawn] == [0, 7]
    assert (drawn[0] == tokens[0]).sum() < 5
    assert torch.equal(drawn[0], random_prompts(tokens, 1000, seed=1)[0])
    assert not torch.equal(drawn[0], random_prompts(tokens, 1000, seed=2)[0])


def test_scores_on_random_tokens_are_those_of_an_analysis_of_them(mini, alice, result):
    tokens = to_prompts(mini, alice, **CUT)
    drawn = torch.stack(random_prompts(tokens, mini.cfg.d_vocab, seed=0))
    direct = Slash()(mini, drawn, nulls=0, progress=False).trained
    np.testing.assert_allclose(result.trained["score"].sel(source="random"), direct["score"], atol=1e-6)


def test_agreement_is_over_the_heads_of_both_sources(result):
    data = result.sel(tokens="all")
    natural, random = (data.score.sel(source=source, distance=1) for source in ("natural", "random"))
    own, measure = result.numbers, result.measure
    r = np.corrcoef(natural.values.flat, random.values.flat)[0, 1]
    assert measure.correlation(own, 1).value == pytest.approx(r)
    rho = spearmanr(natural.values.flat, random.values.flat).statistic
    assert measure.correlation(own, 1, ranks=True).value == pytest.approx(rho)
    both, any_of_them = ((natural >= 0.1) & (random >= 0.1), (natural >= 0.1) | (random >= 0.1))
    assert measure.jaccard(own, 1).value == pytest.approx(float(both.sum() / any_of_them.sum()))
    n = [measure.n_dominant(own, 1, source).value for source in ("natural", "random")]
    assert n == [int((one >= 0.1).sum()) for one in (natural, random)]
    row = result.table().iloc[1]
    assert row[["D", "dominant on text", "on random", "r"]].tolist() == pytest.approx([1, *n, r])

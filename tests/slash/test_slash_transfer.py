"""Slash-dominant heads kept on random tokens."""

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from tl_posgen.models.tokens import to_prompts
from tl_posgen.slash import Slash, SlashTransfer
from tl_posgen.slash.slash_transfer import random_prompts

CUT = {"length": 64, "n_prompts": 2}


@pytest.fixture(scope="module")
def result(report):
    return report["slash_transfer"]


def on_text(result):
    """Scores of every head on text."""
    return result.sel(tokens="all", source="natural")["best_score"].to_series()


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
    direct = Slash()(mini, drawn, null_seeds=(), progress=False).own
    np.testing.assert_allclose(result.own["score"].sel(source="random"), direct["score"], atol=1e-6)


def test_agreement_is_over_the_heads_of_both_sources(result):
    data = result.sel(tokens="all")
    natural, random = (data.score.sel(source=source, distance=1) for source in ("natural", "random"))
    at = data.sel(short_distance=1)
    assert float(at.pearson.sel(end="value")) == pytest.approx(
        np.corrcoef(natural.values.flat, random.values.flat)[0, 1]
    )
    assert float(at.spearman) == pytest.approx(spearmanr(natural.values.flat, random.values.flat).statistic)
    both, any_of_them = ((natural >= 0.1) & (random >= 0.1), (natural >= 0.1) | (random >= 0.1))
    assert float(at.jaccard) == pytest.approx(float(both.sum() / any_of_them.sum()))
    assert at.n_dominant.values.tolist() == [int((one >= 0.1).sum()) for one in (natural, random)]


def test_the_interval_is_fishers_over_heads(result):
    data = result.own
    r, low, high = (data["pearson"].sel(end=end) for end in ("value", "low", "high"))
    n = data.sizes["layer"] * data.sizes["head"]
    for found, side in ((low, -1), (high, 1)):
        np.testing.assert_allclose(found, np.tanh(np.arctanh(r) + side * 1.96 / np.sqrt(n - 3)))
    number = result.numbers("pearson", short_distance=1)
    place = {"tokens": "all", "short_distance": 1}
    assert [number.value, number.low, number.high] == [float(one.sel(place)) for one in (r, low, high)]


def test_slash_heads_of_a_trained_model_stay_so_on_random_tokens(trained):
    transfer = SlashTransfer(distances=[0, 1])
    result = transfer(*trained, length=192, n_prompts=1, null_seeds=(), progress=False)
    data = result.sel(tokens="all").stack(place=("layer", "head"))
    natural, random = (data["best_score"].sel(source=source).values for source in ("natural", "random"))
    strongest = np.argsort(natural)[::-1][:2]
    assert (data["best_distance"].values[strongest] == 1).all()
    assert (random[strongest] > 10 * data["best_uniform"].values[strongest]).all()
    assert result.numbers("pearson", short_distance=1).value > 0.8


def test_examples_are_the_patterns_of_the_strongest_heads_on_both_texts(mini, alice, result, captured):
    data = result.own
    place = tuple(map(int, on_text(result).idxmax()))
    assert (int(data.example_layer[0]), int(data.example_head[0])) == place
    tokens = to_prompts(mini, alice, length=64, n_prompts=1)
    for source, prompt in {"natural": tokens[0], "random": random_prompts(tokens, mini.cfg.d_vocab, 0)[0]}.items():
        [layer] = captured(mini, prompt, layers=[place[0]])
        expected = layer.scores()[place[1]].double().softmax(-1)
        np.testing.assert_allclose(data.pattern.sel(source=source).isel(example=0), expected, atol=1e-5)


def test_the_sentences_tell_the_numbers_and_the_null(result):
    whole, null = (data.sel(tokens="all") for data in (result.own, result.null))
    n_text, n_random = whole.n_dominant.values
    assert result.measure.distance_of_most(result.numbers) == int(n_text.argmax()) == 1
    first, second = result.findings()
    own, rest = (result.numbers("pearson", tokens=one, short_distance=1) for one in ("all", "without first"))
    assert first == (
        "At D = 1 slash scores on random tokens follow those on text over heads with "
        f"r = {own.with_interval:.3f} (random init {float(null.pearson[1, 0]):.3f}; without the first token "
        f"{rest.with_interval:.3f}). Dominant at this distance alone: {n_text[1]} heads on text, "
        f"{n_random[1]} on random tokens, overlap (Jaccard) {float(whole.jaccard[1]):.2f}."
    )
    best = result.numbers.extreme("best_score")
    of_null = null["best_score"].stack(place=("layer", "head"))
    of_null = of_null.isel(place=of_null.sel(source="natural").values.argmax())
    random = float(whole["best_score"].sel(layer=best.layer, head=best.head, source="random"))
    assert second == (
        f"The strongest, {best:.3f} at D = 1 on text, scores {random:.3f} (random init "
        f"{float(of_null.sel(source='random')):.3f}) on random tokens."
    )


def test_the_scatter_has_a_point_a_head(result):
    traces = result.plot(kind="scatter").data
    assert len(traces) == 2 * 5 * 3
    trained, null = traces[3:5]
    assert len(null.x) == len(trained.x) == 16
    own, of_null = (data["score"].sel(tokens="all", distance=1) for data in (result.own, result.null))
    np.testing.assert_array_equal(trained.y, own.sel(source="random").values.flat)
    np.testing.assert_array_equal(null.x, of_null.sel(source="natural").values.flat)
    r = result.numbers("pearson", short_distance=1)
    title = result.plot(kind="scatter").layout.annotations[1].text
    assert title.startswith(f"D = 1: r {r.value:.2f} (random init {r.inits[0]:.2f})<br>ρ ")


def test_the_maps_are_patterns_on_text_and_on_random_tokens_beside_the_null(result):
    figure, triangle = result.plot("maps"), np.tri(64, dtype=bool)
    assert len(figure.data) == 2 * (2 + 1)
    shown = [(example, source) for example in (0, 1) for source in ("natural", "random")]
    for (example, source), trace in zip(shown, figure.data[:4], strict=True):
        expected = result.own["pattern"].isel(example=example).sel(source=source)
        np.testing.assert_array_equal(trace.z, expected.where(triangle))
    strongest = on_text(result).nlargest(1)
    null = result.null["pattern"].isel(example=0).sel(source="random").values
    np.testing.assert_array_equal(np.nan_to_num(figure.data[5].z), null)
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (0, 1)
    titles = [annotation.text for annotation in figure.layout.annotations]
    (layer, head), score = strongest.index[0], strongest.iloc[0]
    assert titles[0] == f"L{layer}H{head} on text: slash score {score:.3f} at D = 1 · mini"
    at = result.sel(tokens="all", source="random", layer=layer, head=head)["best_score"]
    assert titles[1].startswith(f"L{layer}H{head} on random tokens: slash score {float(at):.3f} at")
    assert titles[4].endswith("· random init (seed 0)")


def test_a_page_shows_a_head_on_text_beside_random_tokens(result):
    page = result.show(example=1).local_src
    assert '"text", "random"' in page
    labels = result.token_labels()
    assert len(labels) == 3
    assert f"L{int(result.own.example_layer[1])}H" in labels[1]

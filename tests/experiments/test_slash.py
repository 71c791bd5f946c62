"""Slash-dominant heads on trained models: found, kept on random tokens, and with RoPE taken away."""

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from transformer_lens.head_detector import detect_head

import tl_posgen
from tl_posgen.errors import InputError
from tl_posgen.experiments.slash import ABLATIONS, WITHOUT_ROPE, random_prompts, slash_transfer
from tl_posgen.models.hooks import run_capture
from tl_posgen.models.tokens import bundled_text, to_prompts
from tl_posgen.report.words.slash_transfer import found, table

OPTIONS = {"length": 64, "n_prompts": 2, "progress": False}


@pytest.fixture(scope="module")
def stories(shared):
    return tl_posgen.load_model(str(shared / "models" / "stories260K"))


@pytest.fixture(scope="module")
def text(shared):
    return (shared / "text" / "tinystories.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def mini():
    return tl_posgen.load_model("mini")


@pytest.fixture(scope="module")
def result(mini):
    return slash_transfer(mini, bundled_text(), **OPTIONS)


def test_the_known_previous_token_heads_are_found_with_their_scores(stories, text):
    found = tl_posgen.find_slash_heads(stories, text, length=512, n_prompts=1, distances=[1], kappa=0.3)
    strongest = found.set_index(["layer", "head"])["score"].head(3)
    assert set(strongest.index) == {(1, 3), (3, 6), (1, 6)}
    for head, score in {(1, 3): 0.66, (3, 6): 0.65, (1, 6): 0.52}.items():
        assert strongest[head] == pytest.approx(score, abs=0.05)
    assert (found["ratio"] > 10).all()


def test_heads_rank_as_transformer_lens_ranks_them(stories, text):
    passage = text[:800]
    tokens = stories.to_tokens(passage)
    found = tl_posgen.find_slash_heads(stories, tokens, distances=[1], kappa=1e-9)
    ours = found.set_index(["layer", "head"])["score"].sort_index()
    # "mul" is the share of the whole pattern on the diagonal
    theirs = detect_head(stories, passage, "previous_token_head", error_measure="mul").flatten()
    assert len(ours) == len(theirs)
    assert spearmanr(ours, theirs).statistic > 0.99


def test_finds_are_sorted_and_reach_kappa(mini):
    found = tl_posgen.find_slash_heads(mini, bundled_text(), length=48, n_prompts=2, kappa=0.15)
    assert len(found)
    assert found["score"].is_monotonic_decreasing
    assert found["score"].min() >= 0.15


@pytest.mark.parametrize("wrong", [{"kappa": 0.0}, {"distances": [48]}, {"distances": []}])
def test_impossible_searches_are_refused(mini, wrong):
    with pytest.raises(InputError):
        tl_posgen.find_slash_heads(mini, bundled_text(), length=48, n_prompts=1, **wrong)


def test_random_prompts_keep_first_tokens_and_lengths_and_nothing_else():
    tokens = [torch.arange(50), torch.arange(7, 20)]
    drawn = random_prompts(tokens, 1000, seed=1)
    assert [len(prompt) for prompt in drawn] == [50, 13]
    assert [int(prompt[0]) for prompt in drawn] == [0, 7]
    assert (drawn[0] == tokens[0]).sum() < 5
    assert torch.equal(drawn[0], random_prompts(tokens, 1000, seed=1)[0])
    assert not torch.equal(drawn[0], random_prompts(tokens, 1000, seed=2)[0])


def test_scores_on_random_tokens_are_those_of_an_analysis_of_them(mini, result):
    tokens = to_prompts(mini, bundled_text(), length=64, n_prompts=2)
    drawn = torch.stack(random_prompts(tokens, mini.cfg.d_vocab, seed=0))
    direct = tl_posgen.analyze(mini, drawn, analyzers=["slash"], null_seed=None, progress=False)["slash"].dataset
    for name in ("score", "score_without_first"):
        np.testing.assert_allclose(result.dataset[name].sel(source="random"), direct[name], atol=1e-6)


def test_agreement_is_over_the_heads_of_both_sources(result):
    natural, random = (result.dataset.score.sel(source=source, distance=1) for source in ("natural", "random"))
    at = result.dataset.sel(at=1, variant="all")
    assert float(at.pearson) == pytest.approx(np.corrcoef(natural.values.flat, random.values.flat)[0, 1])
    assert float(at.spearman) == pytest.approx(spearmanr(natural.values.flat, random.values.flat).statistic)
    assert int(at.n_natural) == int((natural >= 0.1).sum())


def test_slash_heads_of_a_trained_model_stay_so_on_random_tokens(stories, text):
    result = slash_transfer(
        stories, text, length=192, n_prompts=1, distances=[0, 1], ablations=["no_rope", "means"], progress=False
    )
    assert result.null is not None
    strongest = result.frame().nlargest(3, "natural")
    assert (strongest["best_distance"] == 1).all()
    assert (strongest["random"] > 10 * strongest["baseline_score"]).all()
    assert (strongest["ablated_no_rope"] < strongest["natural"] / 3).all()
    assert float(result.dataset.pearson.sel(at=1, variant="all")) > 0.8


def test_no_ablation_is_the_model_and_means_without_rope_are_uniform(result):
    data = result.dataset
    np.testing.assert_allclose(data.ablated_none, data.natural, atol=1e-6)
    np.testing.assert_allclose(data.ablated_means_no_rope, data.baseline_score, atol=1e-5)


@pytest.fixture(scope="module")
def absolute(shared):
    return tl_posgen.load_model(str(shared / "models" / "atome_vanilla_1m"))


def test_without_rotary_planes_ablations_of_rope_are_left_out_and_said_to_be(absolute):
    result = slash_transfer(absolute, torch.arange(40)[None] + 60, null_seed=None, progress=False)
    assert result.dataset.ablation.values.tolist() == list(WITHOUT_ROPE)
    assert result.dataset.attrs["left_out"].split(", ")[0] == "no_rope"
    assert "no_rope, means_no_rope" in found(result)[-1]


def test_without_rotary_planes_the_slash_is_lost_with_the_content_of_q_and_k(absolute, text):
    data = slash_transfer(absolute, text, length=96, n_prompts=1, null_seed=None, progress=False).dataset
    layer, head = data["natural"].to_series().idxmax()
    strongest = data.sel(layer=layer, head=head)
    assert float(strongest.natural) > 0.3
    assert float(strongest.ablated_means) == pytest.approx(float(strongest.baseline_score), abs=1e-4)


def test_without_rotary_planes_asking_for_an_ablation_of_rope_is_refused(absolute):
    with pytest.raises(InputError, match="no layer of this model has rotary planes"):
        slash_transfer(absolute, torch.arange(40)[None] + 60, ablations=["no_rope"], progress=False)


def test_examples_are_the_patterns_of_the_strongest_heads_on_both_texts(mini, result):
    data = result.dataset
    place = tuple(map(int, data["natural"].to_series().idxmax()))
    assert (int(data.example_layer[0]), int(data.example_head[0])) == place
    tokens = to_prompts(mini, bundled_text(), length=64, n_prompts=1)
    for source, prompt in {"natural": tokens[0], "random": random_prompts(tokens, mini.cfg.d_vocab, 0)[0]}.items():
        kept = []
        run_capture(mini, prompt[None], kept.append, frozenset({"pattern"}), layers=[place[0]])
        expected = kept[0].pattern[place[1]]
        np.testing.assert_allclose(data.pattern.sel(source=source).isel(example=0), expected, atol=1e-6)


def test_the_short_table_has_a_row_a_distance(result):
    short = table(result.dataset)
    assert short.shape == (5, 8)
    np.testing.assert_array_equal(short["r"], result.dataset.pearson.sel(variant="all"))


def test_the_words_name_the_distance_and_the_null(result):
    first = found(result)[0]
    assert f"At D = {int(result.dataset.n_natural.sel(variant='all').argmax('at'))} " in first
    assert f"random init {float(result.null.pearson.sel(variant='all', at=1)):.3f}" in first


def test_it_comes_back_from_disk_with_a_row_a_head(result, tmp_path):
    frame = result.frame()
    assert len(frame) == 16
    assert {"natural", "random", "random_without_first", *(f"ablated_{kind}" for kind in ABLATIONS)} <= set(frame)
    assert tl_posgen.load(result.save(tmp_path / "r.nc"))["slash_transfer"].dataset.equals(result.dataset)


def test_an_unknown_ablation_is_refused(mini):
    with pytest.raises(InputError, match="nonsense"):
        slash_transfer(mini, bundled_text(), ablations=["nonsense"], **OPTIONS)

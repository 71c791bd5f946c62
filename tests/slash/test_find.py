"""find_slash_heads: the known previous-token heads, and TransformerLens' own detector."""

import pytest
from scipy.stats import spearmanr
from transformer_lens.head_detector import detect_head

import tl_posgen
from tl_posgen.errors import InputError
from tl_posgen.slash import Slash

pytestmark = pytest.mark.longer

KNOWN = {
    "bundled": (256, {(1, 2): 0.359, (3, 1): 0.432}, 0.005),
    "stories": (512, {(1, 3): 0.66, (3, 6): 0.65, (1, 6): 0.52}, 0.05),
}


def test_the_known_previous_token_heads_are_found_with_their_scores(request, trained):
    length, known, tolerance = KNOWN[request.node.callspec.params["trained"]]
    cut = {"length": length, "n_prompts": 1, "progress": False}
    found = tl_posgen.find_slash_heads(*trained, distances=[1], kappa=0.3, **cut)
    strongest = found.set_index(["layer", "head"])["score"].head(len(known))
    assert strongest.to_dict() == pytest.approx(known, abs=tolerance)
    assert (found["ratio"] > 10).all()


def test_heads_rank_as_transformer_lens_ranks_them(trained):
    model, text = trained
    passage = text[:800]
    tokens = model.to_tokens(passage)
    data = Slash()(model, tokens, nulls=0, progress=False).sel(tokens="all", distance=1)
    ours = data["score"].to_series().sort_index()
    # "mul" is the share of the whole pattern on the diagonal
    theirs = detect_head(model, passage, "previous_token_head", error_measure="mul").flatten()
    assert len(ours) == len(theirs)
    assert spearmanr(ours, theirs).statistic > 0.99


def test_finds_among_chosen_heads_are_those_of_the_whole(mini, alice):
    cut = {"length": 48, "n_prompts": 1, "kappa": 0.1, "progress": False}
    whole = tl_posgen.find_slash_heads(mini, alice, **cut)
    some = tl_posgen.find_slash_heads(mini, alice, heads=[(1, 2), (3, 1)], **cut)
    chosen = whole[[pair in ((1, 2), (3, 1)) for pair in zip(whole["layer"], whole["head"], strict=True)]]
    assert len(some)
    assert some.reset_index(drop=True).round(6).equals(chosen.reset_index(drop=True).round(6))
    again = tl_posgen.find_slash_heads(mini, alice, heads=some, **cut)
    assert again.equals(some)


def test_finds_are_all_heads_and_distances_that_reach_kappa_of_those_asked_for(mini, alice):
    cut = {"length": 128, "n_prompts": 1, "progress": False}
    found = tl_posgen.find_slash_heads(mini, alice, kappa=0.1, distances=[1, 0, 1], **cut)
    data = Slash()(mini, alice, nulls=0, **cut).sel(tokens="all")
    score = data["score"].sel(distance=[0, 1])
    assert set(found["distance"]) == {0, 1}
    assert found["score"].is_monotonic_decreasing
    assert len(found) == int((score >= 0.1).sum())
    for row in found.itertuples():
        at = {"layer": row.layer, "distance": row.distance}
        assert row.score == pytest.approx(float(score.sel(head=row.head, **at)))
        assert row.ratio == pytest.approx(row.score / float(data["uniform"].sel(at)))


@pytest.mark.parametrize(
    "wrong", [{"kappa": 0.0}, {"kappa": 1.5}, {"distances": [48]}, {"distances": [-1]}, {"distances": []}]
)
def test_impossible_searches_are_refused_before_anything_runs(mini, alice, monkeypatch, wrong):
    monkeypatch.setattr("tl_posgen.core.feed.run_capture", None)
    with pytest.raises(InputError):
        tl_posgen.find_slash_heads(mini, alice, length=48, n_prompts=1, **wrong)

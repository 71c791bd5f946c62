"""What is measured is what the pass used: edits and changes after the probe show on every route."""

import pytest
import torch
from captures import EVERYTHING, captures_of, run
from families import VOCAB

import tl_posgen
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.capture.cache import captures_from_cache, needed_names
from tl_posgen.models.capture.capturing import capturing
from tl_posgen.models.geometry.proof import checked_rows
from tl_posgen.models.layer_table import geometry_of
from tl_posgen.models.layers.capture import EditedCapture
from tl_posgen.position.decomposition.three_axis import pair_moments_of
from tl_posgen.position.distance.hooks import at_dummy_distance

TOKENS = torch.randint(2, VOCAB - 2, (1, 100), generator=torch.Generator().manual_seed(4))


def edit(layer: int, part: str, change):
    return [(f"blocks.{layer}.attn.hook_{part}", lambda value, hook: change(value))]


EDITS = {
    "scores": ("attn_scores", lambda scores: scores * 1.01),
    "one query": ("attn_scores", lambda scores: scores.index_fill(2, torch.tensor([99]), 0.5).tril()
                  + torch.full_like(scores, -torch.inf).triu(1)),
    "rotated queries": ("rot_q", lambda q: q + 0.1),
}  # fmt: skip


@pytest.mark.parametrize("what", EDITS)
@pytest.mark.parametrize("first", [True, False], ids=["added before", "added after"])
def test_edits_are_seen_whatever_the_order(llama, what, first):
    hooks, used = edit(1, *EDITS[what]), []
    geometry_of(llama)
    if first:
        with llama.hooks(fwd_hooks=hooks):
            plain, edited = captures_of(llama, TOKENS)
    else:
        plain, edited = captures_of(llama, TOKENS, hooks=hooks)
    last = [("blocks.1.attn.hook_attn_scores", lambda scores, hook: used.append(scores[0].clone()))]
    with torch.no_grad():
        llama.run_with_hooks(TOKENS, fwd_hooks=hooks + last)
    assert not isinstance(plain, EditedCapture)
    assert isinstance(edited, EditedCapture)
    visible = edited.geometry.visible(100)
    torch.testing.assert_close(edited.scores()[:, visible], used[0][:, visible])
    torch.testing.assert_close(edited.pattern, edited.scores().softmax(-1))
    for ask in (lambda: edited.q, lambda: edited.rotated_k):
        with pytest.raises(UnsupportedModelError, match=r"L1H\d, query \d+ has scores that its q and k do not"):
            ask()


def test_edited_queries_are_the_queries(llama):
    """hook_q feeds the scores, so edits there belong to q, and everything holds of them."""
    capture = captures_of(llama, TOKENS, hooks=edit(0, "q", lambda q: 2 * q))[0]
    assert not isinstance(capture, EditedCapture)
    torch.testing.assert_close(capture.scores(), capture.attn_scores, rtol=1e-4, atol=1e-4)


def test_scores_that_overflow_are_those_of_the_queries_and_keys(family_model):
    hooks = [one for part in "qk" for one in edit(1, part, lambda x: 1e30 * x)]
    capture = captures_of(family_model("llama", "hooked"), TOKENS, needs=frozenset(), hooks=hooks)[1]
    assert not isinstance(capture, EditedCapture)
    assert not capture.finite
    with pytest.raises(InputError, match=r"q or k of head 0 is not finite at token \d+; .* an overflow"):
        pair_moments_of(capture)


@pytest.mark.parametrize("name", ["three_axis", "residual", "slash"])
def test_measures_of_scores_and_patterns_take_those_of_the_pass(llama, name):
    """Scores that are position + key by construction are found to be so, whatever q and k are."""
    distance = torch.arange(100)[:, None] - torch.arange(100)
    additive = torch.cos(0.3 * distance) + torch.linspace(0, 1, 100)

    def replace(scores):
        return torch.where(distance >= 0, additive, -torch.inf).expand_as(scores)

    geometry_of(llama)
    with torch.no_grad(), tl_posgen.attach(llama, [name]) as run:
        for _ in range(2):
            llama.run_with_hooks(TOKENS, fwd_hooks=edit(0, "attn_scores", replace) + edit(1, "attn_scores", replace))
    result = run.report()[name]
    found = result.sel(tokens="all")
    if name == "residual":
        assert float(found["share"].max()) < 1e-6
    elif name == "three_axis":
        torch.testing.assert_close(torch.tensor(found["r"].values), torch.ones(2, 4).double())
    else:
        pattern = replace(additive).softmax(-1)
        torch.testing.assert_close(
            float(found["score"].sel(layer=0, head=0, distance=3)), float(pattern.diagonal(-3).mean()),
            rtol=1e-5, atol=1e-6,
        )  # fmt: skip
    notes = [sentence for sentence in result.findings() if "scores that are not those of q and k" in sentence]
    assert len(notes) == 1
    assert "in layer 0, 1. L0H" in notes[0]


@pytest.mark.parametrize("name", ["variance", "mean_key", "planes"])
def test_measures_of_queries_and_keys_refuse_edited_scores(llama, name):
    geometry_of(llama)
    with (
        torch.no_grad(),
        tl_posgen.attach(llama, [name]),
        pytest.raises(UnsupportedModelError, match=r"L0H\d.* Likely cause: a hook that edits scores"),
    ):
        llama.run_with_hooks(TOKENS, fwd_hooks=at_dummy_distance(llama, beyond=8))


def test_buffers_changed_after_the_probe_show(model, backend):
    geometry_of(model)
    if backend == "hooked":
        for block in model.blocks:
            block.attn.rotary_sin.mul_(-1)
    else:
        model.rotary_emb.original_component.inv_freq.mul_(0.5)
    with pytest.raises(UnsupportedModelError, match=r"buffers .* that changed after the model was probed"):
        tl_posgen.analyze(model, TOKENS, measures="variance", nulls=0, progress=False)


def test_a_permanent_hook_added_after_the_probe_shows(model):
    geometry_of(model)
    model.hook_dict["blocks.1.attn.hook_attn_scores"].add_perma_hook(lambda scores, hook: 0.9 * scores)
    assert [isinstance(capture, EditedCapture) for capture in run(model, TOKENS)] == [False, True]


def test_a_geometry_that_changes_with_length_shows(model, monkeypatch):
    """As if a prompt longer than the probe were scaled otherwise (query scaling that starts at a trained length)."""
    geometry_of(model)
    scaled = edit(0, "attn_scores", lambda scores: scores if scores.shape[-1] <= 64 else scores * 1.1)
    with model.hooks(fwd_hooks=scaled):
        captures = [run(model, TOKENS[:, :n], layers=[0])[0] for n in (64, 65)]
    assert [isinstance(capture, EditedCapture) for capture in captures] == [False, True]


def test_a_cache_of_edited_scores_is_read_as_edited(llama):
    geometry_of(llama)
    with torch.no_grad(), llama.hooks(fwd_hooks=edit(0, *EDITS["scores"])):
        _, whole = llama.run_with_cache(TOKENS, names_filter=needed_names(llama, EVERYTHING))
        _, patterns = llama.run_with_cache(TOKENS, names_filter=needed_names(llama, {"pattern"}))
    edited, plain = captures_from_cache(whole, llama)
    assert isinstance(edited, EditedCapture)
    assert not isinstance(plain, EditedCapture)
    edited, plain = captures_from_cache(patterns, llama)
    assert not isinstance(plain, EditedCapture)
    with pytest.raises(UnsupportedModelError, match="layer 0: the cached pattern is not the softmax of the scores"):
        edited.scores()


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "gemma2", "neox", "qwen3"])
@pytest.mark.parametrize("n", [2, 3, 64, 65, 120])
def test_plain_passes_are_plain(family_model, backend, name, n):
    captures = run(family_model(name, backend), torch.arange(n)[None] % (VOCAB - 2))
    assert not any(isinstance(capture, EditedCapture) for capture in captures)


def test_edits_of_any_query_show(llama):
    """Not only of the 64 rows that are compared where no other hook is at work."""
    unchecked = next(row for row in range(10, 100) if row not in checked_rows(100).tolist())

    def one_query(scores):
        scores = scores.clone()
        scores[:, 2, unchecked, 7] += 0.5
        return scores

    geometry_of(llama)
    capture = captures_of(llama, TOKENS, hooks=edit(0, "attn_scores", one_query))[0]
    with pytest.raises(UnsupportedModelError, match=f"L0H2, query {unchecked} has scores"):
        assert capture.q is None


def test_a_head_of_large_scores_does_not_hide_edits_of_another(model):
    with torch.no_grad():
        model.blocks[0].attn.W_Q[0].mul_(1e4)

    def small(scores):
        return torch.cat([scores[:, :1], scores[:, 1:] + torch.where(scores[:, 1:] > -1e9, 0.1, 0)], 1)

    geometry_of(model)
    captures = [captures_of(model, TOKENS, hooks=hooks, layers=[0])[0] for hooks in ((), edit(0, "attn_scores", small))]
    assert [isinstance(capture, EditedCapture) for capture in captures] == [False, True]


def test_reset_hooks_leaves_the_capture_in_place(llama):
    captures = []
    with torch.no_grad(), capturing(llama, captures.append):
        llama.reset_hooks()
        llama(TOKENS)
    assert len(captures) == 2


def test_passes_of_the_package_are_not_the_users(llama):
    with torch.no_grad(), tl_posgen.attach(llama, ["three_axis"]) as run:
        llama(TOKENS)
        tl_posgen.check(llama, printed=False)
        tl_posgen.analyze(llama, TOKENS[:, :50], measures="variance", nulls=0, progress=False)
    assert run.report().provenance["prompts"] == 1


def test_a_cache_that_proves_nothing_says_so(llama):
    with torch.no_grad(), llama.hooks(fwd_hooks=at_dummy_distance(llama, beyond=8)):
        _, cache = llama.run_with_cache(TOKENS, names_filter=needed_names(llama))
    report = tl_posgen.analyze_cache(llama, cache, tokens=TOKENS, measures="three_axis")
    assert "not compared with the scores that the pass used" in report.findings()[-1]


@pytest.mark.parametrize(("part", "point"), [("v", "attn.hook_v"), ("resid", "hook_resid_pre")])
def test_edits_are_captured_whenever_their_hooks_were_added(llama, part, point):
    """Where no other captured value shows an edit: values, and the residual stream."""
    change = [(f"blocks.1.{point}", lambda value, hook: 2 * value)]
    with llama.hooks(fwd_hooks=change):
        _, before = captures_of(llama, TOKENS, {part})
    (_, edited), (_, plain) = (captures_of(llama, TOKENS, {part}, hooks=hooks) for hooks in (change, ()))
    assert torch.equal(getattr(before, part), getattr(edited, part))
    torch.testing.assert_close(getattr(edited, part), 2 * getattr(plain, part))


@pytest.mark.parametrize("row", [3, 50, 99])
def test_measures_of_patterns_take_an_edited_one_and_say_so(llama, row):
    """One row of a hundred is enough."""

    def to_first(pattern):
        pattern = pattern.clone()
        pattern[..., row, :] = 0
        pattern[..., row, 0] = 1
        return pattern

    with torch.no_grad(), tl_posgen.attach(llama, ["slash", "three_axis"]) as run:
        llama.run_with_hooks(TOKENS, fwd_hooks=edit(1, "pattern", to_first))
        plain = llama.run_with_cache(TOKENS)[1]["blocks.1.attn.hook_pattern"][0]
    report = run.report()
    found = report["slash"].sel(tokens="all")["score"].sel(layer=1, distance=row)
    expected = to_first(plain[None])[0].diagonal(-row, 1, 2).mean(-1)
    assert float(abs(torch.tensor(found.values) - (expected + plain.diagonal(-row, 1, 2).mean(-1)) / 2).max()) < 1e-5
    note, repeated = report["slash"].notes  # the same prompt ran twice
    assert note.startswith("slash: measured from patterns that are not the softmax of the scores, in layer 1: hooks")
    assert [f"slash: {one}" for one in report["three_axis"].warnings] == [repeated]
    assert not tl_posgen.analyze(llama, TOKENS, measures="slash", nulls=0, progress=False)["slash"].warnings


def test_a_cache_of_edited_patterns_is_named(llama):
    tokens = torch.randint(2, 60, (1, 40), generator=torch.Generator().manual_seed(0))
    for edit, expected in ((lambda pattern, hook: 0 * pattern, True), (lambda pattern, hook: pattern, False)):
        with torch.no_grad(), llama.hooks(fwd_hooks=[("blocks.1.attn.hook_pattern", edit)]):
            _, cache = llama.run_with_cache(tokens)
        captures = list(captures_from_cache(cache, llama, tokens=tokens, needs={"pattern"}))
        assert [capture.edited_pattern for capture in captures] == [False, expected]

"""What is measured is what the pass used: edits and changes after the probe show on every route."""

import threading
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from families import VOCAB

import tl_posgen
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.cache import captures_from_cache, needed_names
from tl_posgen.models.capture import EditedCapture, LayerCapture, StreamedCapture
from tl_posgen.models.capturing import capture_hooks, capturing, run_capture
from tl_posgen.models.geometry import LayerGeometry
from tl_posgen.models.load import load_model
from tl_posgen.models.pass_proof import as_cached, as_streamed, as_used, checked_rows, is_softmax, require_softmax
from tl_posgen.models.probe import geometry_of
from tl_posgen.models.proof import allowed_error
from tl_posgen.position.distance.hooks import at_dummy_distance
from tl_posgen.rope.rotation import Rope, inverse_frequencies

TOKENS = torch.randint(2, VOCAB - 2, (1, 100), generator=torch.Generator().manual_seed(4))
EVERYTHING = frozenset({"v", "attn_scores", "pattern", "resid"})


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
    part, change = EDITS[what]
    hooks, captures, used = edit(1, part, change), [], []
    geometry_of(llama)
    with torch.no_grad():
        if first:
            with llama.hooks(fwd_hooks=hooks), capturing(llama, captures.append, EVERYTHING):
                llama(TOKENS)
        else:
            with capturing(llama, captures.append, EVERYTHING):
                llama.run_with_hooks(TOKENS, fwd_hooks=hooks)
        last = [("blocks.1.attn.hook_attn_scores", lambda scores, hook: used.append(scores[0].clone()))]
        llama.run_with_hooks(TOKENS, fwd_hooks=hooks + last)
    plain, edited = captures
    assert not isinstance(plain, EditedCapture)
    assert isinstance(edited, EditedCapture)
    visible = edited.geometry.visible(100)
    torch.testing.assert_close(edited.scores()[:, visible], used[0][:, visible])
    torch.testing.assert_close(edited.pattern, edited.scores().softmax(-1))
    for ask in (lambda: edited.q, lambda: edited.rotated_k):
        with pytest.raises(
            UnsupportedModelError, match=r"layer 1: head \d, query \d+ has scores that its q and k do not"
        ):
            ask()


def test_edited_queries_are_the_queries(llama):
    """hook_q feeds the scores, so edits there belong to q, and everything holds of them."""
    captures, hooks = [], edit(0, "q", lambda q: 2 * q)
    with torch.no_grad(), capturing(llama, captures.append, EVERYTHING):
        llama.run_with_hooks(TOKENS, fwd_hooks=hooks)
    capture = captures[0]
    assert not isinstance(capture, EditedCapture)
    torch.testing.assert_close(capture.scores(), capture.attn_scores, rtol=1e-4, atol=1e-4)


def test_a_list_of_hooks_that_another_one_follows_is_refused(llama):
    captures = []
    hooks = capture_hooks(llama, captures.append)
    with torch.no_grad(), pytest.raises(InputError, match=r"layer 1: its pattern is not the softmax.*last in the list"):
        llama.run_with_hooks(TOKENS, fwd_hooks=hooks + edit(1, *EDITS["scores"]))
    with torch.no_grad():
        llama.run_with_hooks(TOKENS, fwd_hooks=edit(1, *EDITS["scores"]) + capture_hooks(llama, captures.append))
    assert isinstance(captures[-1], EditedCapture)


@pytest.mark.parametrize("name", ["three_axis", "residual", "across_prompts", "slash"])
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
    if name == "residual":
        assert float(result.dataset["share"].max()) < 1e-6
        assert "plane_share" not in result.dataset
    elif name == "across_prompts":
        torch.testing.assert_close(torch.tensor(result.dataset["position"].values), torch.ones(2, 4).double())
    elif name == "three_axis":
        torch.testing.assert_close(torch.tensor(result.dataset["r"].values), torch.ones(2, 4).double())
    else:
        pattern = replace(additive).softmax(-1)
        torch.testing.assert_close(
            float(result.dataset["score"].sel(layer=0, head=0, distance=3)), float(pattern.diagonal(-3).mean()),
            rtol=1e-5, atol=1e-6,
        )  # fmt: skip
    notes = [sentence for sentence in result.findings() if "scores that are not those of q and k" in sentence]
    assert len(notes) == 1
    assert "in layer 0, 1. layer 0: head" in notes[0]


@pytest.mark.parametrize("name", ["variance", "mean_key", "planes"])
def test_measures_of_queries_and_keys_refuse_edited_scores(llama, name):
    geometry_of(llama)
    with (
        torch.no_grad(),
        tl_posgen.attach(llama, [name]),
        pytest.raises(UnsupportedModelError, match=r"layer 0: head .* Likely cause: a hook that edits scores"),
    ):
        llama.run_with_hooks(TOKENS, fwd_hooks=at_dummy_distance(llama, beyond=8))


def test_buffers_changed_after_the_probe_show(family_directory, backend):
    model = load_model(family_directory("llama"), backend)
    geometry_of(model)
    if backend == "hooked":
        for block in model.blocks:
            block.attn.rotary_sin.mul_(-1)
    else:
        model.rotary_emb.original_component.inv_freq.mul_(0.5)
    with pytest.raises(UnsupportedModelError, match=r"buffers .* that changed after the model was probed"):
        tl_posgen.analyze(model, TOKENS, measures="variance", null_seeds=(), progress=False)


def test_a_permanent_hook_added_after_the_probe_shows(family_directory, backend):
    model, captures = load_model(family_directory("llama"), backend), []
    geometry_of(model)
    model.hook_dict["blocks.1.attn.hook_attn_scores"].add_perma_hook(lambda scores, hook: 0.9 * scores)
    run_capture(model, TOKENS, captures.append)
    assert [isinstance(capture, EditedCapture) for capture in captures] == [False, True]


def test_a_geometry_that_changes_with_length_shows(family_directory, backend, monkeypatch):
    """As if a prompt longer than the probe were scaled otherwise (query scaling that starts at a trained length)."""
    model, captures = load_model(family_directory("llama"), backend), []
    geometry_of(model)
    scaled = edit(0, "attn_scores", lambda scores: scores if scores.shape[-1] <= 64 else scores * 1.1)
    with model.hooks(fwd_hooks=scaled):
        run_capture(model, TOKENS[:, :64], captures.append, layers=[0])
        run_capture(model, TOKENS[:, :65], captures.append, layers=[0])
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


def test_hidden_keys_leave_the_pattern_alone_measurable(llama):
    def hide(scores):
        scores = scores.clone()
        scores[:, :, 50:, 3] = -torch.inf
        return scores

    geometry_of(llama)
    captures = []
    with torch.no_grad(), llama.hooks(fwd_hooks=edit(0, "attn_scores", hide)):
        run_capture(llama, TOKENS, captures.append, EVERYTHING, layers=[0])
    assert float(captures[0].pattern[0, 60, 3]) == 0
    with pytest.raises(UnsupportedModelError, match="sees other keys than its mask gives"):
        captures[0].scores()


def test_attention_whose_hooks_do_not_fire_is_refused(llama, backend, monkeypatch):
    if backend == "bridge":
        pytest.skip("a bridge's attention cannot be given another forward function")
    geometry_of(llama)
    monkeypatch.setattr(llama.blocks[1].attn, "forward", lambda *args, **options: torch.zeros(1, 100, 32))
    with pytest.raises(UnsupportedModelError, match="layer 1: the hooks of its attention did not fire"):
        tl_posgen.analyze(llama, TOKENS, measures="three_axis", null_seeds=(), progress=False)
    with torch.no_grad(), tl_posgen.attach(llama, "three_axis") as run:
        llama(TOKENS)
    with pytest.raises(InputError, match="prompt 0 was captured in 1 of 2 layers"):
        run.report()


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "gemma2", "neox", "qwen3"])
@pytest.mark.parametrize("n", [2, 3, 64, 65, 120])
def test_plain_passes_are_plain(family_model, backend, name, n):
    captures, tokens = [], torch.arange(n)[None] % (VOCAB - 2)
    run_capture(family_model(name, backend), tokens, captures.append, EVERYTHING)
    assert not any(isinstance(capture, EditedCapture) for capture in captures)


def test_the_rows_that_are_compared():
    assert checked_rows(5).tolist() == [0, 1, 2, 3, 4]
    rows = checked_rows(1000).tolist()
    assert (rows[0], rows[-1], len(set(rows))) == (0, 999, 64)


GEOMETRY = LayerGeometry(5, "rotary", 4, 4, 8, 0.3, Rope(inverse_frequencies(8)))


def drawn(geometry: LayerGeometry = GEOMETRY) -> tuple[LayerCapture, torch.Tensor]:
    """Two of a layer's four heads, and the scores of all four."""
    q, k = torch.randn(2, 4, 100, 8, generator=torch.Generator().manual_seed(0))
    scores = LayerCapture(geometry, range(4), 0, None, q, k).scores()
    return LayerCapture(geometry, [3, 1], 0, None, q[[3, 1]], k[[3, 1]]), scores


def edited(scores: torch.Tensor, head: int, row: int, key: int, change: float) -> torch.Tensor:
    scores = scores.clone()
    scores[head, row, key] += change
    return scores


def test_scores_of_heads_that_were_not_chosen_may_be_anything():
    capture, scores = drawn()
    assert as_used(capture, scores, torch.float32, every_row=True) is capture
    assert as_used(capture, edited(scores, 0, 99, 3, 0.5), torch.float32, every_row=True) is capture


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("share", "same"), [(0.8, True), (1.2, False)])
def test_every_entry_may_be_off_by_what_rounding_may_do(dtype, share, same):
    capture, scores = drawn()
    allowed = allowed_error(capture.rotated_q, capture.rotated_k, GEOMETRY, dtype)
    found = as_used(capture, edited(scores, 1, 99, 3, share * float(allowed[1, 99, 3])), dtype)
    assert (found is capture) == same


def test_an_edit_is_named_and_the_scores_are_those_of_the_pass():
    capture, scores = drawn()
    changed = edited(edited(scores, 1, 99, 3, 0.5), 1, 99, 7, -0.25)
    found = as_used(capture, changed, torch.float32)
    assert isinstance(found, EditedCapture)
    assert torch.equal(found.scores(), changed[[3, 1]])
    largest = float(capture.scores()[1, 99].abs().max())
    with pytest.raises(UnsupportedModelError) as refusal:
        assert found.q is None
    assert str(refusal.value).startswith(
        "layer 5: head 1, query 99 has scores that its q and k do not give: off by 0.5, the row's largest being "
        f"{largest:.2g}. Likely cause"
    )
    assert "at some length below 100 tokens" in str(refusal.value)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_scores_that_are_no_numbers_are_not_those_of_q_and_k(value):
    capture, scores = drawn()
    found = as_used(capture, edited(scores, 3, 99, 6, value), torch.float32)
    assert isinstance(found, EditedCapture)
    with pytest.raises(UnsupportedModelError, match="layer 5: head 3, query 99 "):
        assert found.q is None


def test_an_edit_between_the_rows_that_are_compared_is_seen_in_every_row_only():
    capture, scores = drawn()
    between = max(set(range(100)) - set(checked_rows(100).tolist()))
    changed = edited(scores, 1, between, 3, 0.5)
    assert as_used(capture, changed, torch.float32) is capture
    with pytest.raises(UnsupportedModelError, match=f"head 1, query {between} has scores"):
        assert as_used(capture, changed, torch.float32, every_row=True).q is None


@pytest.mark.parametrize("change", [-torch.inf, torch.inf], ids=["hidden", "shown"])
def test_another_mask_is_named_before_other_scores(change):
    capture, scores = drawn()
    changed = edited(scores, 3, 0, 0, 0.5)
    if change < 0:
        changed[1, 99, 40] = change
    else:
        changed[1, 50, 51:] = 0.0
    found = as_used(capture, changed, torch.float32, every_row=True)
    assert isinstance(found, EditedCapture)
    with pytest.raises(UnsupportedModelError, match=r"head 1, query (99|50) sees other keys than its mask gives\."):
        found.scores()


def test_alibi_is_compared_and_kept_up_to_a_constant_per_row():
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    capture, scores = drawn(replace(GEOMETRY, encoding="alibi", rope=Rope(), alibi_slopes=slopes))
    by_key = scores + slopes[:, None, None] * torch.arange(100)[:, None]
    assert as_used(capture, by_key, torch.float32, every_row=True) is capture
    found = as_used(capture, edited(by_key, 1, 99, 3, 0.5), torch.float32)
    torch.testing.assert_close(found.scores(), edited(scores, 1, 99, 3, 0.5)[[3, 1]])


STREAMED = [0, 14, 28, 42, 57, 71, 85, 99]  # the rows of a streamed pass that are compared


def turned(rotated_q: torch.Tensor, rotated_k: torch.Tensor, head: int, row: int, by: float) -> torch.Tensor:
    """Keys of which this row's own makes a score that is off by so much; earlier rows do not see it."""
    q, k = rotated_q[head, row], rotated_k.clone()
    k[head, row] += by / GEOMETRY.scale * q / (q @ q)
    return k


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("row", STREAMED)
def test_rows_of_a_streamed_pass_may_be_off_by_what_rounding_may_do(dtype, row):
    capture, _ = drawn()
    q, k, sinks = capture.rotated_q, capture.rotated_k, torch.tensor([0.5, 0.25])
    allowed = float(allowed_error(q[:, STREAMED], k, GEOMETRY, dtype)[1, STREAMED.index(row), row])
    found = as_streamed(capture, q, turned(q, k, 1, row, 0.8 * allowed), sinks, dtype)
    assert isinstance(found, StreamedCapture)
    assert found.sinks is sinks
    assert torch.equal(found.q, capture.q)
    with pytest.raises(UnsupportedModelError, match=f"layer 5: head 1, query {row} has scores that its q and k do not"):
        as_streamed(capture, q, turned(q, k, 1, row, 1.2 * allowed), sinks, dtype)


def test_what_a_streamed_pass_differs_by_is_named():
    capture, _ = drawn()
    q, k = capture.rotated_q, capture.rotated_k
    with pytest.raises(UnsupportedModelError) as refusal:
        as_streamed(capture, q, turned(q, turned(q, k, 0, 99, 0.5), 1, 57, -0.25), None, torch.float32)
    assert str(refusal.value).startswith(
        "layer 5: head 3, query 99 has scores that its q and k do not give: off by 0.5. Likely cause"
    )
    assert "at some length below 100 tokens" in str(refusal.value)
    with pytest.raises(UnsupportedModelError, match="head 3, query 0 has scores"):
        as_streamed(capture, q.index_fill(1, torch.tensor(0), torch.nan), k, None, torch.float32)


def test_between_its_rows_a_streamed_pass_is_not_compared():
    capture, _ = drawn()
    q = capture.rotated_q.clone()
    q[:, [at for at in range(100) if at not in STREAMED]] *= 2
    assert as_streamed(capture, q, capture.rotated_k, None, torch.float32).sinks is None


def test_a_cache_is_held_against_its_scores_else_its_pattern_else_nothing():
    capture, scores = drawn()
    pattern = scores.softmax(-1)
    assert as_cached(capture, scores, pattern.flip(-1), torch.float32) is capture
    assert as_cached(capture, None, pattern, torch.float32) is capture
    assert capture.proved
    between = edited(scores, 1, max(set(range(100)) - set(checked_rows(100).tolist())), 3, 0.5)
    assert isinstance(as_cached(capture, between, pattern, torch.float32), EditedCapture)
    found = as_cached(capture, None, between.softmax(-1), torch.float32)
    with pytest.raises(UnsupportedModelError, match="layer 5: the cached pattern is not the softmax"):
        found.scores()
    assert as_cached(capture, None, None, torch.float32) is capture
    assert not capture.proved


@pytest.mark.parametrize("sinks", [True, False])
def test_shares_of_a_row_are_no_edit_where_sinks_take_the_rest(sinks):
    capture, scores = drawn(replace(GEOMETRY, sinks=sinks))
    shares = 0.7 * scores[list(capture.heads)].softmax(-1)
    pattern = torch.zeros_like(scores).index_copy(0, torch.tensor(capture.heads), shares)
    dtype = torch.float32
    assert as_cached(capture, scores, pattern, dtype).edited_pattern is not sinks
    assert isinstance(as_cached(capture, None, pattern, dtype), EditedCapture) is not sinks
    refused = nullcontext() if sinks else pytest.raises(InputError, match="not the softmax")
    with refused:
        require_softmax(capture.geometry, capture.scores(), shares, dtype)


def test_a_pattern_is_as_exact_as_its_dtype():
    scores = torch.randn(3, 4, 9, generator=torch.Generator().manual_seed(0))
    pattern, off = scores.softmax(-1), torch.ones(3, 4, 9)
    for at_dtype, share in {torch.float32: 1e-3, torch.bfloat16: 2**-4}.items():
        for part, holds in ((0.95, True), (1.05, False)):
            off[2, 1, 5] = 1 + part * share
            assert is_softmax(scores, pattern * off, at_dtype) == holds
    scores[..., 0] -= 20  # what is next to nothing is not compared
    off[2, 1, 5], off[..., 0] = 1, 2
    assert is_softmax(scores, scores.softmax(-1) * off, torch.float32)
    geometry = LayerGeometry(7, "none", 3, 3, 4, 0.5)
    require_softmax(geometry, scores, scores.softmax(-1), torch.float32)
    with pytest.raises(InputError, match="layer 7: its pattern is not the softmax"):
        require_softmax(geometry, scores, pattern.flip(-1), torch.float32)


def test_every_row_is_compared_on_its_own_scale():
    """A sink may take another share of each; what is next to nothing in one row may be the most of another."""
    scores = torch.zeros(2, 2, 3000)
    scores[0, 0, 0] = 20  # one row sees one key, the others all
    pattern = scores.softmax(-1)
    shares = torch.tensor([[0.2, 0.9], [0.5, 1.0]])[..., None]
    assert is_softmax(scores, shares * pattern, torch.float32, sinks=True)
    assert not is_softmax(scores, shares * pattern, torch.float32)
    for head, row in [(0, 1), (1, 0)]:
        changed = pattern.clone()
        changed[head, row, 1234] *= 1.5
        assert not is_softmax(scores, changed, torch.float32, sinks=True)


def test_rows_that_see_nothing_are_left_out():
    scores = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    scores[1, 2] = -torch.inf
    pattern = scores.softmax(-1)
    for filled in (torch.nan, 0.0, 0.2):
        pattern[1, 2] = filled
        assert is_softmax(scores, pattern, torch.float32)
        assert is_softmax(scores, pattern, torch.float32, sinks=True)
    assert not is_softmax(scores, pattern.flip(-1), torch.float32)


def test_what_sinks_leave_is_compared_as_exactly():
    scores, off = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)), torch.ones(2, 3, 5)
    off[1, 2, scores[1, 2].argsort()[-2]] = 1.01
    assert not is_softmax(scores, 0.1 * off * scores.softmax(-1), torch.float32, sinks=True)
    assert is_softmax(scores, 0.1 * scores.softmax(-1), torch.float32, sinks=True)


def test_softmax_is_told_from_its_edits():
    scores = torch.randn(3, 4, 9).masked_fill(torch.rand(3, 4, 9) < 0.2, -torch.inf)
    pattern = scores.softmax(-1)
    assert is_softmax(scores, pattern, torch.float32)
    assert is_softmax(scores, 0.3 * pattern, torch.float32, sinks=True)  # it takes its share of each row
    for sinks in (False, True):
        assert not is_softmax(scores, (1.1 * scores).softmax(-1), torch.float32, sinks=sinks)
        for factor in (0.0, 1.1):  # the commonest edit there is, and one that no sink makes
            assert not is_softmax(scores, factor * pattern, torch.float32, sinks=sinks)
    assert not is_softmax(scores, 0.5 * pattern, torch.float32)
    scores[0, 0, :3] = torch.tensor([-30.0, -torch.inf, 1.0])
    for key in (0, 1):  # next to nothing there, and hidden
        added = scores.softmax(-1)
        added[0, 0, key] += 0.05
        for sinks in (False, True):
            assert not is_softmax(scores, added, torch.float32, sinks=sinks)


@pytest.mark.parametrize("run", ["capture", "attach"])
def test_two_threads_on_one_model_are_refused(llama, run):
    errors = []

    def other():
        try:
            if run == "capture":
                run_capture(llama, TOKENS, lambda capture: None)
            else:
                llama(TOKENS)
        except InputError as error:
            errors.append(str(error))

    with capturing(llama, lambda capture: None):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert "in another thread" in errors[0] if run == "capture" else "two threads" in errors[0]


def test_active_dropout_is_refused(family_directory, backend):
    model = load_model(family_directory("gpt2"), backend)
    model.train()
    if backend == "bridge":
        with pytest.raises(InputError, match=r"training mode and dropout in .* call model\.eval\(\)"):
            tl_posgen.analyze(model, TOKENS, null_seeds=(), progress=False)
        geometry_of(model.eval())
        with pytest.raises(InputError, match="training mode"), capturing(model, lambda capture: None):
            model.train()(TOKENS)
    else:  # a HookedTransformer has no dropout: the mode changes nothing
        run_capture(model, TOKENS, lambda capture: None)


def test_autocast_is_refused(llama):
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InputError, match="autocast is on"):
        tl_posgen.analyze(llama, TOKENS, null_seeds=(), progress=False)


def test_quantised_weights_are_refused(family_directory, backend):
    model = load_model(family_directory("llama"), backend)
    name, weight = next(iter(model.named_parameters()))
    holder = model.get_submodule(name.rpartition(".")[0])
    setattr(holder, name.rpartition(".")[2], torch.nn.Parameter(weight.data.to(torch.int8), requires_grad=False))
    with pytest.raises(UnsupportedModelError, match=r"is quantised \(int8\)"):
        geometry_of(model)


def test_a_null_that_has_the_models_weights_says_so(mini):
    from tl_posgen.models.random_like import random_like

    report = tl_posgen.analyze(random_like(mini, 3), TOKENS, measures="three_axis", null_seeds=(3, 4), progress=False)
    assert any("the random init has the model's own weights" in sentence for sentence in report.findings())
    assert report["three_axis"].nulls[0].attrs["model"].startswith("random init (seed 3), the model's own weights")
    assert report["three_axis"].nulls[1].attrs["model"] == "random init (seed 4)"


def test_edits_of_any_query_show(llama):
    """Not only of the 64 rows that are compared where no other hook is at work."""
    unchecked = next(row for row in range(10, 100) if row not in checked_rows(100).tolist())

    def one_query(scores):
        scores = scores.clone()
        scores[:, 2, unchecked, 7] += 0.5
        return scores

    geometry_of(llama)
    captures = []
    with torch.no_grad(), capturing(llama, captures.append):
        llama.run_with_hooks(TOKENS, fwd_hooks=edit(0, "attn_scores", one_query))
    with pytest.raises(UnsupportedModelError, match=f"layer 0: head 2, query {unchecked} has scores"):
        assert captures[0].q is None


def test_a_head_of_large_scores_does_not_hide_edits_of_another(family_directory, backend):
    model = load_model(family_directory("llama"), backend)
    with torch.no_grad():
        model.blocks[0].attn.W_Q[0].mul_(1e4)

    def small(scores):
        return torch.cat([scores[:, :1], scores[:, 1:] + torch.where(scores[:, 1:] > -1e9, 0.1, 0)], 1)

    geometry_of(model)
    captures = []
    with torch.no_grad(), capturing(model, captures.append, layers=[0]):
        model(TOKENS)
        model.run_with_hooks(TOKENS, fwd_hooks=edit(0, "attn_scores", small))
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
        tl_posgen.analyze(llama, TOKENS[:, :50], measures="variance", null_seeds=(), progress=False)
    assert run.report().provenance["prompts"] == 1


def test_a_cache_that_proves_nothing_says_so(llama):
    with torch.no_grad(), llama.hooks(fwd_hooks=at_dummy_distance(llama, beyond=8)):
        _, cache = llama.run_with_cache(TOKENS, names_filter=needed_names(llama))
    report = tl_posgen.analyze_cache(llama, cache, tokens=TOKENS, measures="three_axis")
    assert "not compared with the scores that the pass used" in report.findings()[-1]


@pytest.mark.parametrize(("part", "point"), [("v", "attn.hook_v"), ("resid", "hook_resid_pre")])
def test_edits_behind_a_list_of_hooks_are_not_left_unsaid(llama, part, point):
    """Where no other captured value shows an edit: values, and the residual stream."""
    change = [(f"blocks.1.{point}", lambda value, hook: 2 * value)]
    captures: list = []
    with torch.no_grad(), pytest.raises(InputError, match=f"{point}: another hook stands behind"):
        llama.run_with_hooks(TOKENS, fwd_hooks=capture_hooks(llama, captures.append, {part}) + change)
    used: list = []
    with torch.no_grad():
        two = [*capture_hooks(llama, captures.append, {part}), *capture_hooks(llama, used.append, {part})]
        llama.run_with_hooks(TOKENS, fwd_hooks=change + two)
    assert torch.equal(getattr(captures[-1], part), getattr(used[-1], part))
    with torch.no_grad(), capturing(llama, captures.append, {part}):
        llama.run_with_hooks(TOKENS, fwd_hooks=change)
    torch.testing.assert_close(getattr(captures[-1], part), getattr(used[-1], part))
    with torch.no_grad():  # what is not captured may be edited
        llama.run_with_hooks(TOKENS, fwd_hooks=capture_hooks(llama, captures.append) + change)


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
    found = report["slash"].dataset["score"].sel(layer=1, distance=row)
    expected = to_first(plain[None])[0].diagonal(-row, 1, 2).mean(-1)
    assert float(abs(torch.tensor(found.values) - (expected + plain.diagonal(-row, 1, 2).mean(-1)) / 2).max()) < 1e-5
    assert "slash: measured from patterns that are not the softmax of the scores, in layer 1: hooks edit them." in (
        report["slash"].warnings
    )
    assert not report["three_axis"].warnings
    assert not tl_posgen.analyze(llama, TOKENS, measures="slash", null_seeds=(), progress=False)["slash"].warnings


def test_dynamically_quantised_layers_are_refused(family_directory):
    import warnings

    model = load_model(family_directory("llama"), "bridge")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, inplace=True)
    with pytest.raises(UnsupportedModelError, match="is quantised; load the model in float32"):
        geometry_of(model)


def test_generated_tokens_count_alike_on_both_backends(family_model, backend):
    model = family_model("llama", backend)
    with torch.no_grad(), tl_posgen.attach(model, "three_axis") as run:
        model.generate(
            TOKENS[:, :9], max_new_tokens=3, do_sample=False, use_past_kv_cache=False, verbose=False, stop_at_eos=False
        )
    report = run.report()
    assert (report.provenance["prompts"], report.provenance["length"]) == (3, [9, 10, 11])
    assert report["three_axis"].dataset.sizes["prompt"] == 3


def test_a_list_of_hooks_compares_every_row_of_a_pattern_that_others_edit(llama):
    def edit(pattern, hook):
        pattern = pattern.clone()
        pattern[:, :, 51] = 0
        pattern[:, :, 51, 0] = 1
        return pattern

    tokens = torch.randint(2, 60, (1, 100), generator=torch.Generator().manual_seed(0))
    hooks = capture_hooks(llama, lambda _: None, {"pattern"}, layers=[1])
    with pytest.raises(InputError, match="layer 1: its pattern is not the softmax"), torch.no_grad():
        llama.run_with_hooks(tokens, fwd_hooks=[("blocks.1.attn.hook_pattern", edit), *hooks])


def test_a_cache_of_edited_patterns_is_named(llama):
    tokens = torch.randint(2, 60, (1, 40), generator=torch.Generator().manual_seed(0))
    for edit, expected in ((lambda pattern, hook: 0 * pattern, True), (lambda pattern, hook: pattern, False)):
        with torch.no_grad(), llama.hooks(fwd_hooks=[("blocks.1.attn.hook_pattern", edit)]):
            _, cache = llama.run_with_cache(tokens)
        captures = list(captures_from_cache(cache, llama, tokens=tokens, needs={"pattern"}))
        assert [capture.edited_pattern for capture in captures] == [False, expected]

"""Planes held at a distance, against their formula pair by pair, on both backends; streamed passes against formed."""

import math
from typing import get_args

import pytest
import torch
from captures import run
from families import family_cases
from interventions import TOKENS, N, largest, logits, scores_under

from tl_posgen.editing.score_functions import FrozenBeyond
from tl_posgen.editing.token_positions import tokens_at
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.extension.held_planes import hold_planes
from tl_posgen.frequencies.plane_cost import Edit
from tl_posgen.hooks import at_dummy_distance, edit_planes, lm_infinite
from tl_posgen.models.layer_table import geometry_of
from tl_posgen.models.layers import fused
from tl_posgen.models.session import session_of
from tl_posgen.models.streaming.stream import streaming, streaming_by_policy
from tl_posgen.rope.rotation import complex_frequencies, complex_planes

WITHOUT_ROPE = ["gpt2", "bloom", "opt", "gpt_neo", "mpt"]
CASES = family_cases("llama", without=WITHOUT_ROPE)


def held_scores(capture, limits, positions=None):
    """cap(scale Re sum_m g_m z^q_im conj(z^k_jm) e^{i theta_m min(d, limit_m)}), pair by pair in float64; g_m is the
    square of the scaling of RoPE."""
    geometry, rope = capture.geometry, capture.geometry.rope
    q, k = (complex_planes(vars(capture)[part].double(), rope) for part in "qk")
    theta, n = complex_frequencies(rope, vars(capture)["q"].shape[-1]), len(rope.inv_freq)
    gain = torch.ones_like(theta)
    gain[:n] = rope.scaling**2
    limits = torch.cat([limits, torch.full((len(theta) - n,), math.inf)])
    p = torch.arange(q.shape[1]) if positions is None else positions
    away = (p[:, None] - p).clamp(min=0).double()
    angles = theta * away[..., None].minimum(limits)
    scores = geometry.scale * torch.einsum("hip,hjp,ijp->hij", q, k.conj(), torch.polar(gain.expand_as(angles), angles))
    cap, scores = geometry.soft_cap, scores.real
    scores = scores if cap is None else cap * (scores / cap).tanh()
    return scores.masked_fill(~geometry.sees(p[:, None] - p), -torch.inf)


def limits_of(geometry, planes, at):
    limits = torch.full_like(geometry.rope.inv_freq, math.inf)
    limits[planes] = torch.as_tensor(at).to(limits)
    return limits


def assert_scores(actual, expected):
    seen = expected != -torch.inf
    torch.testing.assert_close(actual != -torch.inf, seen)
    torch.testing.assert_close(
        actual[seen].double(), expected[seen], atol=2e-5 * float(expected[seen].abs().max()), rtol=0
    )


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_scores_are_those_of_the_formula(family_model, name, backend):
    model = family_model(name, backend)
    planes = [0, 1]
    for at in (5, [3, 7.5]):
        for capture in scores_under(model, hold_planes(model, planes, at=at), [0]):
            assert_scores(capture.attn_scores, held_scores(capture, limits_of(capture.geometry, planes, at)))


@pytest.mark.parametrize(("name", "backend"), CASES)
def test_nothing_changes_up_to_the_distance_and_beyond_it_does(family_model, name, backend):
    model = family_model(name, backend)
    with torch.no_grad(), streaming_by_policy(session_of(model), N):
        plain = model(TOKENS)
    size = float(plain.abs().max())
    assert largest(logits(model, hold_planes(model, "all", at=N - 1)) - plain) < 1e-5 * size
    assert largest(logits(model, hold_planes(model, [0], at=3)) - plain) > 1e-4 * size


def test_all_planes_at_one_distance_are_the_limit_of_lm_infinite(llama):
    held = logits(llama, hold_planes(llama, "all", at=5))
    for hooks in (lm_infinite(llama, 10**9, limit=5), at_dummy_distance(llama, beyond=5)):
        torch.testing.assert_close(held, logits(llama, hooks), atol=1e-6, rtol=1e-6)


def test_changes_of_single_planes_sum_to_that_of_all(llama):
    (plain,) = run(llama, TOKENS[:1], layers=[0])
    below = torch.ones(N, N, dtype=torch.bool).tril()

    def change(planes):
        (capture,) = scores_under(llama, hold_planes(llama, planes, at=4), [0])
        return (capture.attn_scores - plain.scores())[:, below]

    parts = [change([plane]) for plane in range(4)]
    assert min(map(largest, parts)) > 1e-5
    torch.testing.assert_close(sum(parts), change("all"), atol=1e-5, rtol=1e-4)


def test_names_stand_for_planes_and_distances(llama):
    theta, context = geometry_of(llama)[0].rope.inv_freq, llama.cfg.n_ctx
    partial = [plane for plane in range(4) if theta[plane] * context < 2 * math.pi]
    assert 0 < len(partial) < 4
    by_name = logits(llama, hold_planes(llama, "partial", at=3))
    assert torch.equal(by_name, logits(llama, hold_planes(llama, partial, at=3)))
    quarters = [math.pi / 2 / float(one) for one in theta]
    by_name = logits(llama, hold_planes(llama, "all", at="quarter turn"))
    assert torch.equal(by_name, logits(llama, hold_planes(llama, range(4), at=quarters)))
    assert torch.equal(by_name, logits(llama, hold_planes(llama, [3, 0, 1, 2], at=[quarters[m] for m in (3, 0, 1, 2)])))


def test_planes_are_chosen_by_number_by_mask_and_by_a_function_of_each_layer(llama):
    expected = logits(llama, hold_planes(llama, [1, 3], at=4))
    mask = torch.tensor([False, True, False, True])
    for planes in (mask, lambda rope: mask, lambda rope: [1, 3]):
        assert torch.equal(logits(llama, hold_planes(llama, planes, at=4)), expected)
    assert hold_planes(llama, lambda rope: torch.zeros_like(rope.inv_freq, dtype=torch.bool), at=4) == []
    for edit in get_args(Edit):
        by_number, by_mask = (logits(llama, edit_planes(llama, edit, planes)) for planes in ([1, 3], lambda rope: mask))
        assert torch.equal(by_number, by_mask)


def test_a_layer_whose_planes_are_not_chosen_has_no_hooks(family_model):
    model = family_model("gemma3", "bridge")  # layers with frequencies of two kinds
    thetas = [geometry.rope.inv_freq for geometry in geometry_of(model)]
    slower = min(theta[1].item() for theta in thetas)
    hooks = hold_planes(model, lambda rope: (rope.inv_freq <= slower) & (torch.arange(len(rope.inv_freq)) == 1), at=2)
    layers = {int(name.split(".")[1]) for name, _ in hooks}
    assert layers == {layer for layer, theta in enumerate(thetas) if theta[1] <= slower}
    assert len(layers) < len(thetas)


def test_heads_that_are_not_chosen_stay(llama):
    some = scores_under(llama, hold_planes(llama, "all", at=4, heads=[(0, 1), (0, 2)]), [0])[0].attn_scores
    every = scores_under(llama, hold_planes(llama, "all", at=4), [0])[0].attn_scores
    plain = run(llama, TOKENS[:1], layers=[0])[0].scores()
    torch.testing.assert_close(some[[1, 2]], every[[1, 2]])
    torch.testing.assert_close(some[[0, 3]], plain[[0, 3]])


HELD = {
    "one distance": lambda m: hold_planes(m, [0, 1], at=5),
    "a distance a plane": lambda m: hold_planes(m, "all", at="quarter turn"),
    "all planes": lambda m: hold_planes(m, "all", at=3.5),
    "LM-Infinite": lambda m: lm_infinite(m, 7, 2, limit=4),
    "frozen beyond": lambda m: at_dummy_distance(m, beyond=6),
}
STREAMED = [
    ("llama", "hooked"),
    ("llama", "bridge"),
    ("llama_yarn", "bridge"),
    ("gemma2", "bridge"),
    ("gptj", "bridge"),
]


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize(("name", "backend"), STREAMED)
def test_a_streamed_pass_joins_near_and_far_pairs(family_model, name, backend, held, monkeypatch):
    """In blocks of three rows, and without the function that makes scores of whole blocks."""
    model = family_model(name, backend)
    hooks = HELD[held](model)
    seen = [("blocks.0.attn.hook_pattern", lambda pattern, hook: None)]  # for which scores are formed
    seen += [("blocks.1.attn.hook_pattern", lambda pattern, hook: None)]
    expected = logits(model, [*hooks, *seen])
    monkeypatch.setattr(fused, "SCORES_AT_ONCE", 3 * 2 * 4 * N)
    monkeypatch.setattr(FrozenBeyond, "__call__", None)
    with torch.no_grad(), streaming(model):
        found = model.run_with_hooks(TOKENS, fwd_hooks=hooks)
    torch.testing.assert_close(found, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-4)


def test_padding_is_told_from_text_in_a_streamed_pass(llama, monkeypatch):
    mask = torch.ones_like(TOKENS)
    mask[1, :7] = 0
    monkeypatch.setattr(fused, "SCORES_AT_ONCE", 3 * 2 * 4 * N)
    for hooks in (hold_planes(llama, "all", at=3), lm_infinite(llama, 6, 1)):
        formed, streamed = [], []
        with torch.no_grad():
            formed = llama.run_with_hooks(TOKENS, attention_mask=mask, fwd_hooks=hooks)
            with streaming(llama):
                streamed = llama.run_with_hooks(TOKENS, attention_mask=mask, fwd_hooks=hooks)
        torch.testing.assert_close(streamed[mask.bool()], formed[mask.bool()], atol=2e-5, rtol=1e-4)


@pytest.mark.usefixtures("needs_hooked")
def test_a_streamed_pass_of_a_model_that_has_changed_is_refused(llama):
    hooks = hold_planes(llama, "all", at=3)
    sines = [block.attn.rotary_sin for block in llama.blocks]
    with torch.no_grad(), streaming(llama):
        llama.run_with_hooks(TOKENS, fwd_hooks=hooks)
        for sine in sines:
            sine.neg_()
        try:
            with pytest.raises(InputError, match="make them anew where the model has changed"):
                llama.run_with_hooks(TOKENS, fwd_hooks=hooks)
        finally:
            for sine in sines:
                sine.neg_()
    llama.reset_hooks()


def test_gradients_flow_through_the_join(llama):
    weight, found = next(one for one in llama.parameters() if one.ndim > 1), []
    for streams in (False, True):
        llama.zero_grad()
        with streaming(llama) if streams else torch.enable_grad():
            llama.run_with_hooks(TOKENS, fwd_hooks=hold_planes(llama, [0, 2], at=5)).logsumexp(-1).sum().backward()
        found.append(weight.grad.clone())
    llama.zero_grad()
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(("name", "backend"), [("llama", "hooked"), ("gemma2", "bridge"), ("neox", "bridge")])
def test_far_tokens_stand_at_the_held_distance(family_model, name, backend):
    """Under a gap, where windows hide what is beyond them."""
    model = family_model(name, backend)
    positions = torch.arange(N) + 50 * (torch.arange(N) >= N // 2)
    with tokens_at(model, positions):
        (capture,) = scores_under(model, hold_planes(model, [1], at=9), [0])
    assert_scores(capture.attn_scores, held_scores(capture, limits_of(capture.geometry, [1], 9), positions))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"planes": [4], "at": 3}, "layer 0: plane 4 does not exist"),
        ({"planes": [], "at": 3}, "no planes chosen"),
        ({"planes": [1, 0, 1], "at": [3, 4, 5]}, "planes: 1 is given twice"),
        ({"planes": "slow", "at": 3}, "planes = 'slow'"),
        ({"planes": torch.ones(5).bool(), "at": 3}, r"layer 0: \[5\] booleans, and there are 4 planes"),
        ({"planes": lambda rope: [0], "at": [3]}, "1 distances; give one number"),
        ({"planes": [0, 1], "at": [3]}, "1 distances; give one number, or one for each"),
        ({"planes": "all", "at": [3, 3, 3, 3]}, "4 distances; give one number"),
        ({"planes": [0], "at": -1}, "at = -1"),
        ({"planes": [0], "at": "full turn"}, "at = 'full turn'"),
    ],
)
def test_planes_and_distances_that_there_are_not_are_refused(llama, unchecked, options, message):
    with pytest.raises(InputError, match=message):
        hold_planes(llama, **options)


def test_models_without_planes_are_refused(family_model):
    with pytest.raises(UnsupportedModelError, match="no chosen layer has RoPE"):
        hold_planes(family_model("gpt2"), at=3)
    with pytest.raises(InputError, match="frequencies"):
        hold_planes(family_model("llama_dynamic", "bridge"), at=10_000)


@pytest.mark.usefixtures("needs_hooked")
def test_a_prompt_beyond_a_hooked_transformers_context_is_refused_with_a_remedy(mini):
    tokens = torch.zeros(1, mini.cfg.n_ctx + 1, dtype=torch.long)
    with pytest.raises(InputError, match=r'takes 512, .*; cut texts with length=, or load it with backend="bridge"'):
        mini.run_with_hooks(tokens, fwd_hooks=hold_planes(mini, [3], at=4))

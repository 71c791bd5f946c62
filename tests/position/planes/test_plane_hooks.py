"""Planes perturbed in running models, on both backends and every kind of RoPE."""

import pytest
import torch
from families import FAMILIES
from interventions import TOKENS, N, largest, logits
from rotated_heads import captures_of

from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.hooks import permute_positions, perturb_planes
from tl_posgen.models.layer_table import geometry_of
from tl_posgen.models.session import session_of
from tl_posgen.models.streaming.stream import streaming_by_policy
from tl_posgen.position.planes.hooks import draw_of
from tl_posgen.position.planes.numbers.plane_edits import EDITS
from tl_posgen.rope.frequency_bands import bands_by_thirds

FAST = ("llama", "neox", "gptj", "gemma2", "qwen3", "smollm3")
ROTARY = [
    pytest.param(name, backend, marks=() if name in FAST else pytest.mark.slow)
    for name in (*FAST, "llama_yarn", "mistral", "gemma3", "phi")
    for backend in ("hooked", "bridge")
    if getattr(FAMILIES[name], backend)
]


def captured(model, **where):
    with streaming_by_policy(session_of(model), N):
        return captures_of(model, TOKENS[:1], **where)[0]


@pytest.mark.parametrize(("name", "backend"), ROTARY)
def test_strength_zero_changes_nothing_and_every_edit_does(family_model, name, backend):
    model = family_model(name, backend)
    plain = logits(model)
    bound = 1e-4 * max(1, plain.abs().max().item())
    assert largest(logits(model, perturb_planes(model, "shuffle_phases", strength=0)) - plain) < bound
    every = [(edit, control) for edit in EDITS for control in (False, True)]
    for edit, control in every if name == "llama" else every[1::3]:
        changed = logits(model, perturb_planes(model, edit, control=control))
        assert changed.isfinite().all()
        assert largest(changed - plain) > 10 * bound, (edit, control)


@pytest.mark.parametrize(("name", "backend"), ROTARY)
def test_shuffled_positions_of_keys_are_permuted_positions(family_model, name, backend):
    model = family_model(name, backend)
    hooks = perturb_planes(model, "shuffle_positions", of=["k"], layers=[0], seed=3)
    order = torch.cat([torch.zeros(1).long(), 1 + draw_of(captured(model, layers=[0]), "k", 1, 3).cycle(1.0)])
    permuted = permute_positions(model, order, keys_only=True, layers=[0])
    found, expected = logits(model, hooks, TOKENS[:1]), logits(model, permuted, TOKENS[:1])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_layers_and_heads_add_up_and_a_hook_of_the_user_stays(llama):
    draw = {"edit": "phase_noise", "strength": 0.7, "seed": 2}
    whole = logits(llama, perturb_planes(llama, **draw))
    by_layer = perturb_planes(llama, **draw, layers=[0]) + perturb_planes(llama, **draw, layers=[1])
    torch.testing.assert_close(logits(llama, by_layer), whole)
    outer, inner = ([(layer, head) for layer in (0, 1) for head in heads] for heads in ((0, 3), (1, 2)))
    by_head = perturb_planes(llama, **draw, heads=outer) + perturb_planes(llama, **draw, heads=inner)
    torch.testing.assert_close(logits(llama, by_head), whole)
    seen = []
    name = "blocks.1.hook_resid_pre" if "blocks.1.hook_resid_pre" in llama.hook_dict else "blocks.1.hook_in"
    logits(llama, [*perturb_planes(llama, **draw), (name, lambda x, hook: seen.append(x.shape))])
    assert len(seen) == 1


def test_planes_are_chosen_by_number_mask_or_function(llama):
    plain, n = logits(llama), len(captured(llama).geometry.rope.inv_freq)
    ends = torch.isin(torch.arange(n), torch.tensor([0, n - 1]))
    bands = (
        [0, n - 1],
        ends,
        lambda rope: [0, len(rope.inv_freq) - 1],
        lambda rope: bands_by_thirds(n)[0],
        ~ends & ends,
    )
    numbers, mask, function, third, none = (logits(llama, perturb_planes(llama, "phase_noise", one)) for one in bands)
    assert torch.equal(numbers, mask)
    assert torch.equal(numbers, function)
    assert largest(third - numbers) > 1e-3
    assert largest(none - plain) < 1e-4


@pytest.mark.parametrize("edit", EDITS)
def test_the_first_token_and_what_only_it_sees_stay_unless_it_is_asked_for(llama, edit):
    plain, changed = logits(llama), logits(llama, perturb_planes(llama, edit))
    torch.testing.assert_close(changed[:, 0], plain[:, 0], atol=1e-5, rtol=1e-5)
    both = [logits(llama, perturb_planes(llama, edit, first_token=first)) for first in (False, True)]
    assert largest(both[0] - both[1]) > 1e-3


def test_query_heads_that_share_a_key_see_it_edited_alike_whichever_are_chosen(llama):
    whole, part = captured(llama, layers=[1]), captured(llama, heads=["L1H2", "L1H3"])
    keys, some = (draw_of(capture, "k", 1, 0) for capture in (whole, part))
    assert torch.equal(keys.noise[0], keys.noise[1])
    assert torch.equal(keys.noise[2:], some.noise)
    assert not torch.equal(keys.noise[1], keys.noise[2])
    queries = draw_of(whole, "q", 1, 0)
    assert not torch.equal(queries.noise[0], queries.noise[1])
    assert not torch.equal(queries.order, keys.order)


def test_prompts_are_drawn_apart_and_a_seed_again(llama):
    same = TOKENS[:1].expand(2, N)
    found = logits(llama, perturb_planes(llama, "shuffle_phases"), same)
    assert largest(found[0] - found[1]) > 1e-3
    torch.testing.assert_close(logits(llama, perturb_planes(llama, "shuffle_phases"), same), found)
    assert largest(logits(llama, perturb_planes(llama, "shuffle_phases", seed=1), same) - found) > 1e-3
    alone = logits(llama, perturb_planes(llama, "shuffle_phases"), TOKENS[:1])
    torch.testing.assert_close(alone[0], found[0], atol=1e-5, rtol=1e-5)


def test_a_layer_without_rope_stays_as_it_is(family_model):
    model = family_model("smollm3", "bridge")
    turning = [one.layer for one in geometry_of(model) if one.rope.rotary_dim]
    assert 0 < len(turning) < len(geometry_of(model))
    both = (logits(model, perturb_planes(model, "phase_noise", [0], layers=one)) for one in (None, turning))
    assert torch.equal(*both)
    (other,) = {0, 1} - set(turning)
    with pytest.raises(UnsupportedModelError, match="no chosen layer has RoPE"):
        perturb_planes(model, "phase_noise", layers=[other])


@pytest.mark.parametrize("name", ["gpt2", "bloom"])
def test_a_model_without_rope_is_refused(family_model, name):
    with pytest.raises(UnsupportedModelError, match="no chosen layer has RoPE"):
        perturb_planes(family_model(name, "bridge"), "shuffle_phases")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"strength": 1.5}, "strength of shuffle_phases 1.5"),
        ({"edit": "phase_noise", "strength": -1}, "standard deviation in radians"),
        ({"of": ["v"]}, "of="),
        ({"band": [99]}, "layer 0: band: plane 99 does not exist"),
        ({"band": torch.ones(7).bool()}, r"layer 0: band: \[7\] booleans, and there are 4 planes"),
        ({"band": "high"}, "band: 'high' is no boolean"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_done_is_refused_in_one_line(llama, wrong, said):
    with pytest.raises(InputError, match=said) as refusal:
        perturb_planes(llama, **{"edit": "shuffle_phases", **wrong})
    assert "\n" not in str(refusal.value)


def test_padding_is_not_mixed_in(llama):
    """The padded prompt is the first of its batch, so it has the draws that it has alone."""
    short = TOKENS[0, : N - 4]
    mask = torch.ones(2, N).long()
    mask[0, :4] = 0
    padded = torch.stack([torch.cat([torch.zeros(4).long(), short]), TOKENS[1]])
    hooks = perturb_planes(llama, "mean_phase")
    with torch.no_grad():
        found = llama.run_with_hooks(padded, attention_mask=mask, fwd_hooks=hooks)
    alone = logits(llama, hooks, short[None])
    torch.testing.assert_close(found[0, 4:], alone[0], atol=1e-4, rtol=1e-4)


def test_hooks_leave_the_random_state_and_the_model_alone_and_let_gradients_through(llama):
    before = torch.get_rng_state()
    hooks = perturb_planes(llama, "phase_noise", strength=0.5)
    plain = logits(llama)
    logits(llama, hooks)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(logits(llama), plain)
    llama.zero_grad()
    llama.run_with_hooks(TOKENS, fwd_hooks=hooks).square().sum().backward()
    gradients = [one.grad for one in llama.parameters() if one.grad is not None]
    assert gradients
    assert all(one.isfinite().all() for one in gradients)
    llama.zero_grad()

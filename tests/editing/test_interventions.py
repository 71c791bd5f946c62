"""Every intervention on one model: no change at the true scores, and otherwise only the intended change."""

from functools import partial

import pytest
import torch
from captures import run
from interventions import TOKENS, N, largest, logits, scores_under

from tl_posgen.editing.replace_scores import replace_scores
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.hooks import ablate_bands, interpolate_positions, lm_infinite, retrieve_blocks
from tl_posgen.models.layer_table import geometry_of
from tl_posgen.models.layers.capture import scores_from
from tl_posgen.position.distance.hooks import at_dummy_distance
from tl_posgen.position.order.hooks import jitter_distances, permute_position_part, permute_positions
from tl_posgen.position.order.numbers import jittered_distances, swap_tokens
from tl_posgen.position.substitution.hooks import (
    by_constant,
    by_split,
    by_three_axis,
    own_profile,
    stand_in,
    substitute,
)
from tl_posgen.rope.rotation import rotate
from tl_posgen.rope.splits import DistanceDistribution, point_mass, triangle

SOME = [("llama", "hooked"), ("llama_yarn", "bridge"), ("bloom", "bridge"), ("gptj", "bridge"), ("gpt2", "hooked")]


@pytest.mark.parametrize(("name", "backend"), SOME)
def test_at_the_true_distances_nothing_changes_and_at_others_it_does(family_model, name, backend):
    model = family_model(name, backend)
    if name == "gpt2":
        with pytest.raises(UnsupportedModelError, match="residual stream"):
            at_dummy_distance(model, 3)
        return
    plain = logits(model)
    assert largest(logits(model, at_dummy_distance(model, lambda d: d)) - plain) < 1e-5 * max(1, plain.abs().max())
    assert largest(logits(model, at_dummy_distance(model, 3)) - plain) > 1e-3


def test_distances_past_fixed_frequencies_are_refused(family_model):
    with pytest.raises(InputError, match="frequencies"):
        at_dummy_distance(family_model("llama_dynamic", "bridge"), 10_000)


def test_pairs_beyond_the_limit_see_the_limit(llama):
    frozen = logits(llama, at_dummy_distance(llama, beyond=5))
    same = logits(llama, at_dummy_distance(llama, lambda d: d.clamp(max=5)))
    torch.testing.assert_close(frozen, same, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits(llama, at_dummy_distance(llama, 5, beyond=5)), same, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "backend"), [("llama", "hooked"), ("llama_yarn", "bridge"), ("mistral", "bridge")])
def test_permuted_key_positions_and_turned_keys_are_one_thing(family_model, name, backend):
    model = family_model(name, backend)
    permutation = swap_tokens(N, 0.5, seed=3).permutation
    by_position = logits(model, permute_positions(model, permutation, keys_only=True))

    def turned(capture):  # R_{p_j - j} of the rotated keys, which have YaRN's factor already
        rope = capture.geometry.rope
        k = rotate(capture.rotated_k, permutation - capture.positions, rope) / rope.scaling
        return scores_from(capture.rotated_q, k, capture.geometry, capture.heads)

    by_feature = logits(model, replace_scores(model, turned))
    torch.testing.assert_close(by_position, by_feature, atol=1e-5, rtol=1e-4)
    assert largest(by_position - logits(model)) > 1e-3


@pytest.mark.parametrize(("name", "backend"), [("llama", "hooked"), ("llama_yarn", "bridge"), ("bloom", "bridge")])
def test_perturbations_of_nothing_change_nothing(family_model, name, backend):
    model, plain = family_model(name, backend), logits(family_model(name, backend))
    identity, distances = torch.arange(N), jittered_distances(N, 0.0, 4, seed=0)
    for hooks in (
        permute_positions(model, identity),
        permute_positions(model, identity, keys_only=True),
        permute_position_part(model, identity),
        jitter_distances(model, distances),
        interpolate_positions(model, 1.0),
    ):
        assert largest(logits(model, hooks) - plain) < 1e-4


@pytest.mark.parametrize(
    ("hooks_of", "is_jitter"),
    [
        (permute_positions, False),
        (partial(permute_positions, keys_only=True), False),
        (permute_position_part, False),
        (jitter_distances, True),
    ],
)
def test_every_prompt_of_a_pass_may_have_a_disturbance_of_its_own(llama, hooks_of, is_jitter):
    draws = [
        jittered_distances(N, 0.5, 4, seed=seed) if is_jitter else swap_tokens(N, 0.5, seed=seed).permutation
        for seed in (3, 4)
    ]
    together = logits(llama, hooks_of(llama, torch.stack(draws)))
    for prompt, one in enumerate(draws):
        torch.testing.assert_close(together[[prompt]], logits(llama, hooks_of(llama, one), TOKENS[[prompt]]))
        assert largest(together[[1 - prompt]] - logits(llama, hooks_of(llama, one), TOKENS[[1 - prompt]])) > 1e-3
    with pytest.raises(InputError, match="prompt 2 has 24 tokens"):
        logits(llama, hooks_of(llama, torch.stack(draws)), TOKENS[[0, 1, 0]])


def test_equal_keys_have_a_position_part_only(llama):
    permutation = swap_tokens(N, 0.5, seed=3).permutation
    constant = TOKENS[:1, :1].expand(1, N)
    part = logits(llama, permute_position_part(llama, permutation, layers=[0]), constant)
    whole = logits(llama, permute_positions(llama, permutation, keys_only=True, layers=[0]), constant)
    torch.testing.assert_close(part, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("build", [lm_infinite, retrieve_blocks])
def test_length_arms_equal_vanilla_up_to_the_local_window(llama, build):
    plain = logits(llama)
    for width in (N, 10**9):
        assert largest(logits(llama, build(llama, n_local=width)) - plain) < 1e-5
    assert largest(logits(llama, build(llama, n_local=4, n_global=1)) - plain) > 1e-3


def test_the_two_windows_hide_what_lies_between(llama):
    shown = scores_under(llama, lm_infinite(llama, n_local=5, n_global=2))[0].attn_scores[0] != -torch.inf
    i, j = torch.arange(N)[:, None], torch.arange(N)
    assert torch.equal(shown, (j <= i) & ((j < 2) | (i - j < 5)))


def test_enough_retrieved_blocks_show_all_whole_blocks(llama):
    hooks = retrieve_blocks(llama, n_local=4, n_global=0, block=4, n_blocks=6)
    shown = scores_under(llama, hooks)[0].attn_scores[0] != -torch.inf
    assert shown[23].tolist() == [True] * N
    assert shown[9].tolist() == [True] * 4 + [False] * 2 + [True] * 4 + [False] * 14


def test_a_share_of_the_residual_is_added_back_linearly(llama):
    captures = [
        scores_under(llama, substitute(llama, by_split(triangle(4)), residual=share), layers=[0])[0]
        for share in (0.0, 0.25, 1.0)
    ]
    dropped, quarter, exact = (capture.attn_scores.tril() for capture in captures)
    torch.testing.assert_close(quarter, 0.75 * dropped + 0.25 * exact, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(exact, captures[-1].scores().tril(), atol=1e-5, rtol=1e-5)
    assert largest(dropped - exact) > 0.1


def test_one_threshold_a_layer_replaces_by_the_mean_of_the_last_row_of_head_0(llama):
    (capture,) = run(llama, TOKENS[:1], layers=[0])
    exact = capture.scores()
    row = exact[0, -1]
    threshold = row.sort().values[int(0.6 * len(row)) - 1]
    found = stand_in(capture, partial(by_constant, gamma=0.6, threshold="layer"), 0.6, threshold="layer")
    expected = torch.where((exact <= threshold) & (exact > -torch.inf), row.mean(), exact)
    torch.testing.assert_close(found, expected)
    edited = logits(llama, substitute(llama, by_constant, gamma=0.6, threshold="layer"))
    assert largest(edited - logits(llama, substitute(llama, by_constant, gamma=0.6))) > 1e-3


def test_one_threshold_a_layer_needs_head_0(llama):
    with pytest.raises(InputError, match="head 0, which is not chosen in layer 1"):
        substitute(llama, by_constant, gamma=0.5, threshold="layer", heads=[(0, 0), (0, 1), (1, 1)])
    with pytest.raises(InputError, match="choose from head, layer"):
        substitute(llama, by_constant, gamma=0.5, threshold="row")


def test_quantile_zero_replaces_nothing_and_one_everything(llama):
    plain = logits(llama)
    assert largest(logits(llama, substitute(llama, by_constant, gamma=0)) - plain) < 1e-5
    torch.testing.assert_close(
        logits(llama, substitute(llama, by_constant)), logits(llama, replace_scores(llama, lambda c: 0 * c.q @ c.k.mT))
    )


def test_laws_by_head_are_those_of_each_head(llama):
    rows = torch.tensor([3.0, 3.0, 5.0, 5.0])
    both = substitute(llama, by_split(triangle(rows)))
    first, last = ([(layer, head) for layer in (0, 1) for head in heads] for heads in ((0, 1), (2, 3)))
    apart = substitute(llama, by_split(triangle(3)), heads=first) + substitute(llama, by_split(triangle(5)), heads=last)
    torch.testing.assert_close(logits(llama, both), logits(llama, apart), atol=1e-5, rtol=1e-5)


def test_a_law_can_be_learned_by_gradient(llama):
    weights = torch.full((4,), 0.25, dtype=torch.float64, requires_grad=True)
    hooks = substitute(llama, by_split(DistanceDistribution(torch.arange(4), weights)))
    llama.run_with_hooks(TOKENS, fwd_hooks=hooks).square().sum().backward()
    assert weights.grad is not None
    assert weights.grad.abs().min() > 0


def test_the_stand_ins_differ_from_the_model_and_are_finite(llama):
    plain = logits(llama)
    for by in (by_three_axis, by_constant, by_split(own_profile), by_split(point_mass(1000), "position", "seen")):
        changed = logits(llama, substitute(llama, by))
        assert changed.isfinite().all()
        assert largest(changed - plain) > 1e-3


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_windows_and_caps_survive_a_substitution(family_model, name):
    model = family_model(name, "bridge")
    assert geometry_of(model)[0].window == 6
    assert logits(model, substitute(model, by_three_axis)).isfinite().all()


def test_freezing_all_planes_is_no_rope(llama):
    everything = torch.ones(4, dtype=torch.bool)
    frozen = logits(llama, ablate_bands(llama, "freeze", everything))
    torch.testing.assert_close(frozen, logits(llama, ablate_bands(llama, "no_rope")), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(frozen, logits(llama, at_dummy_distance(llama, 0)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "build",
    [
        lambda m: interpolate_positions(m, 0),
        lambda m: lm_infinite(m, 0),
        lambda m: retrieve_blocks(m, 8, block=0),
        lambda m: substitute(m, by_constant, gamma=1.5),
        lambda m: substitute(m, by_constant, from_layer=2),
        lambda m: by_split(triangle(3), "form"),
        lambda m: at_dummy_distance(m),
        lambda m: at_dummy_distance(m, -1),
        lambda m: at_dummy_distance(m, 3, beyond=torch.inf),
    ],
)
def test_unusable_options_are_refused(llama, build):
    with pytest.raises(InputError):
        build(llama)


@pytest.mark.parametrize("zeros", [30, 400])  # no 64-bit integer; no float either
@pytest.mark.parametrize("option", ["n_local", "n_global", "limit", "block", "n_blocks"])
def test_widths_over_any_prompt_are_refused_by_name(llama, option, zeros):
    make = retrieve_blocks if "block" in option else lm_infinite
    with pytest.raises(InputError, match=f"{option}=1{'0' * zeros}: no prompt is so long; give 1,000,000,000 at most"):
        make(llama, **{"n_local": 8, option: 10**zeros})


def test_a_perturbation_made_for_another_length_is_refused(llama):
    with pytest.raises(InputError, match="24 tokens"):
        logits(llama, permute_positions(llama, torch.arange(N - 1)))

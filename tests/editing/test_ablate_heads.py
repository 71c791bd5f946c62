"""Ablated heads: outputs at zero, at the mean over a reference, or from drawn prompts, on both kinds of model."""

from dataclasses import dataclass
from itertools import product

import pytest
import torch

from tl_posgen.editing.ablate_heads import ablate_heads
from tl_posgen.editing.draws import generator_at
from tl_posgen.errors import InputError
from tl_posgen.interventions import Interventions
from tl_posgen.models.session import session_of

TOKENS = torch.randint(2, 60, (2, 10), generator=torch.Generator().manual_seed(0))
REFERENCE = torch.randint(2, 60, (3, 12), generator=torch.Generator().manual_seed(1))


def outputs(model, tokens, layer, hooks=()):
    """z by head [prompt, pos, head, d] of one layer, under hooks that stand before."""
    kept = []
    watch = (f"blocks.{layer}.attn.hook_z", lambda z, hook: kept.append(z.detach().clone()))
    with torch.no_grad():
        model.run_with_hooks(tokens, fwd_hooks=[*hooks, watch])
    return kept[0].flatten(2).unflatten(-1, (model.cfg.n_heads, -1))


def test_zero_mean_and_drawn_outputs_stand_in_for_those_of_chosen_heads_alone(model):
    own, reference = outputs(model, TOKENS, 1), outputs(model, REFERENCE, 1)
    expected = {
        "zero": torch.zeros_like(own[0, 0, 0]).expand_as(own[:, :, 1]),
        "mean": reference[:, :, 1].mean((0, 1)).expand_as(own[:, :, 1]),
    }
    for how, wanted in expected.items():
        found = outputs(model, TOKENS, 1, ablate_heads(model, "1.1", how, reference=REFERENCE, length=12))
        torch.testing.assert_close(found[:, :, 1], wanted, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(found[:, :, 0], own[:, :, 0])
    drawn = outputs(model, TOKENS, 1, ablate_heads(model, [(1, 1)], "resample", reference=REFERENCE, length=12))
    for row in drawn[:, :, 1]:
        assert min(float((row - one[:10, 1]).abs().max()) for one in reference) < 1e-5


def test_a_prompt_draws_the_same_in_every_pass_and_prompts_differ(model):
    tokens = torch.randint(2, 60, (6, 10), generator=torch.Generator().manual_seed(3))
    hooks = ablate_heads(model, ["0.1", "1.1"], "resample", reference=REFERENCE, length=12, seed=1)
    together = outputs(model, tokens, 0, hooks)[:, 0, 1]
    model.run_with_hooks(tokens[:2], fwd_hooks=hooks, stop_at_layer=1)  # a pass that ends early
    apart = torch.cat([outputs(model, row[None], 0, hooks)[:, 0, 1] for row in tokens.flip(0)]).flip(0)
    torch.testing.assert_close(apart, together)
    assert len(together.unique(dim=0)) > 1
    other_seed = ablate_heads(model, ["0.1", "1.1"], "resample", reference=REFERENCE, length=12, seed=2)
    assert not torch.allclose(outputs(model, tokens, 0, other_seed)[:, 0, 1], together)


def test_heads_that_are_resampled_in_the_unchanged_model_cost_nothing(mini, alice):
    hooks = ablate_heads(mini, "1.1", "resample", length=32)
    result = Nothing()(mini, alice, length=32, n_prompts=4, fwd_hooks=hooks, nulls=0, progress=False)
    assert result.measure.rises(result.numbers)["nothing"].value == pytest.approx(0, abs=1e-6)


@dataclass(frozen=True)
class Nothing(Interventions):
    """rise = L - L, of a condition that changes nothing."""

    def conditions(self, run):
        return {"nothing": [("blocks.2.attn.hook_z", lambda z, hook: z)]}


def test_the_mean_is_over_all_prompts_of_more_than_one_batch(model):
    tokens = torch.randint(2, 60, (10, 12), generator=torch.Generator().manual_seed(2))  # more than run at once
    expected = torch.cat([outputs(model, row[None], 1) for row in tokens]).double().mean((0, 1))[2].float()
    found = outputs(model, TOKENS, 1, ablate_heads(model, "1.2", "mean", reference=tokens, length=12, n_prompts=10))
    torch.testing.assert_close(found[0, 0, 2], expected, atol=1e-6, rtol=1e-4)


def test_bad_ways_and_too_long_prompts_are_refused(model):
    with pytest.raises(InputError, match="how"):
        ablate_heads(model, "1.1", "negate")
    hooks = ablate_heads(model, "1.1", "resample", reference=REFERENCE[:, :6], length=6)
    with pytest.raises(InputError, match="give length="):
        model.run_with_hooks(TOKENS, fwd_hooks=hooks)
    with pytest.raises(InputError, match="KV cache"):  # a step would take what the reference wrote at its first token
        model.run_with_hooks(TOKENS[:, :1], fwd_hooks=hooks)


def test_a_pass_that_begins_behind_the_first_layer_does_not_draw_for_the_prompts_of_the_one_before(model):
    hooks = ablate_heads(model, ["0.1", "1.1"], "resample", reference=REFERENCE, length=12)
    other = TOKENS.flip(1)
    with torch.no_grad():
        before = model.run_with_hooks(TOKENS, fwd_hooks=hooks)
        if session_of(model).backend.name == "hooked":
            resid = model(other, stop_at_layer=1)
            with pytest.raises(InputError, match="begins behind the first layer"):
                model.run_with_hooks(resid, fwd_hooks=hooks, start_at_layer=1)
        else:
            embeddings = model.original_model.get_input_embeddings()(other)
            of_embeddings = model.run_with_hooks(None, inputs_embeds=embeddings, fwd_hooks=hooks)
            torch.testing.assert_close(of_embeddings, model.run_with_hooks(other, fwd_hooks=hooks))
        torch.testing.assert_close(model.run_with_hooks(TOKENS, fwd_hooks=hooks), before)


def test_a_model_generates_under_resampled_heads(model):
    hooks = ablate_heads(model, "1.1", "resample", reference=REFERENCE, length=12)
    options = {"use_past_kv_cache": False, "max_new_tokens": 2, "do_sample": False, "verbose": False}
    with torch.no_grad(), model.hooks(fwd_hooks=hooks):
        expected = TOKENS
        for _ in range(2):
            expected = torch.cat([expected, model(expected)[:, -1:].argmax(-1)], 1)
        assert model.generate(TOKENS, return_type="tokens", **options).tolist() == expected.tolist()


def test_every_seed_and_place_has_a_draw_of_its_own():
    drawn = [
        tuple(torch.rand(2, generator=generator_at(seed, prompt=prompt, layer=layer, side=side)).tolist())
        for seed, prompt, layer, side in product((0, 1, 2, 3, 1000, 2**31), range(3), range(4), range(2))
    ]
    assert len(set(drawn)) == len(drawn)

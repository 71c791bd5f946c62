"""What a source writes, removed in the running model."""

import pytest
import torch
from families import UNEVEN, family_cases
from source_vectors import source_vectors

from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.hooks import remove_source
from tl_posgen.models.layers.capture import scores_from
from tl_posgen.models.session import session_of
from tl_posgen.residual.reference import reference_of
from tl_posgen.rope.rotation import complex_planes, rotate
from tl_posgen.sources.hooks import turned

pytestmark = pytest.mark.longer

TOKENS = torch.randint(2, 60, (3, 14), generator=torch.manual_seed(0))
TEXT = torch.randint(2, 60, (2, 16), generator=torch.manual_seed(1))
MLP = ("L0 MLP", "L0 MLP bias")
HANDED_ON = ("gptj", "opt", "gpt_neo")  # scores are replaced in streamed passes alone


@pytest.fixture(scope="module")
def reference(mini):
    return reference_of(mini, length=32, n_prompts=2)


def seen_under(model, hooks, layer, head, tokens=TOKENS, what="attn_scores"):
    """Scores, or another matrix [prompt, query, key], of a head under hooks; zero where invisible."""
    with torch.no_grad(), model.hooks(fwd_hooks=hooks):
        _, cache = model.run_with_cache(tokens)
    return cache[f"blocks.{layer}.attn.hook_{what}"][:, head].tril()


def expected_pattern(model, row, layer, head, names, on, part, means):
    """Attention of one prompt by its captured queries and keys without what sources write."""
    side = on[0]
    capture, vectors = source_vectors(model, row, layer, side)
    live = sum(vectors[name] for name in names)
    constant = means.sources[side].of_names(names).sum(0)[:, None] / means.sources[side].n
    gone = {"constant": constant.expand_as(live), "all": live, "varying": live - constant}[part]
    q, k = capture.q.double(), capture.k.double()
    q, k = (q, k - gone) if on == "keys" else (q - gone, k)
    rotated = (rotate(x, capture.positions, capture.geometry.rope) for x in (q, k))
    return scores_from(*rotated, capture.geometry, capture.heads)[head].softmax(-1)


@pytest.mark.parametrize("on", ["keys", "queries"])
def test_without_any_source_scores_are_zero(mini, reference, on):
    names = reference.layers[1].sources[on[0]].names
    hooks = remove_source(mini, names, "all", on, [(1, 2)], reference=reference)
    plain = seen_under(mini, (), 1, 2)
    assert seen_under(mini, hooks, 1, 2).abs().max() < 1e-4 * plain.abs().max()
    torch.testing.assert_close(seen_under(mini, hooks, 1, 3), seen_under(mini, (), 1, 3))


@pytest.mark.parametrize(("name", "backend"), family_cases("qwen3", without=["llama4", *UNEVEN, *HANDED_ON]))
def test_each_part_is_missing_from_the_attention_of_every_prompt_of_a_batch(family_model, name, backend):
    model = family_model(name, backend)
    reference = reference_of(model, TEXT, length=16, layers=[1])
    means = reference.layers[1]
    for on in ("keys", "queries"):
        known = means.sources[on[0]].names
        names = [one for one in MLP if one in known]
        for part in ("constant", "varying", "all"):
            hooks = remove_source(model, names, part, on, [(1, 3)], reference=reference)
            found = seen_under(model, hooks, 1, 3, what="pattern")
            for row, pattern in zip(TOKENS, found, strict=True):
                expected = expected_pattern(model, row, 1, 3, names, on, part, means)
                torch.testing.assert_close(pattern.double(), expected.double(), atol=1e-4, rtol=1e-3)
        assert not torch.allclose(found, seen_under(model, (), 1, 3, what="pattern"), atol=1e-3)


def test_names_of_groups_stand_for_what_they_are_made_of(mini, reference):
    pairs = [
        ("L0 attention", [f"L0H{head}" for head in range(4)]),
        (["embed", "L0 attention"], ["embed", *(f"L0H{head}" for head in range(4))]),
    ]
    for one, several in pairs:
        asked = (remove_source(mini, names, heads=[(2, 1)], reference=reference) for names in (one, several))
        torch.testing.assert_close(*(seen_under(mini, hooks, 2, 1) for hooks in asked))


def test_the_control_is_as_large_and_leaves_what_does_not_rotate(family_model, mini, reference):
    geometry = session_of(family_model("neox")).layer(1).geometry
    constant = torch.randn(geometry.n_heads, geometry.d_head, dtype=torch.float64, generator=torch.manual_seed(0))
    other, again, another = (turned(geometry, constant, "keys", seed) for seed in (0, 0, 1))
    z, turns = (complex_planes(x, geometry.rope) for x in (constant, other))
    torch.testing.assert_close(z.abs(), turns.abs())
    n = len(geometry.rope.inv_freq)
    torch.testing.assert_close(z[:, n:], turns[:, n:])
    assert (z[:, :n] - turns[:, :n]).abs().min() > 1e-3
    torch.testing.assert_close(other, again)
    assert not torch.allclose(other, another)
    plain = seen_under(mini, (), 1, 0)
    for control in (False, True):
        hooks = remove_source(mini, "L0 MLP", heads=[(1, 0)], reference=reference, control=control)
        assert not torch.allclose(seen_under(mini, hooks, 1, 0), plain, atol=1e-2)


def test_query_heads_of_one_key_have_one_control(family_model):
    geometry = session_of(family_model("llama")).layer(1).geometry
    constant = torch.ones(geometry.n_heads, geometry.d_head, dtype=torch.float64)
    keys, queries = (turned(geometry, constant, on, 0) for on in ("keys", "queries"))
    torch.testing.assert_close(keys[0], keys[1])
    assert not torch.allclose(keys[0], keys[2])
    assert not torch.allclose(queries[0], queries[1])


def test_a_text_may_be_the_reference(mini):
    text = "Down, down, down. Would the fall never come to an end?"
    one, other = (
        remove_source(mini, "L0 MLP", heads="1.0", reference=given)
        for given in (text, reference_of(mini, text, layers=[1]))
    )
    torch.testing.assert_close(seen_under(mini, one, 1, 0), seen_under(mini, other, 1, 0))


def test_what_is_not_there_is_refused_with_what_is(mini, reference, family_model):
    for source, how, message in (
        ("L7 MLP", {"heads": [(2, 0)]}, "no source 'L7 MLP' before it; it has embed, L0H0"),
        ("L2 attention", {"heads": [(2, 0)]}, "no source 'L2 a"),
        ("L9H0", {}, r"layer 3: no source 'L9H0' before it; it has embed, .*L2 MLP"),
        ("L0 MLP", {"heads": [(0, 1), (1, 1)]}, "layer 0: no source 'L0 MLP' before it; it has embed"),
        (["L0 MLP", "L9 MLP"], {}, "no source 'L9 MLP'"),
        ([], {}, "give one at least"),
        ("embed", {"part": "all", "control": True}, "control=True with part='all'"),
        ("embed", {"reference": reference_of(mini, TEXT, length=16, sources=False)}, "sources=True"),
    ):
        with pytest.raises(InputError, match=message):
            remove_source(mini, source, **{"reference": reference, **how})
    gpt2 = family_model("gpt2")
    learned = reference_of(gpt2, TEXT, length=16)
    with pytest.raises(UnsupportedModelError, match="nothing rotates"):
        remove_source(gpt2, "embed", control=True, reference=learned)


def test_without_chosen_heads_each_layer_loses_those_of_the_sources_that_write_into_it(mini, reference):
    both = remove_source(mini, ["L0 MLP", "L2 MLP"], reference=reference)
    alone = remove_source(mini, "L0 MLP", heads=[(1, 0)], reference=reference)
    torch.testing.assert_close(seen_under(mini, both, 1, 0), seen_under(mini, alone, 1, 0))
    assert {name.split(".")[1] for name, _ in both} >= {"1", "2", "3"}


def test_keys_that_other_hooks_change_are_refused_where_they_have_to_be_traced(mini, reference):
    hooks = remove_source(mini, "L0 MLP", "all", heads=[(1, 0)], reference=reference)
    doubled = ("blocks.1.attn.hook_k", lambda k, hook: 2 * k)
    with pytest.raises(UnsupportedModelError, match="other hooks change them"):
        seen_under(mini, [doubled, *hooks], 1, 0)


def test_gradients_flow_through_a_removed_constant_and_are_refused_of_other_parts(mini, reference):
    embedded = []

    def keep(x, hook):
        embedded.append(x.detach().requires_grad_())
        return embedded[-1]

    for part in ("constant", "varying", "all"):
        hooks = remove_source(mini, "L0 MLP", part, heads="1.1", reference=reference)
        loss = mini.run_with_hooks(TOKENS[:1], return_type="loss", fwd_hooks=[("hook_embed", keep), *hooks])
        if part == "constant":
            loss.backward()
            assert float(embedded[-1].grad.abs().max()) > 0
        else:
            with pytest.raises(InputError, match=r'gradients of what a source writes .* take part="constant"'):
                loss.backward()


def test_of_padded_prompts_the_constant_alone_can_be_removed(mini, reference):
    mask = torch.ones_like(TOKENS)
    mask[1, 9:] = 0
    found = {}
    for part in ("constant", "all"):
        found[part] = remove_source(mini, "L0 MLP", part, heads=[(1, 0)], reference=reference)
    alone = seen_under(mini, found["constant"], 1, 0, TOKENS[1:2, :9])
    seen = []
    watch = ("blocks.1.attn.hook_attn_scores", lambda scores, hook: seen.append(scores[1, 0, :9, :9].tril()))
    with torch.no_grad(), mini.hooks(fwd_hooks=[*found["constant"], watch]):
        mini(TOKENS, attention_mask=mask)
    torch.testing.assert_close(seen[0], alone[0], atol=1e-4, rtol=1e-4)
    with pytest.raises(InputError, match="padded prompts"), mini.hooks(fwd_hooks=found["all"]):
        mini(TOKENS, attention_mask=mask)

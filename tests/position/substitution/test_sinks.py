"""True scores of attention sinks among replaced ones, against formulas pair by pair, in float64."""

import pytest
import torch
from captures import captures_of
from drawn import normal, token_ids, visible
from interventions import largest, logits, scores_under

from tl_posgen.editing.score_functions import RowByRow
from tl_posgen.errors import InputError
from tl_posgen.models.loss import token_losses
from tl_posgen.models.session import session_of
from tl_posgen.models.streaming.stream import streaming
from tl_posgen.models.tokens import prompts_of_one_length
from tl_posgen.position import Substitution
from tl_posgen.position.substitution.conditions import NO_VALUES, TRUE_AT
from tl_posgen.position.substitution.hooks import (
    attention_sinks,
    by_split,
    no_values_at,
    query_profile,
    substitute,
    true_at,
)
from tl_posgen.position.substitution.numbers import FAR, attention_from_afar, positional_profile, random_keys
from tl_posgen.rope.rotation import rotate

N = 40
TOKENS = token_ids(N, seed=1)
SOME = [("llama", "hooked"), ("llama_yarn", "bridge"), ("mistral", "bridge")]  # mistral has windows


def some_keys(n_layers):
    """The first key everywhere, and one in mid-text that is another in every layer."""
    keys = torch.zeros(n_layers, N, dtype=torch.bool)
    keys[:, 0] = keys[range(n_layers), torch.arange(n_layers) + 9] = True
    return keys


@pytest.mark.parametrize("window", [None, 30])
def test_attention_from_afar_is_a_mean_over_far_queries_that_see_the_key(window):
    sees = visible(N, window)
    pattern = normal(3, N, N).masked_fill(~sees, -torch.inf).softmax(-1)
    found = attention_from_afar(pattern, sees)
    for key in range(N):
        far = [i for i in range(key + FAR, N) if sees[i, key]]
        share = sum(float(pattern[head, i, key]) for head in range(3) for i in far) / 3 / max(len(far), FAR)
        assert float(found[key]) == pytest.approx(share, abs=1e-12)


def test_uniform_attention_has_no_sink_and_neither_have_keys_that_only_near_queries_see():
    n = 64
    uniform = visible(n) / visible(n).sum(-1, keepdim=True)
    previous = torch.eye(n)[[0, *range(n - 1)]]
    for pattern in (uniform, previous):
        assert attention_from_afar(pattern[None], visible(n)).max() < 0.1


def test_random_keys_are_other_keys_with_as_many_scores():
    sees, sinks = visible(N), some_keys(1)[0]
    for seed in range(4):
        drawn = random_keys(sinks, sees, seed)
        assert not (drawn & sinks).any()
        n = sees[:, drawn].sum()
        assert sees[:, sinks].sum() <= n < sees[:, sinks].sum() + N
        assert torch.equal(drawn, random_keys(sinks, sees, seed))
    assert not torch.equal(random_keys(sinks, sees, 0), random_keys(sinks, sees, 1))
    assert not random_keys(torch.zeros_like(sinks), sees).any()


@pytest.mark.parametrize(("name", "backend"), SOME)
def test_sinks_are_the_keys_above_the_share_in_the_unchanged_model(family_model, name, backend):
    model = family_model(name, backend)
    shares = torch.stack(
        [
            attention_from_afar(one.pattern, one.geometry.visible(N))
            for one in captures_of(model, TOKENS[None], frozenset({"pattern"}))
        ]
    )
    low, high = shares.flatten().sort().values[[60, 61]]
    share = float(low + high) / 2  # between two of 80
    found = attention_sinks(model, TOKENS, share)
    assert torch.equal(found, shares > share)
    assert found.any() or name == "mistral"  # whose window ends before far queries: all are 0
    assert not attention_sinks(model, TOKENS, 1).any()
    with streaming(session_of(model)):
        assert torch.equal(attention_sinks(model, TOKENS, share), found)


@pytest.mark.parametrize(("name", "backend"), SOME)
def test_scores_of_these_keys_are_true_and_all_others_those_of_the_stand_in(family_model, name, backend):
    model = family_model(name, backend)
    keys = some_keys(model.cfg.n_layers)
    hooks = substitute(model, true_at(by_split(query_profile), keys))
    for one in captures_of(model, TOKENS[None], frozenset({"attn_scores"}), hooks=hooks):
        geometry, at = one.geometry, torch.arange(N)
        q, k = vars(one)["q"].double(), vars(one)["k"].double()
        kbar = k.mean(1, keepdim=True)
        p = positional_profile(q, k, geometry.rope, geometry.scale)
        scores = geometry.scale * rotate(q, at, geometry.rope) @ rotate(k, at, geometry.rope).mT
        position = geometry.scale * rotate(q, at, geometry.rope) @ rotate(kbar.expand_as(k), at, geometry.rope).mT
        turned = [rotate(q, torch.full((N,), float(d)), geometry.rope) for d in p.distances.tolist()]
        here = rotate(k - kbar, torch.zeros(N), geometry.rope)
        content = sum(p.weights[..., [d]] * (x @ here.mT) for d, x in enumerate(turned)) * geometry.scale
        expected = torch.where(keys[one.layer], scores, position + content)
        seen = geometry.visible(N)
        torch.testing.assert_close(one.attn_scores[:, seen].double(), expected[:, seen], atol=1e-4, rtol=1e-4)
        assert largest((scores - position - content)[:, seen]) > 1e-2


@pytest.mark.parametrize(("name", "backend"), SOME)
def test_zero_values_take_what_these_keys_write_and_leave_their_attention(family_model, name, backend):
    model = family_model(name, backend)
    keys, z = some_keys(model.cfg.n_layers), []
    watch = [("blocks.0.attn.hook_z", lambda x, hook: z.append(x.clone()))]
    whole, changed = (
        captures_of(model, TOKENS[None], hooks=[*hooks, *watch])[0] for hooks in ([], no_values_at(model, keys))
    )
    torch.testing.assert_close(changed.pattern, whole.pattern)
    assert not changed.v[:, keys[0]].any()
    torch.testing.assert_close(changed.v[:, ~keys[0]], whole.v[:, ~keys[0]])
    written = torch.einsum("hqk,hkd->qhd", whole.pattern[..., keys[0]], whole.v[:, keys[0]])
    torch.testing.assert_close((z[0] - z[1]).reshape(written.shape), written, atol=1e-5, rtol=1e-4)
    assert largest(written) > 1e-3


@pytest.mark.parametrize(("name", "backend"), SOME)
def test_without_such_keys_nothing_differs_and_streamed_scores_are_the_same(family_model, name, backend):
    model, by = family_model(name, backend), by_split(query_profile)
    keys = some_keys(model.cfg.n_layers)
    none = logits(model, substitute(model, true_at(by, torch.zeros_like(keys))), TOKENS[None])
    assert torch.equal(none, logits(model, substitute(model, by), TOKENS[None]))
    hooks = substitute(model, true_at(by, keys)) + no_values_at(model, keys)
    plain = logits(model, hooks, TOKENS[None])
    assert largest(plain - none) > 1e-3
    with streaming(session_of(model)):
        torch.testing.assert_close(logits(model, hooks, TOKENS[None]), plain, atol=1e-4, rtol=1e-4)


def test_positions_are_keys_of_all_layers_and_all_of_them_are_the_model(llama):
    first = torch.arange(N).expand(2, N) == 0
    by = by_split(query_profile)
    same = [scores_under(llama, substitute(llama, true_at(by, keys))) for keys in ([0], first)]
    for one, other in zip(*same, strict=True):
        assert torch.equal(one.attn_scores, other.attn_scores)
    every = logits(llama, substitute(llama, true_at(by, range(N))), TOKENS[None])
    torch.testing.assert_close(every, llama(TOKENS[None]).detach(), atol=1e-4, rtol=1e-4)
    assert isinstance(true_at(RowByRow(lambda capture: capture.scores()), [0]), RowByRow)


@pytest.mark.parametrize("keys", [[], [-1], [0, -1], [False, True]])
def test_what_are_no_keys_is_refused(llama, keys):
    for make in (lambda: true_at(by_split(query_profile), keys), lambda: no_values_at(llama, keys)):
        with pytest.raises(InputError, match="give positions such as"):
            make()


def test_steps_with_a_cache_and_masks_of_fewer_layers_are_refused(llama):
    mask = torch.zeros(1, N, dtype=torch.bool)
    for hooks in (no_values_at(llama, mask), substitute(llama, true_at(by_split(query_profile), mask))):
        with pytest.raises(InputError, match="a mask of 1 layers has no layer 1"):
            logits(llama, hooks, TOKENS[None])
    with (
        llama.hooks(fwd_hooks=no_values_at(llama, [0])),
        pytest.raises(InputError, match=r"KV cache.*use_past_kv_cache=False"),
    ):
        llama.generate(TOKENS[None], max_new_tokens=3, use_past_kv_cache=True, stop_at_eos=False, verbose=False)


@pytest.mark.parametrize("tokens", [TOKENS.float(), TOKENS[:0], TOKENS[None], TOKENS + 10**6])
def test_what_is_no_prompt_has_no_sinks(llama, unchecked, tokens):
    with pytest.raises(InputError, match=r"no prompt|outside the vocabulary"):
        attention_sinks(llama, tokens)


@pytest.fixture(scope="module")
def measured(mini, alice):
    options = {"widths": (4,), "dummy_distances": (), "near_widths": (), "mean_query_distances": ()}
    cut = {"length": 40, "n_prompts": 2, "nulls": 0, "progress": False}
    return {share: Substitution(**options, sink_share=share)(mini, alice, **cut) for share in (0.1, 1)}


@pytest.mark.slow
def test_losses_at_sinks_are_those_of_hooks_made_for_each_prompt(mini, alice, measured):
    by, own = by_split(query_profile), measured[0.1].trained
    for prompt, tokens in enumerate(prompts_of_one_length(mini, alice, 40, 2)):
        sinks = attention_sinks(mini, tokens, 0.1)
        assert sinks[:, 0].all()
        true, no_values = substitute(mini, true_at(by, sinks)), no_values_at(mini, sinks)
        made = {"query_profile, true at sinks": true, "unchanged, sinks without value": no_values}
        made |= {"query_profile, true at sinks without value": true + no_values}
        made |= {"query_profile, sinks without value": substitute(mini, by) + no_values}
        for condition, hooks in made.items():
            loss = float(own["loss"].sel(condition=condition)[prompt])
            assert loss == pytest.approx(float(token_losses(mini, tokens[None], hooks).mean()), rel=1e-5), condition
    assert own["loss"].sel(condition="query_profile, true at random keys").notnull().all()
    assert own["first_is_sink"].values.tolist() == [1.0] * 4
    assert (own["sink_attention"] > 0).all()


@pytest.mark.slow
def test_without_sinks_conditions_of_sinks_are_those_that_they_vary(measured):
    own, plain = measured[1].trained["loss"], {condition: name for condition, (name, _) in TRUE_AT.items()}
    for condition, name in (plain | NO_VALUES).items():
        assert (own.sel(condition=condition) == own.sel(condition=name)).all(), condition
    assert "there is no attention sink" in measured[1].findings()[-1]
    assert "of the first token in 4 of 4 layers" in measured[0.1].findings()[-1]

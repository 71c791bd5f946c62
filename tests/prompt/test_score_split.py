"""Splits of one prompt: they add up to the model's own scores, in every family, and say where their means come from."""

import numpy as np
import pytest
import torch
from captures import run
from families import family_cases

import tl_posgen
from tl_posgen.errors import InputError
from tl_posgen.position.substitution.numbers import split_maps
from tl_posgen.prompt import position_part, reference_of
from tl_posgen.residual.reference import BUNDLED

TEXT = "it was the best of times, it was the worst of times. it was the age of wisdom."
PROMPT = "Down, down, down. Would the fall never end?"
OTHERS = {"row", "alibi"}  # parts besides the four


@pytest.mark.parametrize(("name", "backend"), family_cases("llama", "gemma2"))
@pytest.mark.parametrize("layer", [0, 1])
def test_parts_add_up_to_the_models_own_scores(family_model, name, backend, layer):
    model, tokens = family_model(name, backend), torch.randint(2, 60, (14,), generator=torch.manual_seed(0))
    parts = tl_posgen.split(model, tokens, layer=layer, reference=TEXT)
    total = parts.position + parts.key_part + parts.query_key + parts.interaction
    total = total + sum(parts[one] for one in OTHERS & set(parts))
    used = run(model, tokens[None], {"attn_scores"}, layers=[layer])[0].attn_scores.numpy()
    visible = np.isfinite(used)
    assert (np.isfinite(total.values) == visible).all()
    if "capped" in parts:
        assert "before the soft cap" in parts.attrs["note"]
        cap = model.cfg.attn_scores_soft_cap if backend == "hooked" else 50.0
        assert abs(cap * np.tanh(total.values / cap) - used)[visible].max() < 1e-4
        np.testing.assert_allclose(parts.capped.values[visible], used[visible])
    else:
        assert abs(total.values - used)[visible].max() < 1e-4
        np.testing.assert_allclose(parts.score.values[visible], used[visible])
    np.testing.assert_allclose(parts.content, parts.key_part + parts.query_key)
    assert parts.attrs["largest_difference"] < 1e-4


@pytest.mark.parametrize("name", ["gpt2", "bloom"])
def test_where_nothing_rotates_position_is_zero_and_what_remains_is_named(family_model, name):
    parts = tl_posgen.split(family_model(name), list(range(2, 12)), layer=0, reference=TEXT)
    assert "nothing rotates" in parts.attrs["note"]
    assert float(abs(parts.position).max()) == float(abs(parts.interaction).max()) == 0
    assert float((parts.row.max("key") - parts.row.min("key")).max()) < 1e-10  # one number a row
    if name == "bloom":
        assert float(parts.alibi.max()) == 0 > float(parts.alibi.min())


def test_parts_of_the_whole_text_are_those_of_the_split_maps(mini, alice):
    """With the prompt's own means asked for as a reference, position and content are those of `split_examples`."""
    tokens = tl_posgen.models.to_prompts(mini, alice, 48, 1)[0]
    parts = tl_posgen.split(mini, tokens, layer=2, reference=reference_of(mini, tokens[None], layers=[2], length=48))
    found = run(mini, tokens[None], {"attn_scores"}, layers=[2])
    capture = found[0]
    maps = split_maps(capture.scores(), capture.q, capture.k, capture.geometry.rope, capture.geometry.scale)
    counted = np.isfinite(maps.position[0].numpy())
    for name in ("position", "content"):
        own = parts[name].values
        means = np.where(counted, own, 0).sum(-1, keepdims=True) / counted.sum(-1, keepdims=True).clip(1)
        np.testing.assert_allclose((own - means)[:, counted], getattr(maps, name).numpy()[:, counted], atol=1e-9)


def test_the_reference_is_named_and_is_never_the_prompt(mini):
    usual, other = (tl_posgen.split(mini, PROMPT, heads="3.1", reference=one) for one in (None, TEXT))
    assert BUNDLED in usual.attrs["reference"]
    assert TEXT[:20] in other.attrs["reference"]
    assert "first token left out" in other.attrs["reference"]
    assert float(abs(usual.position - other.position).max()) > 0.1
    again = tl_posgen.split(
        mini, PROMPT, layer=3, heads="L3H1", reference=reference_of(mini, layers=[3], sources=False)
    )
    np.testing.assert_array_equal(usual.position, again.position)


def test_a_reference_is_the_mean_of_its_prompts_without_the_first_token(mini, alice):
    prompts, found = tl_posgen.models.to_prompts(mini, alice, 40, 3), []
    for prompt in prompts:
        found += run(mini, prompt[None], {"pattern"}, layers=[1])
    reference = reference_of(mini, [prompt.tolist() for prompt in prompts], length=40, distances="attention")
    own = reference.layers[1]
    keys, queries = (torch.cat([getattr(one, part)[:, 1:] for one in found], 1).double() for part in ("k", "q"))
    torch.testing.assert_close(own.mean_key, keys.mean(1))
    torch.testing.assert_close(own.mean_query, queries.mean(1))
    theta, expected = found[0].geometry.rope.inv_freq, 0
    for one in found:
        pattern = one.pattern[:, 1:, 1:].double()
        away = torch.arange(39)[:, None] - torch.arange(39)
        expected = expected + torch.einsum("hij,ijm->hm", pattern + 0j, torch.exp(1j * theta * away[..., None]))
    weights = sum(one.pattern[:, 1:, 1:].double().sum((1, 2)) for one in found)
    torch.testing.assert_close(own.mean_turn, expected / weights[:, None])
    assert (reference.n_prompts, reference.length) == (3, 40)


@pytest.mark.parametrize("name", ["mini", "mini_bridge"])
def test_a_cache_gives_the_position_part_of_one_head(request, name):
    model = request.getfixturevalue(name)
    reference = reference_of(model, length=48, n_prompts=2)
    tokens = torch.arange(5, 29)[None]
    _, cache = model.run_with_cache(tokens)
    found = position_part(cache, 3, 1, model=model, reference=reference)
    expected = tl_posgen.split(model, tokens, layer=3, heads="L3H1", reference=reference)
    np.testing.assert_allclose(found, expected.position[0], atol=1e-5)
    named = position_part(cache, head="L3H1", model=model, reference=reference, tokens=tokens)
    np.testing.assert_array_equal(found, named)
    assert found.attrs["reference"] == reference.label


def test_half_precision_adds_up_within_its_rounding():
    model = tl_posgen.load_model("mini", dtype="bfloat16")
    parts = tl_posgen.split(model, PROMPT, heads="3.1", reference=TEXT)
    total = parts.position + parts.content + parts.interaction
    off = float(abs(total - parts.score).max())
    assert 1e-4 < off < 0.2
    assert off == pytest.approx(parts.attrs["largest_difference"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"layers \[0, 1, 2, 3\]: one layer is split; give layer=, or a head by name"),
        ({"heads": ["3.1", "2.1"]}, r"layers \[2, 3\]: one layer is split"),
        ({"layer": 9}, "layer 9 does not exist"),
        (
            {"layer": 0, "prompt": ["one text", "another text"]},
            "2 prompts: give one text, .*; docs/how_to/one_prompt.md averages",
        ),
        ({"layer": 0, "reference": 3}, r"reference=int: give a text, what reference_of\(model, text\) returned"),
        ({"layer": 0, "reference": ""}, "a text is empty"),
    ],
)
def test_what_cannot_be_split_is_refused(mini, unchecked, options, message):
    with pytest.raises(InputError, match=message):
        tl_posgen.split(mini, **{"prompt": PROMPT, **options})


def test_a_reference_of_other_layers_or_models_is_refused(mini, small_model):
    reference = reference_of(mini, layers=[1], n_prompts=1)
    with pytest.raises(InputError, match=r"the reference has no layer 0, only \[1\]"):
        tl_posgen.split(mini, PROMPT, layer=0, reference=reference)
    with pytest.raises(InputError, match="read by another model, mini, or before the weights of this one"):
        tl_posgen.split(small_model, PROMPT, layer=1, reference=reference)
    with pytest.raises(InputError, match="choose from uniform, causal, attention"):
        reference_of(mini, distances="near")

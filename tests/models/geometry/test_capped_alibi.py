"""ALiBi with a soft cap, in TransformerLens' order: cap(scale <q, k>) - slope d, against loops over pairs."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from captures import collected, run
from families import VOCAB
from interventions import ROW_BY_ROW, TOKENS, N, largest, logits, scores_under

import tl_posgen
from tl_posgen.core.engine import analyze
from tl_posgen.hooks import at_dummy_distance, patch_parts
from tl_posgen.models.conversion.convert import hooked_parts
from tl_posgen.models.layer_table import geometry_of
from tl_posgen.models.layers.capture import StreamedCapture
from tl_posgen.models.streaming.stream import streaming
from tl_posgen.position.decomposition import Residual
from tl_posgen.prompt import reference_of

CAP = 2.0


@pytest.fixture(scope="module")
def model(has_hooked):
    """Two layers of four heads, whose products reach ten times the cap."""
    if not has_hooked:
        pytest.skip("TransformerLens 4 has no HookedTransformer")
    HookedTransformer, HookedTransformerConfig, _ = hooked_parts()
    sizes = {"n_layers": 2, "d_model": 32, "n_ctx": 64, "d_head": 8, "n_heads": 4, "d_vocab": VOCAB, "act_fn": "gelu"}
    cap = {"positional_embedding_type": "alibi", "attn_scores_soft_cap": CAP}
    made = HookedTransformer(HookedTransformerConfig(**sizes, **cap, device="cpu", seed=0)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 2 / weight.shape[-1] ** 0.5)
    return made


def scores_by_loops(model, capture, distance=lambda d: d):
    """CAP tanh(<q_i, k_j> / (sqrt(d_head) CAP)) - slope d, slope = 2^(-2 (head + 1)), pair by pair."""
    q, k = capture.q.double(), capture.k.double()
    found = torch.full((*q.shape[:2], k.shape[1]), -torch.inf, dtype=torch.float64)
    for head in range(len(q)):
        for i in range(q.shape[1]):
            for j in range(i + 1):
                product = float(q[head, i] @ k[head, j]) / 8**0.5
                found[head, i, j] = CAP * np.tanh(product / CAP) - 2.0 ** (-2 * (head + 1)) * distance(i - j)
    return found


def assert_scores(found, expected):
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_the_pass_and_the_capture_have_the_scores_of_the_formula(model):
    assert [(one.soft_cap, one.encoding, one.bilinear) for one in geometry_of(model)] == [(CAP, "alibi", False)] * 2
    assert max(one.error for one in geometry_of(model)) < 1e-5
    names = [f"blocks.{layer}.attn.hook_attn_scores" for layer in (0, 1)]
    with torch.no_grad():
        _, own = model.run_with_cache(TOKENS[:1], names_filter=names)
    for capture, name in zip(run(model, TOKENS[:1], {"attn_scores"}), names, strict=True):
        expected = scores_by_loops(model, capture)
        assert_scores(own[name][0].softmax(-1), expected.softmax(-1))  # whose rows may have constants
        assert_scores(capture.scores(), expected)
        assert_scores(capture.attn_scores, expected)
        products = capture.geometry.scale * capture.q @ capture.k.mT
        assert largest(products) > 3 * CAP  # so that the order shows


def test_streamed_scores_are_those_of_the_formula(model):
    plain = logits(model)
    with streaming(model):
        found, captures = logits(model), run(model, TOKENS[:1])
    torch.testing.assert_close(found, plain, atol=1e-4, rtol=1e-4)
    for capture in captures:
        assert isinstance(capture, StreamedCapture)
        assert_scores(capture.scores(), scores_by_loops(model, capture))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("hooks", "distance"),
    [
        (lambda m: at_dummy_distance(m, lambda d: d), lambda d: d),
        (lambda m: at_dummy_distance(m, 3), lambda d: 3),
        (lambda m: at_dummy_distance(m, beyond=8), lambda d: min(d, 8)),
        (lambda m: at_dummy_distance(m, 30, beyond=8), lambda d: 30 if d > 8 else d),
    ],
)
def test_edited_scores_are_those_of_the_formula_at_other_distances(model, hooks, distance, stream):
    (plain,) = run(model, TOKENS[:1], layers=[0])
    expected = scores_by_loops(model, plain, distance)
    if not stream:
        (capture,) = scores_under(model, hooks(model), [0])
        assert_scores(capture.attn_scores.softmax(-1), expected.softmax(-1))
        return
    unstreamed = logits(model, hooks(model))
    with streaming(model):
        torch.testing.assert_close(logits(model, hooks(model)), unstreamed, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["a function of one's own", "lm_infinite", "some of the residual"])
def test_edits_are_the_same_row_by_row(model, name):
    hooks = ROW_BY_ROW[name](model)
    with torch.no_grad():
        whole = model.run_with_hooks(TOKENS, fwd_hooks=hooks)
    with streaming(model):
        torch.testing.assert_close(logits(model, ROW_BY_ROW[name](model)), whole, atol=1e-4, rtol=1e-4)


def test_the_split_is_of_products_and_the_slope_is_added_behind_the_cap(model):
    reference = reference_of(model, torch.arange(2, 2 + N)[None], length=N)
    parts = tl_posgen.split(model, TOKENS[0], layer=0, reference=reference)
    (capture,) = run(model, TOKENS[:1], {"attn_scores"}, layers=[0])
    used, seen = capture.attn_scores.double().numpy(), capture.geometry.visible(N).numpy()
    products = parts.row + parts.content
    np.testing.assert_allclose((CAP * np.tanh(products / CAP) + parts.alibi).values[:, seen], used[:, seen], atol=1e-5)
    np.testing.assert_allclose(parts.capped.values[:, seen], used[:, seen], atol=1e-6)
    np.testing.assert_allclose((products + parts.alibi).values[:, seen], parts.score.values[:, seen], atol=1e-5)
    assert "before the soft cap" in parts.note
    found = tl_posgen.explain(model, TOKENS[0], 0, 1, against=-2, reference=reference)
    np.testing.assert_allclose(found.trained["attention"], capture.attn_scores[1, -1].softmax(-1), atol=1e-6)
    assert found.trained.attrs["largest_difference"] < 1e-5


def test_with_all_parts_of_another_prompt_a_head_attends_as_it_does_there(model):
    reference = reference_of(model, torch.arange(2, 2 + N)[None], length=N, sources=False)
    parts = ("position", "content", "interaction")
    hooks = patch_parts(model, TOKENS[1], parts, heads=[(0, 1)], reference=reference)
    (patched,), (other,) = scores_under(model, hooks, [0]), run(model, TOKENS[1:], {"attn_scores"}, layers=[0])
    torch.testing.assert_close(patched.attn_scores[1].softmax(-1), other.attn_scores[1].softmax(-1), atol=1e-5, rtol=0)


def test_three_axes_fit_the_slope_exactly_under_a_cap_too_as_their_caveat_says(model):
    (one,) = run(model, TOKENS[:1], layers=[1])
    flat = replace(one, geometry=replace(one.geometry, alibi_slopes=None))
    with_slope, without = (collected(Residual(), capture).sel(tokens="all") for capture in (one, flat))
    np.testing.assert_allclose(with_slope["std"], without["std"], atol=1e-5)
    report = analyze(model, TOKENS, measures=["three_axis"], nulls=0, progress=False)
    assert "three axes fit a straight line exactly" in report["three_axis"].caveat

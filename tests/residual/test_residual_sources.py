"""What earlier layers wrote adds up to the residual stream, and what is removed there is missing in the pass."""

import pytest
import torch
from captures import run
from families import UNEVEN, family_cases

from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models import session_of
from tl_posgen.residual.residual_sources import SourceVectors, read_prompts, residual_sources

TOKENS = torch.randint(2, 60, (14,), generator=torch.manual_seed(0))
LEARNED = {"gpt2", "opt", "gpt_neo"}
BIASED = {"neox", "gptj", "phi", "gpt2", "bloom", "opt", "gpt_neo"}  # MLPs


@pytest.mark.parametrize(("name", "backend"), family_cases("neox", "qwen3", "gemma3", "olmo2", "gpt2", without=UNEVEN))
def test_sources_add_up_to_the_residual_stream_and_to_queries_and_keys(family_model, name, backend):
    model = family_model(name, backend)
    found = residual_sources(model, TOKENS, layer=1)
    reach = found.values.abs().max()
    torch.testing.assert_close(found.values.sum(0), found.residual, rtol=0, atol=2e-6 * float(reach))
    expected = ["embed", *(["pos_embed"] if name in LEARNED else []), *(f"L0H{head}" for head in range(4))]
    assert list(found.names[: len(expected)]) == expected
    assert ("L0 MLP bias" in found.names) == (name in BIASED)
    session, (capture,) = session_of(model), run(model, TOKENS[None], {"resid", "inputs"}, layers=[1])
    for side in ("q", "k"):
        of_side = SourceVectors.of_capture(session, capture, found, side)
        vectors, sums = of_side.vectors(), of_side.sums()
        assert len(of_side.names) == len(vectors) == len(set(of_side.names))
        torch.testing.assert_close(vectors.sum(0), of_side.whole, rtol=0, atol=3e-6 * float(vectors.abs().max()))
        torch.testing.assert_close(sums.means, vectors[:, :, 1:].mean(2), rtol=1e-9, atol=1e-12)


def test_a_model_without_mlps_has_none_among_its_sources(backend):
    if backend != "hooked":
        pytest.skip("built as a HookedTransformer only")
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    config = {"n_layers": 2, "d_model": 16, "n_ctx": 32, "d_head": 8, "n_heads": 2, "d_vocab": 60, "attn_only": True}
    found = residual_sources(HookedTransformer(HookedTransformerConfig(**config)), TOKENS, layer=1)
    assert found.names == ("embed", "pos_embed", "L0H0", "L0H1")
    torch.testing.assert_close(found.values.sum(0), found.residual.double(), atol=1e-5, rtol=0)


def test_a_source_is_what_is_missing_where_it_is_removed(family_model, backend):
    model = family_model("llama", backend)
    found = residual_sources(model, TOKENS, layer=1)

    def remove(z, hook):
        flat = z.flatten(2).clone()
        flat[..., 8:16] = 0  # head 1 of four, 8 numbers each
        return flat.view(z.shape)

    with model.hooks(fwd_hooks=[("blocks.0.attn.hook_z", remove)]):
        without = residual_sources(model, TOKENS, layer=1)
    assert "L0H1" not in without.names  # what is zero throughout is left out
    for name in ("embed", "L0H0", "L0H2", "L0H3"):
        torch.testing.assert_close(without.values[without.names.index(name)], found.values[found.names.index(name)])
    gone, mlp = found.values[found.names.index("L0H1")], found.names.index("L0 MLP")
    change = without.residual.double() - found.residual - (without.values[-1] - found.values[mlp])
    torch.testing.assert_close(change, -gone, rtol=0, atol=1e-5)


def test_a_layers_heads_are_one_source_where_that_is_asked_for(mini):
    found = {}
    for by in ("head", "layer"):
        ((capture, reader),) = read_prompts(session_of(mini), [TOKENS], by, {"resid"}, layers=[2])
        found[by] = reader.of_capture(capture)
    assert found["layer"].names == ("embed", "L0 attention", "L0 MLP", "L1 attention", "L1 MLP")
    fine = found["head"]
    heads = [value for name, value in zip(fine.names, fine.values, strict=True) if name.startswith("L1H")]
    torch.testing.assert_close(sum(heads), found["layer"].values[3], rtol=0, atol=2e-6)  # which the pass rounded


def test_at_layer_zero_there_is_the_embedding_alone(mini):
    found = residual_sources(mini, torch.arange(9), layer=0)
    assert found.names == ("embed",)
    torch.testing.assert_close(found.values[0], found.residual)


def test_a_stream_that_is_no_sum_is_refused_with_the_remedy(mini):
    def double_it(x, hook):
        return 2 * x

    hooks = [("blocks.1.hook_resid_pre", double_it)]
    with (
        mini.hooks(fwd_hooks=hooks),
        pytest.raises(UnsupportedModelError, match=r"off by .*; explain takes parts of your own"),
    ):
        residual_sources(mini, torch.arange(9), layer=1)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("tokens", "layer", "message"),
    [
        (torch.ones(2, 9, dtype=int), 1, r"tokens of shape \(2, 9\): give the token ids of one prompt"),
        ("Down, down", 1, "tokens of str"),
        (torch.tensor(3), 1, r"tokens of shape \(\)"),
        (torch.empty(0, dtype=int), 1, r"tokens of shape \(0,\)"),
        (torch.arange(9), 4, "layer 4"),
        (torch.arange(9), [0, 1], "give one layer"),
        (torch.arange(9), None, "give one layer"),
        (torch.arange(9), float("nan"), "nan"),
    ],
)
def test_tokens_of_several_prompts_and_layers_that_are_none_are_refused(mini, tokens, layer, message):
    with pytest.raises(InputError, match=message):
        residual_sources(mini, tokens, layer)

"""Hooks that take biases of queries and keys off, against models that have none."""

import shutil

import pytest
import torch
from interventions import logits
from safetensors.torch import load_file, save_file

import tl_posgen
from tl_posgen.editing.ablate_heads import ablate_heads
from tl_posgen.editing.without_biases import without_biases
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.hooks import lm_infinite

TOKENS = torch.randint(2, 60, (2, 24), generator=torch.Generator().manual_seed(0))


def zeroed(name: str, bias: torch.Tensor, sides: str) -> torch.Tensor:
    """A parameter of a family's file with the biases of these sides at zero."""
    bias = bias.clone()
    if name.endswith(("q_proj.bias", "k_proj.bias")) and name[-len("q_proj.bias")] in sides:
        bias.zero_()
    elif name.endswith("query_key_value.bias"):  # [head, (q, k, v), d_head]
        for side in sides:
            bias.view(4, 3, -1)[:, "qk".index(side)] = 0
    elif name.endswith("c_attn.bias"):
        for side in sides:
            bias.view(3, -1)["qk".index(side)] = 0
    return bias


@pytest.fixture
def without(family_directory, tmp_path):
    """(family, backend, sides) -> that model with these biases at zero in its file."""

    def load(family, backend, sides="qk"):
        place = shutil.copytree(family_directory(family), tmp_path / f"{family} {backend} {sides}")
        weights = load_file(place / "model.safetensors")
        made = {name: zeroed(name, one, sides) for name, one in weights.items()}
        save_file(made, place / "model.safetensors", metadata={"format": "pt"})
        return tl_posgen.load_model(place, backend=backend)

    return load


slow = pytest.mark.slow
FAMILIES = ["qwen2", *(pytest.param(one, marks=slow) for one in ("neox", "gpt2", "bloom", "opt", "phi", "glm"))]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_model_whose_biases_are_zero(family_model, without, family, backend):
    if backend == "hooked" and family in ("phi", "glm"):
        pytest.skip(f"TransformerLens converts no {family}")
    model = family_model(family, backend)
    expected = logits(without(family, backend), (), TOKENS)
    torch.testing.assert_close(logits(model, without_biases(model), TOKENS), expected, rtol=1e-4, atol=1e-4)
    assert (logits(model, (), TOKENS) - expected).abs().max() > 0.1


def test_one_side_and_one_layer_alone(family_model, without, backend):
    model = family_model("qwen2", backend)
    keys = logits(without("qwen2", backend, "k"), (), TOKENS)
    torch.testing.assert_close(logits(model, without_biases(model, "k"), TOKENS), keys, rtol=1e-4, atol=1e-4)
    names = [name for name, _ in without_biases(model, layers=[1])]
    assert sorted(names) == ["blocks.1.attn.hook_k", "blocks.1.attn.hook_q"]


def test_they_compose_with_other_hooks_and_with_generation(family_model, without, backend):
    model, bare = family_model("qwen2", backend), without("qwen2", backend)
    for more in (lambda m: ablate_heads(m, "1.1"), lambda m: lm_infinite(m, 8, 2)):
        found = logits(model, [*without_biases(model), *more(model)], TOKENS)
        torch.testing.assert_close(found, logits(bare, more(bare), TOKENS), rtol=1e-4, atol=1e-4)
    with torch.no_grad(), tl_posgen.streaming(model):
        streamed = model.run_with_hooks(TOKENS, fwd_hooks=without_biases(model))
    torch.testing.assert_close(streamed, logits(bare, (), TOKENS), rtol=1e-4, atol=1e-4)
    how = {"max_new_tokens": 6, "do_sample": False, "verbose": False, "stop_at_eos": False}
    with model.hooks(fwd_hooks=without_biases(model)):
        written = model.generate(TOKENS[:1, :9], **how)
    assert torch.equal(written, bare.generate(TOKENS[:1, :9], **how))


def test_what_has_no_biases_and_other_sides_are_refused(family_model, backend):
    with pytest.raises(UnsupportedModelError, match="no layer of this model has biases"):
        without_biases(family_model("llama", backend))
    with pytest.raises(InputError, match='give "q", "k", or both'):
        without_biases(family_model("qwen2", backend), of=["v"])

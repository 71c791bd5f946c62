"""Shares of sources on real models: against brute force over every query, key and distance, and beside `variance`."""

import numpy as np
import pytest
import torch
from families import UNEVEN, family_cases
from source_vectors import part_of, source_vectors

import tl_posgen
from tl_posgen.core.engine import analyze
from tl_posgen.errors import UnsupportedModelError
from tl_posgen.rope.planes import turning_factors
from tl_posgen.rope.rotation import complex_planes
from tl_posgen.sources import Sources
from tl_posgen.sources.numbers import TERMS

pytestmark = pytest.mark.longer

TOKENS = torch.randint(2, 60, (2, 9), generator=torch.manual_seed(0))
QUIET = {"nulls": 0, "progress": False}
EVERY = {"terms": tuple(TERMS), "sides": ("k", "q")}
PARTS = {"position": ("d", "qd"), "content": ("k", "qk"), "interaction": ("kd", "qkd"), "key": ("k",)}


def vectors_of(model, layer):
    """What every source adds to queries and keys of both prompts, by side: names, [source, head, token, plane]."""
    captures, *both = zip(*(source_vectors(model, row, layer, "q", "k") for row in TOKENS), strict=True)
    geometry, sides = captures[0].geometry, {}
    for side, prompts in zip("qk", both, strict=True):
        vectors = torch.cat([torch.stack([*one.values()])[:, :, 1:] for one in prompts], 2)
        sides[side] = tuple(prompts[0]), complex_planes(vectors, geometry.rope)
    return sides, geometry


def brute_shares(sides, geometry, side, term):
    """E[w_s w] / E w^2 over every query, key and distance, first tokens left out."""
    n = min(TOKENS.shape[1], geometry.window or TOKENS.shape[1])
    u = part_of(turning_factors(torch.arange(n), geometry.rope, geometry.d_head), term["d"], 0)
    q, k = (part_of(sides[one][1], term[one], 2) for one in "qk")
    q, k = (q, k.sum(0, keepdim=True)) if side == "q" else (q.sum(0, keepdim=True), k)
    scores = torch.einsum("ahim,bhjm,dm->abhijd", q, k.conj(), u).real.flatten(0, 1)
    products = (scores * scores.sum(0)).sum((2, 3, 4))
    return products / products.sum(0)


@pytest.mark.parametrize(("name", "backend"), family_cases("neox", "gemma3", without=UNEVEN))
def test_shares_are_those_of_every_query_key_and_distance(family_model, name, backend):
    model = family_model(name, backend)
    result = Sources(**EVERY, by="head")(model, TOKENS, **QUIET)
    sides, geometry = vectors_of(model, 1)
    data = result.sel(tokens="without first", layer=1)
    for side, (names, _) in sides.items():
        for term, kind in TERMS.items():
            found = data["share"].sel(side=side, term=term)
            if kind["d"] == "rest" and not geometry.rope.rotary_dim:
                assert found.isnull().all()
                continue
            expected = brute_shares(sides, geometry, side, kind)
            reach = float(expected.abs().max())
            np.testing.assert_allclose(found.sel(source=list(names)).T, expected, atol=2e-4 * reach, err_msg=term)
            others = [one for one in data["source"].values if one not in names]
            assert found.sel(source=others).isnull().all()


def test_every_term_is_its_part_of_the_variance_and_sums_to_one_in_every_group(mini, alice):
    cut = {"length": 24, "n_prompts": 4, "consecutive": True, "layers": [1], **QUIET}
    found = analyze(mini, alice, measures=[Sources(**EVERY), "variance"], **cut)
    for tokens in ("all", "without first"):
        one, data = (found[name].sel(tokens=tokens) for name in ("variance", "sources"))
        # of all scores: that between keys and distances of one query is `size` squared, and leaves q's out
        variance = one["size"].sel(of="scores") ** 2 / (1 - one["share"].sel(part="q"))
        for term, parts in PARTS.items():
            expected = one["share"].sel(part=list(parts)).sum("part") * variance
            for side in ("k", "q"):
                np.testing.assert_allclose(data["mean_square"].sel(term=term, side=side), expected, rtol=1e-4)
    share = found["sources"].dataset["share"]
    np.testing.assert_allclose(share.sum("source"), 1, atol=1e-9)
    assert share.sizes["group"] == 5


def test_sums_of_absolute_shares_and_the_largest_stand_beside_them(mini, alice):
    result = Sources()(mini, alice, length=64, n_prompts=4, **QUIET)
    data = result.trained
    expected = abs(data["share"].sel(tokens="without first")).sum("source").mean()
    assert result.measure.absolute(result.numbers).value == pytest.approx(float(expected))
    np.testing.assert_allclose(data["top_share"], data["share"].max("source"))
    assert (data["top_source"].sel(layer=0) == "embed").all()
    layer = result.sel(tokens="without first", layer=2, head=1, side="k", term="position")
    assert str(layer["top_source"].values) == str(layer["share"].idxmax("source").values) == "L0 MLP"


def test_heads_of_a_layer_add_up_to_it(mini, alice):
    cut = {"length": 24, "n_prompts": 1, "layers": [2], "consecutive": True, **QUIET}
    heads, layers = (Sources(by=by)(mini, alice, **cut).trained["share"] for by in ("head", "layer"))
    of_heads = heads.sel(source=[f"L1H{head}" for head in range(4)]).sum("source")
    np.testing.assert_allclose(of_heads, layers.sel(source="L1 attention"), atol=1e-6)


def test_in_half_precision_what_rounding_takes_is_a_source(mini, alice):
    cut = {"length": 24, "n_prompts": 1, "consecutive": True, **QUIET}
    data = Sources()(tl_posgen.load_model("mini", dtype="bfloat16"), alice, **cut).trained
    assert data["source"].values[-1] == "rounding"
    np.testing.assert_allclose(data["share"].sum("source"), 1)
    whole = Sources()(mini, alice, **cut).trained
    at = {"tokens": "without first", "layer": 1, "source": "L0 MLP"}
    np.testing.assert_allclose(data["share"].sel(at), whole["share"].sel(at), atol=0.05)


def test_streamed_passes_give_the_same(mini, alice):
    cut = {"length": 24, "n_prompts": 1, "consecutive": True, **QUIET}
    one, other = (Sources()(mini, alice, streaming=streaming, **cut).trained["share"] for streaming in (True, False))
    np.testing.assert_allclose(one, other, atol=1e-5)


def test_of_a_model_that_rotates_nothing_no_source_writes_a_position(family_model):
    gpt2 = Sources()(family_model("gpt2"), TOKENS, **QUIET)
    assert gpt2.findings()[0] == "No head's scores have position that a source could write through keys."
    assert gpt2.plot("layers")
    assert "nothing rotates" in gpt2.findings()[1]


def test_what_cannot_be_traced_is_refused(family_model):
    model = family_model("llama", "bridge")
    hooks = model.hooks(fwd_hooks=[("blocks.1.ln1.hook_out", lambda x, hook: x.flip(-1))])
    with hooks, pytest.raises(UnsupportedModelError, match="cannot be traced"):
        Sources()(model, TOKENS, **QUIET)

"""The proof refuses every description that does not reproduce the scores, and says what is likely to be wrong."""

from dataclasses import replace
from importlib.metadata import version

import pytest
import torch
from families import GROUPED, save_config, with_sizes

from tl_posgen.errors import UnsupportedModelError
from tl_posgen.models.geometry.proof import (
    allowed_error,
    is_pattern,
    plain_scores,
    prove,
    tolerance,
    without_row_offsets,
)
from tl_posgen.models.layer_table import geometry_of
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.models.loading.load import load_model
from tl_posgen.rope.rotation import Rope


@pytest.fixture(scope="module")
def probed(family_model):
    """Geometry, q, k and scores of a tiny Llama's first layer on 20 tokens."""
    model = family_model("llama", "bridge")
    tokens = torch.randint(64, (1, 20), generator=torch.Generator().manual_seed(1))
    names = [f"blocks.0.attn.hook_{part}" for part in ("q", "k", "attn_scores")]
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens, names_filter=names)
    q, k, scores = (cache[name][0] for name in names)
    return geometry_of(model)[0], q.transpose(0, 1), k.transpose(0, 1), plain_scores(scores, torch.float32)


def test_the_true_description_passes_and_of_several_drafts_the_best_the_first_of_equals(probed):
    geometry, q, k, scores = probed
    assert prove([geometry], q, k, scores).error < 1e-5
    wrong = replace(geometry, rope=replace(geometry.rope, pairing="adjacent"))
    assert prove([wrong, geometry], q, k, scores).rope.pairing == "half"
    assert prove([replace(geometry, window=20), geometry], q, k, scores).window == 20  # of 20 tokens


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda g: replace(g, rope=replace(g.rope, inv_freq=g.rope.inv_freq * 1.01)), "RoPE frequencies or pairing"),
        (lambda g: replace(g, rope=replace(g.rope, pairing="adjacent")), "RoPE frequencies or pairing"),
        (lambda g: replace(g, rope=Rope()), "RoPE frequencies or pairing"),
        (lambda g: replace(g, encoding="none", rope=Rope()), "positional bias"),
        (lambda g: replace(g, scale=g.scale * 1.001), "scale, soft cap"),
        (lambda g: replace(g, soft_cap=30.0), "scale, soft cap"),
        (lambda g: replace(g, window=7), "masks other keys than a causal mask with a window of 7"),
    ],
)
def test_a_wrong_description_is_refused_with_its_likely_cause(probed, change, cause):
    geometry, q, k, scores = probed
    with pytest.raises(UnsupportedModelError, match=rf"layer 0: .*{cause}"):
        prove([change(geometry)], q, k, scores)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_named_where_the_model_has_half_precision(probed, dtype):
    geometry, q, k, scores = probed
    wrong = replace(geometry, scale=geometry.scale * 2)
    with pytest.raises(UnsupportedModelError) as refused:
        prove([wrong], q.to(dtype), k.to(dtype), scores)
    assert ('dtype="float32"' in str(refused.value)) == (dtype == torch.bfloat16)


@pytest.mark.parametrize(("share", "passes"), [(0.9, True), (1.1, False)])
def test_the_error_may_be_a_ten_thousandth_of_the_largest_score(probed, share, passes):
    geometry, q, k, scores = probed
    scores = 10 * scores  # of which rounding explains far less
    scores[1, 9, 4] += share * 1e-4 * scores[scores.isfinite()].abs().max()
    if passes:
        prove([replace(geometry, scale=10 * geometry.scale)], q, k, scores)
    else:
        with pytest.raises(UnsupportedModelError, match=r"off by .* where scores reach .* is allowed\). Likely cause"):
            prove([replace(geometry, scale=10 * geometry.scale)], q, k, scores)


def test_eight_units_of_rounding_are_allowed_below_float32():
    assert (tolerance(torch.float64), tolerance(torch.float32), tolerance(torch.bfloat16)) == (1e-4, 1e-4, 8 * 2**-7)


@pytest.mark.parametrize(
    ("value", "message"),
    [(-torch.inf, "layer 0: it masks other keys than a causal mask would"), (torch.nan, "NaN or inf in the weights")],
)
def test_a_key_hidden_beyond_the_mask_and_what_is_no_number_are_named_as_such(probed, value, message):
    geometry, q, k, scores = probed
    scores = scores.clone()
    scores[2, 9, 4] = value
    with pytest.raises(UnsupportedModelError, match=message):
        prove([geometry], q, k, scores)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_rounding_may_do_grows_with_the_product_and_the_length(dtype):
    q, k = torch.randn(2, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    k = torch.cat([k, k], 1)  # 10 keys
    rotary = LayerGeometry(0, "rotary", 2, 2, 4, 0.3)
    alibi = replace(rotary, encoding="alibi", alibi_slopes=torch.tensor([0.5, 0.125]))
    found, with_bias = allowed_error(q, k, rotary, dtype), allowed_error(q, k, alibi, dtype)
    unit = {torch.float32: 2**-23, torch.bfloat16: 2**-7}[dtype]
    for head, i, j in torch.ones(found.shape).nonzero().tolist():
        product = 0.3 * float(q[head, i].norm()) * float(k[head, j].norm())
        assert float(found[head, i, j]) == pytest.approx(4 * unit * product + 10 * 2**-23 * product)
        bias = 4 * unit * (0.5 * 10)
        assert float(with_bias[head, i, j] - found[head, i, j]) == pytest.approx(bias, rel=1e-4)
    assert (allowed_error(0 * q, k, rotary, dtype) > 0).all()


@pytest.mark.parametrize("cap", [None, 0.7])
@pytest.mark.parametrize("away", [lambda i, j: j - i, lambda i, j: j, lambda i, j: j - 30], ids=["pair", "key", "last"])
def test_alibi_is_proved_in_every_gauge(away, cap):
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(4, 12, 8, generator=generator), torch.randn(2, 12, 8, generator=generator)
    slopes, position = torch.tensor([0.5, 0.25, 0.125, 0.0625]), torch.arange(12)
    geometry = LayerGeometry(0, "alibi", 4, 2, 8, 0.3, soft_cap=cap, alibi_slopes=slopes)
    products = 0.3 * q @ torch.stack([k[0], k[0], k[1], k[1]]).mT
    bias, hidden = slopes[:, None, None] * away(position[:, None], position), position[:, None] < position
    scores = ((products if cap is None else cap * (products / cap).tanh()) + bias).masked_fill(hidden, -torch.inf)
    assert prove([geometry], q, k, scores).error < 1e-5
    arctan, inside = 3 * torch.arctan(products / 3) + bias, 3 * torch.tanh((products + bias) / 3)
    wrong = {
        "slopes": (replace(geometry, alibi_slopes=1.01 * slopes), scores),
        "cap": (replace(geometry, soft_cap=3.0), scores),
        "unknown cap": (geometry, arctan.masked_fill(hidden, -torch.inf)),
        "bias under the cap": (replace(geometry, soft_cap=3.0), inside.masked_fill(hidden, -torch.inf)),
    }
    for draft, of_model in wrong.values():
        with pytest.raises(UnsupportedModelError, match="cause: scale, a soft cap or a positional bias that this"):
            prove([draft], q, k, of_model)


def test_queries_after_rope_are_recognised(probed):
    geometry, q, k, _ = probed
    heads = k.repeat_interleave(2, dim=0)
    scores = (geometry.scale * q @ heads.mT).masked_fill(~geometry.visible(20), -torch.inf)
    with pytest.raises(UnsupportedModelError, match="after RoPE"):
        prove([geometry], q, k, scores)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [([1.01, 0.0], True), ([0.5, 0.5], True), ([1.03, 0.0], False), ([0.5, 2.5], False), ([1.5, -0.5], False)],
)
def test_patterns_are_not_negative_and_add_up_to_one(rows, expected):
    assert is_pattern(torch.tensor([[[1.0, 0.0], rows]])) == expected


def test_a_rotary_table_changed_after_loading_is_refused(family_directory, backend):
    if backend == "bridge":
        model = load_model(family_directory("llama"), "bridge")
        model.rotary_emb.original_component.register_forward_hook(lambda module, args, out: (out[0], out[1] * 1.1))
    else:
        model = load_model(family_directory("llama"), "hooked")
        model.blocks[0].attn.rotary_sin *= 1.1
    with pytest.raises(UnsupportedModelError, match="layer 0: "):
        geometry_of(model)


def test_hooks_that_change_the_scores_during_the_probe_are_refused(model):
    model.add_hook("blocks.1.attn.hook_attn_scores", lambda scores, hook: scores * 1.5)
    with pytest.raises(UnsupportedModelError, match=r"layer 1: .*hooks that change the scores"):
        geometry_of(model)
    model.reset_hooks()


def test_a_bridge_that_computes_another_rotation_is_refused(tmp_path):
    """TransformerLens 3.9 pairs Cohere's coordinates wrongly, so its Cohere is not Cohere; version 4 mended it."""
    directory = save_config(with_sizes("CohereConfig", GROUPED)(), tmp_path)
    if int(version("transformer-lens").split(".")[0]) >= 4:
        assert geometry_of(load_model(directory, "bridge"))[0].rope.pairing == "adjacent"
    else:
        with pytest.raises(UnsupportedModelError, match="this TransformerBridge computes something else"):
            load_model(directory, "bridge")


def test_alibi_scores_are_shifted_so_that_distance_zero_has_no_bias():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 2, 5, 4, generator=generator, dtype=torch.float64)
    j = torch.arange(5.0, dtype=torch.float64)
    alibi = LayerGeometry(0, "alibi", 2, 2, 4, 0.5, alibi_slopes=torch.tensor([0.25, 0.25]))
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    relative = (0.5 * q @ k.mT + 0.25 * (j - j[:, None])).masked_fill(~causal, -torch.inf)
    absolute = (0.5 * q @ k.mT + 0.25 * j).masked_fill(~causal, -torch.inf)
    torch.testing.assert_close(without_row_offsets(absolute, q, k, alibi), relative)
    torch.testing.assert_close(without_row_offsets(relative, q, k, alibi), relative)
    rows = torch.tensor([4, 1])
    some = without_row_offsets(absolute[:, rows], q[:, rows], k, alibi, rows)
    torch.testing.assert_close(some, relative[:, rows])
    absolute[1, 3, 3] = -torch.inf  # the row's own key: nothing tells its offset
    hidden = without_row_offsets(absolute, q, k, alibi)
    assert torch.equal(hidden[1, 3], absolute[1, 3])
    torch.testing.assert_close(hidden[0], relative[0])


def test_masks_of_either_kind_become_minus_infinity():
    half = torch.tensor([1.0, torch.finfo(torch.float16).min], dtype=torch.float16)
    assert plain_scores(half, torch.float16).tolist() == [1.0, -torch.inf]
    assert plain_scores(half.float(), torch.float16).tolist() == [1.0, -torch.inf]
    assert plain_scores(torch.tensor([-60_000.0, -torch.inf]), torch.float32).tolist() == [-60_000.0, -torch.inf]

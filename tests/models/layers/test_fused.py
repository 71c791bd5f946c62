"""Attention without a [query, key] matrix against attention with one, in float64; and the proof of its output."""

from dataclasses import replace

import pytest
import torch

from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.backends.fused_bridge import attention_function, fire_normed, replaced
from tl_posgen.models.geometry.proof import UNITS, allowed_error
from tl_posgen.models.layers import fused
from tl_posgen.models.layers.fused import LayerAttention, Mask, attend, finish_of, masked_softmax
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.models.streaming.stream import as_mask, prove_rows

N, SCALE = 13, 0.3


def drawn(group: int, *, before: int = 0, d_value: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = (4, N, 4), (4 // group, before + N, 4), (4 // group, before + N, d_value)
    q, k, v = (torch.randn(2, *size, generator=generator).double() for size in sizes)
    return q, k, v


def whole(q, k, v, seen, sinks=None, finish=lambda scores, _away: scores) -> torch.Tensor:
    """The softmax over all pairs at once."""
    group, (n, n_keys) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = finish(SCALE * q @ k.mT, torch.arange(n_keys - n, n_keys)[:, None] - torch.arange(n_keys))
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(2, 4, n, 1)], -1)
    return scores.softmax(-1).nan_to_num(0)[..., :n_keys] @ v


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("group", [1, 2])
def test_blocks_of_rows_are_the_whole_softmax(before, window, sinks, group, monkeypatch):
    q, k, v = drawn(group, before=before)
    n_keys = before + N
    padding = torch.ones(2, n_keys, dtype=torch.bool)
    padding[1, :4] = False
    away = torch.arange(before, n_keys)[:, None] - torch.arange(n_keys)
    seen = (away >= 0) & (away < (window or n_keys)) & padding[:, None, None]
    sink = torch.randn(4, generator=torch.Generator().manual_seed(4)).double() if sinks else None
    blocks = []

    def finish(scores, away):
        blocks.append(scores.numel())
        return torch.tanh(scores) - 0.1 * away

    expected = whole(q, k, v, seen, sink, finish)
    monkeypatch.setattr(fused, "SCORES_AT_ONCE", 4 * n_keys * 2 * 3)
    mask = Mask.of_window(N, window, padding, before=before)
    torch.testing.assert_close(attend(q, k, v, SCALE, mask, finish=finish, sinks=sink), expected)
    assert len(blocks) == 1 + 5  # three rows each
    assert max(blocks[1:]) <= 4 * n_keys * 2 * 3
    assert window is None or max(blocks[1:]) <= 4 * 2 * 3 * (window + 2)  # no key that nobody sees


@pytest.mark.parametrize("d_value", [4, 5])
@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("group", [1, 2])
def test_causal_attention_is_the_whole_softmax_on_either_route(group, before, d_value):
    q, k, v = drawn(group, before=before, d_value=d_value)
    mask = Mask.of_window(N, before=before)
    assert mask.causal == (before == 0)
    seen = torch.arange(before, before + N)[:, None] >= torch.arange(before + N)
    torch.testing.assert_close(attend(q, k, v, SCALE, mask), whole(q, k, v, seen))


def test_only_a_causal_mask_without_padding_or_window_is_said_to_be_one():
    padding = torch.ones(1, N, dtype=torch.bool)
    masks = [Mask.of_window(N), Mask.of_window(N, 20), Mask.of_window(N, None, padding)]
    assert [mask.causal for mask in masks] == [True, False, False]
    assert masks[2].padding is padding


def test_a_softmax_is_taken_in_float32_at_least():
    scores = torch.randn(2, 3, 40, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    seen = torch.arange(40) < 30
    for sinks in (None, torch.zeros(2)):
        expected = scores.float()[..., :30].exp()
        expected = expected / (expected.sum(-1, keepdim=True) + (sinks is not None))
        found = masked_softmax(scores, seen, sinks)
        torch.testing.assert_close(found[..., :30], expected)
        assert not found[..., 30:].any()


def test_masks_of_other_makers_are_taken_as_they_are():
    q, k, _ = drawn(1, before=3)
    expected = Mask.of_window(N, before=3).rows(2, 9)
    seen = Mask.of_window(N, before=3).rows(0, N)
    wider = torch.nn.functional.pad(seen, (0, 4))
    floats = torch.zeros(wider.shape).masked_fill(~wider, torch.finfo(torch.float32).min)
    for mask in (None, Mask.of_window(N, before=3), seen, wider, floats, floats.masked_fill(~wider, -torch.inf)):
        assert torch.equal(as_mask(mask, q, k).rows(2, 9), expected)
    padding = torch.tensor([False] * 4 + [True] * (N - 4))
    padded = Mask.of_window(N, None, padding[None]).rows(0, N)
    assert torch.equal(as_mask(padded, q, k[:, :, :N]).padding, padding.expand(2, -1))
    assert as_mask(seen[..., 3:], q, k[:, :, :N]).padding is None


def test_a_method_is_replaced_once_and_put_back():
    heads = torch.nn.Linear(2, 2)
    with replaced(heads, "extra_repr", lambda: "replaced"):
        assert heads.extra_repr() == "replaced"
        with pytest.raises(InputError, match=r"Linear\.extra_repr was replaced"), replaced(heads, "extra_repr", str):
            pass
    assert "extra_repr" not in vars(heads)


@pytest.mark.parametrize("shape", [(2, N, 12), (2, 3, N, 4), (2, N, 3, 4)], ids=["flat", "head first", "token first"])
def test_what_a_norm_makes_is_shown_head_first_and_goes_on_as_it_was(shape):
    out, seen = torch.randn(shape, generator=torch.Generator().manual_seed(0)), []
    found = fire_normed(lambda x: seen.append(x) or 2 * x, N, None, (), out)
    assert torch.equal(found, 2 * out)
    assert torch.equal(seen[0], out.transpose(1, 2) if shape[1:3] == (N, 3) else out)
    with pytest.raises(InputError, match=r"as many tokens as heads \(13\)"):
        fire_normed(None, N, None, (), torch.zeros(2, N, N, 4))


@pytest.mark.parametrize(
    "mask", [None, Mask.of_window(N, 5), Mask.of_window(N, 5).rows(0, N)], ids=["no", "own", "other"]
)
def test_attention_that_is_not_replaced_is_as_it_would_be(mask):
    """Of another part of the model, such as a vision tower."""
    q, k, v = drawn(2)
    z, pattern = attention_function(torch.nn.Identity(), q, k, v, mask, SCALE)
    seen = torch.ones(N, N).bool() if mask is None else Mask.of_window(N, 5).rows(0, N)
    torch.testing.assert_close(z.transpose(1, 2), whole(q, k, v, seen))
    assert pattern is None


# The proof of a layer's output

PLAIN = LayerGeometry(5, "none", 4, 2, 4, SCALE)
GEOMETRIES = {
    "plain": PLAIN,
    "window": replace(PLAIN, window=5),
    "soft cap": replace(PLAIN, soft_cap=0.7),
    "ALiBi": replace(PLAIN, encoding="alibi", alibi_slopes=torch.tensor([0.5, 0.25, 0.125, 0.0625])),
}
ROWS = [0, 4, 8, 12]


def done(geometry=PLAIN, dtype=torch.float32, padding=None, sinks=None) -> LayerAttention:
    q, k, v = (x.to(dtype) for x in drawn(2))
    mask = Mask.of_window(N, geometry.window, padding)
    return LayerAttention(q, k, v, attend(q, k, v, SCALE, mask, finish=finish_of(geometry), sinks=sinks), mask, sinks)


def off_by(one: LayerAttention, head: int, row: int, share: float, geometry=PLAIN) -> LayerAttention:
    """That prompt 1 comes out wrong by a share of what rounding may do."""
    q, k, v = one.q[1].float(), one.k[1].float().repeat_interleave(2, 0), one.v[1].float()
    allowed = float(allowed_error(q[:, [row]], k, geometry, one.q.dtype)[head].max())
    slack = 2 * allowed + 2 * UNITS * max(torch.finfo(one.q.dtype).eps, torch.finfo(torch.float32).eps)
    z = one.z.double().clone()
    z[1, head, row, 2] += share * slack * float(v[head // 2].abs().max())
    return replace(one, z=z)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 0.0, 2.0])], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_rows_of_an_output_may_be_off_by_what_rounding_may_do(geometry, sinks):
    one = done(geometry, sinks=sinks)
    for row in ROWS:
        prove_rows(geometry, off_by(one, 2, row, 0.8, geometry))
        with pytest.raises(UnsupportedModelError, match=f"L5H2, query {row} of 13: its output is not what"):
            prove_rows(geometry, off_by(one, 2, row, 1.2, geometry))
    prove_rows(geometry, off_by(one, 2, 11, 99.0, geometry))  # one of the rows that are not compared


def test_another_geometry_is_refused_with_what_the_output_is_off_by():
    one = done(GEOMETRIES["window"])
    expected = attend(one.q, one.k, one.v, SCALE, Mask.of_window(N))
    off = (expected - one.z)[0, 0, 8].abs().max()
    largest = expected[0, 0, 8].abs().max()
    with pytest.raises(
        UnsupportedModelError, match=f"L5H0, query 8 of 13: .*off by {off:.2g}, .* {largest:.2g}.*of 13|below 13"
    ):
        prove_rows(PLAIN, one)
    with pytest.raises(UnsupportedModelError, match="L5H1, query 12 "):
        prove_rows(PLAIN, off_by(done(), 1, 12, float("nan")))


def test_half_precision_is_compared_as_such():
    one = done(dtype=torch.bfloat16)
    prove_rows(PLAIN, one)
    with pytest.raises(UnsupportedModelError, match="L5H3, query 12 "):
        prove_rows(PLAIN, off_by(one, 3, 12, 3.0))


@pytest.mark.parametrize("side", ["left", "right"])
def test_of_a_padded_prompt_the_last_query_of_its_text_is_compared(side):
    padding = torch.ones(2, N, dtype=torch.bool)
    padding[1, slice(4) if side == "left" else slice(9, None)] = False
    one, last = done(padding=padding), 12 if side == "left" else 8
    prove_rows(PLAIN, off_by(one, 2, last - 1, 99.0))
    with pytest.raises(UnsupportedModelError, match=f"L5H2, query {last} of 13"):
        prove_rows(PLAIN, off_by(one, 2, last, 2.0))


def test_a_pass_over_cached_keys_is_not_compared():
    one = done()
    cached = replace(one, k=torch.cat([one.k, one.k], 2), v=torch.cat([one.v, one.v], 2), z=torch.zeros_like(one.z))
    prove_rows(PLAIN, cached)

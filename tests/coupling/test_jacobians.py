"""Residual Jacobians against finite differences, against one backward pass at a time, and in every family."""

from functools import cache
from itertools import product

import pytest
import torch
import transformer_lens
from families import VOCAB

from tl_posgen.coupling.jacobians import residual_jacobians, residual_streams
from tl_posgen.errors import InputError
from tl_posgen.models.loading.load import load_model
from tl_posgen.models.session import session_of

LAST = 23
PAIRS = [(LAST, LAST), (LAST - 3, LAST), (0, 0)]
HOOKED_AND_BRIDGE = ["llama", "mistral", "neox", "qwen3", "gpt2", "bloom", "gptj"]
BRIDGE_ONLY = ["gemma2", "gemma3", "phi3", "falcon", "opt"]
FAMILY_CASES = [*product(HOOKED_AND_BRIDGE, ["hooked", "bridge"]), *product(BRIDGE_ONLY, ["bridge"])]


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(2, VOCAB, (LAST + 1,), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def family(family_directory):
    """Float64 model of a family on a backend, each built once."""

    @cache
    def make(name, backend):
        if backend == "hooked" and not hasattr(transformer_lens, "HookedTransformer"):
            pytest.skip("this TransformerLens has no HookedTransformer")
        return load_model(family_directory(name), backend=backend, dtype=torch.float64)

    return make


def block(model, tokens, layer, source, rows=None):
    """(output, input) of a block in a plain pass over the whole prompt, for each of `rows` in place of the source."""
    kept = {}

    def enter(x, hook):
        x = x.detach().clone()
        if rows is not None:
            x[:, source] = rows
        kept["input"] = x.requires_grad_()
        return kept["input"]

    def leave(x, hook):
        kept["output"] = x

    hooks = [(f"blocks.{layer}.hook_resid_pre", enter), (f"blocks.{layer}.hook_resid_post", leave)]
    with torch.enable_grad(), model.hooks(fwd_hooks=hooks):
        model(tokens.expand(1 if rows is None else len(rows), -1), return_type=None)
    return kept["output"], kept["input"]


def one_row_at_a_time(model, tokens, layer, source, target):
    """The authors' way: a backward pass through the whole prompt for every output coordinate."""
    output, entering = block(model, tokens, layer, source)
    rows = [torch.autograd.grad(y, entering, retain_graph=True)[0][0, source] for y in output[0, target]]
    return torch.stack(rows) - torch.eye(len(rows), dtype=output.dtype) * (source == target)


def difference(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(("name", "backend"), [("llama", "hooked"), ("gpt2", "hooked"), ("gpt2", "bridge")])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_agrees_with_central_finite_differences_to_1e_6(family, tokens, name, backend, source, target):
    model, layer, step = family(name, backend), 1, 1e-5
    jacobian = residual_jacobians(model, tokens, source, target, layers=[layer])[0].dense()
    centre = residual_streams(model, tokens)[layer, source]
    steps = step * torch.eye(len(centre), dtype=centre.dtype)
    output = block(model, tokens, layer, source, torch.cat([centre + steps, centre - steps]))[0][:, target].detach()
    ahead, behind = output.chunk(2)
    differences = (ahead - behind).mT / (2 * step) - torch.eye(len(centre)) * (source == target)
    assert (jacobian - differences).abs().max() < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), FAMILY_CASES)
def test_every_family_agrees_with_one_backward_pass_per_coordinate(family, tokens, name, backend):
    model = family(name, backend)
    for source, target in PAIRS:
        for jacobian in residual_jacobians(model, tokens, source, target):
            expected = one_row_at_a_time(model, tokens, jacobian.layer, source, target)
            assert difference(jacobian.dense(), expected) < 1e-5  # some norms are taken in float32


@pytest.mark.parametrize("linearise", [True, False])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_matrix_free_products_equal_the_dense_matrix(family, tokens, backend, linearise, source, target):
    model = family("llama", backend)
    v = torch.randn(32, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    free = residual_jacobians(model, tokens, source, target, layers=[0], linearise=linearise)[0]
    dense = residual_jacobians(model, tokens, source, target, layers=[0])[0].dense()
    assert free.touched == (len({source, target}) if linearise else target + 1)
    assert difference(free.matvec(v), dense @ v) < 1e-5
    assert difference(free.rmatvec(v), dense.mT @ v) < 1e-5


def test_lanczos_above_the_size_limit_finds_the_triplets_of_the_dense_route(family, tokens):
    model = family("llama", "bridge")
    free, dense = (residual_jacobians(model, tokens, -1, layers=[1])[0] for _ in range(2))
    found, expected = free.triplets(6, dense_up_to=0), dense.triplets(6)
    assert difference(found.values, expected.values) < 1e-5
    assert ((found.left * expected.left).sum(0).abs() - 1).abs().max() < 1e-6


def test_a_query_norm_across_heads_is_noticed_and_taken_through_the_attention(family, tokens):
    model = family("olmo2", "bridge")
    found = residual_jacobians(model, tokens, -1, layers=[1])[0]
    assert found.touched == len(tokens)
    assert difference(found.dense(), one_row_at_a_time(model, tokens, 1, LAST, LAST)) < 1e-5


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_reading_the_context_in_pieces_changes_nothing(family, tokens, monkeypatch, name, backend):
    model = family(name, backend)
    jacobian, streams = residual_jacobians(model, tokens, -1)[1].dense(), residual_streams(model, tokens)
    monkeypatch.setattr("tl_posgen.coupling.jacobians._SCORES_AT_ONCE", 5 * len(tokens))
    assert difference(residual_streams(model, tokens), streams) < 1e-6
    assert difference(residual_jacobians(model, tokens, -1)[1].dense(), jacobian) < 1e-5


def test_matrices_built_layer_by_layer_are_the_same_and_hold_no_graph(family, tokens, backend):
    model = family("llama", backend)
    early = residual_jacobians(model, tokens, -1, dense_up_to=32)
    late = residual_jacobians(model, tokens, -1)
    for one, other in zip(early, late, strict=True):
        assert one._output.grad_fn is None
        assert difference(one.dense(), other.dense()) < 1e-12


def test_keys_and_values_of_a_layer_are_let_go_once_it_has_run(family, tokens, monkeypatch, backend):
    model, kept = family("llama", backend), []
    kind = type(session_of(model).backend)
    make = kind.context
    monkeypatch.setattr(kind, "context", lambda self: kept.append(make(self)) or kept[-1])
    residual_jacobians(model, tokens, -1)
    names = ("keys", "values") if backend == "bridge" else ("past_keys", "past_values")
    held = [getattr(entry, name).numel() for entry in kept[0].layers for name in names]
    assert held == [0] * 4


def test_streams_are_those_before_the_final_norm(family, tokens, backend):
    model = family("llama", backend)
    streams = residual_streams(model, tokens)
    _, cache = model.run_with_cache(tokens[None])
    assert torch.equal(streams[0], cache["blocks.0.hook_resid_pre"][0])
    assert torch.equal(streams[-1], cache["ln_final.hook_in" if backend == "bridge" else "blocks.1.hook_resid_post"][0])


def test_works_where_gradients_are_switched_off_and_leaves_nothing_behind(family, tokens):
    model = family("llama", "bridge")
    before, state = model(tokens[None]), torch.random.get_rng_state()
    with torch.no_grad():
        found = residual_jacobians(model, tokens, -1)[0].matvec(torch.eye(32, dtype=torch.float64))
        values = residual_jacobians(model, tokens, -1)[0].triplets(2, dense_up_to=0).values
    assert found.isfinite().all()
    assert values.isfinite().all()
    assert torch.equal(model(tokens[None]), before)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": 99}, "token 99 of a prompt of 24"),
        ({"source": 5, "target": 2}, "input token 5 comes after output token 2"),
        ({"source": -1, "layers": [2]}, "layer 2 does not exist: this model has layers 0 to 1"),
    ],
)
def test_a_layer_or_token_that_does_not_exist_is_refused(family, tokens, arguments, message):
    with pytest.raises(InputError, match=message):
        residual_jacobians(family("llama", "bridge"), tokens, **arguments)


def centre(model):
    model.enable_compatibility_mode()


def fuse(model):
    model.original_model.config._attn_implementation = "flash_attention_2"


@pytest.mark.parametrize(
    ("name", "dtype", "change", "message"),
    [
        ("gpt2", "auto", centre, "center_writing_weights=False"),
        ("llama", torch.bfloat16, None, r'load the model with dtype="float32"'),
        ("llama", "auto", fuse, "attn_implementation='eager'"),
    ],
)
def test_what_has_no_sound_jacobian_is_refused_with_the_way_to_load(
    family_directory, tokens, name, dtype, change, message
):
    model = load_model(family_directory(name), backend="bridge", dtype=dtype)
    if change is not None:
        change(model)
    with pytest.raises(InputError, match=message):
        residual_jacobians(model, tokens, -1)

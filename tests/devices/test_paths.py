"""What is no measure on an accelerator: hooks, streaming, caches, generation, the toy."""

from contextlib import nullcontext

import pytest
import torch
from devices.near import assert_near
from interventions import OF_THE_PROMPT, ROW_BY_ROW, N

import tl_posgen
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.hooks import (
    ablate_bands,
    by_constant,
    by_split,
    by_three_axis,
    jitter_distances,
    own_profile,
    permute_position_part,
    permute_positions,
    substitute,
)
from tl_posgen.models import geometry_of
from tl_posgen.models.tokens import bundled_text
from tl_posgen.prompt import reference_of

TEXT = bundled_text()[:4000]
TOKENS = torch.randint(2, 2000, (1, N), generator=torch.Generator().manual_seed(1))
PLACES = torch.randperm(N, generator=torch.Generator().manual_seed(2))
HOOKS = {
    **ROW_BY_ROW,
    **OF_THE_PROMPT,
    "planes dropped": lambda m: ablate_bands(m, "drop", [0, 2]),
    "own profile": lambda m: substitute(m, by_split(own_profile), residual=0.3),
    "three axes": lambda m: substitute(m, by_three_axis),
    "a constant": lambda m: substitute(m, by_constant),
    "positions": lambda m: permute_positions(m, PLACES),
    "the position part permuted": lambda m: permute_position_part(m, PLACES),
    "distances jittered": lambda m: jitter_distances(m, (PLACES[:, None] - PLACES).abs()),
    "keys moved": lambda m: permute_positions(m, PLACES, keys_only=True),
}


WAYS = [("hooked", "float32"), ("hooked", "bfloat16"), ("bridge", "float32"), ("bridge", "bfloat16")]
EVERY_WAY = pytest.mark.parametrize(
    ("backend", "dtype"), [WAYS[0], *(pytest.param(*way, marks=pytest.mark.slow) for way in WAYS[1:])]
)


def error_of(device, dtype):
    """Return what passes may differ by; a bfloat16 number rounds to another one where TF32 moves it a little."""
    return device.error_of_passes if dtype == "float32" else max(3 * device.error_of_passes, 2**-8)


@EVERY_WAY
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_change_logits_as_on_the_cpu(name, streamed, backend, dtype, models, device):
    found = []
    for model in models(backend, dtype):
        with torch.no_grad(), tl_posgen.streaming(model) if streamed else nullcontext():
            found.append(model.run_with_hooks(TOKENS.to(at(model)), fwd_hooks=HOOKS[name](model)).cpu())
    twice = 2 if "source" in name else 1  # its means over a reference come from another pass
    assert_near(*found, twice * error_of(device, dtype))


@EVERY_WAY
@pytest.mark.parametrize("name", ["lm_infinite", "frozen beyond", "frequencies frozen", "split"])
def test_generation_with_a_cache_writes_as_without(name, backend, dtype, models):
    model, _ = models(backend, dtype)
    options = {"do_sample": False, "stop_at_eos": False, "verbose": False, "max_new_tokens": 5}
    with model.hooks(fwd_hooks=HOOKS[name](model)):
        written = [
            model.generate(TOKENS.to(at(model)), use_past_kv_cache=cached, **options) for cached in (True, False)
        ]
    assert torch.equal(*written)


@EVERY_WAY
def test_streamed_passes_measure_as_on_the_cpu(backend, dtype, models, device):
    options = {"length": 40, "n_prompts": 2, "nulls": 1, "streaming": True, "progress": False}
    there, here = (tl_posgen.analyze(model, bundled_text(), **options) for model in models(backend, dtype))
    found = (one["three_axis"].dataset["r"].values for one in (there, here))
    assert_near(*found, device.error if dtype == "float32" else 2**-8)


@EVERY_WAY
def test_attached_passes_and_caches_measure_as_on_the_cpu(backend, dtype, models, device):
    attached, cached = [], []
    for model in models(backend, dtype):
        with tl_posgen.attach(model, "three_axis") as found:
            _, cache = model.run_with_cache(TOKENS.to(at(model)))
        reports = found.report(), tl_posgen.analyze_cache(model, cache, tokens=TOKENS, measures="three_axis")
        for kept, report in zip((attached, cached), reports, strict=True):
            kept.append(report["three_axis"].dataset["r"].values)
    assert_near(*attached, error_of(device, dtype))
    assert_near(*cached, error_of(device, dtype))


MOVED = {
    "as it is": lambda name, value: value,
    "on the CPU": lambda name, value: value.cpu(),
    "keys on the CPU": lambda name, value: value.cpu() if name.endswith("hook_k") else value,
}


@pytest.mark.parametrize("where", MOVED)
def test_a_cache_and_its_tokens_may_lie_on_any_devices(where, models, device):
    model, here = models("hooked")
    options = {"measures": ["three_axis", "slash"]}
    batch = torch.cat([TOKENS, TOKENS.flip(1)])
    _, cache = here.run_with_cache(batch)
    expected = tl_posgen.analyze_cache(here, cache, tokens=batch, **options)
    _, cache = model.run_with_cache(batch.to(at(model)))
    moved = {name: MOVED[where](name, value) for name, value in cache.items()}
    for tokens in (batch, batch.to(at(model))):
        found = tl_posgen.analyze_cache(model, moved, tokens=tokens, **options)
        for measure, variable in (("three_axis", "r"), ("slash", "score")):
            pair = (one[measure].dataset[variable].values for one in (found, expected))
            assert_near(*pair, device.error_of_passes)


@pytest.mark.parametrize(("off", "named"), [(2**-11, True), (0.5, False)])
def test_scores_that_are_off_by_tf32_name_it(off, named, directory, device):
    model = device.load(directory, "hooked")
    rounded = model.hooks(fwd_hooks=[("blocks.0.attn.hook_attn_scores", lambda scores, hook: scores * (1 + off))])
    with rounded, pytest.raises(UnsupportedModelError) as refused:
        geometry_of(model)
    assert ("rounding to TF32" in str(refused.value)) == (named and device.place.startswith("cuda"))


def test_a_random_init_is_drawn_where_it_is_asked(models, device):
    model, here = models("bridge")
    if device.name == "mps":
        with pytest.raises(InputError, match="null_device='mps': random weights are drawn on cpu here"):
            tl_posgen.random_like(model, 0, "mps")
        return
    state = torch.cuda.get_rng_state()
    drawn, again, other = (tl_posgen.random_like(model, seed, device.place) for seed in (0, 0, 1))
    assert torch.equal(state, torch.cuda.get_rng_state())
    weights = [torch.cat([weight.flatten().cpu() for weight in one.parameters()]) for one in (drawn, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    plain = dict(tl_posgen.random_like(here, 0).named_parameters())
    for (name, weight), place in zip(drawn.named_parameters(), model.parameters(), strict=True):
        assert weight.device == place.device
        if weight.ndim == 2:
            assert weight.detach().std().item() == pytest.approx(plain[name].detach().std().item(), rel=0.1)
            if device.name == "gpu":  # a simulated device draws from the random state of the CPU
                assert not torch.equal(weight.cpu(), plain[name])
    report = tl_posgen.analyze(model, TOKENS, measures="variance", null_device=device.place, progress=False)
    assert report.provenance["null_device"] == device.place


def test_the_toy_runs_where_the_accelerator_is_the_default_device(device):
    from tl_posgen.slash import slash_toy

    short = {"steps": 4, "batch": 8, "seeds": (0,), "progress": False}
    here = slash_toy(**short)
    with torch.device(device.place):
        there = slash_toy(**short)
    assert_near(*(one.dataset["loss"].values for one in (there, here)), device.error)


def test_a_model_is_loaded_where_the_accelerator_is_the_default_device(device, directory):
    with torch.device(device.place):
        model = tl_posgen.load_model(directory, "hooked", device=device.place)
    with torch.device("cpu" if device.name == "mps" else device.place):
        report = tl_posgen.analyze(model, bundled_text(), length=18, n_prompts=2, progress=False)
    assert report["three_axis"].frame()["r"].notna().all()


@EVERY_WAY
def test_one_prompt_is_explained_as_on_the_cpu(backend, dtype, models, device):
    found, options = [], {"query": -2, "against": 3}
    for model in models(backend, dtype):
        reference = reference_of(model, TEXT, layers=[1], length=20, n_prompts=2, distances="attention")
        explained = tl_posgen.explain(model, TOKENS[0], 1, 2, reference=reference, **options)
        split = tl_posgen.split(model, TOKENS[0], heads=(1, 2), reference=reference).to_array().values
        found.append([explained.trained["contribution"].sum("source").values, split, explained.check(2).values])
    for there, here in zip(*found, strict=True):
        assert_near(there, here, 20 * error_of(device, dtype))


def at(model):
    return next(model.parameters()).device

"""Passes that no measure is true of are refused: two threads, dropout, autocast, quantised weights, a null alike."""

import threading
import warnings
from functools import partial

import pytest
import torch
from families import VOCAB
from quick_options import KINDS, NAMES, OPTIONS

import tl_posgen
from tl_posgen.coupling.jacobians import residual_jacobians, residual_streams
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.frequencies.gap import next_tokens
from tl_posgen.models.capture.capturing import capturing, run_capture
from tl_posgen.models.layer_table import geometry_of
from tl_posgen.models.loading.load import load_model
from tl_posgen.models.loading.random_init import random_like
from tl_posgen.models.loss import run_prompts
from tl_posgen.models.session import session_of

CUT = {"length": 18, "n_prompts": 2, "nulls": 0, "progress": False}
TOKENS = torch.randint(2, VOCAB - 2, (1, 100), generator=torch.Generator().manual_seed(4))


def test_attention_whose_hooks_do_not_fire_is_refused(llama, backend, monkeypatch):
    if backend == "bridge":
        pytest.skip("a bridge's attention cannot be given another forward function")
    geometry_of(llama)
    monkeypatch.setattr(llama.blocks[1].attn, "forward", lambda *args, **options: torch.zeros(1, 100, 32))
    with pytest.raises(UnsupportedModelError, match="layer 1: the hooks of its attention did not fire"):
        tl_posgen.analyze(llama, TOKENS, measures="three_axis", nulls=0, progress=False)
    with torch.no_grad(), tl_posgen.attach(llama, "three_axis") as run:
        llama(TOKENS)
    with pytest.raises(InputError, match="prompt 0 was captured in 1 of 2 layers"):
        run.report()


@pytest.mark.parametrize("run", ["capture", "attach"])
def test_two_threads_on_one_model_are_refused(llama, run):
    errors = []

    def other():
        try:
            if run == "capture":
                run_capture(llama, TOKENS, lambda capture: None)
            else:
                llama(TOKENS)
        except InputError as error:
            errors.append(str(error))

    with capturing(llama, lambda capture: None):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert "in another thread" in errors[0] if run == "capture" else "two threads" in errors[0]


def test_active_dropout_is_refused(family_directory, backend):
    model = load_model(family_directory("gpt2"), backend)
    model.train()
    if backend == "bridge":
        with pytest.raises(InputError, match=r"training mode and dropout in .* call model\.eval\(\)"):
            tl_posgen.analyze(model, TOKENS, nulls=0, progress=False)
        geometry_of(model.eval())
        with pytest.raises(InputError, match="training mode"), capturing(model, lambda capture: None):
            model.train()(TOKENS)
    else:  # a HookedTransformer has no dropout: the mode changes nothing
        run_capture(model, TOKENS, lambda capture: None)


@pytest.fixture(scope="module")
def in_training(family_directory):
    """A model that was looked at before dropout became active, with RoPE and biases."""
    model = load_model(family_directory("neox"), "bridge")
    session_of(model).layers()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    return model.train()


@pytest.mark.parametrize("name", [name for name in NAMES if KINDS[name].runs_model])
def test_every_measure_that_runs_the_model_refuses_active_dropout(in_training, name):
    measure = KINDS[name].with_options(OPTIONS.get(name, {}))
    with pytest.raises(InputError, match=r"training mode and dropout in .* call model\.eval\(\)"):
        tl_posgen.analyze(in_training, TOKENS, measures=[measure], **CUT)


@pytest.mark.parametrize(
    "run",
    [
        lambda model, row: run_prompts(model, row[None], lambda logits, _: logits),
        lambda model, row: next_tokens(session_of(model), row[None], 1),
        residual_streams,
        lambda model, row: residual_jacobians(model, row, 0, streams=torch.zeros(3, len(row), 32)),
    ],
    ids=["logits", "next tokens", "residual streams", "Jacobians"],
)
def test_passes_refuse_active_dropout(in_training, run):
    with pytest.raises(InputError, match="training mode and dropout"):
        run(in_training, TOKENS[0, :18])


@pytest.mark.parametrize("run", [residual_streams, partial(residual_jacobians, source=0)])
def test_jacobians_of_a_model_that_another_thread_measures_are_refused(llama, run):
    session, errors = session_of(llama), []
    session.layers()

    def measure():
        try:
            run(llama, TOKENS[0, :18])
        except InputError as error:
            errors.append(str(error))

    with session.exclusive("test"):
        thread = threading.Thread(target=measure)
        thread.start()
        thread.join()
    assert "in another thread" in errors[0]


def test_autocast_is_refused(llama):
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InputError, match="autocast is on"):
        tl_posgen.analyze(llama, TOKENS, nulls=0, progress=False)


def test_quantised_weights_are_refused(model):
    name, weight = next(iter(model.named_parameters()))
    holder = model.get_submodule(name.rpartition(".")[0])
    setattr(holder, name.rpartition(".")[2], torch.nn.Parameter(weight.data.to(torch.int8), requires_grad=False))
    with pytest.raises(UnsupportedModelError, match=r"is quantised \(int8\)"):
        geometry_of(model)


def test_a_null_that_has_the_models_weights_says_so(mini):
    nulls = {"random init": (3, 4)}
    report = tl_posgen.analyze(random_like(mini, 3), TOKENS, measures="three_axis", nulls=nulls, progress=False)
    assert any("the random init has the model's own weights" in sentence for sentence in report.findings())
    assert report["three_axis"].nulls[0].attrs["model"].startswith("random init (seed 3), the model's own weights")
    assert report["three_axis"].nulls[1].attrs["model"] == "random init (seed 4)"


def test_dynamically_quantised_layers_are_refused(family_directory):
    model = load_model(family_directory("llama"), "bridge")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, inplace=True)
    with pytest.raises(UnsupportedModelError, match="is quantised; load the model in float32"):
        geometry_of(model)

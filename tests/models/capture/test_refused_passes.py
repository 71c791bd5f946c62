"""Passes that no measure is true of are refused: two threads, dropout, autocast, quantised weights, a null alike."""

import threading
import warnings

import pytest
import torch
from families import VOCAB

import tl_posgen
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.capture.capturing import capturing, run_capture
from tl_posgen.models.layer_table import geometry_of
from tl_posgen.models.loading.load import load_model
from tl_posgen.models.loading.random_init import random_like

TOKENS = torch.randint(2, VOCAB - 2, (1, 100), generator=torch.Generator().manual_seed(4))


def test_attention_whose_hooks_do_not_fire_is_refused(llama, backend, monkeypatch):
    if backend == "bridge":
        pytest.skip("a bridge's attention cannot be given another forward function")
    geometry_of(llama)
    monkeypatch.setattr(llama.blocks[1].attn, "forward", lambda *args, **options: torch.zeros(1, 100, 32))
    with pytest.raises(UnsupportedModelError, match="layer 1: the hooks of its attention did not fire"):
        tl_posgen.analyze(llama, TOKENS, measures="three_axis", null_seeds=(), progress=False)
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
            tl_posgen.analyze(model, TOKENS, null_seeds=(), progress=False)
        geometry_of(model.eval())
        with pytest.raises(InputError, match="training mode"), capturing(model, lambda capture: None):
            model.train()(TOKENS)
    else:  # a HookedTransformer has no dropout: the mode changes nothing
        run_capture(model, TOKENS, lambda capture: None)


def test_autocast_is_refused(llama):
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InputError, match="autocast is on"):
        tl_posgen.analyze(llama, TOKENS, null_seeds=(), progress=False)


def test_quantised_weights_are_refused(model):
    name, weight = next(iter(model.named_parameters()))
    holder = model.get_submodule(name.rpartition(".")[0])
    setattr(holder, name.rpartition(".")[2], torch.nn.Parameter(weight.data.to(torch.int8), requires_grad=False))
    with pytest.raises(UnsupportedModelError, match=r"is quantised \(int8\)"):
        geometry_of(model)


def test_a_null_that_has_the_models_weights_says_so(mini):
    report = tl_posgen.analyze(random_like(mini, 3), TOKENS, measures="three_axis", null_seeds=(3, 4), progress=False)
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

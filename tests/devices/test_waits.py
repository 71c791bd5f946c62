"""The host's waits for an accelerator, and what finished prompts leave on it."""

import gc

import pytest
import torch

import tl_posgen
from tl_posgen.models.tokens import bundled_text

CUT = {"length": 24, "null_seeds": (), "progress": False}


@pytest.fixture
def model(models, device):
    if device.name == "mps":
        pytest.skip("sums are formed on the host, which has to have the numbers")
    return models("hooked")[0]


def test_a_forward_pass_of_the_default_measures_is_waited_for_once_a_layer(model):
    from devices import simulated

    tl_posgen.analyze(model, bundled_text(), n_prompts=1, **CUT)  # finds out what the layers are
    waits = []
    for n_prompts in (2, 6):
        with simulated.events() as seen:
            tl_posgen.analyze(model, bundled_text(), n_prompts=n_prompts, **CUT)
        waits.append(seen.waits)
    assert 0 < waits[1] - waits[0] <= 4 * model.cfg.n_layers


def test_finished_prompts_leave_nothing_on_the_device(model, device):
    def held() -> int:
        gc.collect()
        return sum(torch.cuda.memory_allocated(index) for index in range(torch.cuda.device_count()))

    before, peaks = held(), []
    for n_prompts in (2, 6):
        torch.cuda.reset_peak_memory_stats()
        report = tl_posgen.analyze(model, bundled_text(), n_prompts=n_prompts, **CUT)
        peaks.append(torch.cuda.max_memory_allocated())
    assert report.keys()
    assert held() == before
    assert peaks[1] <= 1.01 * peaks[0]

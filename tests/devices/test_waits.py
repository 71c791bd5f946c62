"""The host's waits for an accelerator, and what finished prompts leave on it."""

import gc

import pytest
import torch

import tl_posgen
from tl_posgen.models.tokens import bundled_text
from tl_posgen.position.decomposition.numbers.mean_key_split import mean_key_products
from tl_posgen.position.decomposition.numbers.pair_moments import pair_moments
from tl_posgen.rope.rotation import Rope, inverse_frequencies

ROPE = Rope(inverse_frequencies(64, 10_000.0))
KERNELS = 390  # of a layer and prompt, its forward pass among them
CUT = {"length": 24, "nulls": 0, "progress": False}


@pytest.fixture
def model(models, device):
    if device.name == "mps":
        pytest.skip("sums are formed on the host, which has to have the numbers")
    return models("hooked")[0]


def test_a_forward_pass_of_the_default_measures_starts_few_kernels_and_is_waited_for_once_a_layer(model, device):
    if device.name == "gpu":
        pytest.skip("only a simulated device counts its waits")
    from devices import simulated

    tl_posgen.analyze(model, bundled_text(), n_prompts=1, **CUT)  # finds out what the layers are
    waits, launches = [], []
    for n_prompts in (2, 6):
        with simulated.events() as seen:
            tl_posgen.analyze(model, bundled_text(), n_prompts=n_prompts, **CUT)
        waits.append(seen.waits)
        launches.append(seen.launches)
    assert 0 < waits[1] - waits[0] <= 4 * (model.cfg.n_layers + 1), seen.at.most_common()  # one more for its tokens
    assert 0 < launches[1] - launches[0] <= 4 * KERNELS * model.cfg.n_layers


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


def test_as_many_kernels_start_for_many_heads_as_for_few(device):
    if device.name in ("gpu", "mps"):
        pytest.skip("only a simulated device counts its kernels; on MPS, sums are formed on the host")
    from devices import simulated

    launches = []
    for n_heads in (2, 16):
        q, k = torch.randn(2, n_heads, 500, 64, device=device.place)
        mean_key_products(
            q, k, ROPE, 1.0, [3], scores=pair_moments(q, k)
        ).correlation()  # keeps what depends on the length alone
        with simulated.events() as seen:
            mean_key_products(q, k, ROPE, 1.0, [3], scores=pair_moments(q, k)).correlation()
        launches.append(seen.launches)
    assert launches[0] == launches[1] > 0

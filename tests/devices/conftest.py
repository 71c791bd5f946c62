"""Whole analyses on an accelerator: `make devices`, `make gpu`, or pytest tests/devices --device cuda.

    --device cuda   one CUDA device, simulated as those below
    --device two    two CUDA devices, the layers of a model spread over them
    --device mps    an Apple GPU: no float64, no complex128
    --device tf32   one CUDA device whose float32 products round to ten bits, as torch allows on request
    --device gpu    the CUDA device of this machine, which is not simulated

Of a simulated device torch stays changed until the process ends, so these tests run in processes of their own, and are
left out without --device. Each compares with the CPU, in the same process.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from families import save_small


@dataclass(frozen=True)
class Device:
    """An accelerator, and how near its numbers must come to the CPU's.

    Attributes:
        name: as --device has it.
        place: torch's name of the (first) device.
        error: largest |difference| as a share of the largest value of an array, in passes of `analyze`.
        error_of_passes: in passes that a test makes, where TF32 may be at work.
        error_of_bfloat16: in passes of `analyze` of a model in bfloat16.
    """

    name: str
    place: str
    error: float
    error_of_passes: float
    error_of_bfloat16: float

    def load(self, directory: Path, backend: str = "auto", dtype: str = "auto") -> Any:
        """Load a model onto the device; the last layer onto the second where there are two."""
        import tl_posgen

        if self.name != "two":
            return tl_posgen.load_model(directory, backend, dtype, self.place)
        if backend == "bridge":
            return tl_posgen.load_model(directory, dtype=dtype, device_map=SPREAD)
        model = tl_posgen.load_model(directory, "hooked", dtype, self.place)
        model.cfg.n_devices = 2  # from which TransformerLens tells where each layer should be
        for module in (model.blocks[1], model.ln_final, model.unembed):
            module.to("cuda:1")
        return model


FIRST, SECOND = ("embed_tokens", "rotary_emb", "layers.0"), ("layers.1", "norm")
SPREAD = {f"model.{name}": number for number, names in enumerate((FIRST, SECOND)) for name in names} | {"lm_head": 1}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the folder out where no device is asked for, and what simulates one where a real one is."""
    name = config.getoption("--device")
    return None if name and (name, collection_path.name) != ("gpu", "simulated") else True


def pytest_configure(config: pytest.Config) -> None:
    if name := config.getoption("--device"):
        start(name)


@cache
def start(name: str) -> None:
    if name == "gpu":
        if not torch.cuda.is_available():
            pytest.exit("--device gpu: torch sees no CUDA device here", 4)
        return
    from devices import simulated

    if name == "mps":
        simulated.mps()
    else:
        simulated.cuda(2 if name == "two" else 1)
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> Device:
    name = pytestconfig.getoption("--device")
    if name == "gpu":  # its kernels round otherwise than the CPU's
        return Device(name, "cuda:0", 5e-5, 5e-5, 2**-6)
    return Device(name, "mps" if name == "mps" else "cuda:0", 1e-5, 0.02 if name == "tf32" else 1e-5, 1e-5)


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="session")
def models(device: Device, directory: Path) -> Any:
    """(backend, dtype) -> the small model on the device, and the same on the CPU."""
    import tl_posgen

    def pair(backend: str = "auto", dtype: str = "auto") -> tuple[Any, Any]:
        return device.load(directory, backend, dtype), tl_posgen.load_model(directory, backend, dtype, "cpu")

    return cache(pair)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)

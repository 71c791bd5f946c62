"""Simulated accelerators: "cuda:0", "cuda:1", .. and "mps" in a torch that was built for the CPU alone.

    simulated.cuda(2)                 # or simulated.mps()
    torch.ones(3, device="cuda")      # data in host memory, device type and dispatch of an accelerator

What the real device refuses is refused: operands on two devices, numpy() of what is there, a generator of another
device, matrix products of integers (CUDA), float64, complex128 and the operators without a Metal kernel (MPS). What it
cannot show: speed, rounding, limits of memory, errors that come later than their cause, kernels that compute something
else.

`events()` counts the places where the host waits for the device. The first import compiles backend.cpp, which takes
half a minute, g++ and Python's headers. torch stays changed until the process ends.
"""

import hashlib
import os
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from torch.utils.cpp_extension import include_paths, library_paths

HERE = Path(__file__).parent
BUILT = HERE.parents[2] / "build" / f"simulated-{torch.__version__}"


def compiled() -> Any:
    """Compile backend.cpp, unless that was done before, and return it as a module."""
    source = HERE / "backend.cpp"
    library = BUILT / f"{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}.so"
    if not library.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        part = library.with_suffix(f".{os.getpid()}")
        folders = [*include_paths(), sysconfig.get_path("include")]
        libraries = [f"-L{folder}" for folder in library_paths()]
        flags = ["-O1", "-g0", "-std=c++20", "-w", "-shared", "-fPIC", f"-DTORCH_EXTENSION_NAME={NAME}"]
        flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
        command = ["g++", *flags, *(f"-I{folder}" for folder in folders), str(source), "-o", str(part), *libraries]
        subprocess.run([*command, "-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"], check=True)
        part.rename(library)  # another process may have made it meanwhile
    spec = spec_from_file_location(NAME, library)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NAME = "simulated_backend"
backend = compiled()


def _storage_on(n: int, device: torch.device) -> torch.UntypedStorage:
    return torch.empty(n, dtype=torch.uint8, device=device).untyped_storage()


def _clone(self: torch.UntypedStorage) -> torch.UntypedStorage:  # torch's own knows compiled backends alone
    return _storage_on(self.nbytes(), self.device).copy_(self)


def _cpu(self: torch.UntypedStorage) -> torch.UntypedStorage:
    return self if self.device.type == "cpu" else _storage_on(self.nbytes(), torch.device("cpu")).copy_(self)


torch.UntypedStorage.clone, torch.UntypedStorage.cpu = _clone, _cpu


# Which operators a device has, from torch's own table


def _lacking(key: str) -> list[str]:
    """Operators that the CPU has a kernel for and `key` ("CUDA", "MPS") has not, as "aten::name.overload"."""
    import torchgen
    from torchgen.gen import parse_native_yaml
    from torchgen.model import DispatchKey

    native = Path(torchgen.__file__).parent / "packaged/ATen/native"
    parsed = parse_native_yaml(str(native / "native_functions.yaml"), str(native / "tags.yaml"))
    wanted, by_name = DispatchKey.parse(key), {str(f.func.name): f for f in parsed.native_functions}
    composite = {DispatchKey.CompositeImplicitAutograd, DispatchKey.CompositeExplicitAutograd}

    def has(function, dispatch) -> bool:
        if function.structured_delegate is not None:
            return has(by_name[str(function.structured_delegate)], dispatch)
        index = parsed.backend_indices[dispatch]
        return index.get_kernel(function) is not None or any(
            parsed.backend_indices[one].get_kernel(function) is not None for one in composite
        )

    lacking = {f"aten::{name}" for name, f in by_name.items() if has(f, DispatchKey.CPU) and not has(f, wanted)}
    return sorted(lacking - (MPS_FALLBACKS if key == "MPS" else set()))


MPS_FALLBACKS = {  # MPSFallback.mm: these run on the CPU, with a warning
    "aten::embedding_renorm_", "aten::linalg_svd", "aten::linalg_svd.U", "aten::col2im", "aten::_linalg_svd",
    "aten::_linalg_svd.U", "aten::upsample_nearest3d.vec",
}  # fmt: skip


def cuda(n: int = 1) -> None:
    """Let torch have n CUDA devices."""
    backend.configure("cuda", n, True, False, _lacking("CUDA"))
    _patch_cuda(n)


def mps() -> None:
    """Let torch have an Apple GPU."""
    backend.configure("mps", 1, False, True, _lacking("MPS"))
    torch.backends.mps.is_available = torch.backends.mps.is_built = lambda: True
    torch._C._mps_emptyCache = lambda: None
    torch._C._mps_deviceSynchronize = lambda: None
    torch.mps.manual_seed = lambda seed: None
    torch.mps.get_rng_state = lambda: torch.empty(0, dtype=torch.uint8)
    torch.mps.set_rng_state = lambda state: None
    torch.mps.current_allocated_memory = lambda: backend.held("mps", 0)


class _Stream:
    """A stream on which everything is done at once, and an event behind it."""

    def record_event(self) -> "_Stream":
        return self

    def synchronize(self) -> None:
        pass


class _Properties:
    name, major, minor, total_memory, multi_processor_count, warp_size = "simulated", 7, 5, 16 * 2**30, 40, 32
    regs_per_multiprocessor, max_threads_per_multi_processor, is_integrated = 65536, 1024, 0
    gcnArchName = "simulated"


def _patch_cuda(n: int) -> None:
    def index(device=None) -> int:
        if device is None:
            return backend.current()
        if isinstance(device, int):
            return device
        found = torch.device(device).index
        return backend.current() if found is None else found

    new = torch.cuda
    new._lazy_init = new.init = lambda: None
    new._initialized = True
    new.is_initialized = new.is_available = lambda: n > 0
    new.device_count = lambda: n
    new.current_device = backend.current
    new.set_device = lambda device: backend.exchange(index(device))
    new._exchange_device = new._maybe_exchange_device = backend.exchange
    new.get_device_properties = lambda device=None: _Properties()
    new.get_device_capability = lambda device=None: (7, 5)  # a T4
    new.get_device_name = lambda device=None: "simulated"
    new.mem_get_info = lambda device=None: (16 * 2**30 - backend.held("cuda", index(device)), 16 * 2**30)
    new.memory_allocated = new.memory_reserved = lambda device=None: backend.held("cuda", index(device))
    new.max_memory_allocated = lambda device=None: backend.peak("cuda", index(device))
    new.reset_peak_memory_stats = lambda device=None: backend.reset_peak("cuda", index(device))
    new.empty_cache = new.ipc_collect = lambda: None
    new.synchronize = lambda device=None: None
    new.is_bf16_supported = lambda including_emulation=True: True
    new.manual_seed = new.manual_seed_all = lambda seed: None
    new.get_rng_state = lambda device="cuda": torch.empty(0, dtype=torch.uint8)
    new.set_rng_state = lambda state, device="cuda": None
    new.get_rng_state_all = lambda: [torch.empty(0, dtype=torch.uint8)] * n
    new.set_rng_state_all = lambda states: None
    new.current_stream = new.default_stream = lambda device=None: _Stream()
    new._is_compiled = lambda: True
    torch._C._cuda_getCurrentRawStream = lambda device: 0


# Waits


class Events:
    """What made the host wait, by kind and by the line of the package that asked for it; kernels launched meanwhile."""

    def __init__(self) -> None:
        self.at: Counter[tuple[str, str]] = Counter()
        self.launches, self._began = 0, backend.launches()

    def __call__(self, kind: str) -> None:
        self.at[kind, self._line()] += 1

    def _line(self) -> str:
        frame, other = sys._getframe(2), None
        while frame is not None:
            name = frame.f_code.co_filename
            if "/tl_posgen/" in name:
                return f"{name[name.rindex('/tl_posgen/') + 1 :]}:{frame.f_lineno}"
            if other is None and "/site-packages/" in name and "/torch/" not in name:
                other = f"{name.split('/site-packages/')[-1]}:{frame.f_lineno}"
            frame = frame.f_back
        return other or "a thread of autograd"

    @property
    def waits(self) -> int:
        return self.at.total()


@contextmanager
def events() -> Iterator[Events]:
    found = Events()
    backend.listen(found)
    try:
        yield found
    finally:
        backend.listen(None)
        found.launches = backend.launches() - found._began

"""All numbers of all measures at one version, kept in a file: what a later version has to find again.

    python tests/freeze.py [MODEL ...]    # writes tests/frozen/MODEL.nc.xz

A file holds the token ids it was made from and, by measure, every stored array: of the model, each null model and each
group of prompts that intervals are made of.
"""

import lzma
import os
import sys
from collections.abc import Mapping
from functools import cache
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch
import xarray as xr
from quick_options import NAMES
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import tl_posgen
from tl_posgen.core import registry
from tl_posgen.errors import UnsupportedModelError
from tl_posgen.models.tokens import bundled_text, to_prompts

HERE = Path(__file__).parent
SHARED = HERE.parents[1] / "shared"
REAL = "SmolLM2_two_layers"
LENGTH, PROMPTS, LAYERS = 24, 4, 2
# the shuffle of versions up to 0.4, whose files call it "shuffled 0", left vectors as they were
CUT = {"nulls": {"random init": (0,), "shuffled matrices": (0,)}, "seed": 0, "progress": False}
GONE = ("any_distance", "plane_sufficiency", "key_cut")  # measures that 0.4 has not
# model -> its directory, a backend that loads it
MODELS = {
    "mini_bridge": ("mini", "bridge"),
    "mini_hooked": ("mini", "hooked"),
    "stories260K_bridge": (str(SHARED / "models" / "stories260K"), "bridge"),
    "stories260K_hooked": (str(SHARED / "models" / "stories260K"), "hooked"),
    "atome_vanilla_1m_bridge": (str(SHARED / "models" / "atome_vanilla_1m"), "bridge"),
    REAL: ("", "bridge"),
}
# options that take less time than the usual ones
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "substitution": {"widths": (4,), "dummy_distances": (8,)},
    "slash_ablation": {"schemes": ("thirds",)},
    "band_ablation": {"schemes": ("thirds",)},
    "perturbation": {"ratios": (0, 0.2), "reaches": ("uniform",), "n_draws": 1, "n_cloze": 0},
    "plane_perturbation": {"edits": ("shuffle_phases",), "strengths": (1.0,), "map_edits": ("shuffle_phases",)},
    "dummy_distance": {"distances": (0, 4, 64), "limits": (8,)},
    "length_extrapolation": {"inside": 12, "times": 2},
    "profiles": {"n_repeated": 2, "period": 4},
    "sources": {"check": True},
    "rules": {"budget": 4},
    "coupling": {"k": 2, "tokens": (0, -1), "chance_samples": 1},
    "token_coupling": {"k": 2, "tokens": (0, -1), "chance_samples": 1},
}


def real_model() -> Path | None:
    """Return the directory of SmolLM2; None where it is not (`make real-models`)."""
    places = [os.environ.get("TL_POSGEN_REAL_MODELS", ""), str(HERE.parent / "build" / "real_models")]
    found = [file for place in places if place for file in Path(place).rglob("SmolLM2-135M-Instruct*.gguf")]
    return found[0] if found else None


def two_layers(file: Path) -> Path:
    """Return a directory with the first two layers of a model in a GGUF file, made once."""
    directory = HERE.parent / "build" / REAL
    if not (directory / "config.json").exists():
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model.config.num_hidden_layers = LAYERS
        del model.config.quantization_config
        first = LlamaForCausalLM(LlamaConfig.from_dict(model.config.to_dict()))
        first.load_state_dict({name: one for name, one in model.state_dict().items() if name in first.state_dict()})
        tokenizer.save_pretrained(directory)
        first.save_pretrained(directory)
    return directory


@cache
def model_of(name: str) -> Any:
    """Return a model of `MODELS`; FileNotFoundError where it is not here."""
    place, backend = MODELS[name]
    if name == REAL:
        file = real_model()
        if file is None:
            raise FileNotFoundError("SmolLM2 is not here: `make real-models` brings it")
        place = str(two_layers(file))
    elif place != "mini" and not Path(place).is_dir():
        raise FileNotFoundError(f"{name}: no directory {place}")
    return tl_posgen.load_model(place, backend=backend, dtype="float32")


def frozen_file(name: str) -> Path:
    """Return the file of a model's frozen numbers."""
    return HERE / "frozen" / f"{name}.nc.xz"


def machine() -> str:
    """Return what float32 rounding depends on: the processor and torch."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    processor = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")
    return f"{processor}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


@cache
def found_now(model: str, measure: str) -> xr.Dataset:
    """Return the arrays that a measure has of a model, its nulls and its groups of prompts."""
    kind = registry.find(measure)
    assert kind is not None
    asked = [
        registry.measure_from(name, dict(OPTIONS.get(name, {})))
        for name in (*(one.name for one in kind.after), measure)
    ]
    try:
        report = tl_posgen.analyze(model_of(model), tokens_of(model), measures=asked, **CUT)
    except UnsupportedModelError as reason:
        return xr.Dataset(attrs={"refused": str(reason)})
    data = stored(report[measure].dataset)
    if "init" in data.coords:
        data = data.assign_coords(
            init=[str(one).replace("shuffled matrices", "shuffled") for one in data["init"].values]
        )
    return data


@cache
def tokens_of(model: str) -> torch.Tensor:
    """Return the token ids [prompt, pos] that a model is measured on: those of its file, else of the bundled text."""
    if frozen_file(model).exists():
        return torch.tensor(frozen(model)["prompts/tokens"].values)
    return torch.stack(to_prompts(model_of(model), bundled_text(), LENGTH, PROMPTS))


def stored(data: xr.Dataset) -> xr.Dataset:
    """Return the arrays of numbers, float32 at most, with their labels; texts are left out."""
    numbers = {str(name): one for name, one in data.data_vars.items() if one.dtype.kind in "fiub"}
    smaller = {name: one.astype(np.float32) if one.dtype.kind == "f" else one for name, one in numbers.items()}
    used = {dim for one in numbers.values() for dim in one.dims}
    labels = {str(dim): data.coords[dim].values for dim in used if dim in data.coords}
    labels = {
        dim: one if one.dtype.kind in "fiu" else np.array([*map(str, one.tolist())], dtype=object)
        for dim, one in labels.items()
    }
    plain = {name: (one.dims, one.values) for name, one in smaller.items()}
    return xr.Dataset(plain, {dim: (dim, one) for dim, one in labels.items()})


def freeze(model: str) -> None:
    """Write the file of a model."""
    tokens = tokens_of(model)
    made_by = {"version": tl_posgen.__version__, "machine": machine()}
    tree = {"prompts": xr.Dataset({"tokens": (("prompt", "pos"), tokens.numpy())}, attrs=made_by)}
    for name in NAMES:
        before = perf_counter()
        tree[name] = found_now(model, name)
        size = sum(one.size for one in tree[name].data_vars.values())
        print(f"{model} {name}: {size} numbers, {perf_counter() - before:.1f} s", flush=True)
    with TemporaryDirectory() as directory:
        plain = Path(directory) / "numbers.nc"
        xr.DataTree.from_dict(tree).to_netcdf(plain, engine="h5netcdf")
        frozen_file(model).write_bytes(lzma.compress(plain.read_bytes(), preset=9))


@cache
def frozen(model: str) -> xr.DataTree:
    """Return the frozen numbers of a model: a node a measure, and the prompts."""
    held = BytesIO(lzma.decompress(frozen_file(model).read_bytes()))
    groups = xr.open_groups(held, engine="h5netcdf")
    loaded = {name: group.load().copy(deep=True) for name, group in groups.items()}
    for group in groups.values():  # what HDF5 closes when Python has ended ends in a segmentation fault
        group.close()
    return xr.DataTree.from_dict(loaded)


if __name__ == "__main__":
    for chosen in sys.argv[1:] or MODELS:
        freeze(chosen)

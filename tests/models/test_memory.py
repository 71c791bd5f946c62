"""Models of a size: the checkpoint's dtype, weights that are held once, random inits in the place of the model."""

import json
import mmap
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import VOCAB, as_dtype, save_family
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import tl_posgen
from tl_posgen.core.null_models import NullModels
from tl_posgen.errors import InputError
from tl_posgen.models.loading.load import Pretrained, open_session
from tl_posgen.models.loading.random_init import random_like
from tl_posgen.models.memory import is_released, trim
from tl_posgen.models.session import session_of

TOKENS = torch.randint(VOCAB, (2, 40), generator=torch.Generator().manual_seed(4))
ON_GLIBC = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other C libraries keep freed memory in other ways"
)
QUIET = {"progress": False, "nulls": 0}


@pytest.fixture(scope="module")
def bfloat16(family_directory, tmp_path_factory):
    """A Llama whose checkpoint holds bfloat16."""
    return as_dtype(family_directory("llama"), tmp_path_factory.mktemp("bf16"), torch.bfloat16)


@pytest.mark.parametrize(
    ("held", "asked", "expected"),
    [
        (torch.bfloat16, "auto", torch.bfloat16),
        (torch.float32, "auto", torch.float32),
        (torch.float64, "auto", torch.float64),
        (torch.float16, "auto", torch.float32),  # on a CPU
        (torch.float16, "float16", torch.float16),
        (torch.bfloat16, "float32", torch.float32),
        (torch.float32, torch.bfloat16, torch.bfloat16),
    ],
)
def test_the_dtype_is_the_checkpoints_unless_another_is_asked_for(family_directory, tmp_path, held, asked, expected):
    directory = as_dtype(family_directory("llama"), tmp_path, held)
    assert session_of(tl_posgen.load_model(directory, dtype=asked)).dtype == expected


@pytest.mark.parametrize("dtype", ["float", "int8", "", torch.int8, torch.bool, torch.complex64])
def test_an_unknown_dtype_is_refused(dtype):
    with pytest.raises(InputError, match="give a floating-point one: auto, float32"):
        tl_posgen.load_model("mini", dtype=dtype)


def test_what_needs_more_digits_is_loaded_in_float32_and_says_so(bfloat16, capsys):
    found = tl_posgen.analyze(bfloat16, TOKENS, measures="coupling", **QUIET)
    assert found.provenance["dtype"] == "float32"
    assert capsys.readouterr().out.count("is loaded in float32, as bfloat16 has too few digits here") == 1
    with pytest.raises(InputError, match=r"float32"):
        tl_posgen.analyze(Pretrained(bfloat16, dtype="bfloat16"), TOKENS, measures="coupling", **QUIET)


def test_a_random_init_in_the_place_of_the_model_has_the_very_weights_of_a_fresh_one(family_directory, backend):
    directory = family_directory("llama")
    model = tl_posgen.load_model(directory, backend)
    fresh = [dict(random_like(model, seed).named_parameters()) for seed in (0, 3)]
    inits = NullModels(model, {"random init": (0, 3)}).models(in_place=True)
    for (_, made), expected in zip(inits, fresh, strict=True):
        assert is_released(model)
        own = dict(made.named_parameters())
        assert own.keys() == expected.keys()
        assert all(torch.equal(own[name], weight) for name, weight in expected.items())


def test_a_device_map_makes_a_bridge_that_stays_where_it_was_put(family_directory):
    model = open_session(Pretrained(family_directory("llama"), device_map={"": "cpu"})).model
    plain = tl_posgen.load_model(family_directory("llama"), "bridge")
    assert type(model).__name__ == "TransformerBridge"
    with torch.no_grad():
        assert torch.equal(model(TOKENS), plain(TOKENS))
        assert torch.equal(random_like(model, 1)(TOKENS), random_like(plain, 1)(TOKENS))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_map": {"": "meta"}}, "device 'meta' cannot be used"),
        ({"device_map": {"": "disk"}}, "weights on disk cannot be analysed"),
        ({"device_map": {"": 7}}, "device 'cuda:7' cannot be used"),
        ({"device_map": "everywhere"}, "give auto, balanced"),
        ({"device_map": "auto", "device": "cpu"}, "contradict each other"),
        ({"device_map": "auto", "backend": "hooked"}, "only a TransformerBridge"),
    ],
)
def test_a_device_map_that_cannot_be_used_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        tl_posgen.load_model("mini", **options)


PEAK = r"""
import re, sys, torch, transformers, transformer_lens
from pathlib import Path
from transformers import LlamaForCausalLM
import tl_posgen
from tl_posgen.models.loading.load import Pretrained
def peak():  # getrusage gives that of the process which started this one where it was larger
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024
text = torch.arange(8)[None]
tl_posgen.analyze(Pretrained("mini", sys.argv[2]), text, measures="three_axis", progress=False)
before = peak()
tl_posgen.analyze(Pretrained(sys.argv[1], sys.argv[2]), text, measures="three_axis", progress=False)
print(peak() - before)
"""


@ON_GLIBC
@pytest.mark.slow
def test_the_weights_are_held_once(tmp_path, backend):
    """Beyond what a small model takes, null models included; in a HookedTransformer they are copied from a file whose
    pages count too. Some 15 s. Blocks that were freed count only where the C library cannot give them back."""
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4, "num_attention_heads": 16}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=512, max_position_embeddings=64))
    save_family("llama", tmp_path)
    n_weights = sum(weight.numel() for weight in model.parameters())
    weights = {  # that differ, as others have no other order
        name: torch.linspace(0.009, 0.011, w.numel()).to(torch.bfloat16).view(w.shape)
        for name, w in model.state_dict().items()
    }
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {"dtype": "bfloat16", "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    blocks = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", PEAK, tmp_path, backend]
    ran = subprocess.run(command, env=blocks, capture_output=True, text=True, check=True)
    times = 1.3 if backend == "bridge" else 2
    assert n_weights < int(ran.stdout.split()[-1]) < times * 2 * n_weights + 30e6


@ON_GLIBC
def test_memory_freed_between_what_stays_goes_back_to_the_system_and_seldom_if_asked():
    def resident() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE / 2**20

    def leave_holes() -> list[torch.Tensor]:
        blocks = [torch.ones(2**14) for _ in range(2048)]  # of 64 KB, which come from the heap
        return blocks[::16]

    trim()
    before = resident()
    stays = leave_holes()
    held = resident() - before
    assert held > 100  # of 128 MB, most of them free
    trim(every=1000.0)  # just done
    assert resident() - before == pytest.approx(held, abs=2)
    trim(every=1e-9)
    assert resident() - before < 32
    assert len(stays) == 128


def test_a_random_init_has_the_weights_that_transformers_gives_that_seed(bfloat16):
    null = random_like(tl_posgen.load_model(bfloat16, "bridge"), 5)
    torch.manual_seed(5)
    plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(bfloat16))
    assert plain.dtype == torch.bfloat16
    assert torch.equal(null.blocks[1].mlp.original_component.up_proj.weight, plain.model.layers[1].mlp.up_proj.weight)

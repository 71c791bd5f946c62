"""The null model: the same shape with random weights."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from tl_posgen.models.backend import Model, backend_of
from tl_posgen.models.convert import hooked_parts
from tl_posgen.models.load import build, load_tokenizer
from tl_posgen.models.origin import Origin, origin_of, remember_origin
from tl_posgen.models.quiet import quiet
from tl_posgen.models.source import read_config


def random_like(model: Model, seed: int) -> Model:
    """A model of the same architecture and shape with freshly initialised weights: the null of every measure.

    The weights are those of `AutoModelForCausalLM.from_config(config)` right after `torch.manual_seed(seed)` on the
    CPU: the architecture's own initialisation in transformers, made into the same kind of object as `model`. So a
    HookedTransformer and a TransformerBridge of one model have the same null for the same seed.
    A HookedTransformer that `load_model` did not make has no Hugging Face config; its null comes from its own cfg and
    `init_weights` (cfg.init_mode), with the same seed. `origin_of(null).initialisation` says which rule was used.

    The global random state is left as it was.

    Example:
        >>> from tl_posgen import load_model
        >>> null = random_like(load_model("mini"), seed=0)
        >>> origin_of(null).initialisation
        'transformers, LlamaForCausalLM'
    """
    origin = origin_of(model)
    with quiet(), seeded(seed):
        if origin.directory is not None:
            config = read_config(origin.directory, origin.trust_remote_code)
            # a training checkpoint may lack a tokenizer of its own
            own = (origin.directory / "tokenizer_config.json").is_file()
            tokenizer = load_tokenizer(origin.directory, origin.trust_remote_code) if own else model.tokenizer
            null, rule = from_hf_config(model, config, tokenizer, origin)
        elif origin.backend == "bridge":
            config = copy.deepcopy(model.original_model.config)
            null, rule = from_hf_config(model, config, model.tokenizer, origin)
        else:
            null, rule = from_cfg(model)
    null.cfg.default_prepend_bos = model.cfg.default_prepend_bos
    remember_origin(null, replace(origin, seed=seed, initialisation=rule))
    return null


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, the CPU's random numbers are those after torch.manual_seed(seed); afterwards, those that were due."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def from_hf_config(model: Model, config: Any, tokenizer: Any, origin: Origin) -> tuple[Model, str]:
    from transformers import AutoModelForCausalLM

    hf_model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", trust_remote_code=origin.trust_remote_code
    ).eval()
    rule = f"transformers, {type(hf_model).__name__}"
    weight = next(model.parameters())
    return build(hf_model.to(weight.dtype), tokenizer, origin.name, str(weight.device), origin.backend), rule


def from_cfg(model: Model) -> tuple[Model, str]:
    """A HookedTransformer from a copy of the cfg; the cfg's own seed is left out, because it seeds everything."""
    HookedTransformer, _, _ = hooked_parts()
    cfg = copy.deepcopy(model.cfg)
    cfg.seed, cfg.tokenizer_name, cfg.init_weights = None, None, True
    null = HookedTransformer(cfg).eval()
    null.tokenizer, cfg.tokenizer_name = model.tokenizer, model.cfg.tokenizer_name
    assert backend_of(null) == "hooked"
    return null, f"HookedTransformer, init_mode {cfg.init_mode}"

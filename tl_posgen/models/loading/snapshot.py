"""Snapshot: a copy of the weights of a model in training, as an object that can be measured."""

import copy
from typing import Any

import torch

from tl_posgen.errors import InputError, ModelError
from tl_posgen.models.conversion.convert import build
from tl_posgen.models.conversion.quiet import quiet
from tl_posgen.models.model import Model


def snapshot(hf_model: Any, tokenizer: Any, backend: str = "auto") -> Model:
    """Copy the current weights of a transformers model into a model of TransformerLens, which shares nothing with it.

    The copy is in evaluation mode, in the dtype and on the device of the weights; conversion is checked as that of
    `load_model`. It takes the memory of the weights once more, and twice more while it is made.

    Args:
        hf_model: a causal language model of transformers; one inside DistributedDataParallel or torch.compile too.
        tokenizer: its tokenizer.
        backend: "auto", "hooked" or "bridge", as in `load_model`.

    Raises:
        InputError: no such model, no tokenizer, weights that are not here (offloaded or sharded).
        UnsupportedModelError: the architecture cannot be had with that backend.

    Example:
        >>> from transformers import AutoModelForCausalLM, AutoTokenizer
        >>> from tl_posgen.models.conversion.source import MINI
        >>> training = AutoModelForCausalLM.from_pretrained(MINI).train()
        >>> model = snapshot(training, AutoTokenizer.from_pretrained(MINI))
        >>> training.training, model.training
        (True, False)
    """
    from transformers import AutoModelForCausalLM, PreTrainedModel

    inner = getattr(hf_model, "_orig_mod", hf_model)  # torch.compile
    inner = getattr(inner, "module", inner)  # DistributedDataParallel
    if not isinstance(inner, PreTrainedModel):
        raise InputError(f"{type(inner).__name__} is no model of transformers; of adapters, give the merged model")
    if tokenizer is None:
        raise InputError(f"{type(inner).__name__}: give its tokenizer, which tokenises prompts and names tokens")
    if name := next((name for name, one in inner.named_parameters() if one.is_meta), None):
        raise InputError(
            f"{name} is on the device meta, which holds no numbers; measure a model whose weights are here"
        )
    weight, name = next(inner.parameters()), inner.config.name_or_path or type(inner).__name__

    def make() -> Any:
        config = copy.deepcopy(inner.config)
        made = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(weight.dtype)
        try:
            made.load_state_dict(inner.state_dict())
        except RuntimeError as error:
            whole = "its weights are sharded, or no longer those of its config"
            raise ModelError(f"{name}: no copy can be made; {whole}") from error
        return made.to(weight.device).eval()

    with quiet(seed=0), torch.autocast(weight.device.type, enabled=False):
        return build(make, tokenizer, name, str(weight.device), backend)

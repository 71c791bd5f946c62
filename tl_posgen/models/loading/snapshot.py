"""Copies of models of transformers whose weights are in memory, such as one in training."""

import copy
from pathlib import Path
from typing import Any

import torch

from tl_posgen.errors import InputError, ModelError
from tl_posgen.models.backends.backend import Origin
from tl_posgen.models.conversion.convert import build, copy_tables, lay_by_rows, weights_in
from tl_posgen.models.conversion.hugging_face import silenced
from tl_posgen.models.model import Model
from tl_posgen.models.session import session_of


def snapshot(hf_model: Any, tokenizer: Any, backend: str = "auto") -> Model:
    """Copy the current weights of a transformers model into a model of TransformerLens, which shares nothing with it.

    The copy is in evaluation mode, in the dtype and on the device of the weights; conversion is checked as that of
    `load_model`, and its random inits are drawn by the model's config as those of `load_model` are. It takes the memory
    of the weights once more, and twice more while it is made.

    Args:
        hf_model: a causal language model of transformers; one inside DistributedDataParallel or torch.compile too.
        tokenizer: its tokenizer.
        backend: "auto", "hooked" or "bridge", as in `load_model`.

    Raises:
        InputError: no such model, no tokenizer.
        ModelError: weights that are not here (offloaded or sharded), or not those of its config.
        UnsupportedModelError: the architecture cannot be had with that backend.

    Example:
        >>> from transformers import AutoModelForCausalLM, AutoTokenizer
        >>> from tl_posgen.models.conversion.files import MINI
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
    weight, source = next(inner.parameters()), inner.config.name_or_path or type(inner).__name__
    name = f"{Path(source).name if Path(source).is_dir() else source}, weights in memory"

    def make() -> Any:
        config = copy.deepcopy(inner.config)
        copied = weights_in(weight.dtype, AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
        try:
            copied.load_state_dict(inner.state_dict())
        except RuntimeError as error:
            reason = "its weights are sharded, offloaded, or no longer those of its config"
            raise ModelError(f"{name}: no copy can be made; {reason}") from error
        copy_tables(inner, copied)
        return copied.to(weight.device).eval()

    with silenced(seed=0), torch.autocast(weight.device.type, enabled=False):
        model = lay_by_rows(build(make, tokenizer, name, str(weight.device), backend))
    session = session_of(model)
    session.remember_origin(Origin(name, session.backend.name, config=copy.deepcopy(inner.config)))
    return model

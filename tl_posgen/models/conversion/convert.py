"""Making a HookedTransformer or a TransformerBridge of a Hugging Face model, its weights untouched, and proving it."""

import copy
import json
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from tl_posgen.errors import ModelError, UnsupportedModelError
from tl_posgen.models.conversion.files import first_line
from tl_posgen.models.memory import is_released, release, trim
from tl_posgen.models.model import Model
from tl_posgen.models.same_logits import how_they_differ, random_tokens, rounding_remedy

PARAMETERS = "_tl_posgen_parameters"  # attribute of a model made here: the number of weights before conversion
_N_TOKENS = 24
_REFUSALS = (ArithmeticError, AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError)


def build(make: Callable[[], Any], tokenizer: Any, name: str, device: str, backend: str) -> Model:
    """Make the model as the asked backend; "auto" is a HookedTransformer where that has the same logits.

    Args:
        make: makes the Hugging Face model: again, where it has become a HookedTransformer that is not the same.

    Raises:
        ModelError: the Hugging Face model does not run, or its logits of a few random tokens are not finite.
        UnsupportedModelError: TransformerLens cannot make that object of it, or one that has other logits.
    """
    hf_model = make()
    n_parameters = sum(weight.numel() for weight in hf_model.parameters())
    config, broken = hf_model.config.get_text_config(), "config.json or the weights are broken"
    limit = getattr(config, "max_position_embeddings", None) or 0  # XLNet says -1 of any number
    if getattr(config, "max_position_embeddings", None) == 0:
        raise ModelError(f"{name}: config.json says max_position_embeddings = 0; {broken}")
    tokens = random_tokens(config.vocab_size, min(_N_TOKENS, limit) if limit > 0 else _N_TOKENS)
    try:
        with torch.no_grad():
            expected: Tensor = hf_model(tokens.to(hf_model.device)).logits.cpu().float()
    except Exception as error:
        n, reason = tokens.shape[1], first_line(error)
        raise ModelError(f"{name}: does not run on {n} random tokens ({reason}); {broken}") from error
    if not expected.isfinite().all():
        narrow = rounding_remedy(hf_model.dtype)
        raise ModelError(f"{name}: logits of random tokens are not finite; {broken}.{narrow}")
    # TransformerLens loads a tokenizer anew with add_bos_token=True, unless it says that it has it: it stays as it is;
    # of one made in memory it misses the name
    tokenizer_copy = copy.deepcopy(tokenizer)
    adds_bos = tokenizer_copy.init_kwargs.pop("add_bos_token", None)
    tokenizer_copy.init_kwargs |= {"add_bos_token": True, "name_or_path": tokenizer_copy.name_or_path}
    model: Any = None
    if backend != "bridge":
        try:
            model = _as_hooked(hf_model, tokenizer_copy, name, device)
            _require_same(model, tokens, expected, name)
        except ModelError as error:
            if backend != "auto":
                remedy = ""
                with suppress(ModelError):  # named only where it works
                    bridge = _as_bridge(make() if is_released(hf_model) else hf_model, tokenizer_copy, name, device)
                    _require_same(bridge, tokens, expected, name)
                    remedy = "; use backend='bridge'"
                raise type(error)(str(error).rstrip(".") + remedy) from error
            model = None
    if model is None:
        model = _as_bridge(make() if is_released(hf_model) else hf_model, tokenizer_copy, name, device)
    init_kwargs = model.tokenizer.init_kwargs
    init_kwargs.pop("add_bos_token", None)
    init_kwargs |= {} if adds_bos is None else {"add_bos_token": adds_bos}
    # whether the tokenizer puts its BOS token in front of a text by default
    ids, plain = tokenizer("a").input_ids, tokenizer("a", add_special_tokens=False).input_ids
    model.cfg.default_prepend_bos = len(ids) > len(plain) and ids[0] == tokenizer.bos_token_id
    vars(model)[PARAMETERS] = n_parameters
    return model


def lay_by_rows(model: Model) -> Model:
    """Lay every weight out row by row, as TransformerLens makes them and safetensors takes them; return the model."""
    for weight in model.parameters():
        if not weight.is_contiguous():
            weight.data = weight.data.contiguous()
            trim(every=0.2)
    return model


def weights_in(dtype: torch.dtype, hf_model: Any) -> Any:
    """Return the model with its weights in a dtype; tables that it computes for itself, such as the frequencies of
    RoPE, stay as they are, as where transformers reads a model in that dtype."""
    saved = set(hf_model.state_dict())
    for name, tensor in chain(hf_model.named_parameters(), hf_model.named_buffers()):
        if name in saved and tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return hf_model


def copy_tables(model: Any, copied: Any) -> None:
    """Give a copy of a model the tables that are not saved with its weights, such as the frequencies of RoPE."""
    copied_tables = dict(copied.named_buffers())
    for name, table in model.named_buffers():
        if name in copied_tables and copied_tables[name].shape == table.shape:
            copied_tables[name].data = table.detach().to(copied_tables[name].device, copy=True)


def _require_same(model: Model, tokens: Tensor, expected: Tensor, name: str) -> None:
    """Refuse a conversion with other logits than the Hugging Face model's."""
    n = min(tokens.shape[1], model.cfg.n_ctx)
    with torch.no_grad():
        converted: Tensor = model(tokens[:, :n].to(model.cfg.device)).cpu().float()
    if differ := how_they_differ(converted, expected[:, :n], model.cfg.dtype):
        raise UnsupportedModelError(
            f"{name}: as a {type(model).__name__} its logits {differ}, so TransformerLens computes something else."
            + rounding_remedy(model.cfg.dtype)
        )


def hooked_parts() -> tuple[Any, Any, Any]:
    """Import HookedTransformer, its config class, and what makes config and weights of a Hugging Face model."""
    try:
        from transformer_lens import (  # pyright: ignore
            HookedTransformer,
            HookedTransformerConfig,
            loading_from_pretrained,
        )
    except ImportError as error:
        raise ModelError(
            "the installed TransformerLens has no HookedTransformer (it was removed in version 4); "
            'use backend="bridge", or install transformer-lens==3.9.0'
        ) from error
    return HookedTransformer, HookedTransformerConfig, loading_from_pretrained


def _as_hooked(hf_model: Any, tokenizer: Any, name: str, device: str) -> Model:
    """Make a HookedTransformer by TransformerLens' own table and converters, nothing folded or centred.

    The original is left without weights: they become the new model's, in the memory where they are, so that no two
    models are held. They keep their layout: TransformerLens transposes those of attention, the MLP and the unembedding
    in every pass, which copies nothing of a view that was transposed before.
    UnsupportedModelError for an architecture that TransformerLens does not convert, or whose RoPE scaling or window it
    loses, which logits of a few tokens do not show.
    """
    HookedTransformer, _, loading = hooked_parts()
    architecture, config = type(hf_model).__name__, hf_model.config
    written, n_ctx = config.to_dict(), getattr(config, "max_position_embeddings", None)
    written |= {"architectures": [architecture]} | ({"n_ctx": n_ctx} if n_ctx else {})  # which it reads of GPT-2
    try:
        with TemporaryDirectory() as place:  # it takes "llama" in a path for the architecture
            (Path(place) / "config.json").write_text(json.dumps(written, default=str))
            options = {"dtype": next(hf_model.parameters()).dtype, "device": device, "n_ctx": n_ctx}
            cfg = loading.get_pretrained_model_config(place, hf_cfg=written, **options)
            scaling = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
            if scaling not in ("default", "llama3"):
                raise ValueError(f"it has no {scaling!r} RoPE scaling")
            window, n = getattr(config, "sliding_window", None), cfg.n_layers
            types = getattr(config, "layer_types", None) or ["sliding_attention"] * n
            local = [bool(window) and kind == "sliding_attention" for kind in types]
            local_there = [bool(cfg.use_local_attn) and kind == "local" for kind in cfg.attn_types or [""] * n]
            if hasattr(config, "sliding_window") and (
                local != local_there or (any(local) and window != cfg.window_size)
            ):
                raise ValueError(f"its window of {window} tokens is lost")
            cfg.model_name, cfg.tokenizer_name = name, None  # it was the temporary directory
            model = HookedTransformer(cfg, tokenizer=tokenizer)
            state = loading.get_pretrained_state_dict(place, cfg, hf_model)
        state = {weight: tensor.detach() for weight, tensor in model.fill_missing_keys(state).items()}
        release(hf_model)
        model_state, parameters, taken = model.state_dict(), dict(model.named_parameters()), set[int]()
        with torch.no_grad():
            for weight in [weight for weight in state if weight in model_state]:
                converted = state.pop(weight)
                if weight not in parameters or converted.shape != model_state[weight].shape:
                    model_state[weight].copy_(converted)
                    continue
                # tied embeddings become two matrices, as TransformerLens has them
                converted = converted.clone() if converted.data_ptr() in taken else converted
                parameters[weight].data = converted.to(model_state[weight])
                taken.add(converted.data_ptr())
        trim()
    except _REFUSALS as error:
        raise UnsupportedModelError(
            f"{name}: TransformerLens cannot make this {architecture} a HookedTransformer ({first_line(error)})"
        ) from error
    return model.eval()


def _as_bridge(hf_model: Any, tokenizer: Any, name: str, device: str) -> Model:
    """Make a TransformerBridge around the model; one that is spread over devices stays there."""
    from transformer_lens.model_bridge import TransformerBridge

    hf_model.config.architectures = hf_model.config.architectures or [type(hf_model).__name__]
    spread = hasattr(hf_model, "hf_device_map")  # accelerate's
    place: dict[str, Any] = {} if spread else {"device": device}
    options = {"tokenizer": copy.deepcopy(tokenizer), "dtype": next(hf_model.parameters()).dtype, **place}
    try:
        hf_model = hf_model.to(device) if place else hf_model
        bridge = TransformerBridge.boot_transformers(name, hf_model=hf_model, **options)
    except _REFUSALS as error:
        reason = first_line(error).split(" Available architectures:")[0]  # a hundred of them
        raise UnsupportedModelError(
            f"{name}: TransformerLens has no bridge for {type(hf_model).__name__} ({reason})"
        ) from error
    if tokenizer.eos_token is None:
        # the bridge has given its copy an end-of-text token that the model has no embedding for, and texts can hold it
        bridge._tokenizer = tokenizer
    return bridge.eval()

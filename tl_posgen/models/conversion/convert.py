"""Making a HookedTransformer or a TransformerBridge of a Hugging Face model, its weights untouched, and proving it."""

import copy
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.errors import ModelError, UnsupportedModelError
from tl_posgen.models.conversion.source import first_line
from tl_posgen.models.conversion.weights import is_released, move_weights, release
from tl_posgen.models.model import Model
from tl_posgen.models.same_logits import logit_error, random_tokens, rounding_remedy

PARAMETERS = "_tl_posgen_parameters"  # attribute of a model made here: the number of weights before conversion
N_TOKENS = 24


class ReferenceLogits(NamedTuple):
    """Random tokens, and the logits of the Hugging Face model."""

    tokens: Int[Tensor, "1 pos"]
    logits: Float[Tensor, "1 pos vocabulary"]

    @classmethod
    def of_model(cls, hf_model: Any, name: str) -> "ReferenceLogits":
        """Run a few random tokens; ModelError where the model does not run, or its logits are not finite."""
        config = hf_model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None) or 0  # XLNet says -1 of any number
        n = min(N_TOKENS, limit) if limit > 0 else N_TOKENS
        tokens = random_tokens(config.vocab_size, n)
        broken = "config.json or the weights are broken"
        try:
            with torch.no_grad():
                logits: Tensor = hf_model(tokens.to(hf_model.device)).logits.cpu().float()
        except Exception as error:
            raise ModelError(f"{name}: does not run on {n} random tokens ({first_line(error)}); {broken}") from error
        if not logits.isfinite().all():
            narrow = rounding_remedy(hf_model.dtype)
            raise ModelError(f"{name}: logits of random tokens are not finite; {broken}.{narrow}")
        return cls(tokens, logits)

    def require_same(self, model: Model, name: str) -> None:
        """Refuse a conversion with other logits; see `logit_error`."""
        n = min(self.tokens.shape[1], model.cfg.n_ctx)
        with torch.no_grad():
            converted: Tensor = model(self.tokens[:, :n].to(model.cfg.device)).cpu().float()
        same, error, allowed = logit_error(converted, self.logits[:, :n], model.cfg.dtype)
        if not same:
            raise UnsupportedModelError(
                f"{name}: as a {type(model).__name__} its logits differ by {error:.2g} ({allowed:.2g} is allowed), "
                "so TransformerLens computes something else." + rounding_remedy(model.cfg.dtype)
            )


def build(make: Callable[[], Any], tokenizer: Any, name: str, device: str, backend: str) -> Model:
    """Make the model as the asked backend; "auto" is a HookedTransformer where that has the same logits.

    `make` makes the Hugging Face model: again, where it has become a HookedTransformer that is not the same.
    """
    hf_model = make()
    reference, model = ReferenceLogits.of_model(hf_model, name), None
    n_parameters = sum(weight.numel() for weight in hf_model.parameters())
    # TransformerLens loads a tokenizer anew with add_bos_token=True, unless it says that it has it: it stays as it is
    words = copy.deepcopy(tokenizer)
    adds_bos = words.init_kwargs.pop("add_bos_token", None)
    words.init_kwargs["add_bos_token"] = True
    if backend != "bridge":
        try:
            model = _as_hooked(hf_model, words, name, device, reference)
        except ModelError as error:
            if backend != "auto":
                remedy = ""
                with suppress(ModelError):  # named only where it works
                    other = _as_bridge(make() if is_released(hf_model) else hf_model, words, name, device)
                    reference.require_same(other, name)
                    remedy = "; use backend='bridge'"
                raise type(error)(str(error).rstrip(".") + remedy) from error
    if model is None:
        model = _as_bridge(make() if is_released(hf_model) else hf_model, words, name, device)
    own = model.tokenizer.init_kwargs
    own.pop("add_bos_token", None)
    own |= {} if adds_bos is None else {"add_bos_token": adds_bos}
    # whether the tokenizer puts its BOS token in front of a text by default
    ids, plain = tokenizer("a").input_ids, tokenizer("a", add_special_tokens=False).input_ids
    model.cfg.default_prepend_bos = len(ids) > len(plain) and ids[0] == tokenizer.bos_token_id
    vars(model)[PARAMETERS] = n_parameters
    return model


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


def _as_hooked(hf_model: Any, tokenizer: Any, name: str, device: str, reference: ReferenceLogits) -> Model:
    """Make a HookedTransformer by TransformerLens' own table and converters, nothing folded or centred, and prove it.

    The original is left without weights: each is freed when it has been copied, so that no two models are held.
    UnsupportedModelError for an architecture that TransformerLens does not convert, or converts to something else.
    """
    HookedTransformer, _, loading = hooked_parts()
    architecture, config = type(hf_model).__name__, hf_model.config
    written, n_ctx = config.to_dict(), getattr(config, "max_position_embeddings", None)
    written |= {"architectures": [architecture]} | ({"n_ctx": n_ctx} if n_ctx else {})  # which it reads of GPT-2
    try:
        with TemporaryDirectory() as place:  # it takes "llama" in a path for the architecture
            (Path(place) / "config.json").write_text(json.dumps(written, default=str))
            how = {"dtype": next(hf_model.parameters()).dtype, "device": device, "n_ctx": n_ctx}
            cfg = loading.get_pretrained_model_config(place, hf_cfg=written, **how)
            if lost := _lost(config, cfg):
                raise ValueError(lost)
            cfg.model_name, cfg.tokenizer_name = name, None  # it was the temporary directory
            model = HookedTransformer(cfg, tokenizer=tokenizer)
            state = loading.get_pretrained_state_dict(place, cfg, hf_model)
        state = {weight: tensor.detach() for weight, tensor in model.fill_missing_keys(state).items()}
        release(hf_model)
        move_weights(state, model)
    except (ArithmeticError, AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{name}: TransformerLens cannot make this {architecture} a HookedTransformer ({first_line(error)})"
        ) from error
    model.eval()
    reference.require_same(model, name)
    return model


def _lost(config: Any, cfg: Any) -> str:
    """Say what TransformerLens' config lacks of the model's that its logits of a few tokens do not show; "" if nothing
    that is known."""
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind not in ("default", "llama3"):
        return f"it has no {kind!r} RoPE scaling"
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * cfg.n_layers
    window = getattr(config, "sliding_window", None)
    local = [bool(window) and kind == "sliding_attention" for kind in types]
    given = [kind == "local" for kind in (cfg.attn_types or [])] if cfg.use_local_attn else [False] * cfg.n_layers
    if hasattr(config, "sliding_window") and (local != given or (any(local) and window != cfg.window_size)):
        return f"its window of {window} tokens is lost"
    return ""


def _as_bridge(hf_model: Any, tokenizer: Any, name: str, device: str) -> Model:
    """Make a TransformerBridge around the model; one that is spread over devices stays there."""
    from transformer_lens.model_bridge import TransformerBridge

    hf_model.config.architectures = hf_model.config.architectures or [type(hf_model).__name__]
    dtype = next(hf_model.parameters()).dtype
    place: dict[str, Any] = {} if spread_of(hf_model) else {"device": device}
    try:
        hf_model = hf_model.to(device) if place else hf_model
        bridge = TransformerBridge.boot_transformers(
            name, hf_model=hf_model, tokenizer=copy.deepcopy(tokenizer), dtype=dtype, **place
        )
    except (AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = first_line(error).split(" Available architectures:")[0]  # a hundred of them
        raise UnsupportedModelError(
            f"{name}: TransformerLens has no bridge for {type(hf_model).__name__} ({reason})"
        ) from error
    if tokenizer.eos_token is None:
        # the bridge has given its copy an end-of-text token that the model has no embedding for, and texts can hold it
        bridge._tokenizer = tokenizer
    bridge.eval()
    return bridge


def spread_of(hf_model: Any) -> dict[str, Any] | None:
    """Return the device of each module, where accelerate has spread the model over devices."""
    return getattr(hf_model, "hf_device_map", None)


def build_random(
    config: Any,
    tokenizer: Any,
    name: str,
    like: Model,
    backend: str,
    trust_remote_code: bool,
    *,
    moved: bool = False,
    spread: dict[str, Any] | None = None,
) -> tuple[Model, str]:
    """Make a model of a Hugging Face config, initialised by transformers, in the dtype and on the device of `like` or
    as `spread_of` says; and the rule that made its weights.

    With `moved`, every weight is moved off its initial value, so that a forgotten norm or bias shows.
    """
    from transformers import AutoModelForCausalLM

    weight, rules = next(like.parameters()), []

    def make() -> Any:
        options = {"attn_implementation": "eager", "trust_remote_code": trust_remote_code}
        hf_model = AutoModelForCausalLM.from_config(copy.deepcopy(config), **options).eval()
        rules.append(f"transformers, {type(hf_model).__name__}")
        if moved:
            with torch.no_grad():
                for parameter in hf_model.parameters():
                    noise = torch.randn_like(parameter)
                    parameter.add_(0.3 * noise if parameter.ndim == 1 else noise * parameter.shape[-1] ** -0.5)
        hf_model = hf_model.to(weight.dtype)
        if spread:
            from accelerate import dispatch_model

            hf_model = dispatch_model(hf_model, spread)
        return hf_model

    return build(make, tokenizer, name, str(weight.device), backend), rules[0]

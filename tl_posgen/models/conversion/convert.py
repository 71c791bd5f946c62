"""Converting a Hugging Face model to the object asked for, its weights untouched."""

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.errors import ModelError, UnsupportedModelError
from tl_posgen.models.conversion.hooked_config import RECIPES, hooked_settings
from tl_posgen.models.conversion.source import first_line
from tl_posgen.models.conversion.weights import MOST_FREED, is_released, release, trim
from tl_posgen.models.model import Model
from tl_posgen.models.same_logits import logit_error, random_tokens, rounding_remedy


def as_hooked(hf_model: Any, tokenizer: Any, name: str, device: str, tried: "Tried") -> Model:
    """Make a HookedTransformer with the same weights, none folded or centred; compare its logits with the original's.

    The original is left without weights: each is let go when it has been copied, so that no two models are held.
    UnsupportedModelError for an architecture without a recipe, or a model that the recipe does not reproduce.
    """
    HookedTransformer, HookedTransformerConfig, conversions = hooked_parts()
    architecture = type(hf_model).__name__
    dtype = next(hf_model.parameters()).dtype
    try:
        settings = hooked_settings(hf_model.config, architecture)
        cfg = HookedTransformerConfig(**settings, model_name=name, dtype=dtype, device=device)
        model = HookedTransformer(cfg, tokenizer=tokenizer)
        state = getattr(conversions, f"convert_{RECIPES[architecture][0]}_weights")(hf_model, cfg)
        state = {weight: tensor.detach() for weight, tensor in model.fill_missing_keys(state).items()}
        release(hf_model)
        move_weights(state, model)
    except (ArithmeticError, AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{name}: TransformerLens cannot make this {architecture} a HookedTransformer ({first_line(error)})"
        ) from error
    model.eval()
    require_same_logits(model, tried, name)
    return model


def move_weights(state: dict[str, Tensor], model: Any) -> None:
    """Copy every tensor into the model's own of that name, and let it go."""
    own, freed = model.state_dict(), 0
    with torch.no_grad():
        for name in [name for name in state if name in own]:
            weight = state.pop(name)
            if weight.shape != own[name].shape:
                raise ValueError(f"{name} is {list(weight.shape)}, and not {list(own[name].shape)}")
            own[name].copy_(weight)
            freed += weight.nbytes
            del weight
            if freed > MOST_FREED:
                trim()
                freed = 0
    trim()


def hooked_parts() -> tuple[Any, Any, Any]:
    """Import HookedTransformer, its config class and the weight converters."""
    try:
        from transformer_lens import HookedTransformer, HookedTransformerConfig  # pyright: ignore
        from transformer_lens.pretrained import weight_conversions  # pyright: ignore
    except ImportError as error:
        raise ModelError(
            "the installed TransformerLens has no HookedTransformer (it was removed in version 4); "
            'use backend="bridge", or install transformer-lens==3.9.0'
        ) from error
    return HookedTransformer, HookedTransformerConfig, weight_conversions


PARAMETERS = "_tl_posgen_parameters"  # attribute of a model made here: the number of weights before conversion


class Tried(NamedTuple):
    """Random tokens, and the logits of the Hugging Face model."""

    tokens: Int[Tensor, "1 pos"]
    logits: Float[Tensor, "1 pos vocabulary"]


def try_out(hf_model: Any, name: str) -> Tried:
    """Run a few random tokens through the model; ModelError where it does not run, or its logits are not finite."""
    config = hf_model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None) or 0  # XLNet says -1 of any number
    n = min(24, limit) if limit > 0 else 24
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
    return Tried(tokens, logits)


def require_same_logits(model: Model, tried: Tried, name: str) -> None:
    """Refuse a conversion that changes the logits of a few random tokens; see `logit_error`."""
    n = min(tried.tokens.shape[1], model.cfg.n_ctx)
    original = tried.logits[:, :n]
    with torch.no_grad():
        converted: Tensor = model(tried.tokens[:, :n].to(model.cfg.device)).cpu().float()
    same, error, allowed = logit_error(converted, original, model.cfg.dtype)
    if not same:
        raise UnsupportedModelError(
            f"{name}: as a {type(model).__name__} its logits differ by {error:.2g} ({allowed:.2g} is allowed), "
            "so TransformerLens computes something else." + rounding_remedy(model.cfg.dtype)
        )


def as_bridge(hf_model: Any, tokenizer: Any, name: str, device: str) -> Model:
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


def build(make: Callable[[], Any], tokenizer: Any, name: str, device: str, backend: str) -> Model:
    """Make the model as the asked backend; "auto" is a HookedTransformer where that has the same logits.

    `make` makes the Hugging Face model: again, where it has become a HookedTransformer that is not the same.
    """
    hf_model = make()
    tried, model = try_out(hf_model, name), None
    n_parameters = sum(weight.numel() for weight in hf_model.parameters())
    # TransformerLens loads a tokenizer anew with add_bos_token=True, unless it says that it has it: it stays as it is
    words = copy.deepcopy(tokenizer)
    adds_bos = words.init_kwargs.pop("add_bos_token", None)
    words.init_kwargs["add_bos_token"] = True
    if backend != "bridge":
        try:
            model = as_hooked(hf_model, words, name, device, tried)
        except ModelError as error:
            if backend != "auto":
                remedy = ""
                with suppress(ModelError):  # named only where it works
                    other = as_bridge(make() if is_released(hf_model) else hf_model, words, name, device)
                    require_same_logits(other, tried, name)
                    remedy = "; use backend='bridge'"
                raise type(error)(str(error).rstrip(".") + remedy) from error
    if model is None:
        model = as_bridge(make() if is_released(hf_model) else hf_model, words, name, device)
    own = model.tokenizer.init_kwargs
    own.pop("add_bos_token", None)
    own |= {} if adds_bos is None else {"add_bos_token": adds_bos}
    # whether the tokenizer puts its BOS token in front of a text by default
    ids, plain = tokenizer("a").input_ids, tokenizer("a", add_special_tokens=False).input_ids
    model.cfg.default_prepend_bos = len(ids) > len(plain) and ids[0] == tokenizer.bos_token_id
    vars(model)[PARAMETERS] = n_parameters
    return model


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
        hf_model = AutoModelForCausalLM.from_config(config, **options).eval()
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

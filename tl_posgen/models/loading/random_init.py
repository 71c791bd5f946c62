"""Random init: a model of the same architecture and shape with freshly drawn weights."""

import re
from dataclasses import replace

import torch

from tl_posgen.errors import InputError, check_seed
from tl_posgen.models.conversion.convert import lay_by_rows
from tl_posgen.models.conversion.hugging_face import silenced
from tl_posgen.models.model import Model
from tl_posgen.models.session import Session, session_of


def random_like(model: Model | Session, seed: int, device: str = "cpu") -> Model:
    """Make a model of the same architecture and shape with freshly initialised weights: the null of every measure.

    The weights are those of `AutoModelForCausalLM.from_config(config)` right after `torch.manual_seed(seed)` on the
    CPU: the architecture's own initialisation in transformers, made into the same kind of object as `model`. So a
    HookedTransformer and a TransformerBridge of one model have the same null for the same seed.
    A HookedTransformer that `load_model` did not make has no Hugging Face config; its null comes from its own cfg and
    `init_weights` (cfg.init_mode), with the same seed. `session_of(null).origin.initialisation` says which rule it
    was.

    The global random state is left as it was.

    Args:
        seed: of the draw.
        device: on which the weights are drawn, "cpu" or a CUDA device such as "cuda": other numbers, and far sooner for
            a model of billions of weights. The model that comes back is where `model` is.

    Raises:
        InputError: another device, or one that is not here.

    Example:
        >>> from tl_posgen import load_model
        >>> null = random_like(load_model("mini"), seed=0)
        >>> session_of(null).origin.initialisation
        'transformers, LlamaForCausalLM, initializer_range 0.02'
    """
    return lay_by_rows(drawn_like(session_of(model), seed, device))


def drawn_like(session: Session, seed: int, device: str = "cpu") -> Model:
    """Return `random_like` for this package's own passes: see `Pretrained.load` on `by_rows`."""
    model, origin = session.model, session.origin
    with silenced(check_seed(seed), check_draws_on(device)):
        null, rule = session.backend.random_init(origin)
    null.cfg.default_prepend_bos = model.cfg.default_prepend_bos
    session_of(null).remember_origin(replace(origin, seed=seed, initialisation=rule, dequantised_from=None))
    return null


def check_draws_on(device: str) -> str:
    """Return the device of the draws; InputError for one that cannot be had."""
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    if not isinstance(device, str) or re.fullmatch(rf"({'|'.join(kinds)})(:\d+)?", device) is None:
        raise InputError(
            f"null_device={device!r}: random weights are drawn on {' or '.join(kinds)} here; give one of them"
        )
    return device

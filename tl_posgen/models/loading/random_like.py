"""Random init: the null model, of the same shape with random weights."""

from dataclasses import replace

from tl_posgen.errors import InputError
from tl_posgen.models.conversion.quiet import quiet
from tl_posgen.models.model import Model
from tl_posgen.models.session import Session, session_of


def require_seed(seed: object) -> None:
    """Refuse what torch's generators do not take."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise InputError(f"seed = {seed!r}: give a whole number, 0 or more")


def random_like(model: Model | Session, seed: int) -> Model:
    """Make a model of the same architecture and shape with freshly initialised weights: the null of every measure.

    The weights are those of `AutoModelForCausalLM.from_config(config)` right after `torch.manual_seed(seed)` on the
    CPU: the architecture's own initialisation in transformers, made into the same kind of object as `model`. So a
    HookedTransformer and a TransformerBridge of one model have the same null for the same seed.
    A HookedTransformer that `load_model` did not make has no Hugging Face config; its null comes from its own cfg and
    `init_weights` (cfg.init_mode), with the same seed. `session_of(null).origin.initialisation` says which rule it
    was.

    The global random state is left as it was.

    Example:
        >>> from tl_posgen import load_model
        >>> null = random_like(load_model("mini"), seed=0)
        >>> session_of(null).origin.initialisation
        'transformers, LlamaForCausalLM'
    """
    require_seed(seed)
    session = session_of(model)
    model, origin = session.model, session.origin
    with quiet(seed):
        null, rule = session.backend.random_init(origin)
    null.cfg.default_prepend_bos = model.cfg.default_prepend_bos
    session_of(null).remember_origin(replace(origin, seed=seed, initialisation=rule, dequantised_from=None))
    return null

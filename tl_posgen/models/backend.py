"""The two objects TransformerLens has for a model, told apart without importing TransformerLens."""

from typing import Any, Literal, TypeAlias

from tl_posgen.errors import InputError

Model: TypeAlias = Any  # a HookedTransformer (TransformerLens 3.9) or a TransformerBridge (3.9 and 4)
Backend = Literal["hooked", "bridge"]


def backend_of(model: Model) -> Backend:
    """Which of the two `model` is.

    Raises:
        InputError: it is neither.
    """
    classes = {cls.__name__ for cls in type(model).__mro__}
    if "HookedTransformer" in classes:
        return "hooked"
    if "TransformerBridge" in classes:
        return "bridge"
    raise InputError(
        f"{type(model).__name__} is not a model of TransformerLens; "
        "load one with tl_posgen.load_model(name_or_directory) or TransformerBridge.boot_transformers"
    )

"""The second null model: the trained weights, their entries in random order."""

import copy
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from tl_posgen.errors import InputError
from tl_posgen.models.backend import Model, backend_of
from tl_posgen.models.origin import origin_of, remember_origin
from tl_posgen.models.random_like import random_like

RULE = "trained, entries of every weight matrix permuted"


def shuffled_like(model: Model, seed: int) -> Model:
    """W -> the entries of W in random order, for every weight matrix W: trained values without trained structure.

    What a measure keeps here, it owes to the sizes of the weights; what it loses, to their arrangement. Embeddings are
    matrices too; the queries of all heads of a layer are one matrix (so are keys, and values), so entries change heads.
    Biases and the gains of norms stay as they are: training set them coordinate by coordinate, and without them the
    scores would have another size altogether. The shuffle is ours.

    A new model of the same kind comes back, without hooks; the weights are those that `model` has in memory. Which
    permutation a seed gives depends on how the backend lays out its matrices, so a HookedTransformer and a
    TransformerBridge of one model have two draws of the same null. The global random state is left as it was.

    Raises:
        InputError: a TransformerBridge whose weights no longer have the architecture's names and shapes.

    Example:
        >>> import torch
        >>> from tl_posgen import load_model
        >>> model = load_model("mini")
        >>> null = shuffled_like(model, seed=0)
        >>> one, other = (next(m.parameters()).flatten() for m in (model, null))
        >>> torch.equal(one, other), torch.equal(one.sort().values, other.sort().values)
        (False, True)
    """
    null = copy_of(model)
    generator = torch.Generator().manual_seed(seed)
    weights = dict(null.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            if is_matrix(name, weight) and not is_joint(weight, weights.values()):
                order = torch.randperm(weight.numel(), generator=generator).to(weight.device)
                weight.copy_(weight.flatten()[order].view_as(weight))
    remember_origin(null, replace(origin_of(model), seed=seed, initialisation=RULE))
    return null


def shuffled_label(seed: int) -> str:
    return f"shuffled weights (seed {seed})"


def copy_of(model: Model) -> Model:
    """The same weights in a model that shares nothing with the first, and without its hooks."""
    if backend_of(model) == "hooked":
        twin = copy.deepcopy(model)
        twin.reset_hooks()
        return twin
    # a deep copy of a bridge can go on using the original's weights: adapters replace methods by closures over them
    twin = random_like(model, seed=0)
    weights, own = dict(model.named_parameters()), dict(twin.named_parameters())
    if {name: w.shape for name, w in weights.items()} != {name: w.shape for name, w in own.items()}:
        raise InputError(
            "this bridge's weights were processed after loading, so no copy of it can be made; load the model anew"
        )
    with torch.no_grad():
        for name, weight in weights.items():
            own[name].copy_(weight)
    return twin


def is_matrix(name: str, weight: Tensor) -> bool:
    """A HookedTransformer keeps one bias per head in a matrix, b_Q [head, d_head]; that is a bias all the same."""
    return weight.ndim > 1 and not name.rsplit(".", 1)[-1].lstrip("_").startswith("b_")


def is_joint(weight: Tensor, weights: Iterable[Tensor]) -> bool:
    """Whether this is a whole piece of memory that other weights are parts of, as a bridge's joint q/k/v; its parts are
    shuffled instead."""
    memory = weight.untyped_storage()
    whole = weight.numel() * weight.element_size() == memory.nbytes()
    parts = [w for w in weights if w.untyped_storage().data_ptr() == memory.data_ptr() and w.numel() < weight.numel()]
    return whole and bool(parts)

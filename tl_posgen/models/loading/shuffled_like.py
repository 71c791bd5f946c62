"""Shuffled weights: the second null model, trained weights with their entries in random order."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from tl_posgen.models.conversion.quiet import quiet
from tl_posgen.models.loading.random_like import require_seed
from tl_posgen.models.model import Model
from tl_posgen.models.session import Session, session_of

RULE = "trained, entries of every weight matrix permuted"


def shuffled_like(model: Model | Session, seed: int) -> Model:
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
    require_seed(seed)
    session = session_of(model)
    null = copy_of(session)
    shuffle(null, seed)
    session_of(null).remember_origin(replace(session.origin, seed=seed, initialisation=RULE), proved=True)
    return null


def shuffle(model: Model, seed: int, *, undo: bool = False) -> None:
    """Put the entries of every weight matrix of this very model in random order, or back from that order."""
    generator = torch.Generator().manual_seed(seed)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            if is_matrix(name, weight) and not _is_joint(weight, weights.values()):
                order = torch.randperm(weight.numel(), generator=generator, device="cpu").to(weight.device)
                flat = weight.flatten()
                shuffled = torch.empty_like(flat).index_copy_(0, order, flat) if undo else flat[order]
                weight.copy_(shuffled.view_as(weight))


def copy_of(session: Session) -> Model:
    """Return the same weights in a model that shares nothing with the first, and without its hooks."""
    with quiet(seed=0):
        return session.backend.copy(session.origin)


def is_matrix(name: str, weight: Tensor) -> bool:
    """Tell matrices from biases, of which a HookedTransformer keeps one per head in b_Q [head, d_head]."""
    return weight.ndim > 1 and not name.rsplit(".", 1)[-1].lstrip("_").startswith("b_")


def _is_joint(weight: Tensor, weights: Iterable[Tensor]) -> bool:
    """Tell whether other weights are parts of its memory (a bridge's joint q/k/v); those are shuffled instead."""
    memory = weight.untyped_storage()
    whole = weight.numel() * weight.element_size() == memory.nbytes()
    parts = [w for w in weights if w.untyped_storage().data_ptr() == memory.data_ptr() and w.numel() < weight.numel()]
    return whole and bool(parts)

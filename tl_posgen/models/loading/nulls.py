"""The null models of a model: random init, of the same shape, and shuffled weights, trained ones in random order."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tl_posgen.arithmetic import elements_at_once, row_ranges
from tl_posgen.errors import InputError, check_seed
from tl_posgen.models.conversion.hugging_face import quiet
from tl_posgen.models.memory import trim
from tl_posgen.models.model import Model
from tl_posgen.models.session import Session, session_of

_AT_ONCE = 2**24  # entries that are moved: smaller blocks stay in the heap, between those that are freed
_SHUFFLED_BY = "trained, entries of every weight matrix permuted"


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
        'transformers, LlamaForCausalLM'
    """
    session = session_of(model)
    model, origin = session.model, session.origin
    with quiet(check_seed(seed), check_draws_on(device)):
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
    seed, session = check_seed(seed), session_of(model)
    with quiet(seed=0):
        null = session.backend.copy(session.origin)
    shuffle(null, seed)
    session_of(null).remember_origin(replace(session.origin, seed=seed, initialisation=_SHUFFLED_BY), proved=True)
    return null


def shuffle(model: Model, seed: int, *, undo: bool = False) -> None:
    """Put the entries of every weight matrix of this very model in random order, or back from that order."""
    generator = torch.Generator().manual_seed(seed)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            memory = weight.untyped_storage()
            # parts of its memory that are weights too (a bridge's joint q/k/v) are shuffled instead
            is_joint = weight.nbytes == memory.nbytes() and any(
                part.untyped_storage().data_ptr() == memory.data_ptr() and part.numel() < weight.numel()
                for part in weights.values()
            )
            if is_matrix(name, weight) and not is_joint:
                n, flat = weight.numel(), weight.flatten()
                indices = torch.int32 if n < 2**31 else torch.int64  # both give the same permutation
                order = torch.randperm(n, generator=generator, dtype=indices, device="cpu").to(weight.device)
                # entries take the memory of the part of the order that has been read: a permutation is as large as W
                reused = not undo and flat.element_size() <= order.element_size()
                shuffled = order.view(flat.dtype)[:n] if reused else torch.empty_like(flat)
                for start, stop in row_ranges(n, 1, elements_at_once(flat.device, _AT_ONCE)):
                    some = order[start:stop]
                    if undo:
                        shuffled[some] = flat[start:stop]
                    else:
                        shuffled[start:stop] = flat.index_select(0, some)
                weight.copy_(shuffled.view_as(weight))
                if n > 2**20:
                    del order, flat, shuffled
                    trim(every=0.2)


def is_matrix(name: str, weight: Tensor) -> bool:
    """Tell matrices from biases, of which a HookedTransformer keeps one per head in b_Q [head, d_head]."""
    return weight.ndim > 1 and not name.rsplit(".", 1)[-1].lstrip("_").startswith("b_")


def permuted_like(session: Session, seed: int) -> Model:
    """The trained blocks in random order: every layer is a trained layer, and none reads what it was trained on."""
    with quiet(seed=0):
        null = session.backend.copy(session.origin)
    order = torch.randperm(session.model.cfg.n_layers, generator=torch.Generator().manual_seed(seed)).tolist()
    given = dict(session.model.named_parameters())
    with torch.no_grad():
        for name, weight in null.named_parameters():
            if found := re.fullmatch(r"(.*?(?:blocks|layers|h)\.)(\d+)(\..*)", name):
                weight.copy_(given[f"{found[1]}{order[int(found[2])]}{found[3]}"])
    session_of(null).remember_origin(replace(session.origin, seed=seed, initialisation="layers permuted"), proved=True)
    return null


@dataclass(frozen=True)
class NullKind:
    """A kind of null model: all that anything else asks of it.

    Attributes:
        name: behind a number, "random init". field: of summary.json, and of provenance with "_seeds".
        prefix: before the seed, its label along the dim init.
        title: of one model. told: what the page says of it.
        make: from a session, a seed and a device of draws to the model.
        of_weights: whether it is made of the trained weights, whose memory a random init may take.
        runs: whether measures that run the model have it where no seeds are given.
        colour, dash: in figures.
    """

    name: str
    field: str
    prefix: str
    title: str
    told: str
    make: Callable[[Session, int, str], Model]
    of_weights: bool
    runs: bool
    colour: str
    dash: str

    def label(self, seed: int) -> str:
        """Return the label along init."""
        return f"{self.prefix}{seed}"

    @property
    def seeds(self) -> str:
        """The name of its seeds in provenance."""
        return {"inits": "null_seeds"}.get(self.field, f"{self.field}_seeds")


_KINDS = (
    NullKind(
        *("random init", "inits", "", "random init"),
        "for a randomly initialised model of the same shape (random init)",
        random_like,
        of_weights=False,
        runs=True,
        colour="#9ca3af",
        dash="dash",
    ),
    NullKind(
        *("shuffled", "shuffled", "shuffled ", "shuffled weights"),
        "for the trained weights with the entries of every matrix in random order (shuffled)",
        lambda session, seed, _: shuffled_like(session, seed),
        of_weights=True,
        runs=False,
        colour="#d8b88a",
        dash="dot",
    ),
    NullKind(
        *("permuted", "permuted", "permuted ", "permuted layers"),
        "for the trained layers in random order (permuted)",
        lambda session, seed, _: permuted_like(session, seed),
        of_weights=True,
        runs=False,
        colour="#a8c5a0",
        dash="dashdot",
    ),
)
NULL_KINDS: Mapping[str, NullKind] = {kind.name: kind for kind in _KINDS}  # in the order in which they are told


def kind_of(label: str) -> tuple[NullKind, int]:
    """Return the kind and the seed of a null model by its label along init."""
    prefix, _, seed = str(label).rpartition(" ")
    return next(kind for kind in NULL_KINDS.values() if kind.prefix.strip() == prefix), int(seed)


def in_order(labels: Any) -> list[str]:
    """Return labels along init as they are told, the model's own first."""
    order = [kind.prefix for kind in NULL_KINDS.values()]
    return sorted(labels, key=lambda one: order.index(kind_of(one)[0].prefix) if one[-1:].isdigit() else -1)


def null_label(init: int | str) -> str:
    """Return the name of a null model by its label along the dim init: a random init's seed, or "shuffled 0"."""
    kind, seed = kind_of(str(init))
    return f"{kind.title} (seed {seed})"

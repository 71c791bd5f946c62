"""Base of the measures of coupling: their options, and Jacobians in each other's top singular bases."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.core.measure import Measure
from tl_posgen.core.options import Count, Each, Whole
from tl_posgen.core.run import Run
from tl_posgen.coupling.jacobians import DENSE_UP_TO, ResidualJacobian, residual_jacobians
from tl_posgen.coupling.numbers.lanczos import SingularTriplets
from tl_posgen.coupling.numbers.overlap import Norm, Pairs, Side, every_pair
from tl_posgen.errors import InputError
from tl_posgen.models.selection import check_indices

_Counts = Count | Annotated[Sequence[Count], Each()]
VERSIONS: dict[str, tuple[Norm, bool]] = {  # label -> norm, and whether A keeps its signs
    "absolute": ("frobenius", False),
    "signed": ("frobenius", True),
    "trace": ("trace", False),
}


@dataclass(frozen=True)
class JacobianMeasure(Measure):
    """Base: J of chosen blocks at chosen tokens, and A = U2' J1 V2 of every pair."""

    k: _Counts = (10,)
    tokens: Any = "last"
    chance_samples: Count = 10
    dense_up_to: Whole = DENSE_UP_TO

    one_length = True
    precise = True
    matrices = 5

    @property
    def ks(self) -> list[int]:
        """Numbers of singular vectors, smallest first."""
        return sorted(np.atleast_1d(self.k).tolist())

    @property
    def positions(self) -> list[int]:
        """Positions whose Jacobians are taken, as they were given."""
        return [-1] if isinstance(self.tokens, str) else [int(token) for token in self.tokens]

    def usual(self) -> Mapping[str, Any]:
        return {"k": self.ks[0]}

    def refuse_choices(self, model: Any, length: int) -> None:
        """Refuse tokens and k that this model and these prompts do not have."""
        limits = (("token", self.positions, -length, length - 1), ("k", self.ks, 1, model.cfg.d_model))
        for what, values, low, high in limits:
            if wrong := [value for value in values if not low <= value <= high]:
                raise InputError(f"{what} {wrong}: choose from {low} to {high}")

    def places(self, run: Run) -> tuple[list[int], list[int]]:
        """Return the chosen layers and tokens; refuse a choice of heads."""
        if run.where["heads"] is not None:
            raise InputError("coupling is of whole blocks: leave heads out, and choose layers")
        tokens = sorted({token % run.tokens.shape[1] for token in self.positions})
        return check_indices(run.where["layers"], run.model.cfg.n_layers, "layer"), tokens

    def jacobians(self, run: Run, prompt: Tensor, source: int, target: int, streams: Tensor) -> list[ResidualJacobian]:
        """Return the Jacobian of every chosen layer from one token to another."""
        options = {"layers": run.where["layers"], "streams": streams, "dense_up_to": self.dense_up_to}
        return residual_jacobians(run.model, prompt, source, target, **options)

    def pairs(self, run: Run, jacobians: Sequence[ResidualJacobian]) -> tuple[Pairs, list[SingularTriplets]]:
        """Return all Jacobians in each other's bases, and their top singular triplets."""
        triplets = [jacobian.triplets(self.ks[-1], self.dense_up_to) for jacobian in jacobians]
        generator, products = torch.Generator().manual_seed(run.seed), [jacobian.matvec for jacobian in jacobians]
        return every_pair(products, triplets, self.chance_samples, generator), triplets

    def by_k(self, pairs: Pairs, version: str, bases: Side) -> Float[np.ndarray, "k first other"]:
        """Return the coupling at every k."""
        norm, signed = VERSIONS[version]
        return np.stack([as_numpy(pairs.coupling(k, norm, bases, signed=signed)) for k in self.ks])


def between_different(squares: Float[np.ndarray, "*place n n"]) -> Float[np.ndarray, "*place n n"]:
    """Return squares of pairs with NaN on the diagonal: a Jacobian couples with itself by definition."""
    return np.where(np.eye(squares.shape[-1], dtype=bool), np.nan, squares)


def as_numpy(x: Tensor) -> np.ndarray:
    return double(x.detach().cpu()).numpy()

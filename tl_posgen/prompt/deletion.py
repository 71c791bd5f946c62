"""Deletion of terms from one row of scores in the running model, beside the same amount of drawn terms."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.errors import InputError
from tl_posgen.hooks.given import under
from tl_posgen.hooks.replace_scores import finished, replace_scores
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.wrapped import WrappedModel

if TYPE_CHECKING:
    from tl_posgen.prompt.explanation import Explanation

DRAWS = 5
TERM = ("key", "term", "source")


@dataclass(frozen=True)
class Deletion:
    """The row of a running model from which something is deleted."""

    wrapped: WrappedModel
    tokens: Int[Tensor, " pos"]
    layer: int
    head: int
    query: int

    def predicted(self, deleted: Float[Tensor, " pos"]) -> tuple[Float[Tensor, " d_vocab"], Float[Tensor, " key"]]:
        """Return log-probabilities of the token after the query, and the head's attention in its row, with this much
        taken from the row's scores."""
        rows = list[Tensor]()

        def scores_of(capture: LayerCapture) -> Float[Tensor, "head query key"]:
            products = capture.geometry.scale * capture.rotated_q @ capture.rotated_k.mT
            products[:, self.query] -= deleted.to(products)
            visible = capture.geometry.visible(capture.length, products.device)
            scores = finished(products, capture).masked_fill(~visible, -torch.inf)
            rows.append(double(scores[0, self.query]).softmax(-1))
            return scores

        hooks = replace_scores(self.wrapped.model, scores_of, heads=[(self.layer, self.head)])
        with under(self.wrapped, hooks):
            place = [(self.layer, self.head)]
            logits = run_capture(self.wrapped, self.tokens[None], lambda _: None, {"logits"}, heads=place)
        assert logits is not None
        return double(logits[0, self.query]).log_softmax(-1), rows[-1]


def compare_deletions(explanation: "Explanation", deletion: Deletion, n: int, seed: int) -> pd.DataFrame:
    """Return what deleting the n largest terms does, and what as much in drawn ones does; see `Explanation.check`."""
    cells = explanation.data["contribution"].sum("plane").transpose(*TERM)
    values, keys = cells.values.ravel(), np.repeat(cells["key"].values, cells[0].size)
    attention = np.repeat(explanation.data["attention"].values, cells[0].size)
    order = np.argsort(-abs(values) * attention * (1 - attention), kind="stable")
    size, rest = float(abs(values[order[:n]]).sum()), float(abs(values[order[n:]]).sum())
    if n < 1 or size > rest:
        raise InputError(f"n = {n}: give a number of terms, of {len(values)}, that are less than all others together")
    untouched = deletion.predicted(torch.zeros(len(deletion.tokens)))

    def deleted(chosen: np.ndarray, shares: np.ndarray) -> dict[str, int | float]:
        row = np.bincount(keys[chosen], shares * values[chosen], minlength=len(deletion.tokens))
        log_p, pattern = deletion.predicted(torch.from_numpy(row))
        moved = float((pattern - untouched[1]).abs().sum() / 2)
        kl = float((untouched[0].exp() * (untouched[0] - log_p)).sum())
        return {"terms": len(chosen), "size": size, "attention": moved, "prediction": kl}

    generator, draws = np.random.default_rng(seed), []
    for _ in range(DRAWS):
        drawn = generator.permutation(order[n:])
        shares = shares_until(abs(values[drawn]), size)
        draws.append(deleted(drawn[: len(shares)], shares))
    rows = [deleted(order[:n], np.ones(n)), pd.DataFrame(draws).mean().to_dict()]
    return pd.DataFrame(rows, index=pd.Index(["largest", "drawn"], name="deleted"))


def shares_until(sizes: np.ndarray, total: float) -> np.ndarray:
    """Return how much of each of the first sizes makes the total: 1, and of the last one a part.

    Example:
        >>> shares_until(np.array([1.0, 2.0, 4.0, 9.0]), 4.0).tolist()
        [1.0, 1.0, 0.25]
    """
    before = np.concatenate([[0.0], sizes.cumsum()[:-1]])
    sizes, before = sizes[before < total], before[before < total]
    return np.minimum(1.0, (total - before) / np.maximum(sizes, 1e-300))

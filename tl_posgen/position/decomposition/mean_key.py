"""The mean-key split: how far each head's scores are f(q, i - j) + g(q, k) at a dummy distance."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from tl_posgen.core.measure import HEAD, Measure, Variable
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.options import NonNegative
from tl_posgen.models.geometry.probe import Probed
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.session import Session
from tl_posgen.position.decomposition.all_layers import of_all_layers
from tl_posgen.position.decomposition.numbers.mean_key_split import mean_key_products
from tl_posgen.position.decomposition.three_axis import pair_moments_of
from tl_posgen.report.head_figures import head_map
from tl_posgen.report.kinds import lines

_FAR = 1000  # the distance of the source
_DIMS = ("tokens", *HEAD, "d0")
_WITHIN = "the mean of each row removed: all that softmax sees"
_EXACT = "nothing rotates, so f + g is the score itself and r = 1 by construction. This measure does not carry over."


@dataclass(frozen=True)
class MeanKey(Measure):
    r"""corr(W, f + g), f_ij = s <R_i q_i, R_j kbar>, g_ij = s <R_d0 q_i, k_j - kbar>, kbar the head's mean key.

    In the position part the head's mean key stands in for every key; the rest is read at one dummy distance. This is
    our reconstruction of the two-axis split.

    W are the scores, s the attention scale, R_i RoPE at position i. A soft cap and ALiBi are not part of W here.
    Without the first token it is left out as query, as key and of the mean key. Numbers are means over prompts.

    Args:
        d0: the headline dummy distance, in tokens; if left out, the largest that the windows of all layers and the
            longest prompt allow (1000 in `attach`, which knows no prompt before).
        distances: further dummy distances.

    Source: reconstructed from the public code of the first author of Han & Ji 2025 (arXiv 2503.13305),
    github.com/Glaciohound/LM-Infinite, which uses d0 = 1000.

    Example:
        >>> result = MeanKey(d0=8)("mini", "Down, down, down.", nulls=0)
        >>> result.sel()["d0"].values.tolist()
        [0, 8, 64]
    """

    d0: NonNegative | None = None
    distances: Sequence[NonNegative] = (0, 64)

    question = "Does one mean key carry the position part?"
    variables = {
        "r": Variable.correlation(
            "r of the mean-key split", "corr of W and f + g", _DIMS, "mean_key_r", "mean key", judged=True
        ),
        "r_within_rows": Variable.correlation("mean-key r within rows", _WITHIN, _DIMS, judged=True),
    }
    curves = ("r",)
    caveats = {"absolute": _EXACT, "alibi": _EXACT.replace("itself", "without its slope"), "none": _EXACT}
    without_meaning = frozenset({"absolute", "alibi", "none"})

    @property
    def headline(self) -> int | float:
        """The headline dummy distance."""
        return _FAR if self.d0 is None else self.d0

    def attached(self, session: Session) -> "MeanKey":
        return replace(self, d0=self.headline)

    def prepare(self, session: Session, tokens: Sequence[Tensor]) -> "MeanKey":
        if self.d0 is not None:
            return self
        windows = [layer.geometry.window for layer in session.layers() if isinstance(layer, Probed)]
        reach = min(max(map(len, tokens)), *(window for window in windows if window), math.inf)
        return replace(self, d0=int(reach) - 1)

    def labels(self) -> Mapping[str, Sequence[Any]]:
        return {"d0": sorted({self.headline, *self.distances})}

    def usual(self) -> Mapping[str, Any]:
        return {"d0": self.headline}

    def of_layer(self, layer: LayerCapture) -> Any:
        geometry = layer.geometry
        return mean_key_products(
            layer.q,
            layer.k,
            geometry.rope,
            geometry.scale,
            self.labels()["d0"],
            window=geometry.window,
            rotated=(layer.rotated_q, layer.rotated_k),
            scores=layer.shared(pair_moments_of) if geometry.bilinear else None,
        )

    def of_layers(self, layer_values: Sequence[Any]) -> Sequence[Mapping[str, Any]]:
        names = "r", "r_within_rows"
        return of_all_layers(
            self, layer_values, lambda products: dict(zip(names, products.correlation().mT, strict=True))
        )

    def findings(self, numbers: Numbers) -> list[str]:
        return [
            f"Each query with the head's mean key, plus content as at distance {self.headline:g}, correlates with the "
            f"scores at {numbers('r'):.3f}."
        ]

    figures = {
        "map": head_map(
            "r",
            ("r", {"tokens": "without first"}),
            title="Mean-key split",
            subtitle="f + g with the head's mean key and dummy distance d0 = {d0:g} (our reconstruction)",
            limits=(0.0, 1.0),
        ),
        "curves": lines(
            {"f(q, i-j) + g(q, k)": [("r", "r"), ("r within rows", "r_within_rows")]},
            "d0",
            title="Mean-key split by dummy distance",
            subtitle="correlation with the scores, mean over heads",
            x_title="d0, tokens",
        ),
    }

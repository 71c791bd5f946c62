"""RoPE's planes: magnitude and phase of queries and keys in each, and what each plane of a head is used for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xarray as xr
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.core.measure import HEAD, TOKENS, Measure, Variable
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.options import Distances, Positive
from tl_posgen.core.run import Run
from tl_posgen.core.sums import Sums
from tl_posgen.errors import InputError
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.session import Session
from tl_posgen.position.planes.numbers.plane_patterns import (
    PARTS,
    PlaneMoments,
    plane_parts,
    plane_scores,
    side_patterns,
    sufficiency,
)
from tl_posgen.position.planes.planes_figure import SIDES, draw_phases
from tl_posgen.report.kinds import lines, points
from tl_posgen.rope.rotation import complex_frequencies

_DIMS, _OF_SIDE, _OF_PART = ("tokens", *HEAD), ("tokens", "side", *HEAD), ("tokens", "part", *HEAD)


@dataclass(frozen=True)
class Planes(Measure):
    r"""z^q_m, z^k_m, queries and keys of every head before RoPE as one complex number per plane m and token; and the
    plane's score s_m = scale E|q^m| E|k^m - kbar^m| max_d 2|sin(theta_m d / 2)|.

    For each plane of queries and keys before RoPE: length, phase, concentration (1: always the same vector), and the
    share of the head's position and content that it carries. A head is certified additive (position + content) if in
    every plane the key is nearly constant, or query and key are too small to matter, or the plane hardly turns.

    Position, content and interaction are those of `variance`, plane by plane. Sum_m s_m, in standard deviations of the
    scores, bounds what a split into position and content can miss: a small sum is sufficient for an additive head;
    whether it also tells heads apart says its correlation over heads with the interaction share. Each of the
    criterion's three conditions holds up to eps. A soft cap is not part of the scores here. A layer without RoPE among
    others (NoPE) is NaN throughout.

    Args:
        eps: tolerance of the criterion. 0.5 is the largest of 0.1, 0.2, 0.3, 0.5, 1 that certifies no randomly
            initialised or shuffled head of the two small models it was chosen on; at 0.1 no trained head is certified.
        n_distances: distances 0 .. n_distances - 1; the longest prompt's length if left out. A window cuts it.

    Raises:
        InputError: no prompt of three tokens: one token besides the first does not vary.
        UnsupportedModelError: a model, or a choice of layers, without RoPE (learned absolute positions, ALiBi).

    Source: the claim of patterns: Han & Ji 2025 (arXiv 2503.13305); measures and criterion: ours

    Example:
        >>> data = Planes(eps=0.3)("mini", "Down, down, down.", nulls=0).sel(tokens="all", side="k")
        >>> data["concentration"].dims, bool((data["concentration"] <= 1).all())
        (('layer', 'head', 'plane'), True)
    """

    eps: Positive = 0.5
    n_distances: Distances | None = None

    question = "What does each of RoPE's planes carry?"
    variables = {
        "magnitude": Variable("mean length of z", "", "E|z|", (*_OF_SIDE, "plane"), interval=True),
        "concentration": Variable.share(
            "concentration", "|E z| / E|z|; 1: always the same vector", (*_OF_SIDE, "plane")
        ),
        "phase": Variable("mean phase", "radians", "arg E z", (*_OF_SIDE, "plane")),
        "energy": Variable("share of energy", "", "share of E|z|^2 over planes", (*_OF_SIDE, "plane")),
        "share": Variable.share("share", "of the part in std^2", _OF_PART),
        "share_by_plane": Variable(
            "share of the plane",
            description="of each part, adds up to 1 over planes; below 0: works against the others",
            dims=(*_OF_PART, "plane"),
            interval=True,
        ),
        "std": Variable(
            "std of the scores", "logits", "over all (query, key, distance), as softmax sees them", _DIMS, interval=True
        ),
        "score_sum": Variable(
            "sum of plane scores / std", "", "sum_m s_m / std", _DIMS, "plane_score_sum", "plane score", interval=True
        ),
        "additive": Variable(
            "certified additive",
            description="1: in every plane E|k - kbar| <= eps E|k|, or 4 scale E|q| E|k| <= eps std, or max_d "
            "2|sin(theta d / 2)| <= eps",
            dims=_DIMS,
            headline="plane_additive",
        ),
        "wavelength": Variable("wavelength", "tokens", "2 pi / theta_m; inf: the unrotated rest", ("layer", "plane")),
    }
    figures = {
        "planes": lines(
            {
                "length of z": [
                    (name, "magnitude", {"side": side, "tokens": "without first"}) for side, name in SIDES.items()
                ],
                "concentration": [
                    (name, "concentration", {"side": side, "tokens": "without first"}) for side, name in SIDES.items()
                ],
                "share of the plane": [
                    (part, "share_by_plane", {"part": part, "tokens": "without first"}) for part in PARTS[:2]
                ],
            },
            "plane",
            title="What planes carry",
            subtitle="before RoPE, first token left out; mean over heads; planes by number, the fastest first",
        ),
        "scatter": points(
            ("score_sum", {"tokens": "without first"}),
            ("share", {"part": "interaction", "tokens": "without first"}),
            title="Do the planes foretell how additive a head is?",
            subtitle="first token left out",
            x_title="sum of plane scores / std of the scores",
            y_title="interaction share, kd + qkd",
        ),
        "phases": draw_phases,
    }
    curves = ("magnitude", "concentration", "phase", "share_by_plane")

    def labels(self) -> Mapping[str, Sequence[Any]]:
        return {"part": PARTS}

    def requires(self, session: Session) -> None:
        session.require_rope(self.name)

    def refuse(self, run: Run) -> None:
        run.session.require_rope(self.name, run.heads)

    def prepare(self, session: Session, tokens: Sequence[Tensor]) -> "Planes":
        if (n := max(map(len, tokens))) < 3:
            raise InputError(
                f"planes: of {n} token{'s' if n > 1 else ''} one at most is left without the first, and of one nothing "
                "varies; give 3 tokens at least"
            )
        return self

    def of_layer(self, layer: LayerCapture) -> Mapping[str, Any]:
        rope = layer.geometry.rope
        if not rope.rotary_dim:
            return {}
        moments = [PlaneMoments.from_qk(layer.q, layer.k, rope, first_token=first) for first in (True, False)]
        return dict(zip(TOKENS, moments, strict=True))

    def of_sums(self, sums: Sums) -> xr.Dataset:
        n = self.n_distances or max(sums.lengths.values())
        all_tokens, without_first = (sums.by_layer(tokens) for tokens in TOKENS)
        layer_values = {}
        for layer in all_tokens:
            geometry = sums.layers[layer][0]
            where = (geometry.rope, geometry.scale, geometry.reach(n))
            values = []
            for moments in (all_tokens[layer], without_first[layer]):
                by_plane = torch.stack(list(plane_parts(moments.triples, *where).values()))
                parts = by_plane.sum(-1)
                std = parts.sum(0).sqrt()
                meets = torch.stack(list(sufficiency(moments, *where, std, self.eps).values()))
                of_tokens = {"share": parts / parts.sum(0), "share_by_plane": by_plane / parts[..., None], "std": std}
                of_tokens |= {"score_sum": plane_scores(moments, *where).sum(-1) / std}
                values.append(side_patterns(moments) | of_tokens | {"additive": double(meets.any(0).all(-1))})
            wavelength = 2 * torch.pi / complex_frequencies(geometry.rope, geometry.d_head)
            layer_values[layer] = values[0] | {"wavelength": wavelength}, values[1]
        data = sums.variables_of(layer_values).reindex(layer=sorted(sums.layers))  # NaN of layers without RoPE
        return data.assign_attrs(n_distances=n)

    def correlation(self, numbers: Numbers, *, ranks: bool = False) -> Number:
        """Return the correlation over heads of the sum of the plane scores with the interaction share, first token left
        out."""
        return numbers.correlation(
            numbers.array("score_sum", first_token=False),
            numbers.array("share", part="interaction", first_token=False),
            ranks=ranks,
        )

    def findings(self, numbers: Numbers) -> list[str]:
        q, k = (f"{numbers('concentration', side=side, first_token=False):.3f}" for side in "qk")
        interaction = numbers("share", part="interaction", first_token=False)
        n_heads = int(numbers.data["additive"].sel(tokens="all").notnull().sum())
        return [
            f"Over heads, plane scores predict the interaction share of {interaction:.3f}, r = "
            f"{self.correlation(numbers):.2f}, first token left out. Their sum is "
            f"{numbers('score_sum', first_token=False):.2f} standard "
            "deviations of the scores; above 1 it bounds nothing by itself.",
            f"Concentration |E z| / E|z| of queries is {q}, of keys {k}, first token left out. With it, the criterion "
            f"at eps = {self.eps:g} certifies {numbers('additive'):.0%} of {n_heads} heads as additive; where null "
            "models "
            "are certified as often, it tells nothing.",
        ]

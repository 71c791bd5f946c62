"""The residual of the three-axis fit: how much of the scores it leaves, and how much of that has one direction."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import double, row_ranges
from tl_posgen.core.formatting import counted
from tl_posgen.core.measure import HEAD, Measure, Variable
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.sums import Sums
from tl_posgen.errors import InputError
from tl_posgen.models.layers.capture import EditedCapture, LayerCapture
from tl_posgen.models.session import Session
from tl_posgen.position.decomposition.numbers.causal_pairs import CausalPairs
from tl_posgen.position.decomposition.numbers.residual_sums import ResidualSums, residual_sums
from tl_posgen.position.decomposition.three_axis import fit_capture
from tl_posgen.report.head_figures import head_map
from tl_posgen.rope.spectra import rank_one_share

_ROUNDING = 1e-13  # share of sum |scale q_i|^2 |k_j|^2 below which a sum of squares is float32 rounding
CROP = 512  # tokens whose residual the top direction is of; the time grows with their cube
_DIMS = ("tokens", *HEAD)
ENTRIES = 2**21  # pairs of tokens held at once: heads are taken in groups
_SHORTEST = 5  # tokens: with fewer, position + query + key fit any scores once the first token is left out


@dataclass(frozen=True)
class Residual(Measure):
    r"""e_ij = W_ij - a_{i-j} - b_i - c_j: what the least-squares three-axis fit of every head leaves.

    The residual of the least-squares three-axis fit: how much it is, and how much of it lies along one direction. Its
    rows sum to zero and no gauge enters, so softmax sees all of it.

    Every row of e sums to zero, because b is free; so all of e is within what softmax sees. It depends on no gauge.
    Energies (sums of e^2) are added up over prompts, the share in one direction is a mean over them; what is no more
    than float32 rounds counts as nothing, and of nothing there is no share.

    Raises:
        InputError: a prompt of fewer than 5 tokens.

    Source: ours; named as open by readers of Han & Ji 2025 (arXiv 2503.13305).

    Example:
        >>> data = Residual()("mini", "Down, down, down.", nulls=0).sel(tokens="all")
        >>> bool(((data["share"] > 0) & (data["share"] < 1)).all())
        True
    """

    question = "What do position + query + key leave?"
    variables = {
        "share": Variable.share("share left", "sum e^2 over that of W within rows", _DIMS, "residual_share"),
        "std": Variable("residual", "logits", "root mean square of e", _DIMS, "residual_std", interval=True),
        "top_share": Variable.share(
            "in one direction", "s_1^2 / sum s^2, s the singular values of e, first 512 tokens", _DIMS
        ),
    }
    figures = {
        "map": head_map(
            "share",
            ("share", {"tokens": "without first"}),
            ("top_share", {"tokens": "without first"}),
            title="What the three-axis fit leaves",
            subtitle="share of the variance within rows that a(i-j) + b(i) + c(j) leaves; its top singular direction",
        )
    }
    caveats = {
        "absolute": "the residual holds what query and key position do together beyond their distance, as well as what "
        "query and key tokens do together.",
        "alibi": "the slope is fitted exactly and is not in the residual: that is content, or position that earlier "
        "layers wrote into the tokens. The variance that the share is of has the slope in it, at random init most of "
        "all: compare std, in logits.",
        "none": "the residual is content, or position that earlier layers wrote into the tokens.",
    }

    def prepare(self, session: Session, tokens: Sequence[Tensor]) -> "Residual":
        _require_length(min(map(len, tokens)))
        return self

    def of_layer(self, layer: LayerCapture) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        _require_length(layer.length)
        fit, values = layer.shared(fit_capture)[0], []
        for heads in (slice(*span) for span in row_ranges(len(layer.heads), layer.length**2, ENTRIES)):
            part = layer.of_heads(heads)
            residuals = residual_sums(part.score_rows, fit.of_heads(heads), crop=CROP)
            values.append([_values_of(sums, part) for sums in residuals])
        of_all, without_first = (
            {name: torch.cat([group[name] for group in groups]) for name in groups[0]}
            for groups in zip(*values, strict=True)
        )
        return of_all, without_first

    def of_sums(self, sums: Sums) -> xr.Dataset:
        energy, within, n = (sums.sum(name, _DIMS) for name in ("energy", "within", "n"))
        top = sums.mean("top_share").where(energy > 0)
        share = energy / within.where(within > 0)
        data = xr.Dataset({"share": share, "std": (energy / n) ** 0.5, "top_share": top})
        # why heads have no number
        fitted = [
            layer
            for layer, (geometry, _) in sums.layers.items()
            if any(CausalPairs(m, geometry.window, False).saturated for m in set(sums.lengths.values()))
        ]
        defined, has_top, has_n = (array.sel(tokens="without first").notnull() for array in (share, top, n))
        saturated = share["layer"].isin(fitted)
        why = {
            "a window of 1 or 2 tokens leaves no more pairs than the fit has parameters": saturated & ~defined & has_n,
            "scores are constant within rows": ~saturated & ~defined & has_n,
            "the fit leaves no more than float32 rounds": ~has_top & defined,
        }
        reasons = [f"in {counted(int(heads.sum()), 'head')} {reason}" for reason, heads in why.items() if heads.any()]
        return data.assign_attrs(not_defined="; ".join(reasons))

    def findings(self, numbers: Numbers) -> list[str]:
        most, least = (numbers.extreme("share", top, first_token=False) for top in (True, False))
        sentences = [
            f"Position + query + key leave {numbers('share'):.0%} of the score variance within rows, without the first "
            f"token {numbers('share', first_token=False):.0%}, of which one singular direction holds "
            f"{numbers('top_share', first_token=False):.0%}. "
            f"Most: {most:.3f}; least: {least:.3f}."
        ]
        return sentences + ([f"Not defined: {numbers.attrs['not_defined']}."] if numbers.attrs["not_defined"] else [])


def _values_of(sums: ResidualSums, capture: LayerCapture) -> dict[str, Float[Tensor, " head"]]:
    """Return sums and the share in one direction of these heads; no energy where any scores would be fitted, so nothing
    is known of e.

    A sum of squares up to 1e-13 sum |scale q_i|^2 |k_j|^2 is rounding, and counts as 0: a score is a sum that may
    cancel, so its rounding error scales with the lengths of its query and key. It scales with the score itself where
    hooks edit the scores, or where the score is larger (ALiBi).
    """
    size, pairs = sums.squares, sums.pairs
    if not isinstance(capture, EditedCapture):
        q, k = (double(x[:, : pairs.n_tokens]).square().sum(-1) for x in (capture.q, capture.k))
        none = torch.zeros_like(k[:, pairs.first :])
        of_keys = torch.stack([none, none, k[:, pairs.first :]])
        seen = pairs.normal(of_keys, pairs.counts(k.device))[1].flip(-1)  # by query, over the keys that it sees
        size = size.maximum(capture.geometry.scale**2 * (q[:, pairs.first :] * seen).sum(-1))
    energy, within = (x.masked_fill(x <= _ROUNDING * size, 0) for x in (sums.energy, sums.within))
    return {
        "energy": torch.full_like(energy, torch.nan) if pairs.saturated else energy,
        "within": within,
        "n": torch.full_like(energy, pairs.n_pairs),
        "top_share": rank_one_share(sums.corner).masked_fill(energy == 0, torch.nan),
    }


def _require_length(n: int) -> None:
    """Refuse prompts so short that any scores are fitted."""
    if n < _SHORTEST:
        raise InputError(f"residual: a prompt of {n} tokens leaves none; give {_SHORTEST} tokens at least")

"""Sources of a prompt of mean tokens: does what a source writes on average need tokens that vary?."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from tl_posgen.core.measure import HEAD, TOKENS, Variable
from tl_posgen.core.run import Run
from tl_posgen.core.sums import Sums
from tl_posgen.hooks.given import under
from tl_posgen.residual.numbers.frozen_map import REST
from tl_posgen.residual.residual_sources import By, ResidualSources
from tl_posgen.sources.source_sums import Letter, SourcedSide, SourceSums, folded, read_prompts

NEGLIGIBLE = 1e-6  # of the longest constant: rounding
N_TOKENS = 8  # of a prompt of mean tokens, where positions are not learned
OF_MEAN_TOKEN = Variable(
    "cosine of the constant with the mean token's",
    "",
    "cos(E x_s, what s writes where every token is the mean one), x the keys or queries; a cosine, as norms before the "
    "projection divide the mean token by less",
    ("side", *HEAD, "source"),
    bounds=(-1, 1),
)


@dataclass
class MeanToken:
    """Mean of the embeddings of all tokens but the first of each prompt, and the sources that it gives rise to.

    Attributes:
        n: how many tokens were added.
        total: the sum of their embeddings.
    """

    n: int = 0
    total: Tensor = field(default_factory=lambda: torch.zeros(()))

    def add(self, written: ResidualSources) -> None:
        """Add the tokens of one prompt."""
        tokens = written.values[written.names.index("embed")][REST]
        self.n, self.total = self.n + len(tokens), self.total.to(tokens) + tokens.sum(0)

    def cosines_of(
        self, run: Run, sums: Sums, sides: Sequence[Letter], by: By, fold: Mapping[str, str], every: Sequence[str]
    ) -> xr.DataArray:
        """Return `OF_MEAN_TOKEN` of the sources `every`, from one short pass; NaN of sources without a constant."""
        hooks, row = self.hooks(run.model.hook_dict), max(run.rows, key=len)
        row, found = row if len(hooks) > 1 else row[:N_TOKENS], dict[int, Any]()
        with under(run.wrapped, hooks):
            for capture, written in read_prompts(run, by, [row]):
                own = folded(written, fold)
                sourced = {side: SourcedSide.of_capture(run.wrapped, capture, own, side) for side in sides}
                found_cosines = [
                    cosines(one, sums.by_layer(f"{side} {TOKENS[1]}")[capture.layer], every)
                    for side, one in sourced.items()
                ]
                found[capture.layer] = torch.stack(found_cosines).cpu().numpy()
        return sums.over_layers("of_mean_token", found).assign_coords(source=np.array(every, object))

    def hooks(self, known: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Return hooks, at points that the model has, that put the mean token in the place of every token, learned
        positions as they are."""
        positions: list[Tensor] = []

        def keep(value: Tensor, hook: Any) -> None:
            positions[:] = [value]

        def replace(value: Tensor, hook: Any) -> Tensor:
            mean = (self.total / self.n).to(value)
            return mean.expand_as(value) if not positions else mean + positions[0].expand_as(value)

        hooks = [("hook_pos_embed", keep), ("blocks.0.hook_resid_pre", replace)]
        return [(name, hook) for name, hook in hooks if name in known]


def cosines(sourced: SourcedSide, sums: SourceSums, every: Sequence[str]) -> Float[Tensor, "head source"]:
    """cos(x_s, E x_s) of every source, x_s the mean over this prompt; NaN of a source without one or the other."""
    own = SourceSums(sourced.whole.shape[1] - 1, sourced.names, sourced.sums(REST)).of_names(every)
    constant = sums.of_names(every).to(own.device)
    lengths = own.norm(dim=-1), constant.norm(dim=-1)
    known = [length > NEGLIGIBLE * length.amax(0) for length in lengths]
    cosine = (own * constant).sum(-1) / (lengths[0] * lengths[1])
    return cosine.masked_fill(~(known[0] & known[1]), torch.nan).clamp(-1, 1).mT

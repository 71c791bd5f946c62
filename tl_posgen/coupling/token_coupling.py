"""Coupling between the tokens of a layer: by their own Jacobians, from one input token, to one output token."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Annotated, Any

import numpy as np
import pandas as pd
import xarray as xr
from torch import Tensor

from tl_posgen.core.formatting import counted, in_brackets
from tl_posgen.core.measure import Variable
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.options import Each
from tl_posgen.core.run import Run
from tl_posgen.coupling.coupling import JacobianMeasure
from tl_posgen.coupling.jacobians import residual_streams
from tl_posgen.errors import InputError
from tl_posgen.models.session import Session
from tl_posgen.report.kinds import lines

KINDS = {
    "self": "each token's own",
    "same_input": "from the first token",
    "same_output": "to the last token",
}
_DRAWN = {"coupling": "coupling", "chance": "random bases"}
_SPREAD = 3  # tokens, where none are given


@dataclass(frozen=True)
class TokenCoupling(JacobianMeasure):
    r"""coupling = 1 - || |U2' J1 V2| - S1 ||_F / ||S1||_F of two tokens' Jacobians in one layer, as in `Coupling`.

    The coupling of the residual Jacobians of two tokens in one layer, in three ways: each token's own, one input token
    to several outputs, several inputs to one output token. It is 1 for shared singular vectors and about 0 for
    unrelated ones. Random bases with the same spectra and a random-init model stand beside it. 95% intervals are over
    prompts.

    "self" J_tt with J_t't'; "same_input" J_{t1,t} with J_{t1,t'} for the first t1 of `tokens`, the identity taken off
    J_{t1,t1}; "same_output" J_{t,t2} with J_{t',t2} for the last t2. Random bases are orthonormal, with J1's own
    spectrum. Intervals are Student's.

    Args:
        k: numbers of top singular vectors, or one.
        tokens: positions, two at least, counted from 0 or negative from the end; three evenly spread, if left out. Of n
            tokens there are 3 (n - 1) Jacobians a layer and prompt, each of d_model backward passes through two tokens.
        chance_samples: random bases per Jacobian.
        dense_up_to: d_model up to which Jacobians are built as matrices.

    Raises:
        InputError: as `Coupling` does; fewer than two tokens.

    Source: Aubry, Meng, Sugolov and Papyan, arXiv 2407.07810; chance and intervals are ours.

    Example:
        >>> from tl_posgen.models.tokens import bundled_text
        >>> found = TokenCoupling(k=4)("mini", bundled_text(), length=12, n_prompts=1, nulls=0, progress=False)
        >>> found.trained["token"].values.tolist(), found.trained["coupling"].dims
        ([3, 7, 11], ('kind', 'prompt', 'k', 'layer', 'token', 'token_2'))
    """

    tokens: Annotated[Sequence[int], Each()] | None = None

    question = "Does a layer act along the same directions at different tokens?"
    rows = ("kind", "k", "layer", "token", "token_2")
    variables = {
        "coupling": Variable(
            "coupling of tokens",
            "",
            "Jacobian of token in the bases of token_2",
            ("kind", "prompt", "k", "layer", "token", "token_2"),
            bounds=(-np.inf, 1),
        ),
        "chance": Variable(
            "coupling in random bases",
            "",
            "mean over draws, J1's own spectrum",
            ("kind", "prompt", "k", "layer", "token"),
            bounds=(-np.inf, 1),
        ),
    }
    legend = (
        "K: number of top singular vectors; in brackets 95% intervals over prompts, from four on; random bases: what "
        "chance couples."
    )
    figures = {
        "layers": lines(
            {
                title: [(name, variable, {"kind": kind}) for variable, name in _DRAWN.items()]
                for kind, title in KINDS.items()
            },
            title="Coupling of tokens",
            subtitle="mean over pairs of tokens, top K",
            y_title="coupling",
        )
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens is not None and len(self.tokens) < 2:
            raise InputError("tokens couple with each other: give two positions at least")

    def prepare(self, session: Session, tokens: Sequence[Tensor]) -> "TokenCoupling":
        length, prepared = len(tokens[0]), self
        if self.tokens is None:  # evenly spread
            spread = {length * part // _SPREAD - 1 for part in range(1, _SPREAD + 1)}
            prepared = replace(self, tokens=sorted(spread - {-1}))
        super(TokenCoupling, prepared).prepare(session, tokens)
        if len({token % length for token in prepared.positions}) < 2:
            raise InputError("tokens couple with each other: give two different positions at least, in longer prompts")
        return prepared

    def of_model(self, run: Run) -> xr.Dataset:
        chosen_layers, tokens = self.places(run)

        def one_prompt(prompt: int) -> xr.Dataset:
            ids = run.tokens[prompt]
            streams = residual_streams(run.session, ids)
            between = cache(lambda source, target: self.jacobians(run, ids, source, target, streams))
            members = {
                "self": [between(token, token) for token in tokens],
                "same_input": [between(tokens[0], target) for target in tokens],
                "same_output": [between(source, tokens[-1]) for source in tokens],
            }
            by_kind = [
                [self.pairs(run, jacobians) for jacobians in zip(*of_kind, strict=True)] for of_kind in members.values()
            ]
            couplings, chances = (
                np.stack([np.stack([self.by_k(pairs, "absolute", bases) for pairs in layers], 1) for layers in by_kind])
                for bases in ("aligned", "chance")
            )
            sizes = np.stack([[pairs.values[:, 0].cpu().numpy() for pairs in layers] for layers in by_kind])
            has_jacobian = (sizes > 0)[:, None, ..., None]  # a token outside the layer's window has no Jacobian
            couplings = np.where(has_jacobian & has_jacobian.swapaxes(-1, -2), couplings, np.nan)
            chances = np.where(has_jacobian, chances, np.nan).mean(-1)
            labels = {"kind": list(members), "k": self.ks, "layer": chosen_layers, "token": tokens, "token_2": tokens}
            dims = ("kind", "k", "layer", "token")
            return xr.Dataset({"coupling": ((*dims, "token_2"), couplings), "chance": (dims, chances)}, labels)

        data = run.grid(one_prompt, pure=True, prompt=range(len(run.rows)))
        return data.assign({name: data[name].transpose(*variable.dims) for name, variable in self.variables.items()})

    def findings(self, numbers: Numbers) -> list[str]:
        sentences = []
        for k in numbers.data["k"].values:
            phrases = []
            for kind in KINDS:
                coupling, chance = (numbers(name, kind=kind, k=k) for name in ("coupling", "chance"))
                bracketed = in_brackets(f"{coupling.null:.3f}", f"random bases {chance.plain:.3f}")
                phrases.append(f"{kind.replace('_', ' ')} {coupling.with_interval:.3f}{bracketed}")
            n_tokens = numbers.data.sizes["token"]
            sentences.append(f"Top-{k} coupling over pairs of {n_tokens} tokens within layers: {'; '.join(phrases)}.")
        undefined = numbers.data["chance"].isnull()
        if n_layers := int(undefined.any([dim for dim in undefined.dims if dim != "layer"]).sum()):
            sentences.append(
                f"In {counted(n_layers, 'layer')} some tokens get no attention of others, by a window or as it "
                "underflowed to 0, and their Jacobian is zero: those pairs are left out."
            )
        return sentences

    def table(self, numbers: Numbers) -> pd.DataFrame:
        """Return a row a K: each kind with its 95% interval, and random bases."""
        rows = []
        for k in numbers.data["k"].values:
            row: dict[str, Any] = {"K": k}
            for kind, (name, suffix) in product(KINDS, {"coupling": "", "chance": " random bases"}.items()):
                row[kind.replace("_", " ") + suffix] = f"{numbers(name, kind=kind, k=k).with_interval:.3f}"
            rows.append(row)
        return pd.DataFrame(rows)

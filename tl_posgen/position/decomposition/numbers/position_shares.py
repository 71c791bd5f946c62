"""Part of a head's scores that is the same in every prompt, and its projections on functions of position."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.errors import InputError
from tl_posgen.position.decomposition.numbers.causal_pairs import normal_blocks
from tl_posgen.rope.bilinear_sums import sums_along_diagonals

FUNCTIONS = ("distance", "key", "either", "line")
PARTS = ("all", *FUNCTIONS)
NOTHING = 1e-10  # eigenvalues below this share of the largest belong to directions that cancel within rows


def row_centred(
    scores: Float[Tensor, "head query key"], mask: Bool[Tensor, "query key"]
) -> Float[Tensor, "head query key"]:
    """W_ij - mean of row i over the keys that count, float64; 0 at other keys."""
    scores = double(scores).masked_fill(~mask, 0)
    mean = scores.sum(-1) / mask.sum(-1).clamp(min=1)
    return (scores - mean[..., None]).masked_fill_(~mask, 0)


class PositionParts:
    r"""Energies of row-centred matrices w in the spaces of `PARTS`, over one set of pairs.

    The least-squares fit a_{i-j} + c_j (less its row means) to w has the energy x' G^+ x, where x holds the sums of w
    by distance and by key, and G = Z'Z - Z' R Z, Z the indicators of distance and key and R the mean over a row. For
    a(i-j) or c(j) alone only that part of x and G enters. G depends on the mask alone and is inverted once.

    Raises:
        InputError: no row sees two keys.

    Example:
        >>> mask = torch.ones(4, 4, dtype=torch.bool).tril()
        >>> w = row_centred(torch.arange(4.0).square().expand(1, 4, 4), mask)  # W_ij = j^2
        >>> energy = dict(zip(PARTS, PositionParts(mask).energy(w)[0].tolist()))
        >>> round(energy["key"] / energy["all"], 6), energy["distance"] < energy["all"]
        (1.0, True)
    """

    def __init__(self, mask: Bool[Tensor, "query key"]):
        if not (mask.sum(-1) > 1).any():
            raise InputError("no query sees two keys, so nothing varies within rows; give longer prompts")
        self.mask, self.n = mask, len(mask)
        gram = _gram(double(mask))
        parts = {"distance": slice(self.n), "key": slice(self.n, None), "either": slice(None)}
        self.inverses = {
            name: (part, torch.linalg.pinv(gram[part, part], hermitian=True, rtol=NOTHING))
            for name, part in parts.items()
        }
        self.position = torch.arange(self.n, dtype=gram.dtype, device=gram.device)
        self.line_square = self.position @ gram[parts["key"], parts["key"]] @ self.position

    def energy(self, w: Float[Tensor, "head query key"]) -> Float[Tensor, "head part=5"]:
        """Return the sum of squares of w and of its projection on each space, in the order of `PARTS`."""
        by_key = w.sum(1)
        x = torch.cat([sums_along_diagonals(w), by_key], -1)
        found = {name: ((x[:, part] @ inverse) * x[:, part]).sum(-1) for name, (part, inverse) in self.inverses.items()}
        found |= {"all": w.square().sum((1, 2)), "line": (by_key @ self.position).square() / self.line_square}
        return torch.stack([found[name] for name in PARTS], -1)


def position_shares(
    prompts: Float[Tensor, "head part=5"], mean: Float[Tensor, "head part=5"], n_prompts: int, n_pairs: int
) -> dict[str, Float[Tensor, "head *function"]]:
    r"""W^p = P + M^p, P the same in every prompt: |P|^2 = B - S / (n - 1), with S = T - B.

    T is the mean over prompts of |W^p|^2 and B the energy of the mean W. For independent prompts
    E B = |P|^2 + Var M / n and E T = |P|^2 + Var M, which gives the correction; it also holds for any projection.

    Args:
        prompts: T, the mean over prompts of `PositionParts.energy`.
        mean: B, the energy of the mean over prompts.

    Returns:
        `position` and, of it, `share` [head, function], the functions of i - j alone, of j alone, a(i - j) + c(j) and
        linear in j, so in i - j too, as shares of `variance`, the mean square of the row-centred scores; unbiased, so
        small ones may be below 0. `chance` is S / (n - 1) as a share.
    """
    noise = (prompts - mean) / (n_prompts - 1)
    total = prompts[:, :1]
    shares = (mean - noise) / total
    found = {"position": shares[:, 0], "share": shares[:, 1:]}
    return found | {"chance": noise[:, 0] / total[:, 0], "variance": total[:, 0] / n_pairs}


def _gram(seen: Float[Tensor, "query key"]) -> Float[Tensor, "distance_and_key distance_and_key"]:
    """Z'Z - Z' R Z: the normal equations of distances and keys, the queries eliminated."""
    n = len(seen)
    distances, mixed, tokens = normal_blocks(seen)
    both = torch.cat([torch.cat([distances.diag(), mixed[:, n:]], 1), torch.cat([mixed[:, n:].T, tokens[n:, n:]], 1)])
    of_queries = torch.cat([mixed[:, :n].T, seen], 1)
    return both - of_queries.T @ (of_queries / seen.sum(1).clamp(min=1)[:, None])

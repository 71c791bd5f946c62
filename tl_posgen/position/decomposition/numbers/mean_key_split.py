"""Correlation of a head's scores with the mean key's split into position and content, f(q, i - j) + g(q, k)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from tl_posgen.arithmetic import DOUBLE, double, elements_at_once
from tl_posgen.errors import InputError
from tl_posgen.position.decomposition.numbers.causal_pairs import CausalPairs
from tl_posgen.position.decomposition.numbers.pair_moments import QUERIES_AT_ONCE, PairMoments, pair_moments
from tl_posgen.rope.bilinear_sums import products_over_band
from tl_posgen.rope.planes import turning_factors
from tl_posgen.rope.rotation import Rope, complex_planes, real_coordinates, rotate

FORMED, FORMED_ON_ACCELERATOR = 768, 2048  # tokens up to which scores are formed: measured; fewer kernels
SCORES_AT_ONCE = 2**19  # entries of all forms of a block of rows: fits the cache


@dataclass(frozen=True)
class MeanKeyProducts:
    """Centred sums over pairs that the correlation of W with its split is made of.

    Attributes:
        shared, of_split: sums of W (f + g), and of (f + g)^2.
        scores: moments of W.
    """

    shared: Float[Tensor, "tokens=2 rows=2 distance head"]
    of_split: Float[Tensor, "tokens=2 rows=2 distance head"]
    scores: PairMoments

    @classmethod
    def joined(cls, products: Sequence["MeanKeyProducts"]) -> "MeanKeyProducts":
        """Return those of all heads of several layers, over the same pairs."""
        shared, of_split = (torch.cat([getattr(p, name) for p in products], -1) for name in ("shared", "of_split"))
        return cls(shared, of_split, PairMoments.joined([p.scores for p in products]))

    @property
    def pairs(self) -> CausalPairs:
        return self.scores.pairs

    @property
    def n_heads(self) -> int:
        return self.scores.n_heads

    def correlation(self) -> Float[Tensor, "rows=2 tokens=2 distance head"]:
        """corr(W, f + g) over all pairs, and within rows, whose means softmax ignores; NaN where W is constant."""
        assert self.scores.without_first_token
        moments = self.scores, self.scores.without_first_token
        squares, constant = (
            torch.stack([getattr(m, name) for m in moments])[:, :, None] for name in ("squares", "is_constant")
        )
        r = (self.shared / (squares * self.of_split).sqrt()).nan_to_num(0, 0, 0).clamp(-1, 1)
        return r.masked_fill(constant, torch.nan).transpose(0, 1)


def mean_key_products(
    q: Float[Tensor, "head pos d_head"],
    k: Float[Tensor, "head pos d_head"],
    rope: Rope,
    scale: float,
    distances: Sequence[int | float],
    *,
    window: int | None = None,
    rotated: tuple[Float[Tensor, "head pos d_head"], Float[Tensor, "head pos d_head"]] | None = None,
    scores: PairMoments | None = None,
) -> MeanKeyProducts:
    r"""f_ij = scale <R_i q_i, R_j kbar>, g_ij = scale <Rbar q_i, k_j - kbar>, Rbar = R_d0; r = corr(W, f + g).

    W, f and g are bilinear, so sums of products of two of them need no [query, key] matrix, and they give

        cov(W, f + g) = cov(W, f) + cov(W, g),   var(f + g) = var f + 2 cov(f, g) + var g.

    The sums are over the pairs without token 0; then its column is added, and each row's change by the other kbar.

    Args:
        q, k: before RoPE.
        distances: dummy distances d0, one row of the result each. kbar is the mean of the keys that count.
        window: as in `CausalPairs`.
        rotated, scores: q and k after RoPE, and the moments of W over all pairs; computed if not given.

    Returns:
        Sums over all pairs and within rows: of all tokens, and with token 0 left out as query, as key and from the mean
        key. See `correlation`.

    Source: the estimator with d0 = 1000 is in the public code of the first author of Han & Ji 2025
    (arXiv 2503.13305); this way to compute r is ours.
    """
    if wrong := [distance for distance in distances if not distance >= 0]:
        raise InputError(f"dummy distance {wrong[0]}: distances must be 0 or more")
    n = q.shape[1]
    if n < 2:
        raise InputError(f"{n} token: none is left for the mean-key split without the first one; give a longer text")
    pairs, positions = CausalPairs(n, window), torch.arange(n, device=q.device)
    dtype = DOUBLE if pairs.width < n else torch.promote_types(q.dtype, torch.float32)
    q, k = q.to(dtype), k.to(dtype)
    turned_q, turned_k = (x.to(dtype) for x in rotated or (rotate(x, positions, rope) for x in (q, k)))
    turns = _turns(tuple(distances), rope, q.shape[-1], dtype, q.device)
    at_once = max(1, elements_at_once(q.device, QUERIES_AT_ONCE) // q[0].numel())
    mean, mean_of_rest = (x.mean(1, keepdim=True, dtype=DOUBLE).to(dtype) for x in (k, k[:, 1:]))
    turned_means = rotate(torch.stack([mean, mean_of_rest]), positions, rope)
    heads = (q, mean - mean_of_rest, turned_q, turned_k, *turned_means, k - mean_of_rest)
    groups = zip(*(x.split(at_once) for x in heads), strict=True)
    products = torch.cat([_products(*group, turns=turns, pairs=pairs) for group in groups], -2).mT * scale**2
    shared, of_split = products
    return MeanKeyProducts(shared, of_split, scores or pair_moments(turned_q, turned_k, scale, window=window))


@lru_cache(maxsize=128)
@torch.inference_mode(False)
def _turns(
    distances: tuple[int | float, ...], rope: Rope, d_head: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return a matrix for each distance d, x @ turn = R_d x."""
    factors = turning_factors(torch.tensor(distances, dtype=DOUBLE, device="cpu"), rope, d_head)
    planes = complex_planes(torch.eye(d_head, dtype=DOUBLE, device="cpu"), rope)
    return (real_coordinates(planes * factors[:, None]) @ real_coordinates(planes).mT).to(device, dtype)


def _products(
    q: Tensor, moved: Tensor, turned_q: Tensor, *keys: Tensor, turns: Tensor, pairs: CausalPairs
) -> Float[Tensor, "with=2 first_token=2 rows=2 head distance"]:
    """Return the centred sums of W S and of S^2 with S = f + g, for a few heads, with token 0 and without it.

    Args:
        moved: the mean key with token 0 less that without it.
        keys: k, the mean key and the mean of all but the first after RoPE; k before RoPE less that mean.
    """
    sums, counts, gained, weights = _tables(pairs, len(turns), q.device)
    queries, of_keys = [turned_q, *(q @ turn for turn in turns)], torch.stack(keys)
    # the mean of the keys is subtracted, and its row means are added back, so that no digits cancel
    centre = of_keys[:, :, 1:].mean(2, keepdim=True)
    vectors = torch.cat([centre, of_keys[:, :, :1], moved[None]])[:, :, 0].movedim(0, -1)
    at_vectors = double(torch.stack([query @ vectors for query in queries])).movedim(-1, 0)
    at_centre, first, (by_moved,) = at_vectors.split([4, 4, 1])
    means, gram = _within_rows([query[:, 1:] for query in queries], of_keys[:, :, 1:].sub_(centre), counts, pairs.width)

    # from forms to W and S: rows without token 0, with its column, and both again about the mean of all pairs
    rows = torch.tensordot(sums, means + _of_forms(at_centre)[..., 1:], 1)
    within = sums[:, None] @ gram @ sums[:, None].mT
    first = torch.tensordot(sums[0], _of_forms(first), 1)
    apart = first[..., 1:] - rows[0]
    within[0] += torch.einsum("fhi,ghi->hfg", gained * counts * apart, apart)
    with_first = torch.cat([first[..., :1], torch.addcmul(rows[0], gained, apart)], -1)
    with_first[1:] -= by_moved[1:]
    about = torch.stack([with_first, pad(rows[1], (1, 0))])
    about -= (weights * about).sum(-1, keepdim=True) / weights.sum(-1, keepdim=True)
    between = torch.einsum("tfhi,tghi->thfg", weights * about, about)
    products = torch.stack([within + between, within], 1)
    return torch.stack([products[..., 0, 1:], products.diagonal(dim1=-2, dim2=-1)[..., 1:]])


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def _tables(pairs: CausalPairs, n_distances: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return the forms that W and S consist of, of all tokens and without the first [first_token=2, 1 + distance,
    form]; pairs of each row without token 0; the share of token 0 in each of these rows; pairs of each row, of all
    tokens and without the first [first_token=2, 1, 1, row]."""
    sums = torch.zeros(2, 1 + n_distances, 3 + n_distances, dtype=DOUBLE, device="cpu")
    sums[:, 0, 0] = sums[0, 1:, 1] = sums[1, 1:, 2] = 1
    sums[:, 1:, 3:] = torch.eye(n_distances, device="cpu")
    counts = replace(pairs, first_token=False).counts()[1, 0].flip(0)
    seen = double(torch.arange(1, pairs.n_tokens, device="cpu") < pairs.width)
    weights = torch.stack([pad(counts + seen, (1, 0), value=1), pad(counts, (1, 0))])[:, None, None]
    return tuple(x.to(device) for x in (sums, counts, seen / (counts + 1), weights))


def _of_forms(x: Float[Tensor, "key=4 query ..."]) -> Float[Tensor, "form ..."]:
    """Return what W, f, f without token 0, and g at each distance are of: q with three keys, three queries with one."""
    return torch.cat([x[:3, 0], x[3, 1:]])


def _within_rows(
    queries: Sequence[Float[Tensor, "head row d_head"]],
    keys: Float[Tensor, "key=4 head row d_head"],
    counts: Float[Tensor, " row"],
    width: int,
) -> tuple[Float[Tensor, "form head row"], Float[Tensor, "head form form"]]:
    """Return row means of all forms, and sums of products of two about them; of long texts those that r is made of."""
    heads, n, _ = queries[0].shape
    w, f, f_of_rest, content = keys
    forms = [*((queries[0], k) for k in (w, f, f_of_rest)), *((q, content) for q in queries[1:])]
    gram = torch.zeros(heads, len(forms), len(forms), dtype=DOUBLE, device=counts.device)
    if n <= (FORMED if counts.device.type == "cpu" else FORMED_ON_ACCELERATOR):
        sums = w.new_empty(len(forms), heads, n)
        step = max(1, elements_at_once(counts.device, SCORES_AT_ONCE) // sums.numel())
        buffer = w.new_empty(sums.numel() * min(step, n))
        for start in range(0, n, step):
            stop, first = min(start + step, n), max(0, start - width + 1)
            shape = len(forms), heads, stop - start, stop - first
            scores = buffer[: math.prod(shape)].view(shape)
            for form, (q, k) in zip(scores, forms, strict=True):
                torch.matmul(q[:, start:stop], k[:, first:stop].mT, out=form)
            scores[..., start - first :].tril_()
            if width < n:
                scores.triu_(start - first - width + 1)
            torch.sum(scores, -1, out=sums[..., start:stop])
            by_row = scores.permute(1, 2, 0, 3)
            gram += (by_row @ by_row.mT).sum(1, dtype=DOUBLE)
    else:
        seen = keys.cumsum(-2)  # sums over the keys that each query sees
        seen[..., width:, :] -= seen[..., :-width, :].clone()
        sums = torch.stack([torch.linalg.vecdot(q, seen[min(form, 3)]) for form, (q, _) in enumerate(forms)])
        form_pairs = [(form, form) for form in range(1, len(forms))] + [(0, 1), (0, 2)]
        form_pairs += [(form, g) for form in range(3) for g in range(3, len(forms))]
        for (form, other_form), products in zip(form_pairs, products_over_band(forms, form_pairs, width), strict=True):
            gram[:, form, other_form] = gram[:, other_form, form] = products
    means = double(sums) / counts
    return means, gram - torch.einsum("fhi,ghi->hfg", means * counts, means)

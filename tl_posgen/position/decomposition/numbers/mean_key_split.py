"""Correlation of a head's scores with the mean key's split into position and content, f(q, i - j) + g(q, k)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double, elements_at_once
from tl_posgen.errors import InputError
from tl_posgen.position.decomposition.numbers.causal_pairs import CausalPairs
from tl_posgen.position.decomposition.numbers.pair_moments import QUERIES_AT_ONCE, PairMoments, pair_moments
from tl_posgen.rope.bilinear_sums import Form, products_over_band
from tl_posgen.rope.planes import turning_factors
from tl_posgen.rope.rotation import Rope, complex_planes, real_coordinates, rotate

FORMED, FORMED_ON_ACCELERATOR = 768, 2048  # tokens up to which scores are formed: measured; fewer kernels
SCORES_AT_ONCE = 2**19  # entries of all forms of a block of rows: fits the cache


def mean_key_r(
    q: Float[Tensor, "head pos d_head"],
    k: Float[Tensor, "head pos d_head"],
    rope: Rope,
    scale: float,
    distances: Sequence[int | float],
    *,
    window: int | None = None,
    rotated: tuple[Float[Tensor, "head pos d_head"], Float[Tensor, "head pos d_head"]] | None = None,
    scores: PairMoments | None = None,
) -> tuple[Float[Tensor, "tokens=2 distance head"], Float[Tensor, "tokens=2 distance head"]]:
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
        r over all pairs, and within rows, whose means do not affect softmax: of all tokens, and with token 0 left out
        as query, as key and from the mean key. NaN where W is constant.

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
    factors = turning_factors(torch.tensor(distances, dtype=DOUBLE, device="cpu"), rope, q.shape[-1])
    planes = complex_planes(torch.eye(q.shape[-1], dtype=DOUBLE, device="cpu"), rope)
    turns = (real_coordinates(planes * factors[:, None]) @ real_coordinates(planes).mT).to(q)  # x @ turn = R_d x
    at_once = max(1, elements_at_once(q.device, QUERIES_AT_ONCE) // q[0].numel())
    mean, mean_of_rest = (x.mean(1, keepdim=True, dtype=DOUBLE).to(dtype) for x in (k, k[:, 1:]))
    turned_means = rotate(torch.stack([mean, mean_of_rest]), positions, rope)
    heads = (q, k - mean_of_rest, mean - mean_of_rest, turned_q, turned_k, *turned_means)
    groups = zip(*(x.split(at_once) for x in heads), strict=True)
    found = torch.cat([_products(*group, turns=turns, pairs=pairs) for group in groups], -1) * scale**2
    scores = scores or pair_moments(turned_q, turned_k, scale, window=window)
    assert scores.without_first_token
    both = (scores, scores.without_first_token)
    squares = torch.stack([torch.stack([one.tss, one.within_rows]) for one in both])  # [tokens, rows, head]
    constant = torch.stack([torch.stack([one.is_constant(one.tss), one.is_constant(one.within_rows)]) for one in both])
    shared, of_split = found.unbind(2)
    r = (shared / (squares[:, :, None] * of_split).sqrt()).nan_to_num(0, 0, 0).clamp(-1, 1)
    over_all, within_rows = r.masked_fill(constant[:, :, None], torch.nan).unbind(1)
    return over_all, within_rows


@dataclass(frozen=True)
class _Rows:
    """Row means and centred sums of W and S = f + g, without the scale.

    Attributes:
        counts: number of pairs of each row.
        w, split: row means of W and of S.
        within: sums of (W - row mean) (S - row mean) and of (S - row mean)^2.
    """

    counts: Float[Tensor, " row"]
    w: Float[Tensor, "head row"]
    split: Float[Tensor, "distance head row"]
    within: Float[Tensor, "with=2 distance head"]

    def with_first_key(self, w: Float[Tensor, "head row"], split: Tensor, width: int) -> "_Rows":
        """Return the rows with token 0 added, from the scores of its key for every query and its own query."""
        seen = double(torch.arange(1, w.shape[-1], device=w.device) < width)
        w_apart, split_apart = w[..., 1:] - self.w, split[..., 1:] - self.split
        share = seen / (self.counts + 1)
        return _Rows(
            torch.cat([torch.ones_like(seen[:1]), self.counts + seen]),
            torch.cat([w[..., :1], self.w + share * w_apart], -1),
            torch.cat([split[..., :1], self.split + share * split_apart], -1),
            self.within + _sums(share * self.counts, w_apart, split_apart),
        )

    def products(self) -> Float[Tensor, "rows=2 with=2 distance head"]:
        """Return centred sums of W S and of S^2, over all pairs and within rows."""
        w, split = (x - (self.counts * x).sum(-1, keepdim=True) / self.counts.sum() for x in (self.w, self.split))
        return torch.stack([self.within + _sums(self.counts, w, split), self.within])


def _sums(weights: Tensor, w: Tensor, split: Tensor) -> Float[Tensor, "with=2 distance head"]:
    return torch.stack([(weights * w * split).sum(-1), (weights * split.square()).sum(-1)])


def _products(
    q: Tensor, content: Tensor, moved: Tensor, turned_q: Tensor, *turned_keys: Tensor, turns: Tensor, pairs: CausalPairs
) -> Float[Tensor, "first_token=2 rows=2 with=2 distance head"]:
    """Return the centred sums of (f + g) W and of (f + g)^2 for a few heads, with token 0 and without it.

    Args:
        content: keys before RoPE less the mean of all but the first; `moved`: that mean with token 0 less without it.
        turned_keys: k, the mean key, and the mean of all but the first, after RoPE.
    """
    at_distances = [q @ turn for turn in turns]
    forms = [*((turned_q, k) for k in turned_keys), *((x, content) for x in at_distances)]
    w, f, f_of_rest, *contents = range(len(forms))
    which = [(one, g) for one in (w, f, f_of_rest) for g in contents] + [(g, g) for g in contents]
    which += [(w, f), (w, f_of_rest), (f, f), (f_of_rest, f_of_rest)]
    rest = replace(pairs, first_token=False)
    counts = rest.counts(q.device)[1, 0].flip(0)
    means, products = _within_rows(forms, which, counts, rest.width)
    within = dict(zip(which, products, strict=True))

    def rows(f: int) -> _Rows:
        with_w = [within[w, f] + within[w, g] for g in contents]
        squares = [within[f, f] + 2 * within[f, g] + within[g, g] for g in contents]
        split = torch.stack([means[f] + means[g] for g in contents])
        return _Rows(counts, means[w], split, torch.stack([*with_w, *squares]).unflatten(0, (2, -1)))

    first = [double((q @ k[:, :1].mT)[..., 0]) for q, k in forms]
    every = rows(f).with_first_key(first[w], torch.stack([first[f] + first[g] for g in contents]), pairs.width)
    by_mean = torch.stack([double((x @ moved.mT)[..., 0]) for x in at_distances])
    return torch.stack([replace(every, split=every.split - by_mean).products(), rows(f_of_rest).products()])


def _within_rows(
    forms: Sequence[Form], which: Sequence[tuple[int, int]], counts: Float[Tensor, " row"], width: int
) -> tuple[list[Float[Tensor, "head row"]], list[Float[Tensor, " head"]]]:
    """Return row means of each w_ij = <q_i, k_j>, and sums of products of pairs of such scores about them.

    Token 0 is left out. The mean key is subtracted first and its row means are added back, so that no digits cancel.
    """
    queries, keys = {id(q): q[:, 1:] for q, _ in forms}, dict[int, tuple[Tensor, Tensor]]()
    for one in {id(k): k for _, k in forms}.values():
        mean = one[:, 1:].mean(-2, keepdim=True)
        keys[id(one)] = mean, one[:, 1:] - mean
    centred = [(queries[id(q)], keys[id(k)][1]) for q, k in forms]
    if len(counts) <= (FORMED if counts.device.type == "cpu" else FORMED_ON_ACCELERATOR):
        seen_means, gram = _formed(centred, counts, width)
        found = [gram[:, one, other] for one, other in which]
    else:
        seen = {id(k): k.cumsum(-2) for _, k in centred}  # sums over the keys that each query sees
        for one in seen.values():
            one[..., width:, :] -= one[..., :-width, :].clone()
        seen_means = torch.stack([double(torch.linalg.vecdot(q, seen[id(k)])) for q, k in centred]) / counts
        products = products_over_band(centred, which, width)
        found = [
            product - (counts * seen_means[one] * seen_means[other]).sum(-1)
            for (one, other), product in zip(which, products, strict=True)
        ]
    means = [
        row + double((queries[id(q)] @ keys[id(k)][0].mT)[..., 0])
        for row, (q, k) in zip(seen_means, forms, strict=True)
    ]
    return means, found


def _formed(
    forms: Sequence[Form], counts: Float[Tensor, " row"], width: int
) -> tuple[Float[Tensor, "form head row"], Float[Tensor, "head form form"]]:
    """Return row means of scores <q_i, k_j>, and sums of products of two about them, from the scores of all forms."""
    (heads, n, _), n_forms, device = forms[0][0].shape, len(forms), counts.device
    step = max(1, elements_at_once(device, SCORES_AT_ONCE) // (n_forms * heads * n))
    sums = forms[0][0].new_empty(n_forms, heads, n)
    buffer = sums.new_empty(n_forms * heads * min(step, n) * n)
    gram = torch.zeros(heads, n_forms, n_forms, dtype=DOUBLE, device=device)
    for start in range(0, n, step):
        stop, first = min(start + step, n), max(0, start - width + 1)
        shape = n_forms, heads, stop - start, stop - first
        scores = buffer[: math.prod(shape)].view(shape)
        for one, (q, k) in zip(scores, forms, strict=True):
            torch.matmul(q[:, start:stop], k[:, first:stop].mT, out=one)
        scores[..., start - first :].tril_()
        if width < n:
            scores.triu_(start - first - width + 1)
        torch.sum(scores, -1, out=sums[..., start:stop])
        by_row = scores.permute(1, 2, 0, 3)
        gram += (by_row @ by_row.mT).sum(1, dtype=DOUBLE)
    means = double(sums) / counts
    return means, gram - torch.einsum("fhi,ghi->hfg", means * counts, means)

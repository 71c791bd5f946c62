"""Normal equations of three additive axes on a full causal triangle, in closed form."""

from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE


def solve_triangle(right: Float[Tensor, "axis=3 head size"]) -> Float[Tensor, "axis=3 head size"]:
    r"""theta with w theta_k + w A (sum of the other two axes) = right_k, w_t = n - t the pairs at index t: O(n).

    A averages an axis over the pairs at each index of another: (A x)_t = (x_0 + .. + x_{n-1-t}) / w_t. It maps a
    polynomial of degree p to one of degree p, with the eigenvalue (-1)^p / (p + 1), and T = A^-2 - I is tridiagonal,

        w_t (T x)_t = kappa_{t-1} (x_t - x_{t-1}) - kappa_t (x_{t+1} - x_t),     kappa_t = (t + 1) (n - t) (n - 1 - t).

    So the sum sigma of the axes, and then each axis, need a pseudo-inverse of T - 3 and of T, which are two weighted
    cumulative sums each:

        (I + 2 A) sigma = sum_k right_k / w,          (I + 2 A)^+ = (I - 2 A) (I + 4 (T - 3)^+)
        (I - A) theta_k = right_k / w - A sigma,      (I - A)^+ = (I + A) (I + T^+)

    Constants and one straight line are free: what comes out along them is arbitrary.

    Args:
        right: sums over the pairs of every axis in the corner coordinates of `CausalPairs`, of one matrix: see
            `CausalPairs.consistent`. Four indices or more.

    Source: ours

    Example:
        >>> a, b, c = solve_triangle(torch.tensor([4.0, 3, 2, 1]).double().repeat(3, 1, 1))[:, 0]  # scores of 1
        >>> round(float(a[1] + b[2] + c[0]), 9)
        1.0
    """
    inverse, kappa, weighted, crossed = _tables(right.shape[-1], right.device)
    means = right * inverse
    total = means.sum(0)
    g = total.add((crossed * (weighted * total).cumsum(-1)).sum(0), alpha=4)
    sigma = g.addcmul(g.cumsum(-1).flip(-1), inverse, value=-2)
    theta = means.addcmul_(sigma.cumsum(-1).flip(-1), inverse, value=-1)
    steps = (theta / inverse).cumsum_(-1).mul_(kappa).cumsum_(-1)
    theta[..., 1:] -= steps[..., :-1]
    theta = theta.addcmul(theta.cumsum(-1).flip(-1), inverse)
    theta[0] += (sigma - theta.sum(0)).mean(-1, keepdim=True)
    return theta


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def _tables(n: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return 1 / w, 1 / kappa with a last zero, and of T f = 3 f the two solutions: phi w and q w; -q and phi.

    phi_t = t - c, c = (n - 1) / 3. Of q_t = phi_t sum_{s < t} 1 / (kappa_s phi_s phi_{s+1}) the partial fractions are
    harmonic sums and telescoping ones, and any multiple of phi may be added; it is chosen to make q small about phi's
    zero, where digits would cancel.
    """
    t, c = torch.arange(n, dtype=DOUBLE, device="cpu"), (n - 1) / 3
    w, phi = n - t, t - c
    kappa = (t[:-1] + 1) * w[:-1] * (w[:-1] - 1)
    upward = torch.cat([t.new_zeros(1), (1 / (t + 1)).cumsum(0)])  # H_0 .. H_n
    down = upward.flip(0)  # H_n .. H_0
    harmonic = (
        upward[:n] / (n * (n + 1) * c * (c + 1))
        + down[:n] / ((n + 1) * (2 * c + 1) * (2 * c + 2))
        - down[1:] / (n * 2 * c * (2 * c + 1))
    )
    q = phi * (harmonic - harmonic[round(c)]) - 1 / ((c + 1) * (2 * c + 1) * 2 * c)
    crossed = torch.stack([-q, phi])[:, None]
    kappa = torch.cat([1 / kappa, t.new_zeros(1)])
    return tuple(x.to(device) for x in (1 / w, kappa, torch.stack([phi * w, q * w])[:, None], crossed))

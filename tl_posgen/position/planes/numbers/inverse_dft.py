"""Expressivity of RoPE: a head with any given function of distance, and the best fit by a model's own planes."""

from dataclasses import dataclass

import torch
from jaxtyping import Complex, Float, Real
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double
from tl_posgen.errors import InputError
from tl_posgen.rope.rotation import Rope, from_planes


@dataclass(frozen=True)
class TableHead:
    """Head with <R_d q_a, k_b> = table[a, b, d] for every query token a, key token b and distance d < N."""

    rope: Rope
    q: Float[Tensor, "query_token d_head"]
    k: Float[Tensor, "key_token d_head"]


def head_for_table(table: Real[Tensor, "query_token key_token distance"]) -> TableHead:
    """Return a head whose score is a given function of query token, key token and distance.

    With theta_m = 2 pi m / N, m = 0 .. floor(N / 2), and z^q_m conj(z^k_m) the Fourier coefficients of a function F of
    distance, <R_d q, k> = F(d) for d = 0 .. N - 1: a plane per frequency, so RoPE excludes no function of distance.
    For several tokens the coefficient at theta_m is a complex matrix C_m over token pairs. Its singular value
    decomposition C_m = sum_r s_r u_r v_r^H gives planes that all rotate at theta_m, with z^q_a = sqrt(s_r) u_ar and
    z^k_b = sqrt(s_r) v_br; so floor(N / 2) + 1 frequencies times min(query tokens, key tokens) planes suffice.

    Raises:
        InputError: something else than finite real values [query_token, key_token, distance].

    Source: Han & Ji 2025 argue expressivity by an inverse Fourier transform; the construction is our reconstruction.

    Example:
        >>> from tl_posgen.rope.rotation import rotate
        >>> values = torch.tensor([0.0, 3.0, 1.0, -2.0], dtype=torch.float64)
        >>> head = head_for_table(values[None, None])
        >>> turned = rotate(head.q.expand(1, 4, -1), torch.arange(4), head.rope)
        >>> torch.allclose(turned[0] @ head.k[0], values)
        True
    """
    if table.ndim != 3 or not table.numel() or table.is_complex() or not bool(table.isfinite().all()):
        raise InputError(
            f"head_for_table: a table of shape {tuple(table.shape)} and {table.dtype}: give finite real values "
            "[query_token, key_token, distance]; of a function of distance alone, values[None, None]"
        )
    n = table.shape[-1]
    spectrum = torch.fft.rfft(double(table)) / n
    # a real cosine is two conjugate exponentials and a plane is one; the ends of the spectrum have no conjugate
    spectrum[..., 1 : (n + 1) // 2] *= 2
    u, s, vh = torch.linalg.svd(spectrum.permute(2, 0, 1), full_matrices=False)
    root = s.sqrt()[:, None]
    z_query, z_key = u * root, vh.mH * root
    theta = 2 * torch.pi * torch.arange(len(s), dtype=DOUBLE) / n
    rope = Rope(theta.repeat_interleave(s.shape[1]).to(table.device))
    return TableHead(rope, _vectors(z_query, rope), _vectors(z_key, rope))


def fit_frequencies(
    values: Real[Tensor, "*batch distance"], inv_freq: Float[Tensor, " plane"], rcond: float = 1e-12
) -> tuple[Float[Tensor, "*batch distance"], Complex[Tensor, "*batch plane"]]:
    """F(d) ~ Re sum_m c_m e^{i theta_m d} on d = 0 .. N - 1, by least squares, at given frequencies (a model's own).

    The pseudo-inverse of cos(theta_m d), -sin(theta_m d) leaves out directions below rcond times the largest singular
    value, since slow planes are nearly collinear within N tokens. A larger rcond gives smaller logits.

    Returns:
        The fitted values, and c_m = scale z^q_m conj(z^k_m), the smallest in norm where several fit equally well. If
        sum_m |c_m|, the planes in phase, is far above the values, then planes cancel each other, which is unlikely in
        a trained head.
    """
    distance = torch.arange(values.shape[-1], dtype=DOUBLE, device=values.device)
    angles = distance[:, None] * double(inv_freq).to(values.device)
    design = torch.cat([angles.cos(), -angles.sin()], dim=1)
    weights = double(values) @ torch.linalg.pinv(design, rtol=rcond).mT
    real, imag = weights.chunk(2, dim=-1)
    return weights @ design.mT, torch.complex(real.contiguous(), imag.contiguous())


def _vectors(z: Complex[Tensor, "frequency token rank"], rope: Rope) -> Float[Tensor, "token d_head"]:
    planes = z.permute(1, 0, 2).flatten(1)
    return from_planes(planes, planes.real[:, :0], rope)

"""Which RoPE planes make a slash: contributions by plane, frequency bands, ablations, the rank-one prediction."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Complex, Float, Int, Real
from torch import Tensor

from tl_posgen.errors import InputError
from tl_posgen.maths.agreement import pearson
from tl_posgen.maths.rope import Rope, complex_frequencies, complex_planes, from_planes, rotate, to_planes
from tl_posgen.maths.spectra import rank_one, top_direction

BANDS = ("high", "medium", "low")

Ablation = Literal["none", "drop", "freeze", "keep", "rank_one", "no_rope", "means", "means_no_rope"]


# Bands


def bands_by_thirds(n_planes: int) -> Bool[Tensor, "band=3 plane"]:
    """Plane m of P is in band floor(3m / P): high, medium and low frequencies, a third of the planes each [ours].

    Example:
        >>> bands_by_thirds(4).int().tolist()
        [[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    """
    return 3 * torch.arange(n_planes) // max(n_planes, 1) == torch.arange(3)[:, None]


def bands_by_wavelength(rope: Rope, n: int, shortest: float = 32.0) -> Bool[Tensor, "band=3 plane"]:
    r"""By wavelength 2 pi / theta in tokens: high < `shortest` <= medium <= n < low, n the length of the prompt [ours].

    Example:
        >>> bands_by_wavelength(Rope(torch.tensor([1.0, 0.1, 0.001], dtype=torch.float64)), n=512).int().tolist()
        [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    """
    wavelength = 2 * torch.pi / rope.inv_freq.double()
    high, low = wavelength < shortest, wavelength > max(n, shortest)
    return torch.stack([high, ~high & ~low, low])


# Contributions


def plane_contributions(
    q: Float[Tensor, "head pos d_head"],
    k: Float[Tensor, "head pos d_head"],
    rope: Rope,
    scale: float = 1.0,
    window: int | None = None,
) -> Float[Tensor, "head plane_and_rest distance"]:
    r"""C_l(D) = E_i[InnerProd(i, i-D, l)] - E_{j<=i}[InnerProd(i, j, l)]: what plane l adds to the logit at D.

    InnerProd(i, j, l) = |z^q_il| |z^k_jl| cos(theta_l (i-j) + arg z^q_il - arg z^k_jl), exactly the share of plane l in
    the logit, so the sum over planes is the mean logit on diagonal D less the mean over the triangle. The definition
    of C is ours. All D come at once from cross-correlations by FFT, in float64.

    Args:
        q, k: before RoPE.
        scale: multiplies <q, k>; leave it at 1 for the bare inner product.
        window: take the second mean over the visible pairs of a sliding window.

    Returns:
        The rotary planes first, then the unrotated remainder paired up as planes that never turn.
    """
    n = q.shape[1]
    # a head at a time, as the transforms take several times the room of the result
    heads = zip(q, k, strict=True)
    sums = scale * torch.stack([_cross_correlation(_turned(q_h, rope), _turned(k_h, rope)) for q_h, k_h in heads])
    counts = torch.arange(n, 0, -1, dtype=torch.float64, device=q.device)
    visible = slice(window)
    return sums / counts - sums[..., visible].sum(-1, keepdim=True) / counts[visible].sum()


def _turned(x: Float[Tensor, "pos d_head"], rope: Rope) -> Complex[Tensor, "plane_and_rest pos"]:
    positions = torch.arange(len(x), device=x.device)
    return complex_planes(rotate(x.double(), positions, rope), rope).mT


def _cross_correlation(
    z_q: Complex[Tensor, "plane pos"], z_k: Complex[Tensor, "plane pos"]
) -> Float[Tensor, "plane pos"]:
    """Re sum_i z^q_i conj(z^k_{i-D}) for every D >= 0; padded to 2n so that nothing wraps round."""
    n = z_q.shape[-1]
    product = torch.fft.fft(z_q, 2 * n) * torch.fft.fft(z_k, 2 * n).conj()
    return torch.fft.ifft(product).real[..., :n]


# Ablations: of the vectors before RoPE, of RoPE itself, and the two together


def drop(x: Float[Tensor, "*batch d_head"], rope: Rope, band: Bool[Tensor, " plane"]) -> Float[Tensor, "*batch d_head"]:
    """The planes of the band set to zero, the others and the unrotated remainder as they were. Before RoPE."""
    return from_planes(to_planes(x, rope) * ~band, x[..., rope.rotary_dim :], rope)


def keep(x: Float[Tensor, "*batch d_head"], rope: Rope, band: Bool[Tensor, " plane"]) -> Float[Tensor, "*batch d_head"]:
    """Only the planes of the band; the others and the unrotated remainder set to zero. Before RoPE."""
    return from_planes(to_planes(x, rope) * band, torch.zeros_like(x[..., rope.rotary_dim :]), rope)


def freeze(rope: Rope, band: Bool[Tensor, " plane"]) -> Rope:
    """theta = 0 in the band: its planes keep their content and no longer turn with the position.

    Example:
        >>> freeze(Rope(torch.tensor([1.0, 0.1])), torch.tensor([True, False])).inv_freq.tolist()
        [0.0, 0.10000000149011612]
    """
    return replace(rope, inv_freq=rope.inv_freq * ~band)


def means(x: Float[Tensor, "*batch pos d_head"]) -> Float[Tensor, "*batch pos d_head"]:
    """Every vector replaced by the mean over positions: no content is left, only what all tokens share."""
    return x.mean(-2, keepdim=True).expand_as(x)


def ablate(
    q: Float[Tensor, "head pos d_head"],
    k: Float[Tensor, "head pos d_head"],
    rope: Rope,
    kind: Ablation | str,
    band: Bool[Tensor, " plane"] | None = None,
    positions: Real[Tensor, " pos"] | None = None,
) -> tuple[Float[Tensor, "head pos d_head"], Float[Tensor, "head pos d_head"]]:
    """The rotated q and k after an ablation; take the softmax anew, e.g. by `slash_statistics_from_qk`.

    Args:
        q, k: before RoPE.
        kind: "drop" the band, "freeze" it (theta = 0) or "keep" only it; "rank_one" truncates Q and K and keeps RoPE;
            "no_rope" keeps Q and K and turns nothing, so a slash of position alone vanishes; "means" replaces q and k
            by their means over positions, and "means_no_rope" turns nothing then: uniform attention is left.
            The choice of ablations is ours.
        band: planes, for the first three.
        positions: 0, 1, 2, ... by default.

    Raises:
        InputError: an unknown kind, or no band where one is needed.

    Example:
        >>> q = k = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
        >>> rope = Rope(torch.tensor([torch.pi], dtype=torch.float64))
        >>> ablate(q, k, rope, "no_rope")[0].tolist()
        [[[1.0, 0.0], [1.0, 0.0]]]
    """
    if kind not in get_args(Ablation):
        raise InputError(f"ablation {kind!r}: choose one of {', '.join(get_args(Ablation))}")
    one_band = kind in ("drop", "freeze", "keep")
    if one_band and (band is None or band.shape != rope.inv_freq.shape):
        raise InputError(f"ablation {kind!r} needs a band: a boolean for each of the {len(rope.inv_freq)} planes")
    whole = torch.ones_like(rope.inv_freq, dtype=torch.bool)
    planes = band.to(whole.device) if one_band and band is not None else whole
    content = {
        "drop": lambda x: drop(x, rope, planes),
        "keep": lambda x: keep(x, rope, planes),
        "rank_one": rank_one,
        "means": means,
        "means_no_rope": means,
    }.get(kind, lambda x: x)
    turning = freeze(rope, planes) if kind in ("freeze", "no_rope", "means_no_rope") else rope
    positions = torch.arange(q.shape[1], device=q.device) if positions is None else positions
    return rotate(content(q), positions, turning), rotate(content(k), positions, turning)


# The rank-one prediction


@dataclass(frozen=True)
class SlashProfile:
    """g(D) = sum_l A_l cos(theta_l D + phi_l): the logit by distance if Q and K were exactly of rank one.

    Attributes:
        amplitude: A_l >= 0, in logits.
        phase: phi_l in radians.
        logit: g(D).
        score: the slash score that g alone gives, 1/(N-D) sum_{i>=D} e^{g(D)} / sum_{d<=i} e^{g(d)} [ours].
    """

    amplitude: Float[Tensor, "head plane_and_rest"]
    phase: Float[Tensor, "head plane_and_rest"]
    logit: Float[Tensor, "head distance"]
    score: Float[Tensor, "head distance"]


@dataclass(frozen=True)
class ProfileMatch:
    """A predicted slash profile beside the measured one, over the same distances, per head.

    Attributes:
        predicted_peak, measured_peak: the distance of the highest score of each.
        score_at_peak: measured score at the predicted peak over the measured highest: 1 where the peaks agree.
        correlation: Pearson's, of the two scores over distances.
    """

    predicted_peak: Int[Tensor, " head"]
    measured_peak: Int[Tensor, " head"]
    score_at_peak: Float[Tensor, " head"]
    correlation: Float[Tensor, " head"]


def rank_one_profile(
    q: Float[Tensor, "head pos d_head"], k: Float[Tensor, "head pos d_head"], rope: Rope, scale: float
) -> SlashProfile:
    r"""A_l = scale alpha beta |v^q_l| |v^k_l|, phi_l = arg v^q_l - arg v^k_l, from the top right-singular vectors v.

    alpha and beta are the means over positions of Q v^q and K v^k. That g has this form under exact rank one follows
    from RoPE; taking the means for alpha_i and beta_j, and the score made of g, are ours.

    Args:
        q, k: before RoPE.
        scale: multiplies <q, k>.
    """
    v_q, v_k = top_direction(q), top_direction(k)
    strength = scale * (q.double().mean(1) * v_q).sum(-1) * (k.double().mean(1) * v_k).sum(-1)
    z = complex_planes(v_q, rope) * complex_planes(v_k, rope).conj()
    z = z * strength[:, None]
    z = torch.cat([z[:, : len(rope.inv_freq)] * rope.scaling**2, z[:, len(rope.inv_freq) :]], dim=-1)
    distance = torch.arange(q.shape[1], dtype=torch.float64, device=q.device)
    angle = complex_frequencies(rope, q.shape[-1]).to(q.device)[:, None] * distance
    logit = (z[..., None] * torch.polar(torch.ones_like(angle), angle)).real.sum(1)
    return SlashProfile(z.abs(), z.angle(), logit, score_of_profile(logit))


def score_of_profile(logit: Float[Tensor, "head distance"]) -> Float[Tensor, "head distance"]:
    r"""1/(N-D) sum_{i>=D} e^{g(D)} / sum_{d<=i} e^{g(d)}: slash scores of a logit g(distance).

    Example:
        >>> score_of_profile(torch.zeros(1, 2)).tolist()
        [[0.75, 0.5]]
    """
    g = logit.double()
    log_normaliser = g.logcumsumexp(-1)
    over_queries = (-log_normaliser).flip(-1).logcumsumexp(-1).flip(-1)
    return (g + over_queries).exp() / torch.arange(g.shape[-1], 0, -1, device=g.device)


def match_profiles(
    predicted: Float[Tensor, "head distance"], measured: Float[Tensor, "head distance"], reach: int | None = None
) -> ProfileMatch:
    """Peaks and correlation of two score profiles over D < reach; by default half the prompt, as the last D are means
    over few queries [ours]."""
    reach = max(1, measured.shape[-1] // 2) if reach is None else reach
    predicted, measured = predicted[:, :reach], measured[:, :reach]
    guess, truth = predicted.argmax(-1), measured.argmax(-1)
    at_guess = measured.gather(-1, guess[:, None])[:, 0] / measured.amax(-1)
    return ProfileMatch(guess, truth, at_guess, pearson(predicted, measured))

"""Attention core of one layer, replaced by its derivative at the prompt, which makes Jacobian products cheap."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

_CHUNK_ELEMENTS = 2**22


def vector_jacobian_products(
    output: Tensor, inputs: list[Tensor], cotangents: Float[Tensor, "row *shape"], row_elements: int
) -> list[Float[Tensor, "row *shapes"]]:
    """J' e for every row e of cotangents, in batched backward passes; row_elements (floats per row) limits the batch.

    An input that the output does not depend on gets zeros. The graph is kept.
    """
    parts = [
        torch.autograd.grad(output, inputs, part, is_grads_batched=True, retain_graph=True, materialize_grads=True)
        for part in cotangents.split(max(1, _CHUNK_ELEMENTS // row_elements))
    ]
    return [torch.cat(images) for images in zip(*parts, strict=True)]


@dataclass
class LinearisedAttention:
    r"""z_t2 ~ z_t2 + C_q (dq_t2) + C_k (dk_t1) + C_v (dv_t1), head by head: hooks that replace hook_z by this.

    The prompt's length enters only through the core softmax(q k') v, whose Jacobian is block diagonal over heads:
    d_head backward passes (times the heads that share a key), each for all heads at once, give the whole of it. A
    product with the Jacobian of the block then involves only the tokens t1 to t2.

    One random product through the replacement is compared with that through the layer. If they differ (query norms
    across heads, gates, hooks that do not fire or have another layout) the layer is not replaced: exact, but slower.

    """

    layer: int
    leaf: Tensor | None = None  # x_t1, set before the attention runs
    active: bool = False  # whether the replacement is in place

    def hooks(self, available: Any) -> list[tuple[str, Any]]:
        """Return [(hook_name, fn)] for hook_q, hook_k, hook_v and hook_z, or [] if the model lacks one of them."""
        names = {part: f"blocks.{self.layer}.attn.hook_{part}" for part in ("q", "k", "v", "z")}
        if not all(name in available for name in names.values()):
            return []
        seen: dict[str, Tensor] = {}

        def remember(x: Tensor, hook: Any, part: str) -> Tensor:
            seen[part] = x
            return x

        def replace(z: Tensor, hook: Any) -> Tensor:
            assert self.leaf is not None
            linear = _linear_core(z, **seen, leaf=self.leaf) if len(seen) == 3 else None
            seen.clear()
            self.active = linear is not None
            return z if linear is None else linear

        return [(names[part], partial(remember, part=part)) for part in ("q", "k", "v")] + [(names["z"], replace)]


def _linear_core(z: Tensor, q: Tensor, k: Tensor, v: Tensor, leaf: Tensor) -> Tensor | None:
    """Return z with the last token's row replaced by its first-order expansion, or None where that is not exact."""
    if not all(x.requires_grad for x in (z, q, k, v)) or not (q.ndim == k.ndim == v.ndim == 4 and len(q) == 1):
        return None
    n_heads, n_key_heads, d_value = q.shape[2], k.shape[2], v.shape[3]
    same_tokens = q.shape[1] == k.shape[1] == v.shape[1] == z.shape[1]
    if not same_tokens or z[0, -1].numel() != n_heads * d_value or v.shape[2] != n_key_heads or n_heads % n_key_heads:
        return None
    inputs, matrices = (q[0, -1], k[0, 0], v[0, 0]), _core_jacobian(z, q, k, v)
    changes = [(x - x.detach()).flatten() @ matrix.mT for x, matrix in zip(inputs, matrices, strict=True)]
    last = z[:, -1:].detach() + torch.stack(changes).sum(dim=0).reshape(z[:, -1:].shape)
    linear = torch.cat([z[:, :-1].detach(), last], dim=1)
    return linear if _same_derivative(z, linear, leaf) else None


def _core_jacobian(z: Tensor, q: Tensor, k: Tensor, v: Tensor) -> list[Float[Tensor, "d_z d_input"]]:
    """dz_t2 / d(q_t2, k_t1, v_t1), block diagonal over groups of heads that share a key.

    One backward pass per coordinate of z and member of a group, for all groups at once. The passes are not batched: in
    a batch every row would get a copy of all keys and values.
    """
    n_groups, d_value = v.shape[2:]
    columns = torch.eye(q.shape[2] // n_groups * d_value, dtype=z.dtype, device=z.device)
    rows = []
    for column in columns:
        cotangent = torch.zeros_like(z)
        cotangent[0, -1] = column.repeat(n_groups).reshape(z.shape[2:])
        gq, gk, gv = torch.autograd.grad(z, (q, k, v), cotangent, retain_graph=True, materialize_grads=True)
        # copies: a gradient can be a view into that of all cached keys
        rows.append((gq[0, -1].reshape(n_groups, -1).clone(), gk[0, 0].clone(), gv[0, 0].clone()))
    # a matrix [row, input of the group] for each group
    return [torch.block_diag(*torch.stack(part, dim=1)) for part in zip(*rows, strict=True)]


def _same_derivative(z: Tensor, linear: Tensor, leaf: Tensor) -> bool:
    """Return whether one random product J' w, w at the last token, agrees through z and its replacement.

    The tolerance is 1e-4, since some norms and rotations are computed in float32 even in a float64 model.
    """
    w, generator = torch.zeros_like(z), torch.Generator().manual_seed(0)
    w[:, -1] = torch.randn(z[:, -1].shape, generator=generator, dtype=z.dtype).to(z.device)
    exact, found = (
        torch.autograd.grad(out, leaf, w, retain_graph=True, materialize_grads=True)[0] for out in (z, linear)
    )
    return bool((exact - found).norm() <= 1e-4 * exact.norm())

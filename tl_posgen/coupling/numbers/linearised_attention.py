"""Attention core of one layer, replaced by its derivative at the prompt, which makes Jacobian products cheap."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

_CHUNK_ELEMENTS = 2**20  # which fit into a processor's cache


def vector_jacobian_products(
    output: Tensor, inputs: Sequence[Tensor], cotangents: Float[Tensor, "row *shape"], row_elements: int
) -> list[Float[Tensor, "row *shapes"]]:
    """J' e for every row e of cotangents, in batched backward passes; row_elements (floats per row) limits the batch.

    An input that the output does not depend on gets zeros. The graph is kept.
    """
    batches = [
        torch.autograd.grad(output, inputs, batch, is_grads_batched=True, retain_graph=True, materialize_grads=True)
        for batch in cotangents.split(max(1, _CHUNK_ELEMENTS // row_elements))
    ]
    return [torch.cat(images) for images in zip(*batches, strict=True)]


@dataclass
class LinearisedAttention:
    r"""z_t2 ~ z_t2 + C_q (dq_t2) + C_k (dk_t1) + C_v (dv_t1), head by head: hooks that replace hook_z by this.

    The prompt's length enters only through the core softmax(q k') v, whose Jacobian is block diagonal over heads:
    d_head backward passes (times the heads that share a key), each for all heads at once, give the whole of it. A
    product with the Jacobian of the block then involves only the tokens t1 and t2. C_q is needed only where t1 = t2.

    One random product through the replacement is compared with that through the layer. If they differ (query norms
    across heads, gates, hooks that do not fire or have another layout) the layer is not replaced: exact, but slower.
    """

    layer: int
    n_keys: int  # of t2
    leaf: Tensor | None = None  # x_t1, set before the attention runs
    active: bool = False  # whether the replacement is in place
    _seen: dict[str, Tensor] = field(default_factory=dict)

    def hooks(self, available: Any, parts: str) -> list[tuple[str, Any]]:
        """Return [(hook_name, fn)] that keep some of "q", "k" and "v" of one token's pass, and replace "z"; [] if the
        model lacks one of them."""
        names = {part: f"blocks.{self.layer}.attn.hook_{part}" for part in parts}
        if not all(name in available for name in names.values()):
            return []

        def remember(x: Tensor, hook: Any, part: str) -> Tensor:
            self._seen[part] = x
            return x

        def replace(z: Tensor, hook: Any) -> Tensor:
            linear = self._linear(z)
            self._seen.clear()
            self.active = linear is not None
            return z if linear is None else linear

        return [(name, replace if part == "z" else partial(remember, part=part)) for part, name in names.items()]

    def _linear(self, z: Tensor) -> Tensor | None:
        """Return the first-order expansion of z, or None where that is not exact."""
        inputs, (k, v) = list(self._seen.values()), (self._seen.get(part) for part in "kv")
        if self.leaf is None or k is None or v is None or not all(x.requires_grad for x in (z, *inputs)):
            return None
        n_groups, d_value = v.shape[2:] if v.ndim == 4 else (0, 0)  # heads that share a key are a group
        n_heads = z.numel() // d_value if d_value else 0
        heads = {"q": n_heads, "k": n_groups, "v": n_groups}
        if not n_groups or n_heads % n_groups or len(z) != 1 or z.shape[1] != 1 or z.numel() != n_heads * d_value:
            return None
        if any(x.ndim != 4 or x.shape[:3] != (1, 1, heads[part]) for part, x in self._seen.items()):
            return None
        # dz / d(q, k, v): a backward pass per coordinate of z and member of a group, for all groups at once
        columns = torch.eye(z.numel() // n_groups, dtype=z.dtype, device=z.device)
        cotangents = columns.repeat(1, n_groups).reshape(-1, *z.shape)
        images = vector_jacobian_products(z, inputs, cotangents, self.n_keys * z.numel())
        blocks = [image.reshape(len(columns), n_groups, -1).transpose(0, 1) for image in images]
        changes = [
            (x - x.detach()).flatten() @ torch.block_diag(*groups).mT for x, groups in zip(inputs, blocks, strict=True)
        ]
        linear = z.detach() + torch.stack(changes).sum(0).reshape(z.shape)
        # one random product J' w through z and its replacement; some norms and rotations are in float32 everywhere
        w = torch.randn(z.shape, generator=torch.Generator().manual_seed(0), dtype=z.dtype).to(z.device)
        exact, linearised = (
            torch.autograd.grad(out, self.leaf, w, retain_graph=True, materialize_grads=True)[0] for out in (z, linear)
        )
        return linear if bool((exact - linearised).norm() <= 1e-4 * exact.norm()) else None

"""Provenance of a result: names for pictures, and what is needed to run it again."""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from importlib.metadata import version
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tl_posgen.arithmetic import double_device, elements_at_once, summable
from tl_posgen.models.same_logits import N_TOKENS, without_hooks
from tl_posgen.models.session import Session
from tl_posgen.models.tokens import first_token_in_words, repeated_share

OF_FUNCTIONS = ("fwd_hooks", "added_hooks", "metric")  # entries that hold names, which may be those of others
SAME_WEIGHTS = ", the model's own weights"  # of a null whose seed also made the model


@cache
def versions() -> dict[str, str]:
    """Return the versions of packages that a result may depend on."""
    return {name: version(name) for name in ("tl-posgen", "transformer-lens", "torch", "transformers")}


_BLOCK = 2**16  # words that one sum stands for
_IN_CACHE = 2**18  # words that are multiplied at once
_MOST_REPEATED = 0.5  # share of runs of tokens that stand in another prompt too, above which it is said
_WORDS = {1: torch.int8, 2: torch.int16}  # bytes of an entry -> how its bits are read; wider ones as some int32


def fingerprint(session: Session) -> str:
    """Return sixteen letters of every byte of all parameters and buffers, equal on every device; see `digest_of`. Tied
    ones count once."""
    # a HookedTransformer with ALiBi has W_pos too: memory that is neither set nor used
    unused = "pos_embed.W_pos" if getattr(session.model.cfg, "positional_embedding_type", "") == "alibi" else ""
    tensors = {**dict(session.model.named_parameters()), **dict(session.model.named_buffers())}
    return digest_of({name: tensors[name] for name in sorted(tensors) if name != unused}, session.device)


def logits_digest(session: Session) -> str | None:
    """Return sixteen letters of the logits that the model gives for a few fixed tokens: of whatever it computes with,
    such as adapters, functions and hooks of torch; None where it cannot read these tokens, as what was put into it is
    made for others. Hooks of TransformerLens are left out for that reason."""
    by, has_hooks = session.streamed.by, any(point.fwd_hooks for point in session.model.hook_dict.values())
    tokens = session.backend.some_tokens(N_TOKENS)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(session.exclusive("logits"))
        if by is not None:
            stack.enter_context(by.paused())
        if has_hooks:
            stack.enter_context(without_hooks(session.model))
        try:
            logits = session.backend.model(tokens, return_type="logits", **session.backend.options(tokens))
        except Exception:  # whatever a function of the user's raises
            return None
    return digest_of({"logits": logits}, session.device)


def digest_of(tensors: Mapping[str, Tensor], device: torch.device) -> str:
    """SHA-256 of the sums s_b = sum_i c_i w_bi mod 2^64 over blocks b of words w of 8, 16 or 32 bits, and of each
    tensor's name, dtype and shape; its first sixteen letters.

    The factors c are odd, random and the same for all blocks. Of tensors that differ, all sums agree with a probability
    of 2^-32 at most, whatever else is alike: entries that are swapped, other signs. The sums are formed where a tensor
    lies, and the host waits once for all of them.

    Source: ours; the sums are multilinear hashing (Carter and Wegman, J. Comput. Syst. Sci. 18, 1979), as analysed by
    Lemire and Kaser, arXiv 1202.4961.

    Example:
        >>> x = torch.arange(6.0).reshape(2, 3)
        >>> first, again, swapped = (digest_of({"x": some}, x.device) for some in (x, x.clone(), x[[1, 0]]))
        >>> first == again != swapped
        True
    """
    by_device, sums = dict[torch.device, Tensor](), list[Tensor]()
    for tensor in tensors.values():
        words = summable(tensor.detach().flatten()).view(_WORDS.get(tensor.element_size(), torch.int32))
        if words.device not in by_device:
            by_device[words.device] = _factors(_BLOCK).to(words.device)
        c, n_whole = by_device[words.device], len(words) // _BLOCK * _BLOCK
        groups = words[:n_whole].view(-1, _BLOCK).split(max(1, elements_at_once(words.device, _IN_CACHE) // _BLOCK))
        of_blocks = [(group * c).sum(1) for group in groups] if n_whole else []
        of_blocks.append((words[n_whole:] * c[: len(words) - n_whole]).sum()[None])
        sums.append(torch.cat(of_blocks).to(double_device(device)))
    host_sums = torch.cat(sums).cpu().split([len(block_sums) for block_sums in sums])
    digest = hashlib.sha256()
    for (name, tensor), numbers in zip(tensors.items(), host_sums, strict=True):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode() + numbers.numpy().tobytes())
    return digest.hexdigest()[:16]


@cache
def _factors(n: int) -> Int[Tensor, " _"]:
    """Draw n odd numbers of 64 bits, the same ones every time."""
    generator = torch.Generator().manual_seed(0)  # of the CPU, whatever torch's default device is
    return torch.randint(-(2**62), 2**62, (n,), generator=generator, device="cpu") * 2 + 1


def provenance_of(
    session: Session,
    tokens: Sequence[Int[Tensor, " _"]],
    nulls: Mapping[str, Sequence[int]] = MappingProxyType({}),
    seed: int | None = None,
    *,
    weights: bool = True,
) -> dict[str, Any]:
    """Return what is needed to run the same analysis again, JSON-ready.

    Args:
        weights: whether their fingerprint is taken, which reads all of them.
    """
    origin = session.origin
    lengths = sorted({len(prompt) for prompt in tokens})
    digest = hashlib.sha256(repr([len(prompt) for prompt in tokens]).encode())
    for prompt in tokens:
        digest.update(prompt.to(torch.int64).cpu().numpy().tobytes())
    repeated, n_ctx = round(repeated_share(tokens), 3), int(session.model.cfg.n_ctx)
    return {
        "model": session.label,
        **({} if origin.called is None else {"file": session.file}),
        "revision": origin.revision,
        "backend": origin.backend,
        "dtype": str(session.model.cfg.dtype).removeprefix("torch."),
        "dequantised_from": origin.dequantised_from,
        "initialisation": origin.initialisation,
        "encoding": session.encoding,
        "prompts": len(tokens),
        "length": lengths[0] if len(lengths) == 1 else lengths,
        "first_token": first_token_in_words(session, tokens),
        **({"repeated": repeated} if repeated > _MOST_REPEATED else {}),
        **({"beyond_context": [lengths[-1], n_ctx]} if lengths and lengths[-1] > n_ctx else {}),
        "tokens_sha256": digest.hexdigest() if tokens else None,
        **({"weights": fingerprint(session)} if weights else {}),
        "parameters": session.backend.n_parameters(),
        "seed": seed,
        "nulls": {kind: list(seeds) for kind, seeds in nulls.items()},
        **({"random_init": session.backend.drawing_rule(origin)} if nulls.get("random init") else {}),
        "mask": "causal, and the window of each layer that has one",
        "versions": dict(versions()),
    }

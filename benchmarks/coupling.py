"""Top singular triplets of every layer's residual Jacobian at the last token, against the authors' way, in one run.

    python benchmarks/coupling.py --d-model 512 --layers 4 --tokens 256 --k 10

Operations per layer (multiplications and additions, Llama block with d_mlp = 8/3 d, n tokens):
    authors     d backward passes through the whole prompt, 24 d^2 n each:  24 d^3 n,  then a full SVD
    here        d products that touch the last token only:                  24 d^3,    then the same SVD,
                after the attention core is differentiated: d_head backward passes, about 8 d n each
so about n times fewer before the SVD, which is then what is left.

Peak memory is that of the tensors each way allocates, for prompts of growing length (the authors' without their d x d
matrix). What still grows here are the keys and values, 2 n d_key floats a layer, and the residual streams, n d floats
a layer, which are a result.
"""

import argparse
import time
from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tl_posgen.coupling.jacobians import DENSE_UP_TO, residual_jacobians


def random_llama(d_model: int, n_layers: int, n_ctx: int):
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    config = HookedTransformerConfig(
        n_layers=n_layers, d_model=d_model, n_ctx=n_ctx, d_head=64, n_heads=d_model // 64, d_mlp=8 * d_model // 3,
        d_vocab=512, act_fn="silu", gated_mlp=True, normalization_type="RMS", positional_embedding_type="rotary",
        rotary_dim=64, final_rms=True, device="cpu", seed=0,
    )  # fmt: skip
    return HookedTransformer(config).eval()


def authors_jacobian(model, tokens: Tensor, layer: int, rows: int) -> Tensor:
    """The first `rows` rows of the Jacobian: a backward pass each, through the block on the whole prompt."""
    streams: dict[str, Tensor] = {}

    def enter(x: Tensor, hook) -> Tensor:
        streams["input"] = x.detach().clone().requires_grad_()
        return streams["input"]

    def leave(x: Tensor, hook) -> None:
        streams["output"] = x

    hooks = [(f"blocks.{layer}.hook_resid_pre", enter), (f"blocks.{layer}.hook_resid_post", leave)]
    with model.hooks(fwd_hooks=hooks):
        model(tokens[None], return_type=None, stop_at_layer=layer + 1)
    gradients = [
        torch.autograd.grad(streams["output"][0, -1, i], streams["input"], retain_graph=True)[0][0, -1]
        for i in range(rows)
    ]
    return torch.stack(gradients) - torch.eye(rows, model.cfg.d_model)


def authors_way(model, tokens: Tensor, k: int) -> list[Tensor]:
    matrices = [authors_jacobian(model, tokens, layer, model.cfg.d_model) for layer in range(model.cfg.n_layers)]
    return [torch.linalg.svd(matrix)[1][:k] for matrix in matrices]


def this_way(model, tokens: Tensor, k: int) -> list[Tensor]:
    jacobians = residual_jacobians(model, tokens, -1, dense_up_to=DENSE_UP_TO)
    return [jacobian.triplets(k).values for jacobian in jacobians]


def seconds(job: Callable[[], list[Tensor]]) -> tuple[float, list[Tensor]]:
    """Processor time of this process: on one thread that of a clock, had the machine nothing else to do."""
    start = time.process_time()
    values = job()
    return time.process_time() - start, values


def peak_mebibytes(job: Callable[[], object]) -> float:
    """Largest sum of tensor memory that lived at one time, of what the job allocated."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        job()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(accumulate(nbytes for _, nbytes in changes)) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("d-model", 512), ("layers", 4), ("tokens", 256), ("k", 10), ("threads", 1), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lengths", type=int, nargs="*", default=[256, 512, 1024, 2048])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    longest = max([arguments.tokens, *arguments.lengths])
    model = random_llama(arguments.d_model, arguments.layers, longest)
    tokens = torch.randint(512, (longest,), generator=torch.Generator().manual_seed(0))
    prompt, k = tokens[: arguments.tokens], arguments.k

    this_way(model, prompt[:8], k)  # the first calls of the libraries
    authors, expected = seconds(lambda: authors_way(model, prompt, k))
    timed = [seconds(lambda: this_way(model, prompt, k)) for _ in range(arguments.repeats)]
    here, actual = sorted(timed, key=lambda pair: pair[0])[len(timed) // 2]
    error = max(float((a - b).abs().max() / a[0]) for a, b in zip(expected, actual, strict=True))
    print(
        f"d {arguments.d_model}, {arguments.layers} layers, {len(prompt)} tokens, top {k}, threads {arguments.threads}"
    )
    print(f"authors {authors:.2f} s   here {here:.2f} s   {authors / here:.0f} times faster")
    print(f"largest difference of a singular value over s_1: {error:.1e}")

    for length in arguments.lengths:
        mine = peak_mebibytes(lambda n=length: this_way(model, tokens[:n], k))
        theirs = peak_mebibytes(lambda n=length: authors_jacobian(model, tokens[:n], arguments.layers - 1, 4))
        print(f"{length:5d} tokens: peak memory here {mine:6.0f} MiB, authors {theirs:6.0f} MiB")


if __name__ == "__main__":
    main()

"""Train the mini recipe at two contexts and two RoPE bases, and once on tokens in random order.

    python examples/clock/train.py --books DIRECTORY --work build/contexts

Tokens of a batch, schedule and everything that a run does not name are the recipe of examples/mini_model/train.py, at an
eighth of its steps. In the run `random_order` the tokens of each window are permuted: near tokens tell no more of the
next one than far ones, so nothing asks for a penalty on distance. Stop it at any time and give the same command again.
A run lies in WORK/RUN.
"""

import argparse
import sys
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from mini_model import train as recipe

STEPS = recipe.CHECKPOINTS[-1] // 8
TOKENS = 8 * recipe.CONTEXT  # of a batch
RUNS = {  # name: context, base
    "512_1e4": (512, 1e4),
    "256_1e6": (256, 1e6),
    "random_order": (512, 1e4),
    "256_1e4": (256, 1e4),
    "512_1e6": (512, 1e6),
}


def new_model(vocab_size: int, context: int, base: float, seed: int) -> LlamaForCausalLM:
    config = recipe.new_config(vocab_size)
    config.max_position_embeddings = context
    config.rope_parameters = {"rope_type": "default", "rope_theta": base}
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def loss_in_random_order(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The mean loss with the tokens after BOS permuted, in each window by itself; drawn from the window's own tokens."""
    generator = torch.Generator().manual_seed(int(batch.sum()))
    order = torch.rand(batch[:, 1:].shape, generator=generator).argsort(dim=1)
    return recipe.mean_loss(model, torch.cat([batch[:, :1], batch[:, 1:].gather(1, order)], dim=1))


def main() -> None:
    parser = recipe.options("Train the mini recipe at two contexts and two bases.", Path("build/contexts"), STEPS)
    parser.add_argument("--runs", choices=RUNS, nargs="+", default=list(RUNS))
    args = parser.parse_args()
    tokenizer, stream, held_out = recipe.prepare(args.books, args.work, args.vocab_size)
    for name in args.runs:
        work, (context, base) = args.work / name, RUNS[name]
        last = work / "checkpoints" / f"step{args.steps:05d}"
        if last.is_dir():
            continue
        work.mkdir(exist_ok=True)
        run = argparse.Namespace(**vars(args) | {"work": work, "context": context, "batch": TOKENS // context})
        loss_of = loss_in_random_order if name == "random_order" else recipe.mean_loss
        recipe.train(new_model(len(tokenizer), context, base, args.seed), stream, held_out, run, (0,), loss_of=loss_of)
        tokenizer.save_pretrained(last)


if __name__ == "__main__":
    main()

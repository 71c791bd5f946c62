"""Train the mini recipe with position encodings at an eighth of its tokens.

    python examples/encodings/train.py --books DIRECTORY --encoding rope split --seeds 0 1 2 --work build/encodings

Everything but the encoding and the number of steps is the recipe of examples/mini_model/train.py, its schedule rescaled.
At one seed all encodings start from the same weights and see the same batches. Stop it at any time and give the same
command again. A run lies in WORK/ENCODING-SEED; tokenizer and tokens, the same for all runs, in WORK.
Runs of another number of --steps need another WORK: their schedule is another.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from attention import ENCODINGS, EncodedLlama
from mini_model import train as recipe

STEPS = recipe.CHECKPOINTS[-1] // 8


def new_model(vocab_size: int, encoding: str, seed: int) -> EncodedLlama:
    config = recipe.new_config(vocab_size)
    config.encoding, config.use_cache = encoding, False
    torch.manual_seed(seed)
    return EncodedLlama(config)


def main() -> None:
    parser = recipe.options("Train the mini recipe with position encodings.", Path("build/encodings"), STEPS)
    parser.add_argument("--encoding", choices=ENCODINGS, nargs="+", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", help="several runs, one after the other")
    parser.set_defaults(every=100)
    args = parser.parse_args()
    tokenizer, stream, held_out = recipe.prepare(args.books, args.work, args.vocab_size)
    for seed in args.seeds or [args.seed]:
        for encoding in args.encoding:
            work = args.work / f"{encoding}-{seed}"
            if (work / "checkpoints" / f"step{args.steps:05d}").is_dir():
                continue
            work.mkdir(exist_ok=True)
            run = argparse.Namespace(**vars(args) | {"work": work, "seed": seed})
            recipe.train(new_model(len(tokenizer), encoding, seed), stream, held_out, run, (), torch.float32)


if __name__ == "__main__":
    main()

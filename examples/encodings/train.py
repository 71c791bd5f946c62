"""Train the mini recipe with one position encoding at an eighth of its tokens.

    python examples/encodings/train.py --books DIRECTORY --encoding split --seed 0 --work build/encodings

Everything but the encoding and the number of steps is the recipe of examples/mini_model/train.py, its schedule rescaled.
At one seed all encodings start from the same weights and see the same batches. Stop it at any time and give the same
command again. The run lies in WORK/ENCODING-SEED; tokenizer and tokens, the same for all runs, in WORK.
"""

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


if __name__ == "__main__":
    parser = recipe.options("Train the mini recipe with one position encoding.", Path("build/encodings"), STEPS)
    parser.add_argument("--encoding", choices=ENCODINGS, required=True)
    parser.set_defaults(every=100)
    args = parser.parse_args()
    tokenizer, stream, held_out = recipe.prepare(args.books, args.work, args.vocab_size)
    args.work /= f"{args.encoding}-{args.seed}"
    args.work.mkdir(exist_ok=True)
    model = new_model(len(tokenizer), args.encoding, args.seed)
    recipe.train(model, stream, held_out, args, checkpoints=(), dtype=torch.float32)

"""Train six models that differ from the mini model in one or two things: depth, width, heads, tokens or texts.

    python examples/shapes/train.py --books DIRECTORY --shape deep --work build/shapes

Data, schedule and everything that a shape does not name are the recipe of examples/mini_model/train.py, at a quarter of
its steps. Stop a run at any time and give the same command again. It lies in WORK/SHAPE.
"""

import shutil
import sys
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from mini_model import train as recipe

STEPS = recipe.CHECKPOINTS[-1] // 4
SHAPES = {
    "shallow": {"num_hidden_layers": 2, "hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 6},
    "deep": {"num_hidden_layers": 8, "hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3},
    "narrow_heads": {"head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 4},
    "wide_heads": {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1},
    "bytes": {},  # no merges: a token is a byte
    "one_author": {},  # the books of one author
}
VOCABULARY = {"bytes": 257}
AUTHOR = "arthur_conan_doyle"


def new_model(shape: str, vocab_size: int, seed: int) -> LlamaForCausalLM:
    config = recipe.new_config(vocab_size)
    for name, value in SHAPES[shape].items():
        setattr(config, name, value)
    config.intermediate_size = config.hidden_size * 11 // 4  # the mini model's 352 for 128
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def books_of(shape: str, books: Path, work: Path) -> Path:
    """The directory of books that a shape is trained on: all, or a copy of one author's and the two held out."""
    if shape != "one_author":
        return books
    chosen = work / "books"
    chosen.mkdir(parents=True, exist_ok=True)
    for book in [*books.glob(f"{AUTHOR}*.txt"), *(books / name for name in recipe.HELD_OUT)]:
        shutil.copyfile(book, chosen / book.name)
    return chosen


if __name__ == "__main__":
    parser = recipe.options("Train the mini recipe with another shape.", Path("build/shapes"), STEPS)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    args = parser.parse_args()
    args.work /= args.shape
    books = books_of(args.shape, args.books, args.work)
    vocab_size = VOCABULARY.get(args.shape, args.vocab_size)
    tokenizer, stream, held_out = recipe.prepare(books, args.work, vocab_size)
    recipe.train(new_model(args.shape, len(tokenizer), args.seed), stream, held_out, args, checkpoints=(0,))
    tokenizer.save_pretrained(args.work / "checkpoints" / f"step{args.steps:05d}")

"""Train the bundled mini model from scratch: tokenizer, weights, checkpoints and the log of its loss.

    python examples/mini_model/train.py --books DIRECTORY --work build/mini

DIRECTORY holds plain-text books, one a file, title block above a line of dashes. The run is seeded and resumable: stop
it at any time and give the same command again. Batch number `step` depends on the seed and on `step` alone, so a
resumed run sees the batches that an uninterrupted one would have seen.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tqdm.auto import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

BUNDLED_TEXT = "lewis_carroll_alice_s_adventures_in_wonderland.txt"  # ships with the package, never trained on
HELD_OUT = (BUNDLED_TEXT, "kenneth_grahame_the_wind_in_the_willows.txt")
BOS = "<s>"
CONTEXT = 512
CHECKPOINTS = (0, 32, 80, 200, 500, 1250, 3200, 8000)  # log-spaced, a factor 2.5 apart; the last is the model


def read_book(path: Path) -> str:
    """The text below the title block."""
    text = path.read_text(encoding="utf-8")
    head, dashes, body = text.partition("\n-------\n")
    return (body if dashes else head).strip() + "\n"


def train_tokenizer(books: list[Path], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE over the training books; typographic quotes and dashes become their ASCII forms."""
    ascii_forms = {"“": '"', "”": '"', "‘": "'", "’": "'", "—": "--", "\r\n": "\n"}
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), *(normalizers.Replace(old, new) for old, new in ascii_forms.items())]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((read_book(book) for book in books), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=BOS, pad_token=BOS, model_max_length=CONTEXT
    )


def tokenize(tokenizer: PreTrainedTokenizerFast, books: list[Path]) -> np.ndarray:
    parts = [tokenizer(read_book(book), add_special_tokens=False)["input_ids"] for book in books]
    return np.concatenate([np.asarray(part, dtype=np.uint16) for part in parts])


def windows(stream: np.ndarray, starts: np.ndarray, length: int = CONTEXT) -> torch.Tensor:
    """Windows of `length` tokens: BOS, then length - 1 tokens of the stream from each start."""
    rows = stream[starts[:, None] + np.arange(length - 1)].astype(np.int64)
    return torch.from_numpy(np.concatenate([np.zeros((len(rows), 1), dtype=np.int64), rows], axis=1))


def new_config(vocab_size: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )


def new_model(vocab_size: int, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(new_config(vocab_size))


def mean_loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, stream: np.ndarray, n_windows: int = 32, length: int = CONTEXT) -> float:
    starts = np.linspace(0, len(stream) - length, n_windows).astype(np.int64)
    rows = windows(stream, starts, length)
    return float(np.mean([mean_loss(model, chunk).item() for chunk in rows.split(8)]))


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over a fortieth of the steps, then a cosine down to a tenth of the peak."""
    warm = min(1.0, (step + 1) / (steps / 40))
    return peak * warm * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def save_model(model: LlamaForCausalLM, directory: Path, dtype: torch.dtype = torch.float16) -> None:
    """Safetensors and config, ready for from_pretrained; the tied output matrix is stored once."""
    directory.mkdir(parents=True, exist_ok=True)
    state = {name: value.to(dtype).contiguous() for name, value in model.state_dict().items()}
    del state["lm_head.weight"]
    partial = directory / "model.safetensors.partial"
    save_file(state, partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # safetensors writes for the owner alone
    partial.replace(directory / "model.safetensors")
    model.config.architectures = [type(model).__name__]
    model.config.dtype = dtype
    model.config.save_pretrained(directory)


def save_state(path: Path, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, step: int) -> None:
    partial = path.with_suffix(".partial")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, partial)
    partial.replace(path)


def prepare(books_dir: Path, work: Path, vocab_size: int) -> tuple[PreTrainedTokenizerFast, np.ndarray, np.ndarray]:
    """Tokenizer, training stream and held-out stream, made once and kept in `work`."""
    books = sorted(books_dir.glob("*.txt"))
    train = [book for book in books if book.name not in HELD_OUT]
    held_out = [book for book in books if book.name in HELD_OUT]
    if len(held_out) != len(HELD_OUT):
        raise SystemExit(f"{books_dir}: the held-out books {', '.join(HELD_OUT)} are not all there")
    if not (work / "held_out.npy").exists():
        work.mkdir(parents=True, exist_ok=True)
        tokenizer = train_tokenizer(train, vocab_size)
        tokenizer.save_pretrained(work / "tokenizer")
        np.save(work / "train.npy", tokenize(tokenizer, train))
        np.save(work / "held_out.npy", tokenize(tokenizer, held_out))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work / "tokenizer")
    return tokenizer, np.load(work / "train.npy"), np.load(work / "held_out.npy")


def train(
    model: LlamaForCausalLM,
    stream: np.ndarray,
    held_out: np.ndarray,
    args: argparse.Namespace,
    checkpoints: tuple[int, ...] = CHECKPOINTS,
    dtype: torch.dtype = torch.float16,
    loss_of: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor] = mean_loss,
) -> None:
    """AdamW on `args.steps` batches, resumed from the state in `args.work`; checkpoints, and the last model, in `dtype`.

    `loss_of` gives what is minimised, from the model and a batch of windows.
    """
    torch.set_num_threads(args.threads)
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)

    state_path, log_path, first = args.work / "state.pt", args.work / "log.jsonl", 0
    if state_path.exists():
        state = torch.load(state_path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
        kept = [line for line in log_path.read_text().splitlines() if json.loads(line)["step"] < first]
        log_path.write_text("".join(line + "\n" for line in kept))

    def evaluate(step: int, train_loss: float | None) -> None:
        record = {"step": step, "tokens": step * args.batch * args.context, "train_loss": train_loss}
        record |= {"held_out_loss": held_out_loss(model, held_out, length=args.context), "time": round(time.time())}
        with log_path.open("a") as log:
            log.write(json.dumps(record) + "\n")
        bar.set_postfix(held_out=f"{record['held_out_loss']:.3f}")

    last = min(args.steps, args.until or args.steps)
    bar = tqdm(range(first, last), initial=first, total=args.steps, unit="step", mininterval=5)
    recent: list[float] = []
    for step in bar:
        if step in checkpoints:
            save_model(model, args.work / "checkpoints" / f"step{step:05d}", dtype)
        if step % args.every == 0 or step in checkpoints:
            save_state(state_path, model, optimizer, step)
            evaluate(step, float(np.mean(recent)) if recent else None)
            recent.clear()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        rng = np.random.default_rng([args.seed, step])
        starts = rng.integers(0, len(stream) - args.context, args.batch)
        loss = loss_of(model, windows(stream, starts, args.context))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent.append(loss.item())
    save_state(state_path, model, optimizer, last)
    if last < args.steps:
        return
    evaluate(last, float(np.mean(recent)) if recent else None)
    save_model(model, args.work / "checkpoints" / f"step{args.steps:05d}", dtype)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {args.steps} steps: {args.work / 'checkpoints'}")


def options(description: str, work: Path, steps: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--books", type=Path, required=True, help="directory of plain-text books")
    parser.add_argument("--work", type=Path, default=work, help="where state, log and checkpoints go")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--until", type=int, help="stop here; the same command without it goes on")
    parser.add_argument("--every", type=int, default=200, help="steps from one saved state to the next")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens of a window")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    return parser


if __name__ == "__main__":
    args = options("Train the bundled mini model.", Path("build/mini"), CHECKPOINTS[-1]).parse_args()
    tokenizer, stream, held_out = prepare(args.books, args.work, args.vocab_size)
    train(new_model(len(tokenizer), args.seed), stream, held_out, args)

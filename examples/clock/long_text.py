"""Loss by position, and copies across the text, of prompts of twice a model's training context under five conditions.

    python examples/clock/long_text.py --model FILE.gguf --text wikitext2.txt --out build/clock/long_text.jsonl

A prompt is 2 L tokens of text. Its last tokens are eight passages of the prompt once more, from eight depths: a cue of
8 tokens, and 24 that are judged. Runs are kept one by one; give the same command again to go on. One condition of one
prompt takes SmolLM2 (L = 8,192) five to fifteen minutes of a core.

Conditions: the model unchanged; planes of less than a turn held at L / 2, and LM-Infinite (windows of L, ten first
tokens), by this package's hooks in streamed passes; position interpolation and YaRN, factor 2, by transformers' own
frequencies and attention.
"""

import argparse
import json
import time
from pathlib import Path

import pandas as pd
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tl_posgen
from tl_posgen.hooks import hold_planes, lm_infinite
from tl_posgen.models.loss import token_losses
from tl_posgen.models.tokens import to_prompts

CUE, JUDGED, DEPTHS = 8, 24, 8
PASSAGE = CUE + JUDGED
CONDITIONS = ("unchanged", "held", "lm_infinite", "interpolation", "yarn")


def with_copies(text: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Replace a prompt's last tokens by copies of eight passages; also where these passages begin."""
    length = len(text) - DEPTHS * PASSAGE
    starts = [int((at + 0.5) / DEPTHS * length) for at in range(DEPTHS)]
    order = [starts[at] for at in (3, 6, 0, 5, 2, 7, 1, 4)]  # neighbours in the text are not copied side by side
    return torch.cat([text[:length], *(text[at : at + PASSAGE] for at in order)]), order


def losses_of(condition: str, args: argparse.Namespace, prompts: torch.Tensor) -> torch.Tensor:
    """-ln p of every next token, prompts x (length - 1)."""
    if condition in ("interpolation", "yarn"):
        directory, file = args.model.parent, args.model.name
        config = AutoConfig.from_pretrained(directory, gguf_file=file)
        rule = {"interpolation": "linear", "yarn": "yarn"}[condition]
        config.rope_parameters = {**config.rope_parameters, "rope_type": rule, "factor": 2.0}
        if rule == "yarn":
            config.rope_parameters["original_max_position_embeddings"] = config.max_position_embeddings
        model = AutoModelForCausalLM.from_pretrained(directory, gguf_file=file, config=config, dtype=torch.float32)
        rows = []
        with torch.no_grad():
            for tokens in prompts:
                hidden = model.model(tokens[None], use_cache=False).last_hidden_state[0, :-1]
                parts = zip(hidden.split(512), tokens[1:].split(512), strict=True)
                rows.append(
                    torch.cat(
                        [torch.nn.functional.cross_entropy(model.lm_head(x), y, reduction="none") for x, y in parts]
                    )
                )
        return torch.stack(rows)
    model = tl_posgen.load_model(args.model, backend="bridge")
    context = int(model.cfg.n_ctx)
    hooks = {
        "unchanged": list,
        "held": lambda: hold_planes(model, "partial", at=context // 2),
        "lm_infinite": lambda: lm_infinite(model, context),
    }[condition]()
    with tl_posgen.streaming(model):
        return torch.cat([token_losses(model, tokens[None], hooks) for tokens in prompts])


def summary(records: list[dict]) -> pd.DataFrame:
    """A row a run: text by place, and copies of passages that began before and behind 4,096."""
    rows = []
    for record in records:
        copies = {"far_copies": [], "near_copies": []}
        for copy in record["copies"]:
            copies["far_copies" if copy["begins"] < 4096 else "near_copies"].append(copy["loss"])
        means = {name: sum(losses) / len(losses) for name, losses in copies.items() if losses}
        rows.append({"prompt": record["prompt"], "condition": record["condition"], **record["text"], **means})
    return pd.DataFrame(rows).round(4).sort_values("prompt", kind="stable")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, nargs="+", default=[0, 1], help="which of the prompts")
    parser.add_argument("--of", type=int, default=2, help="how many prompts are spread over the text")
    parser.add_argument("--conditions", choices=CONDITIONS, nargs="+", default=list(CONDITIONS))
    parser.add_argument("--length", type=int, help="tokens; twice the training context if left out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    kept = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    model = tl_posgen.load_model(args.model, backend="bridge")
    length = args.length or 2 * int(model.cfg.n_ctx)
    prompts = to_prompts(model, args.text.read_text(encoding="utf-8"), length=length, n_prompts=args.of)
    del model
    for index in args.prompts:
        tokens, order = with_copies(prompts[index])
        for condition in args.conditions:
            if any((one["prompt"], one["condition"], one["length"]) == (index, condition, length) for one in kept):
                continue
            begin = time.process_time()
            loss = losses_of(condition, args, tokens[None])[0]
            text = loss[: len(loss) - DEPTHS * PASSAGE]
            copies = loss[len(text) :].reshape(DEPTHS, PASSAGE)[:, CUE:]
            record = {
                "prompt": index,
                "condition": condition,
                "length": length,
                "seconds": round(time.process_time() - begin),
            }
            record["text"] = {at: round(float(text[at : at + 2048].mean()), 4) for at in range(0, length, 2048)}
            record["copies"] = [
                {
                    "begins": at,
                    "loss": round(float(row.mean()), 4),
                    "above_half": round(float((row < 0.6931).float().mean()), 4),
                }
                for at, row in zip(order, copies, strict=True)
            ]
            with args.out.open("a") as out:
                out.write(json.dumps(record) + "\n")
            kept.append(json.loads(json.dumps(record)))
            summary(kept).to_csv(args.out.with_suffix(".csv"), index=False)
            print(record, flush=True)


if __name__ == "__main__":
    main()

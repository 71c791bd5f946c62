"""Train one head on a task that needs token x distance, which no sum of position and content solves.

    python examples/encodings/task.py --seeds 0 1 2 3 4 --steps 1500

A prompt is `LENGTH` tokens (mark, value), mark a or b, value 0 .. N_VALUES - 1, all random, and then a query token. The
tokens at the distances NEAR and FAR from the query have one mark. The answer is the value at NEAR if that mark is a, at
FAR if it is b: a head must want a at one distance and b at another one.

With scores f(q, d) + g(q, k) the weight of NEAR against FAR is e^(f(NEAR) - f(FAR)) times e^(g(k) - g(k')), and the marks
of k and k' are the same: whatever prefers NEAR for a prefers it for b. So the model has one layer, one head, no MLP and a
linear readout; with more heads, one for each distance, an MLP could choose between them. Always looking at one distance
is right in half of the prompts, and in 1 / N_VALUES of the others. Nothing here is text.

writes task.json beside this file: accuracy of every encoding and seed. Runs that are in it with these steps stay.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig

sys.path.insert(0, str(Path(__file__).parent))
from attention import ENCODINGS, EncodedLlama

HERE = Path(__file__).parent
LENGTH, N_VALUES, NEAR, FAR = 12, 8, 2, 7
QUERY = 2 * N_VALUES  # the token after those of mark a, 0 .. N_VALUES - 1, and of mark b
ONE_DISTANCE = 0.5 + 0.5 / N_VALUES  # accuracy of a head that looks at one distance only
TESTED = 4096  # prompts


class Nothing(torch.nn.Module):
    """Zero in place of an MLP."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(hidden)


def new_model(encoding: str, seed: int) -> EncodedLlama:
    """One layer of one head without MLP; output weights of their own."""
    config = LlamaConfig(
        vocab_size=QUERY + 1,
        hidden_size=64,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=LENGTH + 1,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},  # planes enough to tell twelve distances
    )
    config.encoding, config.use_cache = encoding, False
    torch.manual_seed(seed)
    model = EncodedLlama(config)
    model.model.layers[0].mlp = Nothing()
    return model


def prompts(n: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens [n, LENGTH + 1] and answers [n]."""
    marks = torch.randint(2, (n, LENGTH), generator=generator)
    marks[:, LENGTH - FAR] = marks[:, LENGTH - NEAR]
    values = torch.randint(N_VALUES, (n, LENGTH), generator=generator)
    answers = torch.where(marks[:, -NEAR] == 0, values[:, -NEAR], values[:, -FAR])
    tokens = torch.cat([marks * N_VALUES + values, torch.full((n, 1), QUERY)], 1)
    return tokens, answers


def accuracy(encoding: str, seed: int, steps: int, batch: int = 128) -> float:
    """Train one model on new prompts in every step, and return the share of right answers on others."""
    model, generator = new_model(encoding, seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        tokens, answers = prompts(batch, generator)
        loss = cross_entropy(model(tokens).logits[:, -1, :N_VALUES], answers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    tokens, answers = prompts(TESTED, torch.Generator().manual_seed(10**6))
    with torch.no_grad():
        right = model(tokens).logits[:, -1, :N_VALUES].argmax(-1) == answers
    return float(right.double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train one head on a task that needs token x distance.")
    parser.add_argument("--seeds", type=int, nargs="+", default=range(5))
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--encoding", choices=ENCODINGS, nargs="+", default=ENCODINGS)
    parser.add_argument("--out", type=Path, default=HERE / "task.json", help="what is found, and where runs go on from")
    args = parser.parse_args()
    found = json.loads(args.out.read_text()) if args.out.is_file() else {}
    if found.get("steps") != args.steps:
        found = {"steps": args.steps, "one_distance": ONE_DISTANCE, "accuracy": {}}
    for encoding in args.encoding:
        of_seeds = found["accuracy"].setdefault(encoding, {})
        for seed in map(str, args.seeds):
            if seed not in of_seeds:
                of_seeds[seed] = accuracy(encoding, int(seed), args.steps)
                args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
                print(f"{encoding}, seed {seed}: {of_seeds[seed]:.3f}", flush=True)


if __name__ == "__main__":
    main()

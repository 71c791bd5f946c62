"""Is it the clock that fails beyond the context, or the sink? Planes held for the first key alone, and for all others.

    python examples/clock/first_key.py --model FILE --text wikitext2.txt --out first_key.csv   # minutes for SmolLM2

The second half of prompts of 256 tokens stands S positions further on, as in `gap`. Scores of the model as it is (far
planes turn on) and scores whose planes of less than a turn are held at L / 2 are put together in four ways: `unchanged`;
`held`; `first key held`, which gives the sink alone the scores that it has inside the context; `others held`, which
leaves the sink what the turned planes give it. A row: the loss of the text and of a copy of the first half, and the
attention that queries of the second half give to the first key, mean over heads, and over those that are sinks (more
than .3) where there is no gap.
"""

import argparse
from collections import defaultdict
from pathlib import Path

import pandas as pd
import torch

import tl_posgen
from tl_posgen.editing.replace_scores import replace_scores
from tl_posgen.editing.score_functions import FrozenBeyond, RowByRow
from tl_posgen.editing.token_positions import tokens_at
from tl_posgen.extension.held_planes import partial_planes
from tl_posgen.frequencies.gap import next_tokens
from tl_posgen.frequencies.numbers.gap import apart, split_of, with_copy
from tl_posgen.models.session import session_of
from tl_posgen.models.tokens import to_prompts

CONDITIONS = {
    "unchanged": (False, False),
    "held": (True, True),
    "first key held": (True, False),
    "others held": (False, True),
}
LENGTH, SKIP, SINK = 256, 8, 0.3


def hooks_of(model, first_held: bool, others_held: bool, shares: dict[int, list[torch.Tensor]]) -> list:
    """Hooks that put both scores together; the attention to the first key, [head], goes to `shares`, a list a layer."""
    context = int(model.cfg.n_ctx)

    def limit_of(geometry) -> torch.Tensor:
        limits = torch.full((len(geometry.rope.inv_freq),), torch.inf, dtype=torch.float64)
        limits[partial_planes(geometry, context)] = context / 2
        return limits

    held = FrozenBeyond(limit_of)

    def scores_of(capture) -> torch.Tensor:
        plain, frozen = capture.scores(), held(capture)
        is_first = torch.arange(plain.shape[-1], device=plain.device) == 0
        scores = torch.where(is_first, frozen if first_held else plain, frozen if others_held else plain)
        if capture.q.shape[-2] == LENGTH:
            visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
            attention = scores.masked_fill(~visible, -torch.inf).softmax(-1)
            shares[capture.layer].append(attention[:, split_of(LENGTH) + SKIP :, 0].mean(-1).double())
        return scores

    return replace_scores(model, RowByRow(scores_of))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gaps", type=float, nargs="+", default=[0, 0.5, 0.75, 1, 1.5], help="in training contexts")
    parser.add_argument("--prompts", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = tl_posgen.load_model(args.model, backend="bridge")
    tokens = torch.stack(to_prompts(model, args.text.read_text(encoding="utf-8"), LENGTH, args.prompts))
    has_bos = int((tokens[:, 0] == tokens[0, 0]).all())
    both, session = torch.cat([tokens, with_copy(tokens, has_bos)]), session_of(model)
    rows, sinks = [], None
    for gap in (round(share * int(model.cfg.n_ctx)) for share in args.gaps):
        for condition, held in CONDITIONS.items():
            shares: dict[int, list[torch.Tensor]] = defaultdict(list)
            with tokens_at(session, apart(LENGTH, gap)):
                loss, _ = next_tokens(session, both, split_of(LENGTH) + SKIP, hooks_of(model, *held, shares))
            text, copy = loss.mean(-1).split(len(tokens))
            share = torch.cat([torch.stack(of_layer[: len(tokens)]).mean(0) for of_layer in shares.values()])
            sinks = share > SINK if sinks is None else sinks
            row = {"gap": gap, "condition": condition, "text": float(text.mean()), "copy": float(copy.mean())}
            row |= {
                "attention_to_first": float(share.mean()),
                "in_sinks": float(share[sinks].mean()),
                "sinks": int(sinks.sum()),
            }
            rows.append(row)
            print(
                {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()},
                flush=True,
            )
    pd.DataFrame(rows).round(4).to_csv(args.out, index=False)


if __name__ == "__main__":
    main()

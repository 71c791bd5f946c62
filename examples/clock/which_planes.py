"""Which planes have to be held, and where, to keep far text harmless and far tokens readable?

    python examples/clock/which_planes.py --model FILE --text wikitext2.txt --out planes.csv   # minutes for SmolLM2

The second half of prompts of 256 tokens stands 1.5 training contexts L further on, as in `gap`, with the planes that
make less than `turns` turns in L held at the distance `at` (in L). A row: the loss of the text and of a copy of the
first half; the first rows are the unchanged model, without a gap, then with it, and the text without its first half.
"""

import argparse
from math import inf, pi
from pathlib import Path

import pandas as pd
import torch

import tl_posgen
from tl_posgen.editing.token_positions import tokens_at
from tl_posgen.frequencies.gap import next_tokens
from tl_posgen.frequencies.numbers.gap import apart, split_of, with_copy
from tl_posgen.hooks import hold_planes
from tl_posgen.models import geometry_of
from tl_posgen.models.session import session_of
from tl_posgen.models.tokens import to_prompts

TURNS, AT, FAR = (0.25, 0.5, 1, 2, 4, inf), (0.125, 0.25, 0.5, 0.75), 1.5
LENGTH, SKIP = 256, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--turns", type=float, nargs="+", default=TURNS)
    parser.add_argument("--at", type=float, nargs="+", default=AT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = tl_posgen.load_model(args.model, backend="bridge")
    session, context = session_of(model), int(model.cfg.n_ctx)
    tokens = torch.stack(to_prompts(model, args.text.read_text(encoding="utf-8"), LENGTH, args.prompts))
    with_bos = int((tokens[:, 0] == tokens[0, 0]).all())
    both, kept = torch.cat([tokens, with_copy(tokens, with_bos)]), []
    theta = {one.layer: one.rope.inv_freq.double() * (one.window or context) for one in geometry_of(model)}

    def keep(
        condition: str, gap: int, hooks=(), prompts=both, first: int = split_of(LENGTH) + SKIP, **settings
    ) -> None:
        with tokens_at(session, apart(LENGTH, gap)[: prompts.shape[1]]):
            losses = next_tokens(session, prompts, first, hooks)[0].mean(-1).split(len(tokens))
        means = dict(zip(("text", "copy"), (float(loss.mean()) for loss in losses), strict=False))
        kept.append({"condition": condition, "gap": gap, **settings, **means})
        print(kept[-1], flush=True)
        pd.DataFrame(kept).round(4).to_csv(args.out, index=False)

    far = round(FAR * context)
    keep("unchanged", 0)
    keep("unchanged", far)
    keep("text without its first half", 0, (), torch.cat([tokens[:, :1], tokens[:, split_of(LENGTH) :]], 1), 1 + SKIP)
    for turns in args.turns:
        slow = {layer: (of_layer < 2 * pi * turns).nonzero()[:, 0].tolist() for layer, of_layer in theta.items()}
        for at in args.at:
            layers = [layer for layer, planes in slow.items() if planes]
            hooks = [
                one for layer in layers for one in hold_planes(model, slow[layer], at=at * context, layers=[layer])
            ]
            keep("held", far, hooks, turns=turns, at=at, planes=len(slow[layers[-1]]))


if __name__ == "__main__":
    main()

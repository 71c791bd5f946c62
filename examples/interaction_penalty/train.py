"""Train the mini recipe with a penalty on interaction, beside RoPE without one, `split` and `alibi`.

    loss + strength * mean over layers and heads of interaction_share(q, k), both of the batch, before RoPE

    python examples/interaction_penalty/train.py --books DIRECTORY --strengths .01 .1 1 --seeds 0 1 2

Model, data and schedule are those of examples/encodings, at fewer steps of shorter windows (--steps, --context): what
is minimised differs alone. Position + content has interaction 0, so that a large strength asks RoPE for what `split`
has by construction, and leaves it its rotated keys. Stop it at any time and give the same command again: a run lies in
WORK/NAME-SEED, and all runs of one seed come before the next seed's. Runs of another number of --steps or --context
need another WORK.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[1] / "encodings"), str(Path(__file__).parents[1])]
from attention import EncodedAttention, EncodedLlama
from train import new_model, recipe
from transformers.models.llama.modeling_llama import repeat_kv

from tl_posgen.position import interaction_share
from tl_posgen.rope.rotation import Rope

STEPS, CONTEXT = 250, 128
STRENGTHS = (0.01, 0.1, 1.0)


def penalised_loss(model: EncodedLlama, batch: torch.Tensor, strength: float) -> torch.Tensor:
    """loss + strength * mean interaction share of all heads, each over all windows of the batch together."""
    rope, shares = Rope(model.model.rotary_emb.inv_freq.double()), []

    def keep(attention: EncodedAttention, args, kwargs) -> None:
        q, k = attention.operands(kwargs["hidden_states"])
        k = repeat_kv(k, attention.num_key_value_groups)
        # without the first token of each window, as it is in no other place
        q, k = (x[:, :, 1:].transpose(0, 1).flatten(1, 2) for x in (q, k))
        shares.append(interaction_share(q, k, rope, n_distances=batch.shape[1] - 1, first_token=True))

    hooks = [layer.self_attn.register_forward_pre_hook(keep, with_kwargs=True) for layer in model.model.layers]
    try:
        loss = recipe.mean_loss(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return loss + strength * torch.cat(shares).mean()


def runs_of(strengths: Sequence[float]) -> dict[str, tuple[str, float]]:
    """Return encoding and strength by name."""
    penalised = {f"rope, penalty {strength:g}": ("rope", strength) for strength in strengths if strength}
    return {"rope": ("rope", 0.0), **penalised, "split": ("split", 0.0), "alibi": ("alibi", 0.0)}


def directory_of(work: Path, name: str, seed: int) -> Path:
    return work / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"


def main() -> None:
    parser = recipe.options("Train the mini recipe with a penalty on interaction.", Path("build/penalty"), STEPS)
    parser.add_argument("--strengths", type=float, nargs="+", default=STRENGTHS)
    parser.add_argument("--seeds", type=int, nargs="+", default=(0, 1, 2), help="several runs, one after the other")
    parser.set_defaults(every=100, context=CONTEXT)
    args = parser.parse_args()
    tokenizer, stream, held_out = recipe.prepare(args.books, args.work, args.vocab_size)
    for seed in args.seeds:
        for name, (encoding, strength) in runs_of(args.strengths).items():
            work = directory_of(args.work, name, seed)
            if (work / "checkpoints" / f"step{args.steps:05d}").is_dir():
                continue
            work.mkdir(exist_ok=True)
            run = argparse.Namespace(**vars(args) | {"work": work, "seed": seed})
            loss_of = partial(penalised_loss, strength=strength) if strength else recipe.mean_loss
            recipe.train(new_model(len(tokenizer), encoding, seed), stream, held_out, run, (), torch.float32, loss_of)


if __name__ == "__main__":
    main()

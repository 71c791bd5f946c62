"""Finished `rope` runs as plain Qwen2 models, which every command reads: the learned mean key is the bias of its keys.

    python examples/encodings/as_qwen2.py --work build/encodings

writes WORK/rope-SEED/qwen2/step01000 of each, and step00000 as it began, with the tokenizer.
"""

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from attention import EncodedLlama
from train import STEPS, new_model

SAME = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rope_parameters", "rms_norm_eps"),
    *("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
)


def as_qwen2(model: EncodedLlama) -> Qwen2ForCausalLM:
    """The same function of the tokens: <R q, R (k + m)> has m as the bias of k, and none of q and v."""
    if model.config.encoding != "rope":
        raise ValueError(f"{model.config.encoding}: only rope is a model of transformers")
    plain = Qwen2ForCausalLM(Qwen2Config(**{name: getattr(model.config, name) for name in SAME})).to(model.dtype)
    weights = {name.replace("mean_key", "k_proj.bias"): value for name, value in model.state_dict().items()}
    for name, parameter in plain.state_dict().items():
        if name not in weights:
            assert name.endswith(("q_proj.bias", "v_proj.bias")), name
            weights[name] = torch.zeros_like(parameter)
    plain.load_state_dict(weights)
    return plain.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description="Finished rope runs as plain Qwen2 models.")
    parser.add_argument("--work", type=Path, default=Path("build/encodings"), help="where train.py left them")
    work = parser.parse_args().work
    for checkpoint in sorted(work.glob(f"rope-*/checkpoints/step{STEPS:05d}")):
        run, trained = checkpoint.parents[1], EncodedLlama.from_pretrained(checkpoint)
        start = new_model(trained.config.vocab_size, "rope", int(run.name.removeprefix("rope-")))
        for step, model in ((0, start), (STEPS, trained)):
            out = run / "qwen2" / f"step{step:05d}"
            as_qwen2(model).save_pretrained(out)
            AutoTokenizer.from_pretrained(work / "tokenizer").save_pretrained(out)
            print(out)


if __name__ == "__main__":
    main()

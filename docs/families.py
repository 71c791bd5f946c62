"""Every decoder that the installed transformers knows, as a tiny random model: are captured scores those it uses?

    python docs/families.py                     # all, into docs/families.json, of the installed TransformerLens
    python docs/families.py llama gemma2        # some, the others as they were
    python docs/families.py llama gemma2 --show # some, printed, nothing written

The truth is every softmax over keys that the plain Hugging Face model computes with eager attention: its input, layer
by layer. A model is "right" where the captured scores and mask equal it in every layer, "refused" where this package
says that it cannot be analysed and why, "wrong" where numbers differ, "crash" on any other error. Architectures that
transformers cannot build small, or that have no such softmax, are "not built".
"""

import argparse
import json
import multiprocessing
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

WRITTEN = Path(__file__).with_name("families.json")
LENGTH = 60  # beyond the probe's 48 tokens, and every window below
SECONDS = 60  # of the processor's time, for one architecture, whatever else the machine does
MEMORY = 6 * 2**30  # of one process: what is larger could not be reduced
MASKED = -9_000  # the first GPT masks with -10,000, all others with the most negative number of a dtype
OUTCOMES = ("right", "refused", "wrong", "crash", "not built")

SMALL = {
    "vocab_size": 62, "hidden_size": 32, "n_embd": 32, "d_model": 32, "dim": 32, "embedding_size": 32,
    "intermediate_size": 48, "ffn_dim": 48, "ffn_hidden_size": 48, "n_inner": 48, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "moe_shared_expert_intermediate_size": 16, "intermediate_size_mlp": 48,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "decoder_layers": 2, "encoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8,
    "max_position_embeddings": 128, "n_positions": 128, "max_seq_len": 128, "n_ctx": 128, "decoder_ffn_dim": 48,
    "encoder_ffn_dim": 48, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "top_k": 2, "moe_topk": 2, "moe_num_experts": 4, "moe_k": 2, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "word_embed_proj_dim": 32, "d_ff": 48, "rotary_dim": 4, "num_codebooks": 1,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 62, "num_kv_shared_layers": 0,
    "attn_layer_offset": 1, "attn_layer_period": 2, "full_attention_interval": 2, "window_size": 6,
    "attention_types": [[["global", "local"], 1]],
}  # fmt: skip
UNUSUAL = {
    "attention_bias": True, "use_bias": True, "bias": True, "mlp_bias": True, "qkv_bias": True, "add_bias_linear": True,
    "sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1, "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 8.0, "partial_rotary_factor": 0.5, "rotary_pct": 0.5, "qk_layernorm": True,
    "use_qk_norm": True, "tie_word_embeddings": True, "alibi": True, "parallel_attn": False,
    "use_parallel_residual": False, "new_decoder_architecture": True, "multi_query": False, "rope_theta": 500.0,
    "query_pre_attn_scalar": 16, "num_key_value_heads": 1, "scale_attn_by_inverse_layer_idx": True,
    "attention_multiplier": 0.5, "clip_qkv": 1.0, "num_attention_heads_per_layer": [4, 8],
}  # fmt: skip


class SoftmaxInputs(TorchDispatchMode):
    """Keeps the input of every softmax over keys: [batch, head, query, key], as many keys as queries or one more."""

    def __init__(self) -> None:
        super().__init__()
        self.scores: list[torch.Tensor] = []
        self.shifted = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._softmax.default:
            x, dim = args[0], args[1] % args[0].ndim
            if x.ndim == 4 and dim == 3 and x.shape[2] == LENGTH and x.shape[3] in (LENGTH, LENGTH + 1):
                self.scores.append(x[0, :, :, :LENGTH].float().clone())
                self.shifted |= x.shape[3] > LENGTH  # with a sink: GPT-OSS takes each row's maximum off first
        return func(*args, **(kwargs or {}))


def architectures() -> list[str]:
    """Model types of transformers with a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def configs(model_type: str) -> Iterator[tuple[str, Any]]:
    """A small default config, and one with what is unusual of it switched on."""
    from transformers import AutoConfig

    plain = AutoConfig.for_model(model_type)
    derived = {name for name in dir(type(plain)) if isinstance(getattr(type(plain), name, None), property)}
    known = {name for name in {**SMALL, **UNUSUAL} if has(plain, name)} - derived
    if "kv_lora_rank" in known:  # latent attention derives it from its parts
        known -= {"head_dim"}
    small = {name: SMALL[name] for name in SMALL if name in known}
    if "num_key_value_heads" in known and plain.num_key_value_heads == getattr(plain, "num_attention_heads", None):
        small["num_key_value_heads"] = 4
    if "kv_lora_rank" in known:  # latent attention has as many keys as queries
        small["num_key_value_heads"] = 4
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None, "use_cache": False}
    yield "default", build_config(model_type, {**small, **ids})
    changed = {
        name: value for name, value in UNUSUAL.items() if name in known and getattr(plain, name) not in (value, None)
    }
    changed |= {"sliding_window": 6} if "sliding_window" in known else {}
    if "num_attention_heads_per_layer" in known:  # None unless given
        changed["num_attention_heads_per_layer"] = UNUSUAL["num_attention_heads_per_layer"]
    yield "unusual", build_config(model_type, {**small, **ids, **changed})


def has(config: Any, name: str) -> bool:
    """Whether a config has an entry; some refuse to say where layers differ."""
    try:
        return hasattr(config, name)
    except Exception:
        return False


def build_config(model_type: str, options: dict[str, Any]) -> Any:
    """The config; lists a layer and sizes derived from others are left to it."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type, **options)
    types = getattr(config, "layer_types", None)
    if types is not None and len(types) != config.num_hidden_layers:
        kinds = list(dict.fromkeys(types))  # one layer of every kind, as far as there are layers
        layers = [*kinds, *types][: config.num_hidden_layers]
        config = AutoConfig.for_model(model_type, **options, layer_types=layers)
    return config


def outcome_of(model_type: str, variant: str, config: Any, backend: str) -> tuple[str, str]:
    """(outcome, reason) of one config."""
    from families import lively, tokenizer

    from tl_posgen.errors import PosgenError
    from tl_posgen.models import load_model, run_capture

    torch.manual_seed(0)
    try:
        config._attn_implementation = "eager"
        model = lively(config)
        tokens = torch.randint(2, 62, (1, LENGTH), generator=torch.Generator().manual_seed(1))
        with torch.no_grad(), SoftmaxInputs() as seen:
            model(tokens)
        if not seen.scores:
            return "not built", "no softmax over keys"
    except Exception as error:
        return "not built", one_line(error)
    with tempfile.TemporaryDirectory() as directory:
        try:
            model.save_pretrained(directory)
            tokenizer().save_pretrained(directory)
        except Exception as error:
            return "not built", one_line(error)
        captures: dict[int, Any] = {}
        try:
            loaded = load_model(directory, backend)
            run_capture(loaded, tokens, lambda one: captures.update({one.layer: one}), {"attn_scores"})
        except MemoryError as error:
            return "not built", one_line(error)
        except PosgenError as refusal:
            return "refused", one_line(refusal).replace(f"{directory}: ", "").replace(directory, "")
        except Exception as error:
            return "crash", one_line(error) + " | " + traceback.format_exc().strip().splitlines()[-3].strip()
    if len(seen.scores) != len(captures):
        return "wrong", f"{len(seen.scores)} layers of softmax, {len(captures)} captured"
    worst = max(difference(captures[layer], seen.scores[layer], seen.shifted) for layer in captures)
    return ("right", f"{worst:.0e}") if worst <= 1e-3 else ("wrong", f"off by {worst:.2g} of the largest score")


def difference(capture: Any, actual: torch.Tensor, shifted: bool) -> float:
    """max |captured - used| of the largest, up to a shift of each row where ALiBi is; inf where another key is seen."""
    found = capture.scores().float()
    visible = found != -torch.inf
    if not torch.equal(visible, actual > MASKED):
        return float("inf")
    if shifted or capture.geometry.encoding == "alibi":
        found, actual = (x - x.masked_fill(~visible, -torch.inf).amax(-1, keepdim=True) for x in (found, actual))
    error = (found - actual).abs().masked_fill(~visible, 0)
    return float(error.max() / actual.abs().masked_fill(~visible, 0).max())


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:200]}"


def backends() -> list[str]:
    from tl_posgen.errors import ModelError
    from tl_posgen.models.conversion.convert import hooked_parts

    try:
        hooked_parts()
    except ModelError:
        return ["bridge"]
    return ["hooked", "bridge"]


def measure(model_type: str, found: Any) -> None:
    """All outcomes of one architecture, put into a queue: run in a process of its own, as some crash or hang."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    used = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (used + SECONDS, used + SECONDS))
    rows = []
    try:
        for variant, config in configs(model_type):
            for backend in backends():
                outcome, reason = outcome_of(model_type, variant, config, backend)
                rows.append({"variant": variant, "backend": backend, "outcome": outcome, "reason": reason})
                if outcome == "not built":
                    break
    except Exception as error:
        rows.append({"variant": "default", "backend": "", "outcome": "not built", "reason": one_line(error)})
    found.put(rows)


def all_outcomes(names: list[str]) -> Iterator[tuple[str, list[dict[str, str]]]]:
    import queue

    import transformers
    from tqdm.auto import tqdm

    context = multiprocessing.get_context("fork")
    transformers.utils.logging.disable_progress_bar()
    outcome_of("llama", *next(configs("llama")), "bridge")  # the children inherit what that imports
    for name in tqdm(names, unit="architecture"):
        found = context.Queue()
        child = context.Process(target=measure, args=(name, found))
        child.start()
        started, rows = time.monotonic(), None
        while rows is None:
            alive = child.is_alive() and time.monotonic() - started < 20 * SECONDS
            try:
                rows = found.get(timeout=1)
            except queue.Empty:
                if not alive:
                    why = f"no result within {SECONDS} s (exit {child.exitcode})"
                    rows = [{"variant": "default", "backend": "", "outcome": "not built", "reason": why}]
        child.kill()
        child.join()
        yield name, rows


def write(name: str, rows: list[dict[str, str]]) -> None:
    """The rows of one architecture in place of those that were there: a run that is stopped loses nothing."""
    known = json.loads(WRITTEN.read_text()) if WRITTEN.exists() else {}
    key = f"TransformerLens {version('transformer-lens')}"
    others = [row for row in known.get(key, {}).get("rows", []) if row["family"] != name]
    every = sorted(others + rows, key=lambda row: row["family"])
    known[key] = {"transformers": version("transformers"), "rows": every}
    WRITTEN.write_text(json.dumps(known, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="model types; all if left out")
    parser.add_argument("--show", action="store_true", help="print, write nothing")
    chosen = parser.parse_args()
    rows = []
    for name, some in all_outcomes(chosen.names or architectures()):
        rows += (own := [{"family": name, **row} for row in some])
        if chosen.show:
            words = ("family", "variant", "backend", "outcome", "reason")
            print("\n".join(" ".join(f"{row[word]:12}" for word in words) for row in own))
        else:
            write(name, own)
    counts = {outcome: sum(row["outcome"] == outcome for row in rows) for outcome in OUTCOMES}
    print(", ".join(f"{n} {outcome}" for outcome, n in counts.items()))
    sys.exit(1 if counts["wrong"] or counts["crash"] else 0)


if __name__ == "__main__":
    main()

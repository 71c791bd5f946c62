"""How much memory each measure takes: what it declares, held by counting bytes at two lengths."""

import pytest
import torch
from families import VOCAB, save_config
from live_memory import LiveMemory
from transformers import Qwen2Config

import tl_posgen
from tl_posgen import arithmetic
from tl_posgen.core import registry
from tl_posgen.frequencies.gap import Gap
from tl_posgen.frequencies.plane_cost import PlaneCost
from tl_posgen.joining import Profiles
from tl_posgen.models.layers import fused
from tl_posgen.position import LengthExtrapolation, Perturbation, PlanePerturbation
from tl_posgen.position.decomposition import residual
from tl_posgen.rules import Rules, rules

FORMED = 5  # matrices that a pass which is not streamed holds beside those of the measure
HEADS, LENGTH = 16, 192
ROWS = ("SCORES_AT_ONCE", 2**12)
SHORTER = {  # at which one matrix more than declared is found as at `LENGTH`
    **dict.fromkeys(("residual", "perturbation", "plane_perturbation", "dummy_distance", "length_extrapolation"), 96),
    **{"band_ablation": 96, "substitution": 64, "profiles": 64, "rules": 64},
}
PROMPTS = {"length_extrapolation": 2, "rules": 2}  # at least
NAMES = [name for name in registry.BUILT_IN if registry.find(name).is_fed or registry.find(name).runs_model]


@pytest.fixture(scope="module")
def many_heads(tmp_path_factory):
    """Many heads, each of few dimensions: at these lengths a [head, query, key] matrix is larger than all the rest."""
    sizes = {"hidden_size": 4 * HEADS, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    config = Qwen2Config(vocab_size=VOCAB, max_position_embeddings=2 * LENGTH, bos_token_id=0, eos_token_id=1, **sizes)
    return tl_posgen.load_model(save_config(config, tmp_path_factory.mktemp("many_heads")))


def request_of(name, n):
    options = {
        "perturbation": Perturbation(ratios=(0, 0.5), n_cloze=0),
        "plane_perturbation": PlanePerturbation(
            edits=["shuffle_phases"], strengths=[1], map_edits=["mean_phase"], map_by="bands"
        ),
        "length_extrapolation": LengthExtrapolation(inside=n // 2, times=2),
        "profiles": Profiles(metrics="literature"),
        "gap": Gap(gaps=[0, 4 * n]),
        "plane_cost": PlaneCost(edits=["drop", "freeze"], groups=["thirds"]),
        "rules": Rules(rules=["slashes_and_vertical", "position_and_content"], budget=32),
    }
    return registry.measure_from(options.get(name, name))


def peak_of(model, request, n, streaming):
    n_prompts = PROMPTS.get(request.name, 1)
    tokens = torch.randint(VOCAB, (n_prompts, n), generator=torch.Generator().manual_seed(0))
    with LiveMemory() as held:
        tl_posgen.analyze(model, tokens, measures=[request], streaming=streaming, nulls=0, progress=False)
    return held.peak


CASES = [(name, streaming) for streaming in (True, False) for name in NAMES if streaming or registry.find(name).is_fed]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "streaming"), CASES)
def test_a_measure_holds_no_more_matrices_than_it_declares(many_heads, monkeypatch, name, streaming):
    """What is held beyond those matrices about doubles from one length to twice that: none of it is a matrix."""
    bounds = (
        (residual, "ENTRIES", 1),
        (arithmetic, *ROWS),
        (rules, "BLOCK", 8),
        (fused, "SCORES_AT_ONCE", 2**16),
    )
    for module, bound, size in bounds:
        monkeypatch.setattr(module, bound, size)  # heads one by one, of which these are parts: as in long prompts
    matrices = registry.find(name).matrices + (0 if streaming else FORMED)
    lengths = [times * SHORTER.get(name, LENGTH) for times in (1, 2)]
    one, two = (peak_of(many_heads, request_of(name, n), n, streaming) - matrices * 4 * HEADS * n**2 for n in lengths)
    assert two <= max(0, 2.2 * one)


@pytest.mark.slow
def test_the_untouched_model_beyond_its_length_forms_no_matrix(many_heads, monkeypatch):
    monkeypatch.setattr(arithmetic, *ROWS)
    requests = [(n, LengthExtrapolation(inside=n // 2, times=2, conditions=())) for n in (LENGTH, 2 * LENGTH)]
    one, two = (peak_of(many_heads, registry.measure_from(options), n, True) for n, options in requests)
    assert two <= 2.2 * one

"""What users get for arguments of a wrong type: one clear error, with the type checker of the tests switched off."""

from pathlib import Path

import pandas as pd
import pytest
import torch

import tl_posgen
from tl_posgen import PosgenError, coupling, slash
from tl_posgen.core import registry
from tl_posgen.coupling.jacobians import residual_jacobians
from tl_posgen.errors import InputError
from tl_posgen.evaluation import LensLM
from tl_posgen.models.conversion.source import MINI
from tl_posgen.studies.emergence import emergence

pytestmark = pytest.mark.usefixtures("unchecked")
TEXT = "Down, down, down. Would the fall never come to an end? I wonder how many miles I have fallen by this time."
SCORES = pd.DataFrame({"model": ["mini"], "score": [0.4]})
CUT = {"length": 16, "n_prompts": 1, "null_seeds": (), "progress": False}

ANALYZE = {
    "a model that is a number": ({"model": 5}, "int is not a model"),
    "a model that is nothing": ({"model": None}, "NoneType is not a model"),
    "a bare module": ({"model": torch.nn.Linear(2, 2)}, "Linear"),
    "prompts that are a number": ({"prompts": 5}, "prompts"),
    "prompts that are nothing": ({"prompts": None}, "prompts"),
    "prompts that are a dictionary": ({"prompts": {"text": TEXT}}, "prompts"),
    "prompts that are a path": ({"prompts": Path("alice.txt")}, "prompts"),
    "prompts of fractions": ({"prompts": [[0.5, 1.5]]}, "integers"),
    "a length in words": ({"length": "16"}, "length"),
    "a fractional length": ({"length": 16.5}, "length"),
    "a length that is true": ({"length": True}, "length"),
    "a number of prompts in words": ({"n_prompts": "one"}, "n_prompts"),
    "layers in words": ({"layers": "0"}, "layer"),
    "a fractional layer": ({"layers": [0.5]}, "layer"),
    "heads in words": ({"heads": "all"}, "head"),
    "a triple for a head": ({"heads": [(0, 1, 2)]}, "head"),
    "null seeds that are a number": ({"null_seeds": 0}, "null_seeds"),
    "null seeds in words": ({"null_seeds": "0"}, "null_seeds"),
    "null seeds that are fractions": ({"null_seeds": (0.5,)}, "null_seeds"),
    "a null seed twice": ({"null_seeds": (1, 1)}, "null_seeds"),
    "a seed in words": ({"seed": "x"}, "seed"),
    "measures that are a number": ({"measures": 5}, "5"),
    "measures that are numbers": ({"measures": [5]}, "5"),
    "measures in a set": ({"measures": {"slash"}}, "'slash'} is no measure: .*or a list of them"),
    "heads that can be read once": ({"heads": (head for head in [0])}, "heads=<generator.*give a list of integers"),
    "layers that can be read once": ({"layers": iter([0])}, "give a list of integers"),
    "the class of all measures": ({"measures": [tl_posgen.Measure]}, "measure takes no single model"),
    "an option that is no measure": ({"measures": [tl_posgen.Variable("r")]}, "is no measure"),
}


@pytest.mark.parametrize("case", ANALYZE)
def test_analyze_names_what_is_wrong(mini, case):
    arguments, said = ANALYZE[case]
    whole = {"model": mini, "prompts": TEXT, "measures": "three_axis", **CUT} | arguments
    with pytest.raises(InputError, match=said) as refusal:
        tl_posgen.analyze(whole.pop("model"), whole.pop("prompts"), **whole)
    assert "\n" not in str(refusal.value)


OTHERS = {
    "load": (lambda: tl_posgen.load(5), "5"),
    "load_model": (lambda: tl_posgen.load_model(5), "5"),
    "random_like": (lambda: tl_posgen.random_like(tl_posgen.load_model("mini"), seed="x"), "seed"),
    "judge_claims, prompts": (lambda: tl_posgen.judge_claims("mini", [TEXT]), "prompts"),
    "judge_claims, papers": (lambda: tl_posgen.judge_claims("mini", TEXT, papers="slash"), "papers"),
    "find_slash_heads, kappa": (lambda: tl_posgen.find_slash_heads("mini", TEXT, kappa="x"), "kappa"),
    "find_slash_heads, distances": (lambda: tl_posgen.find_slash_heads("mini", TEXT, distances=["x"]), "distances"),
    "judge_claims, checkpoints": (lambda: tl_posgen.judge_claims("mini", TEXT, checkpoints="step0"), "checkpoints"),
    "judge_claims, keep": (lambda: tl_posgen.judge_claims("mini", TEXT, keep=5), "keep"),
    "judge_claims, length": (lambda: tl_posgen.judge_claims("mini", TEXT, length="x"), "length"),
    "judge_claims, null seeds": (lambda: tl_posgen.judge_claims("mini", TEXT, null_seeds=5), "null_seeds"),
    "ablate_bands, model": (lambda: slash.ablate_bands("mini", "no_rope"), "str is not a model"),
    "ablate_bands, kind": (lambda: slash.ablate_bands(tl_posgen.load_model("mini"), 5), "ablation 5"),
    **{
        f"ablate_bands, band {number}": (
            lambda band=band: slash.ablate_bands(tl_posgen.load_model("mini"), "drop", band),
            said,
        )
        for number, (band, said) in enumerate(
            {
                "high": "layer 0: band: 'high' is no boolean",
                3: "band: 3 is no",
                torch.ones(16): r"band: a tensor of torch\.float32",
                (lambda rope: "low"): "band: 'low' is no",
                (lambda rope: None): "needs a band",
            }.items()
        )
    },
    "slash_toy, angle": (lambda: slash.slash_toy(angle=float("nan"), progress=False), "angle"),
    "slash_toy, learning rate": (lambda: slash.slash_toy(learning_rate=float("nan"), progress=False), "learning_rate"),
    "slash_toy, seeds": (lambda: slash.slash_toy(seeds=(2**70,), progress=False), "seeds"),
    "coupling, length": (lambda: coupling.Coupling()("mini", TEXT, length="x", progress=False), "length"),
    "coupling_scores, scores": (lambda: coupling.coupling_scores(5, TEXT), "scores = 5"),
    "coupling_scores, score": (lambda: coupling.coupling_scores(SCORES, TEXT, score=5), "score = 5"),
    "coupling_scores, k": (lambda: coupling.coupling_scores(SCORES, TEXT, k=[2]), "k = "),
    "coupling_scores, tokenizer": (lambda: coupling.coupling_scores(SCORES, TEXT, tokenizer=5), "tokenizer = 5"),
    "coupling_scores, widths": (lambda: coupling.coupling_scores(SCORES, TEXT, widths=64), "widths = 64"),
    "coupling_scores, no widths": (lambda: coupling.coupling_scores(SCORES, TEXT, widths=()), "widths"),
    "residual_jacobians, tokens": (lambda: jacobians("Down", 1), "token ids"),
    "residual_jacobians, batch": (lambda: jacobians([[1, 2], [3, 4]], 1), "tokens of 2 prompts"),
    "residual_jacobians, vocabulary": (lambda: jacobians([10**7, 1], 1), "outside the vocabulary"),
    "residual_jacobians, source": (lambda: jacobians([1, 2], "x"), "source = 'x'"),
    "residual_jacobians, target": (lambda: jacobians([1, 2], 0, 1.5), "target = 1.5"),
    "residual_jacobians, streams": (lambda: jacobians([1, 2], 0, streams="x"), "streams"),
    "residual_jacobians, dense_up_to": (lambda: jacobians([1, 2], 0, dense_up_to="x"), "dense_up_to"),
    "emergence, checkpoints": (lambda: emergence("step0", TEXT), "checkpoints = 'step0'"),
    "emergence, a checkpoint": (lambda: emergence([5], TEXT), r"checkpoints = \[5\]"),
    "emergence, tokenizer": (lambda: emergence([MINI], TEXT, tokenizer=5), "tokenizer = 5"),
    "emergence, length": (lambda: emergence([MINI], TEXT, length="x"), "length"),
    "LensLM, hooks": (lambda: LensLM("mini", 5), "fwd_hooks: 5"),
    "LensLM, batch size": (lambda: LensLM("mini", batch_size=True), "batch_size True"),
    "an option": (lambda: registry.find("slash").with_options({"kapa": 1}), "kapa"),
    "find, a list": (lambda: registry.find(["three_axis"]), r"the name of a measure = \['three_axis'\]: give a word"),
    "find, nothing": (lambda: registry.find(None), "the name of a measure = None: give a word"),
    "analyze_cache": (lambda: tl_posgen.analyze_cache(tl_posgen.load_model("mini"), 5), "cache"),
}


def jacobians(*arguments, **more):
    return residual_jacobians(tl_posgen.load_model("mini"), *arguments, **more)


@pytest.mark.parametrize("case", OTHERS)
def test_the_other_ways_in_name_it_too(case):
    call, said = OTHERS[case]
    with pytest.raises(PosgenError, match=said):
        call()

"""Models and layers without RoPE, refused by every measure of planes."""

import pytest
import torch

from tl_posgen.core.engine import analyze
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.position.planes import PlanePerturbation, Planes, PlaneSufficiency

MEASURES = [Planes, PlaneSufficiency, PlanePerturbation]
TOKENS = torch.arange(2, 26)[None]


@pytest.mark.parametrize("name", ["gpt2", "bloom"])
@pytest.mark.parametrize("measure", MEASURES)
def test_a_model_without_rope_is_refused_before_anything_runs(family_model, measure, name):
    with pytest.raises(UnsupportedModelError, match="no layer of this model has RoPE"):
        measure()(family_model(name, "bridge"), TOKENS, progress=False)


@pytest.mark.parametrize("name", ["gpt2", "bloom"])
def test_a_model_without_rope_is_skipped_if_that_is_asked_for(family_model, name):
    how = {"null_seeds": (), "progress": False, "skip_unsupported": True}
    assert list(analyze(family_model(name, "bridge"), TOKENS, measures=["planes", "three_axis"], **how)) == [
        "three_axis"
    ]


@pytest.mark.parametrize("measure", MEASURES)
def test_only_layers_without_rope_are_refused(family_model, measure):
    with pytest.raises(UnsupportedModelError, match=r"layers 1: none of them has RoPE|no chosen layer has RoPE"):
        measure()(family_model("smollm3", "bridge"), TOKENS, layers=[1], null_seeds=(), progress=False)


@pytest.mark.parametrize("measure", [Planes, PlaneSufficiency])
def test_a_prompt_of_one_token_is_refused(mini, measure):
    with pytest.raises(InputError, match="a prompt has only 1 token"):
        measure()(mini, [[5]], null_seeds=(), progress=False)

"""Checkpoints and their results, which several tests share."""

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from tl_posgen.coupling import Coupling
from tl_posgen.models.conversion.files import MINI
from tl_posgen.studies.emergence import emergence

CUT = {"tokenizer": "mini", "length": 32, "n_prompts": 4, "progress": False}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """some_model/checkpoints/step0: random weights; step10: the bundled model's. Neither has a tokenizer."""
    root = tmp_path_factory.mktemp("root") / "some_model" / "checkpoints"
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MINI)).save_pretrained(root / "step0")
    AutoModelForCausalLM.from_pretrained(MINI).save_pretrained(root / "step10")
    return [root / "step0", root / "step10"]


@pytest.fixture(scope="session")
def per_head(checkpoints, alice):
    """The usual measures and slash."""
    return emergence(checkpoints, alice, measures=["three_axis", "variance", "mean_key", "slash"], **CUT)


@pytest.fixture(scope="session")
def of_coupling(checkpoints, alice):
    """Coupling at K = 4 beside two random inits."""
    return emergence(checkpoints, alice, measures=[Coupling(k=4)], nulls=2, **CUT)

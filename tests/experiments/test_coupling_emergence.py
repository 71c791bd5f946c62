"""Coupling over checkpoints: two real ones, random weights and the bundled model's."""

import numpy as np
import pytest

from tl_posgen import load, load_model
from tl_posgen.errors import InputError
from tl_posgen.experiments.coupling import coupling, headline
from tl_posgen.experiments.coupling_emergence import coupling_emergence
from tl_posgen.models.source import MINI
from tl_posgen.models.tokens import bundled_text

OPTIONS = {"k": 4, "length": 24, "n_prompts": 2, "progress": False}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """some_model/checkpoints/step0: random weights; step10: the bundled model's. Neither has a tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    root = tmp_path_factory.mktemp("root") / "some_model" / "checkpoints"
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MINI)).save_pretrained(root / "step0")
    AutoModelForCausalLM.from_pretrained(MINI).save_pretrained(root / "step10")
    return [root / "step0", root / "step10"]


@pytest.fixture(scope="module")
def result(checkpoints):
    return coupling_emergence(checkpoints, bundled_text(), tokenizer="mini", **OPTIONS)


def test_the_last_checkpoint_measures_as_the_model_itself(result):
    mini = coupling(load_model("mini"), bundled_text(), **OPTIONS | {"k": [4]}, null_seed=None)
    expected = headline(mini.dataset, 4)
    found = {name: float(result.dataset[name][-1]) for name in expected}
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_it_is_named_after_the_model_and_carries_steps_and_loss(result):
    assert result.dataset.attrs["model"] == "some_model"
    assert result.dataset.step.values.tolist() == [0, 10]
    assert float(result.dataset.loss[1]) < float(result.dataset.loss[0]) - 0.5


def test_the_null_is_one_random_model_with_its_seed_in_the_name(result):
    assert result.null.checkpoint.values.tolist() == ["random init (seed 0)"]
    assert np.isfinite(result.null.coupling).all()


def test_it_can_be_saved_and_tabulated(result, tmp_path):
    assert load(result.save(tmp_path / "r.nc"))["coupling_emergence"].dataset.equals(result.dataset)
    assert result.frame()["checkpoint"].tolist() == ["step0", "step10"]


def test_bad_input_is_refused(checkpoints, tmp_path):
    for wrong in ([], [checkpoints[0], checkpoints[0]], [tmp_path / "nowhere"]):
        with pytest.raises(InputError):
            coupling_emergence(wrong, bundled_text(), tokenizer="mini", **OPTIONS)
    with pytest.raises(InputError, match=r"k \[129\]: choose from 1 to 128"):
        coupling_emergence(checkpoints, bundled_text(), tokenizer="mini", **OPTIONS | {"k": 129})

"""Measures over checkpoints: three real ones, made by moving random weights towards the bundled model's."""

import numpy as np
import pytest

from tl_posgen import load, load_model
from tl_posgen.errors import InputError
from tl_posgen.experiments.emergence import emergence
from tl_posgen.experiments.loss import token_losses
from tl_posgen.models.checkpoints import steps_of
from tl_posgen.models.source import MINI
from tl_posgen.models.tokens import bundled_text, to_prompts
from tl_posgen.report.words import emergence as words

OPTIONS = {"tokenizer": "mini", "length": 32, "n_prompts": 1, "progress": False}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """step0: random weights; step10: the bundled model's. Neither has a tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    root = tmp_path_factory.mktemp("checkpoints")
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MINI)).save_pretrained(root / "step0")
    AutoModelForCausalLM.from_pretrained(MINI).save_pretrained(root / "step10")
    return [root / "step0", root / "step10"]


@pytest.fixture(scope="module")
def result(checkpoints):
    return emergence(checkpoints, bundled_text(), **OPTIONS)


def test_the_last_checkpoint_measures_as_the_model_itself(result):
    mini = load_model("mini")
    tokens = to_prompts(mini, bundled_text(), length=32, n_prompts=1)[0][None]
    assert float(result.dataset.loss[-1]) == pytest.approx(float(token_losses(mini, tokens).mean()), abs=1e-3)


def test_training_lowers_the_loss_and_raises_r(result):
    assert float(result.dataset.loss[1]) < float(result.dataset.loss[0]) - 0.5
    r = result.dataset.three_axis_r_visible.mean(("layer", "head"))
    assert float(r[1]) > float(r[0])


def test_steps_come_from_the_names(result):
    assert result.dataset.step.values.tolist() == [0, 10]
    assert steps_of(["a", "b"]).tolist() == [0, 1]


def test_it_can_be_drawn_saved_and_tabulated(result, tmp_path):
    for kind in ("means", "heads"):
        assert "Emergence" in result.plot(kind=kind).layout.title.text
    assert len(result.frame()) == 2 * 16
    assert np.isfinite(result.frame(null=True)["three_axis_r"]).all()
    assert load(result.save(tmp_path / "r.nc"))["emergence"].dataset.equals(result.dataset)


def test_the_words_name_both_ends_and_the_null(result):
    said = " ".join(words.found(result))
    r = result.dataset.three_axis_r_visible.mean(("layer", "head"))
    assert f"from {float(r[0]):.3f} at step 0 to {float(r[1]):.3f} at step 10" in said
    assert f"random init {float(result.null.three_axis_r_visible.mean()):.3f}" in said


def test_the_table_has_a_row_a_checkpoint(result):
    table = words.table(result.dataset)
    assert table["checkpoint"].tolist() == ["step0", "step10"]
    assert table["loss"].tolist() == result.dataset.loss.values.tolist()


def test_bad_input_is_refused(checkpoints, tmp_path):
    for wrong in ([], [checkpoints[0], checkpoints[0]], [tmp_path / "nowhere"]):
        with pytest.raises(InputError):
            emergence(wrong, bundled_text(), **OPTIONS)
    with pytest.raises(InputError, match="no tokenizer"):
        emergence(checkpoints, bundled_text(), length=32, n_prompts=1)

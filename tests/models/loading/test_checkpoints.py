"""Checkpoints are refused before anything is loaded."""

import pandas as pd
import pytest

import tl_posgen
from tl_posgen.coupling import coupling_scores
from tl_posgen.errors import InputError, ModelError
from tl_posgen.models.conversion.files import MINI, TOKENIZERS
from tl_posgen.models.loading.checkpoints import Checkpoints


@pytest.mark.parametrize(
    ("checkpoints", "message"),
    [([], "give one at least"), ("step1", r"give a list of them"), (["a/step1", "b/step1"], "two have one name")],
)
def test_checkpoints_that_are_no_sequence_of_them_are_refused(checkpoints, message):
    with pytest.raises(InputError, match=message):
        Checkpoints(checkpoints)


@pytest.mark.parametrize("name", ["mini", MINI])
def test_a_revision_of_what_is_here_is_refused(name):
    with pytest.raises(InputError, match=r"revision 'step0': .*mini is here and has none; leave it out"):
        tl_posgen.load_model(name, revision="step0")


def test_revisions_on_the_hub_take_another_tokenizer_too(monkeypatch, tmp_path):
    for file in MINI.iterdir():
        if file.name not in TOKENIZERS:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr("tl_posgen.models.conversion.files._download", lambda name, revision: tmp_path)
    run = Checkpoints(["step1", "step2"], model="someone/model", tokenizer="mini")
    assert run.models[1].load().to_tokens("Alice").shape[1] > 1
    with pytest.raises(ModelError, match="no tokenizer"):
        Checkpoints(["step1"], model="someone/model").models[0].load()


def test_a_table_of_scores_may_name_models_of_the_hub_beside_a_tokenizer(monkeypatch, alice):
    def asked(name, revision):
        raise ModelError("the Hub was asked")

    monkeypatch.setattr("tl_posgen.models.conversion.files._download", asked)
    table = pd.DataFrame({"model": ["someone/model"], "score": [0.5]})
    with pytest.raises(ModelError, match="the Hub was asked"):
        coupling_scores(table, alice, tokenizer="mini", widths=(64,), progress=False)

"""Measures during training: logged where they are asked for, and training goes on as without them, bit by bit."""

import random

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from tl_posgen.errors import InputError
from tl_posgen.models.conversion.files import MINI
from tl_posgen.training import PositionCallback, analyze_in_training, headline_means

TEXT = "Down, down, down. Would the fall never come to an end? " * 4
CUT = {"length": 16, "n_prompts": 1}
SHAPE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def tiny(dropout: float = 0.0):
    tokenizer = AutoTokenizer.from_pretrained(MINI)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), attention_dropout=dropout, **SHAPE))
    return model, tokenizer


def trainer_of(directory, dropout: float = 0.0, **more) -> Trainer:
    model, tokenizer = tiny(dropout)
    ids = tokenizer(TEXT).input_ids[:24]
    rows = [{"input_ids": ids[n : n + 16], "labels": ids[n : n + 16]} for n in range(8)]
    told = {"max_steps": 4, "logging_steps": 1, "per_device_train_batch_size": 2, "save_strategy": "no"}
    told |= {"report_to": [], "use_cpu": True, "disable_tqdm": True, "learning_rate": 1e-2} | more
    arguments = TrainingArguments(str(directory), **told)
    return Trainer(model, arguments, train_dataset=rows, processing_class=tokenizer)


@pytest.mark.parametrize(("dropout", "bf16"), [(0.1, False), (0.1, True)])
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_training_is_bit_by_bit_what_it_is_without(tmp_path, dropout, bf16):
    weights, losses, states, reports = [], [], [], {}
    for measured in (False, True):
        trainer = trainer_of(tmp_path, dropout, bf16=bf16)
        if measured:
            callback = PositionCallback(trainer, TEXT, at=2, measures=["three_axis", "slash", "loss"], **CUT)
            trainer.add_callback(callback)
            reports = callback.reports
        random.seed(0)  # checked arguments, as tests run here, draw
        trainer.train()
        weights.append(trainer.model.state_dict())
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
        states.append((torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()))  # noqa: NPY002
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4
    assert states[0] == states[1]
    logged = [row for row in trainer.state.log_history if "position/seconds" in row]
    assert [row["step"] for row in logged] == [0, 2, 4]
    assert list(reports) == [0, 2, 4]
    for row in logged:
        assert 0 < row["position/three_axis_r"] <= 1
        assert row["position/seconds"] > 0
    scores = [row["position/slash_score"] for row in logged]
    assert len(set(scores)) == 3, "the weights of each step are measured"
    assert logged[-1]["position/loss"] < logged[0]["position/loss"]


def test_the_model_in_training_stays_as_it_is():
    model, tokenizer = tiny(dropout=0.1)
    model.train().bfloat16()
    ids = tokenizer(TEXT, return_tensors="pt").input_ids[:, :8]
    model(ids, labels=ids).loss.backward()
    gradients = {name: one.grad.clone() for name, one in model.named_parameters()}
    weights = {name: one.clone() for name, one in model.state_dict().items()}
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        report = analyze_in_training(model, tokenizer, TEXT, measures="three_axis", **CUT)
    assert 0 < headline_means(report)["three_axis_r"] <= 1
    assert not report["three_axis"].numbers.inits
    assert report.provenance["dtype"] == "bfloat16"
    assert all(module.training for module in model.modules())
    assert all(torch.equal(one.grad, gradients[name]) for name, one in model.named_parameters())
    assert all(torch.equal(one, weights[name]) for name, one in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_what_cannot_be_measured_is_refused_before_training(tmp_path):
    trainer = trainer_of(tmp_path)
    with pytest.raises(InputError, match="thre_axis"):
        PositionCallback(trainer, TEXT, measures=["thre_axis"])
    for at in (0, [-1], True, [True], []):
        with pytest.raises(InputError, match="at="):
            PositionCallback(trainer, TEXT, at=at)
    for settings, said in (
        ({"lenght": 16}, "lenght"),
        ({"length": -3}, "length=-3"),
        ({"n_prompts": 0}, "n_prompts=0"),
    ):
        with pytest.raises(InputError, match=said):
            PositionCallback(trainer, TEXT, **settings)
    with pytest.raises(InputError, match="Linear is no transformers"):
        PositionCallback(torch.nn.Linear(2, 2), TEXT)
    trainer.processing_class = None
    with pytest.raises(InputError, match="give tokenizer="):
        PositionCallback(trainer, TEXT)
    with pytest.raises(InputError, match="Linear is no model of transformers"):
        analyze_in_training(torch.nn.Linear(2, 2), None, TEXT)
    with pytest.raises(InputError, match="'mini' is no model"):
        analyze_in_training("mini", None, TEXT)

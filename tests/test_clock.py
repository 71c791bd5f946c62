"""examples/clock: tokens in random order, planes held for some keys, for some planes; what was found, in small."""

import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from clock import first_key, long_text, train, which_planes

from tl_posgen import bundled_text


def test_a_window_in_random_order_keeps_its_first_token_and_all_others(monkeypatch):
    batch = torch.randint(1, 64, (3, 21), generator=torch.Generator().manual_seed(0))
    batch[:, 0] = 0
    monkeypatch.setattr(train.recipe, "mean_loss", lambda model, given: given)
    shuffled = train.loss_in_random_order(torch.nn.Identity(), batch)
    assert not torch.equal(shuffled, batch)
    assert torch.equal(shuffled[:, 0], batch[:, 0])
    assert torch.equal(shuffled.sort(dim=1).values, batch.sort(dim=1).values)


def test_passages_come_again_at_the_end_of_a_prompt():
    text = torch.arange(1024)
    prompt, begins = long_text.with_copies(text)
    n = long_text.DEPTHS * long_text.PASSAGE
    assert len(prompt) == 1024
    assert torch.equal(prompt[: 1024 - n], text[: 1024 - n])
    for copy, begin in zip(prompt[-n:].split(long_text.PASSAGE), begins, strict=True):
        assert copy.tolist() == list(range(begin, begin + long_text.PASSAGE))


@pytest.mark.slow
def test_the_clock_and_not_the_sink_fails_beyond_the_context_of_mini(tmp_path, monkeypatch):
    text, out = tmp_path / "text.txt", tmp_path / "out.csv"
    text.write_text(bundled_text(), encoding="utf-8")
    given = ["--model", "mini", "--text", str(text), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["first_key.py", *given, "--gaps", "0", "1.5"])
    first_key.main()
    rows = pd.read_csv(out).set_index(["gap", "condition"])["text"]
    assert rows[0].max() - rows[0].min() < 1e-3
    far = rows[768]
    assert far["unchanged"] - far["held"] > 0.5
    assert far["others held"] - far["held"] < 0.3 < 1 < far["first key held"] - far["held"]
    monkeypatch.setattr(sys, "argv", ["which_planes.py", *given, "--turns", "0.25", "1", "--at", "0.5"])
    which_planes.main()
    rows = pd.read_csv(out)
    few, enough = rows[rows["condition"] == "held"]["text"]
    assert few - enough > 0.5
    assert enough == pytest.approx(far["held"], abs=0.01)

"""Whole pieces of work on an accelerator: a report that is kept and taken up, a sweep, emergence, the command,
large Jacobians, models of other families."""

import sys

import pytest
import torch
from devices.near import assert_same_numbers
from families import save_family, save_small

import tl_posgen
from tl_posgen.cli import main
from tl_posgen.coupling import Coupling
from tl_posgen.models.tokens import bundled_text
from tl_posgen.studies.emergence import emergence

FAMILIES = ("llama3", "neox", "gemma2", "gpt2", "bloom", "mistral")
CUT = {"length": 18, "n_prompts": 4, "nulls": 1, "progress": False}


@pytest.mark.parametrize("family", [pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES])
def test_default_measures_of_other_families_give_the_numbers_of_the_cpu(family, tmp_path, device):
    if (family, device.name) == ("bloom", "two"):
        pytest.skip("TransformerLens adds the ALiBi of its first device to the scores of the second")
    directory = save_family(family, tmp_path / family)
    models = device.load(directory, "hooked"), tl_posgen.load_model(directory, "hooked", device="cpu")
    tokens = torch.randint(2, 64, (4, 18), generator=torch.Generator().manual_seed(3))
    options = {"skip_unsupported": True, "nulls": 1, "progress": False}
    there, here = (tl_posgen.analyze(model, tokens, **options) for model in models)
    assert there.keys() == here.keys() != set()
    for name in here:
        assert_same_numbers(there[name].dataset, here[name].dataset, device.error)


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
def test_a_trained_model_gives_the_numbers_of_the_cpu(streaming, device):
    if device.name == "two":
        pytest.skip("the small model is spread over devices")
    options = CUT | {"length": 64, "streaming": streaming}
    models = (tl_posgen.load_model("mini", device=place) for place in (device.place, "cpu"))
    there, here = (tl_posgen.analyze(model, bundled_text(), **options) for model in models)
    for name in here:
        assert_same_numbers(there[name].dataset, here[name].dataset, device.error)


def test_kept_parts_are_taken_up(tmp_path, models, device):
    there, here = models("hooked")
    first = tl_posgen.analyze(there, bundled_text(), measures=["three_axis", "loss"], keep=tmp_path, **CUT)
    parts = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again = tl_posgen.analyze(there, bundled_text(), measures=["three_axis", "loss"], keep=tmp_path, **CUT)
    assert parts == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} != {}
    plain = tl_posgen.analyze(here, bundled_text(), measures=["three_axis", "loss"], **CUT)
    for name in plain:
        assert_same_numbers(again[name].dataset, first[name].dataset, 0)
        assert_same_numbers(again[name].dataset, plain[name].dataset, device.error)


def test_jacobians_too_large_for_matrices_couple_as_on_the_cpu(models, device):
    measure = Coupling(k=2, tokens=(-1,), chance_samples=1, dense_up_to=8)
    there, here = (measure(model, bundled_text(), **CUT) for model in models("hooked"))
    assert_same_numbers(there.dataset[["coupling"]], here.dataset[["coupling"]], 1e-3)  # Lanczos ends at a tolerance


def test_the_command_writes_a_report(tmp_path, directory, device, monkeypatch):
    asked = ["analyze", "--model", str(directory), "--device", device.place, "--length", "18", "--prompts", "4"]
    monkeypatch.setattr(sys, "argv", ["tl-posgen", *asked, "--out", str(tmp_path / "report")])
    with pytest.raises(SystemExit, match=r"^0$"):
        main()
    assert (tmp_path / "report" / "index.html").exists()


def test_a_sweep_runs_there(tmp_path, directory, device):
    study = {"name": "one", "length": 18, "n_prompts": 4, "measures": ["three_axis"], "nulls": 1}
    study["models"] = [{"name": str(directory), "label": "small", "device": device.place}]
    swept = tl_posgen.sweep(study, out=tmp_path, progress=False)
    assert {*swept.values()} == {"finished"}


def test_checkpoints_are_measured_as_on_the_cpu(tmp_path, directory, device):
    checkpoints = [save_small(tmp_path / "step1", seed=1), directory]
    there, here = (
        emergence(checkpoints, bundled_text(), measures=["three_axis"], tokenizer="mini", device=place, **CUT)
        for place in (device.place, "cpu")
    )
    assert_same_numbers(there.dataset, here.dataset, device.error)

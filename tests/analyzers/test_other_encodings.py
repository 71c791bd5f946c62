"""The measures on models that know positions otherwise than by RoPE, and what is said of them there."""

import dataclasses

import numpy as np
import pytest
import torch
from families import save_family

import tl_posgen
from tl_posgen.analyzers.across_prompts import AcrossPrompts
from tl_posgen.analyzers.residual import Residual
from tl_posgen.analyzers.three_axis import ThreeAxis
from tl_posgen.models.hooks import run_capture
from tl_posgen.report.encodings import NOTES, WHERE, carries_over, note
from tl_posgen.results import Result

MEASURES = ["three_axis", "variance", "mean_key", "slash"]
OPTIONS = {"null_seed": None, "examples": 0, "progress": False}
ENCODINGS = {"gpt2": "absolute", "bloom": "alibi"}
FIXED = ["share_qd", "share_kd", "share_qkd"]


def random_prompts(n: int) -> torch.Tensor:
    return torch.randint(2, 64, (2, n), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("encodings")
    return {name: tl_posgen.load_model(str(save_family(name, root / name))) for name in ENCODINGS}


@pytest.fixture(scope="module")
def reports(models):
    """All measures on two random prompts of 40 tokens."""
    analyzers = [*MEASURES, Residual(), AcrossPrompts()]
    return {
        name: tl_posgen.analyze(model, random_prompts(40), analyzers=analyzers, **OPTIONS)
        for name, model in models.items()
    }


@pytest.fixture(scope="module")
def alibi_capture(models):
    kept = []
    run_capture(models["bloom"], random_prompts(40)[:1], kept.append, layers=[1])
    return kept[0]


def without_slope(capture):
    return dataclasses.replace(capture, geometry=dataclasses.replace(capture.geometry, alibi_slopes=None))


@pytest.mark.parametrize(("name", "encoding"), ENCODINGS.items())
def test_a_report_names_its_encoding(reports, name, encoding):
    assert reports[name].provenance["encoding"] == encoding


@pytest.mark.parametrize("name", ENCODINGS)
def test_every_measure_has_numbers(reports, name):
    for result in reports[name].values():
        scalars = result.frame().drop(columns=["layer", "head"])
        named = [column for column in scalars if "of_position" not in column and column not in ("r_low", "r_high")]
        assert np.isfinite(scalars[named].to_numpy()).all(), result.name


@pytest.mark.parametrize("name", ENCODINGS)
def test_the_mean_key_split_is_exact_by_construction(reports, name):
    data = reports[name]["mean_key"].dataset
    np.testing.assert_allclose(data["r_by_distance"], 1, atol=1e-6)


@pytest.mark.parametrize("name", ENCODINGS)
def test_distance_meets_nothing_in_the_variance(reports, name):
    np.testing.assert_allclose(reports[name]["variance"].dataset[FIXED].to_array(), 0, atol=1e-9)


def test_learned_positions_have_no_distance_share(reports):
    np.testing.assert_allclose(reports["gpt2"]["variance"].dataset["share_d"], 0, atol=1e-9)


def test_the_slope_of_alibi_is_its_distance_share(reports):
    assert (reports["bloom"]["variance"].dataset["share_d"] > 0).all()


@pytest.mark.parametrize("name", ENCODINGS)
def test_the_residual_has_no_planes(reports, name):
    assert "plane_share" not in reports[name]["residual"].dataset


def test_the_slope_of_alibi_is_not_in_the_residual(alibi_capture):
    found = []
    for capture in (alibi_capture, without_slope(alibi_capture)):
        analyzer = Residual()
        analyzer.update(capture)
        found.append(analyzer.result())
    with_slope, without = found
    for name in ("std", "distance_abs", "spectrum", "pair_mean"):
        np.testing.assert_allclose(with_slope[name], without[name], atol=1e-4)
    assert (with_slope["share"] < without["share"]).all()


def test_the_slope_of_alibi_raises_r_within_rows(alibi_capture):
    found = []
    for capture in (alibi_capture, without_slope(alibi_capture)):
        analyzer = ThreeAxis()
        analyzer.update(capture)
        found.append(analyzer.result()["r_visible"])
    assert (found[0] > found[1]).all()


def test_the_slope_of_alibi_is_position_by_distance_and_by_key(models):
    def scale_out(value, hook):
        return torch.zeros_like(value)

    analyzer = AcrossPrompts()
    queries = [(name, scale_out) for name in models["bloom"].hook_dict if name.endswith("attn.hook_q")]
    with models["bloom"].hooks(fwd_hooks=queries), tl_posgen.attach(models["bloom"], [analyzer]) as run:
        models["bloom"](random_prompts(12))
    data = run.report()["across_prompts"].dataset
    for name in ("position", "by_distance", "by_key", "by_either", "by_line"):
        np.testing.assert_allclose(data[name], 1, atol=1e-6)


@pytest.mark.parametrize("name", ENCODINGS)
def test_every_measure_that_changes_its_meaning_says_so(reports, name):
    said = {result.name for result in reports[name].values() if note(result)}
    assert said == {*MEASURES, "residual", "across_prompts"}
    assert all(WHERE[ENCODINGS[name]] in note(reports[name][measure]) for measure in said)


@pytest.mark.parametrize(("name", "lost"), [("gpt2", {"variance", "mean_key"}), ("bloom", {"mean_key"})])
def test_what_holds_by_construction_does_not_carry_over(reports, name, lost):
    assert {result.name for result in reports[name].values() if not carries_over(result)} == lost


def test_every_note_is_for_an_encoding_that_exists():
    assert {encoding for notes in NOTES.values() for encoding in notes} <= set(WHERE)


def test_rope_needs_no_note():
    report = tl_posgen.analyze("mini", "Down, down, down.", **OPTIONS)
    assert [note(result) for result in report.values()] == [None] * 3


def test_mixed_encodings_are_named_once_each_and_noted_as_some_layers(tmp_path):
    model = tl_posgen.load_model(str(save_family("smollm3", tmp_path)), backend="bridge")
    report = tl_posgen.analyze(model, random_prompts(24), analyzers=["mean_key"], **OPTIONS)
    assert report.provenance["encoding"] == "rotary, none"
    assert "in some layers: nothing rotates" in note(report["mean_key"])
    assert carries_over(report["mean_key"])


def test_a_result_of_unknown_encoding_has_no_note(reports):
    assert note(Result("mean_key", reports["gpt2"]["mean_key"].dataset)) is None


@pytest.fixture(scope="module")
def learned(shared):
    """A trained model with learned positions, beside its null."""
    text = (shared / "text" / "tinystories.txt").read_text(encoding="utf-8")
    analyzers = [AcrossPrompts(crop=96)]
    model = tl_posgen.load_model(str(shared / "models" / "atome_vanilla_1m"))
    return tl_posgen.analyze(model, text, analyzers=analyzers, length=96, n_prompts=4, examples=0, progress=False)[
        "across_prompts"
    ]


def test_learned_positions_turn_into_distance_by_training(learned):
    trained, null = (float(data["distance_of_position_no_first"].mean()) for data in (learned.dataset, learned.null))
    assert trained > 0.6 > 0.2 > null


def test_learned_positions_are_position_at_random_init_too(learned):
    assert float(learned.null["position_no_first"].mean()) > 0.1

"""The measures on models that know positions otherwise than by RoPE, and what is said of them there."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from families import save_family

import tl_posgen
from tl_posgen.core.attach import attach
from tl_posgen.core.engine import analyze
from tl_posgen.core.result import Result
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.tokens import read_text
from tl_posgen.position.decomposition import AcrossPrompts, MeanKey, Residual, ThreeAxis
from tl_posgen.report.caveats import ENCODINGS as WHERE

MEASURES = ["three_axis", "variance", "mean_key", "residual", "across_prompts", "attention_examples"]
CAVEATS = {"gpt2": set(MEASURES), "bloom": set(MEASURES[:-1])}
OPTIONS = {"null_seeds": (), "progress": False}
ENCODINGS = {"gpt2": "absolute", "bloom": "alibi"}
OUT = {"tokens": "without first"}


def random_prompts(n: int) -> torch.Tensor:
    return torch.randint(2, 64, (2, n), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("encodings")
    return {name: tl_posgen.load_model(str(save_family(name, root / name))) for name in ENCODINGS}


@pytest.fixture(scope="module")
def reports(models):
    """All measures on two random prompts of 40 tokens."""
    return {name: analyze(model, random_prompts(40), measures=MEASURES, **OPTIONS) for name, model in models.items()}


@pytest.fixture(scope="module")
def alibi_capture(models):
    kept = []
    run_capture(models["bloom"], random_prompts(40)[:1], kept.append, layers=[1])
    return kept[0]


@pytest.fixture(scope="module")
def both_slopes(alibi_capture) -> Sequence[LayerCapture]:
    """One capture with its slope and without."""
    one, flat = alibi_capture, replace(alibi_capture.geometry, alibi_slopes=None)
    return [
        LayerCapture(each, heads=one.heads, prompt=0, tokens=one.tokens, q=one.q, k=one.k)
        for each in (one.geometry, flat)
    ]


@pytest.mark.parametrize(("name", "encoding"), ENCODINGS.items())
def test_a_report_names_its_encoding(reports, name, encoding):
    assert reports[name].provenance["encoding"] == encoding


@pytest.mark.parametrize("name", ENCODINGS)
def test_every_measure_has_numbers(reports, name):
    for result in reports[name].values():
        scalars = result.frame(every=True).select_dtypes("number")
        named = [column for column in scalars if "of_position" not in column]
        assert named
        assert np.isfinite(scalars[named].to_numpy()).all(), result.name


@pytest.mark.parametrize("name", ENCODINGS)
def test_the_mean_key_split_is_exact_by_construction(reports, name):
    np.testing.assert_allclose(reports[name]["mean_key"].own["r"], 1, atol=1e-6)


@pytest.mark.parametrize("name", ENCODINGS)
def test_distance_meets_nothing_in_the_variance(reports, name):
    np.testing.assert_allclose(reports[name]["variance"].own["share"].sel(part=["qd", "kd", "qkd"]), 0, atol=1e-9)


def test_learned_positions_have_no_distance_share(reports):
    np.testing.assert_allclose(reports["gpt2"]["variance"].own["share"].sel(part="d"), 0, atol=1e-9)


def test_the_slope_of_alibi_is_its_distance_share(reports):
    assert (reports["bloom"]["variance"].own["share"].sel(part="d") > 0).all()


@pytest.mark.parametrize("name", ENCODINGS)
def test_the_residual_has_no_planes(reports, name):
    assert "plane_share" not in reports[name]["residual"].own


def test_the_slope_of_alibi_is_not_in_the_residual(both_slopes, collected):
    with_slope, without = (collected(Residual(), capture).sel(tokens="all") for capture in both_slopes)
    for name in ("std", "abs_residual", "spectrum", "pair_residual"):
        np.testing.assert_allclose(with_slope[name], without[name], atol=1e-4)
    assert (with_slope["share"] < without["share"]).all()


def test_the_slope_of_alibi_raises_r_within_rows(both_slopes, collected):
    with_slope, without = (collected(ThreeAxis(), capture)["r_within_rows"] for capture in both_slopes)
    assert (with_slope > without).all()


def test_the_mean_key_split_is_of_the_scores_without_their_slope(both_slopes, collected):
    with_slope, without = (collected(MeanKey(), capture)["r"] for capture in both_slopes)
    np.testing.assert_array_equal(with_slope, without)


def test_the_slope_of_alibi_is_position_by_distance_and_by_key(models):
    def scale_out(value, hook):
        return torch.zeros_like(value)

    queries = [(name, scale_out) for name in models["bloom"].hook_dict if name.endswith("attn.hook_q")]
    with models["bloom"].hooks(fwd_hooks=queries), attach(models["bloom"], ["across_prompts"]) as run:
        models["bloom"](random_prompts(12))
    data = run.report()["across_prompts"].sel(tokens="all")
    for name in ("position", "share"):
        np.testing.assert_allclose(data[name], 1, atol=1e-6)


@pytest.mark.parametrize("name", ENCODINGS)
def test_every_measure_that_changes_its_meaning_says_so(reports, name):
    said = {result.name for result in reports[name].values() if result.caveat}
    assert said == CAVEATS[name]
    assert all(reports[name][measure].findings()[-1] == reports[name][measure].caveat for measure in said)
    assert all(WHERE[ENCODINGS[name]] in reports[name][measure].caveat for measure in said)


@pytest.mark.parametrize(("name", "lost"), [("gpt2", {"variance", "mean_key"}), ("bloom", {"mean_key"})])
def test_nothing_is_concluded_from_what_holds_by_construction(reports, name, lost):
    told = {result.name for result in reports[name].values() if len(result.findings()) > bool(result.caveat)}
    assert told == set(MEASURES) - lost - {"attention_examples"}


def test_every_caveat_is_for_an_encoding_that_exists(reports):
    measures = [result.measure for result in reports["gpt2"].values()]
    assert {encoding for one in measures for encoding in one.caveats} <= set(WHERE)
    assert {encoding for one in measures for encoding in one.without_meaning} <= set(WHERE)


def test_rope_needs_no_caveat(report):
    assert report.provenance["encoding"] == "rotary"
    assert [result.caveat for result in report.values()] == [None] * len(MEASURES)


def test_mixed_encodings_are_named_once_each_and_noted_as_some_layers(tmp_path):
    model = tl_posgen.load_model(str(save_family("smollm3", tmp_path)), backend="bridge")
    result = MeanKey()(model, random_prompts(24), **OPTIONS)
    assert result.provenance["encoding"] == "rotary, none"
    assert len(result.findings()) == 2
    assert "in some layers: nothing rotates" in result.findings()[1]


def test_a_result_of_unknown_encoding_has_no_caveat(reports):
    result = Result(MeanKey(), reports["gpt2"]["mean_key"].dataset)
    assert result.caveat is None
    assert len(result.findings()) == 1


@pytest.fixture(scope="module")
def learned(learned_positions, shared):
    """A trained model with learned positions, beside its null."""
    text = read_text(shared / "text" / "tinystories.txt")
    return AcrossPrompts()(learned_positions, text, length=96, n_prompts=4, progress=False)


def test_learned_positions_turn_into_distance_by_training(learned):
    part = learned.numbers("part_of_position", function="distance", **OUT)
    assert part.value > 0.6 > 0.2 > part.inits[0]


def test_learned_positions_are_position_at_random_init_too(learned):
    assert learned.numbers("position", **OUT).inits[0] > 0.1

"""Every claim is judged from real results of the mini model, and says its numbers and its null's."""

import math

import pytest

import tl_posgen
from tl_posgen.claims import coupling as of_coupling
from tl_posgen.claims import position as of_position
from tl_posgen.claims import slash as of_slash
from tl_posgen.claims.base import judged, threshold
from tl_posgen.claims.run import digest_of, parts_directory
from tl_posgen.experiments import (
    any_distance,
    band_ablation,
    cone,
    coupling,
    dummy_distance,
    length,
    perturbation,
    plane_sufficiency,
    slash_transfer,
    substitution,
)
from tl_posgen.models.tokens import bundled_text

CLAIMS = [*of_position.CLAIMS, *of_slash.CLAIMS, *of_coupling.CLAIMS]
CUT = {"length": 48, "n_prompts": 2, "progress": False}


@pytest.fixture(scope="module")
def model():
    return tl_posgen.load_model("mini")


@pytest.fixture(scope="module")
def results(model):
    text = bundled_text()
    names = ["three_axis", "variance", "mean_key", "residual", "across_prompts"]
    few = {"ratios": (0.05, 0.2), "arms": ("words", "positions", "position_part"), "reaches": ("uniform",)}
    experiments = [
        substitution(model, text, search=False, head_costs=False, **CUT),
        dummy_distance(model, text, distances=(0, 64), limits=(8,), **CUT),
        plane_sufficiency(model, text, **CUT),
        any_distance(model, text, n_distances=16, **CUT),
        perturbation(model, text, seeds=(0,), **few, **CUT),
        length(model, text, inside=32, times=2, n_prompts=2, progress=False),
        slash_transfer(model, text, **CUT),
        cone(model, text, **CUT),
        band_ablation(model, text, splits=["thirds"], **CUT),
        coupling(model, text, **CUT),
    ]
    analyzed = tl_posgen.analyze(model, text, analyzers=names, examples=0, **CUT)
    return {**analyzed.results, **{result.name: result for result in experiments}}


@pytest.fixture(scope="module")
def table(results):
    return judged(CLAIMS, results, "mini", {}).frame().set_index("claim")


def test_every_claim_that_needs_no_checkpoints_has_a_row(table):
    without = {claim.name for claim in CLAIMS if not {"emergence", "coupling_emergence"} & set(claim.needs)}
    assert set(table.index) == without


def test_names_are_unique():
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS)


def test_each_row_has_numbers_a_null_and_a_criterion(table):
    assert set(table["verdict"]) <= {"held", "partly", "not held", "open"}
    for column in ("measured", "null"):
        assert table[column].str.contains(r"\d").all()
    assert (table["measured"] != table["null"]).all()
    assert table["criterion"].str.len().min() > 5


def test_the_mini_model_is_not_additive_enough_for_the_first_claim(table, results):
    r = float(results["three_axis"].dataset["r_no_first"].mean())
    assert f"{r:.3f}" in table.loc["position 1", "measured"]
    assert table.loc["position 1", "verdict"] == threshold(r, 0.95, 0.75)


def test_a_claim_without_its_results_is_left_out(results):
    found = judged(CLAIMS, {name: results[name] for name in ("cone",)}, "mini", {}).frame()
    assert found["claim"].tolist() == ["slash 2", "slash 3"]


def test_thresholds_are_reached_at_their_value():
    assert [threshold(value, 0.9, 0.5) for value in (0.9, 0.89, 0.5, 0.49)] == ["held", "partly", "partly", "not held"]
    assert threshold(math.nan, 0.9, 0.5) == "open"


def test_the_table_is_saved_read_and_drawn(results, tmp_path):
    result = judged(CLAIMS, results, "mini", {})
    read = tl_posgen.load(result.save(tmp_path / "claims.nc"))["claims"]
    assert read.frame().equals(result.frame())
    assert "mini" in read.plot().layout.title.text


def test_parts_of_other_weights_or_settings_are_never_taken_up(model, tmp_path):
    other = tl_posgen.random_like(model, seed=1)
    digests = {digest_of(one) for one in (model, other)}
    assert len(digests) == 2
    assert len({parts_directory(tmp_path, {"weights": digest, "length": 8}) for digest in digests}) == 2
    assert parts_directory(tmp_path, {"a": 1}) == parts_directory(tmp_path, {"a": 1})
    assert parts_directory(tmp_path, {"a": 1}) != parts_directory(tmp_path, {"a": 2})

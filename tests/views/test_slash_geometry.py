"""Pictures and words of the cone and of the slash planes show the numbers of their results."""

import numpy as np
import pytest
import torch
from families import save_family

import tl_posgen
from tl_posgen.analyzers.slash_planes import SlashPlanes
from tl_posgen.experiments.cone import cone
from tl_posgen.models.tokens import bundled_text
from tl_posgen.report.findings import findings
from tl_posgen.report.summary import short_table
from tl_posgen.results import Result
from tl_posgen.views import cone as cone_view
from tl_posgen.views import slash_planes as planes_view

OPTIONS = {"length": 64, "n_prompts": 1, "progress": False}


@pytest.fixture(scope="module")
def mini():
    return tl_posgen.load_model("mini")


@pytest.fixture(scope="module")
def coned(mini):
    return cone(mini, bundled_text(), **OPTIONS)


@pytest.fixture(scope="module")
def planes(mini):
    return tl_posgen.analyze(mini, bundled_text(), analyzers=[SlashPlanes()], **OPTIONS)["slash_planes"]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A model that turns nothing, and has biases."""
    model = tl_posgen.load_model(save_family("gpt2", tmp_path_factory.mktemp("gpt2")), backend="bridge")
    tokens = torch.arange(2, 22)[None]
    report = tl_posgen.analyze(model, tokens, analyzers=[SlashPlanes()], null_seed=None, progress=False)
    return {"cone": cone(model, tokens, null_seed=None, progress=False), **report.results}


def test_rank_boxes_hold_every_head_of_its_group(coned):
    traces = coned.plot(kind="rank").data
    dominant = coned.dataset.sel(variant="all").stack(place=("layer", "head"))
    dominant = dominant.isel(place=np.flatnonzero(dominant["dominant"]))
    np.testing.assert_array_equal(traces[0].y, [*dominant["r1_q"].values, *dominant["r1_k"].values])
    assert sum(len(trace.y) for trace in traces) == 2 * 2 * (16 + 16)


def test_there_is_a_histogram_a_layer_and_side(coned):
    traces = coned.plot(kind="cosines").data
    assert len(traces) == 2 * 4
    np.testing.assert_array_equal(traces[5].y, coned.null["cosine_share"].sel(variant="all", layer=1))


def test_gain_maps_stand_beside_the_null(coned):
    maps = coned.plot(kind="gain").data
    np.testing.assert_array_equal(maps[1].z, coned.dataset["gain_k"].sel(variant="all"))
    np.testing.assert_array_equal(maps[2].z, coned.null["gain_q"].sel(variant="all"))


def test_the_counterfactual_has_two_points_a_head(coned):
    points = [trace for trace in coned.plot(kind="counterfactual").data if trace.mode == "markers"]
    assert sum(len(trace.x) for trace in points) == 2 * 2 * (16 + 16)
    shown = np.sort(np.concatenate([trace.y for trace in points if "only the axis" in trace.name]))
    expected = [*coned.dataset["best_axis_only"].values.ravel(), *coned.null["best_axis_only"].values.ravel()]
    np.testing.assert_allclose(shown, np.sort(expected))


def test_biases_are_drawn_only_where_there_are_any(coned, gpt2):
    assert "bias" not in cone_view.drawable(coned.dataset)
    assert "bias" in cone_view.drawable(gpt2["cone"].dataset)
    assert gpt2["cone"].plot(kind="bias").data[0].x[0] == "Q, input part"


def test_the_strongest_heads_are_drawn_plane_by_plane(planes):
    lift = [trace for trace in planes.plot(kind="planes").data if trace.name == "lift"]
    assert len(lift) == 8
    layer, head = planes.dataset["best_score"].sel(variant="all").to_series().idxmax()
    expected = planes.dataset["contribution"].sel(variant="all", layer=layer, head=head, at="best")
    np.testing.assert_array_equal(lift[0].y, expected)


def test_predicted_and_measured_profiles_share_a_panel(planes):
    traces = planes.plot(kind="profiles").data
    layer, head = planes.dataset["best_score"].sel(variant="all").to_series().idxmax()
    one = planes.dataset.sel(variant="all", layer=layer, head=head)
    for name, label in (("score", "measured"), ("predicted", "predicted from rank one")):
        first = next(trace for trace in traces if trace.name == label)
        np.testing.assert_array_equal(first.y, one[name].sel(distance=first.x - 1))


@pytest.mark.parametrize(("kind", "at"), [("bands", "best"), ("edge", "edge")])
def test_band_boxes_hold_every_head(planes, kind, at):
    traces = planes.plot(kind=kind).data
    shown = np.sort(np.concatenate([trace.y for trace in traces if trace.name != "random init (seed 0)"]))
    bands = planes.dataset["bands"].sel(variant="all", at=at, band=["high", "medium", "low"])
    np.testing.assert_allclose(shown, np.sort(bands.values.ravel()))


def test_a_model_that_turns_nothing_has_no_planes_to_draw_and_says_so(gpt2):
    result = gpt2["slash_planes"]
    assert planes_view.drawable(result.dataset) == ("bands", "edge", "profiles")
    for kind in planes_view.drawable(result.dataset):
        assert result.plot(kind=kind).data
    assert any("No plane of this model turns" in sentence for sentence in findings({"slash_planes": result}))


def test_unknown_kinds_are_refused(coned, planes):
    for result in (coned, planes):
        with pytest.raises(ValueError, match="nonsense"):
            result.plot(kind="nonsense")


def test_tables_hold_the_means_of_each_group_of_heads(coned, planes):
    first = short_table(coned).iloc[0]
    data = coned.dataset.sel(variant="all")
    dominant = data["dominant"].values
    assert first["heads"] == f"{dominant.sum()} slash-dominant"
    assert first["r1 Q"] == pytest.approx(data["r1_q"].values[dominant].mean())
    edge = short_table(planes).query("measure == 'edge' and `bands by` == 'thirds'").iloc[0]
    bands = planes.dataset["bands"].sel(variant="all", at="edge", scheme="thirds", band="high").values
    assert edge["high"] == pytest.approx(bands[planes.dataset["dominant"].sel(variant="all").values].mean())


def test_words_give_numbers_beside_the_null(coned, planes):
    ranks, axis, kept = findings({"cone": coned})
    assert "random init" in ranks
    assert f"{float(coned.dataset['gain_k'].sel(variant='all').mean()):.2f} (random init " in axis
    assert "uniform attention" in kept
    lift, edge, *predictions = findings({"slash_planes": planes})
    assert "above the mean logit by" in lift
    assert "In the random init no band" in edge
    assert "Random init:" in predictions[-1]


def test_words_say_so_where_no_head_is_dominant(coned, planes):
    """The nulls as if they were the models."""
    sentences = findings({one.name: Result(one.name, one.null) for one in (coned, planes)})
    assert any("nothing can be asked of the axis" in sentence for sentence in sentences)
    assert any("no band makes a slash" in sentence for sentence in sentences)

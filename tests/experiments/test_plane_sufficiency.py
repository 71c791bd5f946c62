"""Do plane scores foretell the interaction share? On the bundled model."""

import numpy as np
import pytest
from scipy import stats

from tl_posgen import load, load_model
from tl_posgen.analyzers.feed import measure
from tl_posgen.analyzers.planes import Planes
from tl_posgen.errors import InputError
from tl_posgen.experiments.plane_sufficiency import correlation, plane_sufficiency
from tl_posgen.models.shuffled_like import shuffled_like
from tl_posgen.models.tokens import bundled_text, to_prompts
from tl_posgen.report.findings import findings
from tl_posgen.report.summary import short_table

OPTIONS = {"length": 64, "n_prompts": 2, "progress": False}


@pytest.fixture(scope="module")
def mini():
    return load_model("mini")


@pytest.fixture(scope="module")
def result(mini):
    return plane_sufficiency(mini, bundled_text(), **OPTIONS)


def test_there_is_a_row_for_every_kind_of_weights_layer_and_head(result):
    frame = result.frame()
    assert frame.groupby("weights").size().to_dict() == {"trained": 16, "random init": 16, "shuffled": 16}


def test_rows_are_those_of_the_planes_analyzer(mini, result):
    tokens = to_prompts(mini, bundled_text(), length=64, n_prompts=2)
    for kind, model in (("trained", mini), ("shuffled", shuffled_like(mini, seed=0))):
        found = measure(model, tokens, [Planes()], progress=False)["planes"]
        for name in ("score_sum", "interaction_no_first", "additive"):
            np.testing.assert_allclose(result.dataset[name].sel(weights=kind), found[name], err_msg=f"{kind} {name}")


@pytest.mark.parametrize("group", ["trained", "random init", "shuffled", "pooled"])
def test_correlations_are_over_the_heads_of_the_group(result, group):
    frame = result.frame()
    frame = frame if group == "pooled" else frame[frame["weights"] == group]
    at = result.dataset.sel(group=group, variant="no_first")
    x, y = frame["score_sum_no_first"], frame["interaction_no_first"]
    assert float(at["pearson"]) == pytest.approx(stats.pearsonr(x, y).statistic)
    assert float(at["spearman"]) == pytest.approx(stats.spearmanr(x, y).statistic)
    assert int(at["n_heads"]) == len(frame)


def test_the_bound_foretells_the_interaction_share_of_trained_heads(result):
    assert float(result.dataset["spearman"].sel(group="trained", variant="no_first")) > 0.7


def test_training_lowers_both_beside_both_nulls(result):
    for name in ("score_sum", "interaction"):
        trained, *nulls = result.dataset[name].mean(("layer", "head")).values
        assert trained < 0.8 * min(nulls)


def test_a_head_without_a_number_is_left_out(result):
    data = result.dataset.sel(weights=["trained"]).copy(deep=True)
    data["interaction"][0, 0, 0] = np.nan
    *_, n = correlation(data, "")
    assert n == 15


def test_the_share_of_certified_heads_rises_with_eps(result):
    certified = result.dataset["certified"]
    assert (certified.diff("eps") >= 0).all()
    np.testing.assert_allclose(certified.sel(eps=0.5), result.dataset["additive"].mean(("layer", "head")))


def test_the_scatter_shows_every_head_and_its_correlations_in_the_legend(result):
    traces = result.plot(kind="scatter").data
    assert len(traces) == 6
    data = result.dataset
    np.testing.assert_array_equal(traces[0].y, data["interaction"].sel(weights="trained").values.ravel())
    r = float(data["pearson"].sel(group="shuffled", variant="no_first"))
    assert f"r = {r:.2f}" in traces[5].name


def test_it_can_be_drawn_saved_and_tabulated(result, tmp_path):
    for kind in ("scatter", "certified"):
        assert "mini" in result.plot(kind=kind).layout.title.text
    assert load(result.save(tmp_path / "r.nc"))["plane_sufficiency"].dataset.equals(result.dataset)
    assert short_table(result)["weights"].tolist() == ["trained", "random init", "shuffled", "pooled"]


def test_the_words_have_all_three_kinds(result):
    sentences = " ".join(findings({"plane_sufficiency": result}))
    for group in ("trained", "random init", "shuffled", "pooled"):
        assert f"{float(result.dataset['pearson'].sel(group=group, variant='no_first')):.2f}" in sentences


@pytest.mark.parametrize("wrong", [{"eps": -1.0}, {"n_distances": 0}, {"length": 1}])
def test_bad_input_is_refused(mini, wrong):
    with pytest.raises(InputError):
        plane_sufficiency(mini, bundled_text(), **{**OPTIONS, **wrong})

"""The planes analyzer on the bundled model, and on tiny models of every kind of RoPE."""

from functools import cache

import numpy as np
import pytest
import torch
from families import save_family

import tl_posgen
from tl_posgen.analyzers.feed import Feed, measure
from tl_posgen.analyzers.planes import EPS_GRID, NO_FIRST, Planes
from tl_posgen.analyzers.variance import Variance
from tl_posgen.errors import InputError, ModelError, UnsupportedModelError
from tl_posgen.models.convert import hooked_parts
from tl_posgen.models.hooks import run_capture
from tl_posgen.models.load import load_model
from tl_posgen.models.tokens import bundled_text, to_prompts
from tl_posgen.report.findings import findings
from tl_posgen.report.summary import short_table

OPTIONS = {"length": 48, "n_prompts": 2, "progress": False}
TOKENS = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def mini():
    return load_model("mini")


@pytest.fixture(scope="module")
def report(mini):
    return tl_posgen.analyze(mini, bundled_text(), analyzers=[Planes(), Variance()], **OPTIONS)


@pytest.fixture(scope="module")
def result(report):
    return report["planes"]


@pytest.fixture(scope="module")
def captures(mini):
    """Layer 1 of both prompts."""
    kept = []
    for tokens in to_prompts(mini, bundled_text(), length=48, n_prompts=2):
        run_capture(mini, tokens[None], kept.append, layers=[1])
    return kept


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """(name, backend) -> that tiny model."""

    @cache
    def model(name: str, backend: str = "bridge"):
        if backend == "hooked":
            try:
                hooked_parts()
            except ModelError as error:
                pytest.skip(str(error))
        return load_model(save_family(name, tmp_path_factory.mktemp(name)), backend=backend)

    return model


def planes_of(model, **options):
    return measure(model, list(TOKENS), [Planes(**options)], progress=False)["planes"]


@pytest.mark.parametrize(("suffix", "first"), [("", 0), ("_no_first", 1)])
@pytest.mark.parametrize("side", ["q", "k"])
def test_magnitude_concentration_and_phase_are_those_of_the_tokens(result, captures, side, suffix, first):
    x = torch.cat([getattr(capture, side)[:, first:] for capture in captures], 1).double()
    z = torch.complex(x[..., :16], x[..., 16:])  # Llama pairs coordinate m with m + d_head / 2
    data = result.dataset.sel(layer=1)
    np.testing.assert_allclose(data[f"magnitude_{side}{suffix}"], z.abs().mean(1), rtol=1e-6)
    np.testing.assert_allclose(data[f"mean_{side}{suffix}"], z.mean(1).abs(), rtol=1e-5)
    np.testing.assert_allclose(data[f"concentration_{side}{suffix}"], z.mean(1).abs() / z.abs().mean(1), rtol=1e-5)
    phase = np.exp(1j * data[f"phase_{side}{suffix}"].values)
    np.testing.assert_allclose(phase, (z.mean(1) / z.mean(1).abs()).numpy(), atol=1e-5)


def test_position_meaning_and_interaction_are_those_of_the_variance_analyzer(report):
    found, other = report["planes"].dataset, report["variance"].dataset
    np.testing.assert_allclose(found["interaction_no_first"], other["interaction"], atol=1e-8)
    total = found["position"] + found["meaning"] + found["interaction"]
    np.testing.assert_allclose(total, 1)


def test_std_is_that_of_the_scores_over_all_triples_that_softmax_can_see(report):
    other = report["variance"].dataset
    seen = other["variance"] * (1 - other["share_q"])
    np.testing.assert_allclose(report["planes"].dataset["std_no_first"], seen**0.5, rtol=1e-6)


def test_shares_over_planes_add_up_to_one(result):
    for name in ("position_by_plane", "meaning_by_plane", "interaction_by_plane", "energy_q", "energy_k"):
        np.testing.assert_allclose(result.dataset[name].sum("plane"), 1)


def test_the_score_sum_is_that_of_its_planes(result):
    for suffix in ("", "_no_first"):
        data = result.dataset
        expected = data[f"score{suffix}"].sum("plane") / data[f"std{suffix}"]
        np.testing.assert_allclose(data[f"score_sum{suffix}"], expected)


def test_the_wavelength_is_a_turn_in_tokens(mini, captures, result):
    theta = captures[0].geometry.rope.inv_freq
    np.testing.assert_allclose(result.dataset["wavelength"], (2 * np.pi / theta).expand(4, -1))


def test_prompts_of_different_lengths_count_by_their_tokens(mini):
    prompts = [torch.arange(300, 340), torch.arange(500, 520)]
    together, first, second = (
        measure(mini, some, [Planes(n_distances=20)], layers=[2], progress=False)["planes"].isel(layer=0)
        for some in (prompts, prompts[:1], prompts[1:])
    )
    expected = (40 * first["magnitude_k"] + 20 * second["magnitude_k"]) / 60
    np.testing.assert_allclose(together["magnitude_k"], expected)


def test_heads_that_share_keys_share_their_measures_of_keys(result):
    keys = result.dataset["concentration_k"]
    np.testing.assert_array_equal(keys.sel(head=[0, 2]), keys.sel(head=[1, 3]))
    assert not np.allclose(keys.sel(head=0), keys.sel(head=2))


def test_a_head_is_additive_where_every_plane_meets_a_condition(mini):
    data = measure(mini, [torch.arange(300, 348)], [Planes(eps=0.7)], progress=False)["planes"]
    met = (data["meets_position"] + data["meets_quiet"] + data["meets_slow"]) > 0
    np.testing.assert_allclose(data["planes_met"], met.mean("plane"))
    np.testing.assert_array_equal(data["additive"], met.all("plane"))
    assert 0 < float(data["additive"].mean()) < 1


def test_a_larger_eps_certifies_more_heads_and_the_headline_is_one_of_them(result):
    by_eps = result.dataset["additive_by_eps"]
    assert by_eps["eps"].values.tolist() == list(EPS_GRID)
    assert (by_eps.diff("eps") >= 0).all()
    np.testing.assert_array_equal(by_eps.sel(eps=result.dataset.attrs["eps"]), result.dataset["additive"])


def test_at_the_default_eps_the_trained_model_has_certified_heads_and_the_null_has_none(shared):
    model = load_model(shared / "models/stories260K")
    text = (shared / "text/tinystories.txt").read_text()[:4000]
    found = tl_posgen.analyze(model, text, analyzers=[Planes()], length=128, n_prompts=1, progress=False)["planes"]
    assert float(found.dataset["additive"].mean()) > 0.3
    assert float(found.null["additive"].mean()) == 0


def test_training_concentrates_keys(result):
    assert float(result.dataset["concentration_k"].mean()) > 1.5 * float(result.null["concentration_k"].mean())


def test_partial_rotary_heads_keep_their_unrotated_remainder(family):
    data = planes_of(family("neox"))
    assert np.isinf(data["wavelength"]).sum("plane").values.tolist() == [2, 2]
    assert np.isfinite(data["magnitude_q"]).all()
    np.testing.assert_allclose(data["position_by_plane"].where(np.isinf(data["wavelength"]), drop=True), 0, atol=1e-12)
    assert (data["meets_slow"].where(np.isinf(data["wavelength"])).fillna(1) == 1).all()


def test_adjacent_pairs_make_a_plane_in_gptj(family):
    model = family("gptj", "hooked")
    kept = []
    run_capture(model, TOKENS[:1], kept.append, layers=[0])
    data = measure(model, [TOKENS[0]], [Planes()], progress=False)["planes"].sel(layer=0)
    first_plane = kept[0].q[..., :2].double().norm(dim=-1).mean(1)
    np.testing.assert_allclose(data["magnitude_q"].sel(plane=0), first_plane, rtol=1e-6)


def test_layers_may_differ_in_frequencies_and_windows(family):
    data = planes_of(family("gemma3"))
    assert not np.allclose(data["wavelength"].sel(layer=0), data["wavelength"].sel(layer=1))
    alone = planes_of(family("gemma3"), n_distances=6)  # layer 0 has a window of six
    np.testing.assert_allclose(alone["score_sum"].sel(layer=0), data["score_sum"].sel(layer=0))
    assert not np.allclose(alone["score_sum"].sel(layer=1), data["score_sum"].sel(layer=1))


def test_both_backends_find_the_same(family):
    one, other = (planes_of(family("llama", backend)) for backend in ("hooked", "bridge"))
    for name in ("concentration_q", "score_sum", "interaction", "relative_phase"):
        np.testing.assert_allclose(one[name], other[name], atol=1e-4)


def test_a_layer_without_rope_among_others_has_no_numbers(family):
    data = planes_of(family("smollm3"))
    assert data["layer"].values.tolist() == [0, 1]
    with_planes = np.isfinite(data["magnitude_q"]).all(("head", "plane"))
    assert with_planes.values.tolist() == np.isfinite(data["additive"]).all("head").values.tolist() == [True, False]


@pytest.mark.parametrize(("name", "why"), [("gpt2", "absolute"), ("bloom", "alibi")])
def test_a_model_of_another_encoding_is_refused_by_layer_with_the_remedy(family, name, why):
    with pytest.raises(UnsupportedModelError, match=rf"layer 0: .*{why}.*leave the planes analyzer out"):
        planes_of(family(name))


def test_only_layers_without_rope_are_refused(family):
    with pytest.raises(UnsupportedModelError, match="layers 1: none of them has RoPE"):
        measure(family("smollm3"), list(TOKENS), [Planes()], layers=[1], progress=False)


@pytest.mark.parametrize("wrong", [{"eps": 0.0}, {"eps": float("nan")}, {"n_distances": 0}])
def test_bad_options_are_refused(wrong):
    with pytest.raises(InputError):
        Planes(**wrong)


def test_a_prompt_of_one_token_is_refused(mini):
    with pytest.raises(InputError, match="no token is left"):
        run_capture(mini, torch.tensor([[5]]), Feed([Planes()]))


def test_the_result_comes_back_from_disk_with_a_row_a_head(result, tmp_path):
    loaded = tl_posgen.load(result.save(tmp_path / "planes.nc"))["planes"]
    assert loaded.dataset.equals(result.dataset)
    assert len(loaded.frame()) == 16
    assert {"interaction", "score_sum_no_first", "rank_k", "centred_participation_q"} <= set(loaded.frame().columns)
    assert {f"{name}_no_first" for name in NO_FIRST} <= set(result.dataset)


def test_phases_have_a_marker_a_plane_for_queries_and_keys(result):
    figure = result.plot(kind="phases", heads=[(1, 2)], first_token=True)
    assert [trace.name for trace in figure.data] == ["queries", "keys"] * 2
    one = result.dataset.sel(layer=1, head=2)
    np.testing.assert_allclose(figure.data[1].r, one["concentration_k"])
    np.testing.assert_allclose(np.radians(figure.data[1].theta), one["phase_k"])


def test_the_heads_drawn_by_default_are_the_extreme_ones(result):
    layer, head = result.dataset["position"].to_series().idxmax()
    titles = [note.text for note in result.plot(kind="phases", radius="magnitude").layout.annotations]
    assert titles[0] == f"most position: L{layer} H{head} · mini"


def test_magnitudes_are_drawn_by_wavelength_trained_beside_null(result):
    traces = result.plot(kind="magnitude").data
    assert len(traces) == 2 * 2 * 4
    np.testing.assert_allclose(traces[1].y, result.dataset["magnitude_q_no_first"].mean("head").sel(layer=1))
    np.testing.assert_allclose(traces[1].x, result.dataset["wavelength"].sel(layer=1))


def test_shares_have_a_row_a_head_and_a_column_a_plane(result):
    maps = result.plot(kind="shares").data
    assert [np.shape(panel.z) for panel in maps] == [(16, 16)] * 4
    expected = result.dataset["meaning_by_plane_no_first"].sel(layer=0, head=3)
    np.testing.assert_allclose(maps[1].z[3], expected)  # Llama's planes are already in order of wavelength


@pytest.mark.parametrize("name", ["neox", "gemma3", "smollm3"])
def test_every_kind_can_be_drawn_of_unusual_layers(family, name):
    result = tl_posgen.Result("planes", planes_of(family(name)))
    for kind, axis in (("phases", "r"), ("magnitude", "y"), ("shares", "z")):
        drawn = [np.asarray(trace[axis], float) for trace in result.plot(kind=kind).data]
        assert any(np.isfinite(values).any() for values in drawn)


@pytest.mark.parametrize("wrong", [{"kind": "nonsense"}, {"radius": "nonsense"}])
def test_an_unknown_picture_is_refused(result, wrong):
    with pytest.raises(ValueError, match="nonsense"):
        result.plot(**wrong)


def test_a_head_that_is_not_there_is_refused(result):
    with pytest.raises(InputError, match="pairs that the result has"):
        result.plot(heads=[(0, 9)])


def test_the_words_have_the_number_and_its_null(result):
    sentences = " ".join(findings({"planes": result}))
    for side in (result.dataset, result.null):
        assert f"{float(side['concentration_k'].mean()):.3f}" in sentences


def test_the_short_table_counts_every_plane_once(result):
    table = short_table(result)
    assert float(table["planes"].sum()) == 16
    np.testing.assert_allclose(table[["position", "meaning"]].sum(), 1)

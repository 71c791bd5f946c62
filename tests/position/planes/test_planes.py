"""RoPE's planes on the bundled model, and on tiny models of every kind of RoPE."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from declared import assert_declared

import tl_posgen
from tl_posgen import registry
from tl_posgen.analysis import analyze
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.feed import Feed, one_pass
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.tokens import to_prompts
from tl_posgen.position.decomposition.variance import Variance
from tl_posgen.position.planes.plane_patterns import PARTS
from tl_posgen.position.planes.planes import CONDITIONS, EPS_GRID, SHOWN, WITH_AND_WITHOUT, Planes
from tl_posgen.procedure import as_result

OPTIONS = {"length": 48, "n_prompts": 2, "progress": False}
TOKENS = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(5))
OUT = "_without_first_token"


@pytest.fixture(scope="session")
def report(mini, alice):
    return analyze(mini, alice, measures=[Planes(), Variance()], null_seeds=(0, 1), **OPTIONS)


@pytest.fixture(scope="session")
def result(report):
    return report["planes"]


@pytest.fixture(scope="session")
def captures(mini, alice):
    """Layer 1 of both prompts."""
    kept = []
    for tokens in to_prompts(mini, alice, length=48, n_prompts=2):
        run_capture(mini, tokens[None], kept.append, layers=[1])
    return kept


def planes_of(model, prompts=TOKENS, where=None, **options):
    request = registry.request_of(Planes(**options))
    return one_pass(model, list(prompts), [request], label="some", **(where or {}))["planes"]


def result_of(dataset):
    return as_result(registry.request_of("planes"), [dataset], {})


@pytest.mark.parametrize(("suffix", "first"), [("", 0), (OUT, 1)])
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


def test_position_content_and_interaction_are_those_of_the_variance_decomposition(report):
    found, other = report["planes"].dataset, report["variance"].dataset
    np.testing.assert_allclose(found["interaction_without_first_token"], other["interaction"], atol=1e-8)
    total = found["position"] + found["content"] + found["interaction"]
    np.testing.assert_allclose(total, 1)


def test_std_is_that_of_the_scores_over_all_triples_that_softmax_can_see(report):
    other = report["variance"].dataset
    seen = other["variance"] * (1 - other["share_q"])
    np.testing.assert_allclose(report["planes"].dataset["std_without_first_token"], seen**0.5, rtol=1e-6)


def test_shares_over_planes_add_up_to_one(result):
    for name in ("position_by_plane", "content_by_plane", "interaction_by_plane", "energy_q", "energy_k"):
        np.testing.assert_allclose(result.dataset[name].sum("plane"), 1)


def test_the_score_sum_is_that_of_its_planes(result):
    for suffix in ("", OUT):
        data = result.dataset
        expected = data[f"score{suffix}"].sum("plane") / data[f"std{suffix}"]
        np.testing.assert_allclose(data[f"score_sum{suffix}"], expected)


def test_the_wavelength_is_a_turn_in_tokens(mini, captures, result):
    theta = captures[0].geometry.rope.inv_freq
    np.testing.assert_allclose(result.dataset["wavelength"], (2 * np.pi / theta).expand(4, -1))


def test_prompts_of_different_lengths_count_by_their_tokens(mini):
    prompts = [torch.arange(300, 340), torch.arange(500, 520)]
    together, first, second = (
        planes_of(mini, some, {"layers": [2]}, n_distances=20).isel(layer=0)
        for some in (prompts, prompts[:1], prompts[1:])
    )
    expected = (40 * first["magnitude_k"] + 20 * second["magnitude_k"]) / 60
    np.testing.assert_allclose(together["magnitude_k"], expected)


def test_heads_that_share_keys_share_their_measures_of_keys(result):
    keys = result.dataset["concentration_k"]
    np.testing.assert_array_equal(keys.sel(head=[0, 2]), keys.sel(head=[1, 3]))
    assert not np.allclose(keys.sel(head=0), keys.sel(head=2))


def test_a_head_is_additive_where_every_plane_meets_a_condition(mini):
    data = planes_of(mini, [torch.arange(300, 348)], eps=0.7)
    met = (data["meets_position"] + data["meets_quiet"] + data["meets_slow"]) > 0
    np.testing.assert_allclose(data["planes_met"], met.mean("plane"))
    np.testing.assert_array_equal(data["additive"], met.all("plane"))
    assert 0 < float(data["additive"].mean()) < 1


def test_a_larger_eps_certifies_more_heads_and_the_headline_is_one_of_them(result):
    by_eps = result.dataset["additive_by_eps"]
    assert by_eps["eps"].values.tolist() == list(EPS_GRID)
    assert (by_eps.diff("eps") >= 0).all()
    np.testing.assert_array_equal(by_eps.sel(eps=result.dataset.attrs["eps"]), result.dataset["additive"])


def test_at_the_default_eps_the_trained_model_has_certified_heads_and_the_null_has_none(stories, tinystories):
    found = analyze(stories, tinystories[:4000], measures=["planes"], length=128, n_prompts=1, progress=False)["planes"]
    assert float(found.dataset["additive"].mean()) > 0.3
    assert float(found.null["additive"].mean()) == 0


def test_at_the_default_eps_a_head_of_the_bundled_model_is_certified_and_none_of_the_null(mini, alice):
    found = analyze(mini, alice, measures=["planes"], length=256, n_prompts=1, progress=False)["planes"]
    assert float(found.dataset["additive"].sum()) >= 1
    assert float(found.null["additive"].sum()) == 0


def test_training_concentrates_keys(result):
    assert float(result.dataset["concentration_k"].mean()) > 1.5 * float(result.null["concentration_k"].mean())


def test_partial_rotary_heads_keep_their_unrotated_remainder(family_model):
    data = planes_of(family_model("neox", "bridge"))
    assert np.isinf(data["wavelength"]).sum("plane").values.tolist() == [2, 2]
    assert np.isfinite(data["magnitude_q"]).all()
    np.testing.assert_allclose(data["position_by_plane"].where(np.isinf(data["wavelength"]), drop=True), 0, atol=1e-12)
    assert (data["meets_slow"].where(np.isinf(data["wavelength"])).fillna(1) == 1).all()


def test_adjacent_pairs_make_a_plane_in_gptj(family_model):
    model = family_model("gptj", "hooked")
    kept = []
    run_capture(model, TOKENS[:1], kept.append, layers=[0])
    data = planes_of(model, TOKENS[:1]).sel(layer=0)
    first_plane = kept[0].q[..., :2].double().norm(dim=-1).mean(1)
    np.testing.assert_allclose(data["magnitude_q"].sel(plane=0), first_plane, rtol=1e-6)


def test_layers_may_differ_in_frequencies_and_windows(family_model):
    data = planes_of(family_model("gemma3", "bridge"))
    assert not np.allclose(data["wavelength"].sel(layer=0), data["wavelength"].sel(layer=1))
    alone = planes_of(family_model("gemma3", "bridge"), n_distances=6)  # layer 0 has a window of six
    np.testing.assert_allclose(alone["score_sum"].sel(layer=0), data["score_sum"].sel(layer=0))
    assert not np.allclose(alone["score_sum"].sel(layer=1), data["score_sum"].sel(layer=1))


def test_both_backends_find_the_same(family_model):
    one, other = (planes_of(family_model("llama", backend)) for backend in ("hooked", "bridge"))
    for name in ("concentration_q", "score_sum", "interaction", "relative_phase"):
        np.testing.assert_allclose(one[name], other[name], atol=1e-4)


def test_a_layer_without_rope_among_others_has_no_numbers(family_model):
    data = planes_of(family_model("smollm3", "bridge"))
    assert data["layer"].values.tolist() == [0, 1]
    with_planes = np.isfinite(data["magnitude_q"]).all(("head", "plane"))
    assert with_planes.values.tolist() == np.isfinite(data["additive"]).all("head").values.tolist() == [True, False]


@pytest.mark.parametrize(("name", "why"), [("gpt2", "absolute"), ("bloom", "alibi")])
def test_a_model_of_another_encoding_is_refused_by_layer_with_the_remedy(family_model, name, why):
    with pytest.raises(UnsupportedModelError, match=rf"layer 0: .*{why}.*leave planes out"):
        planes_of(family_model(name, "bridge"))


def test_only_layers_without_rope_are_refused(family_model):
    with pytest.raises(UnsupportedModelError, match="layers 1: none of them has RoPE"):
        planes_of(family_model("smollm3", "bridge"), where={"layers": [1]})


@pytest.mark.parametrize(
    "wrong",
    [
        {"eps": 0.0},
        {"eps": float("nan")},
        {"eps": "small"},
        {"n_distances": 0},
        {"n_distances": 2.5},
        {"reference": "none"},
        {"reference": float("inf")},
    ],
    ids=str,
)
def test_bad_options_are_refused(wrong, unchecked):
    with pytest.raises(InputError, match=next(iter(wrong))):
        Planes(**wrong)


def test_a_prompt_of_one_token_is_refused(mini):
    with pytest.raises(InputError, match="no token is left"):
        run_capture(mini, torch.tensor([[5]]), Feed([registry.request_of("planes")]))


@pytest.mark.parametrize("name", ["gpt2", "bloom"])
def test_a_model_without_rope_is_refused_before_anything_runs_or_skipped(family_model, name):
    with pytest.raises(UnsupportedModelError, match="no layer of this model has RoPE"):
        analyze(family_model(name, "bridge"), TOKENS, measures=["planes"], null_seeds=(), progress=False)
    both = analyze(
        family_model(name, "bridge"),
        TOKENS,
        measures=["planes", "variance"],
        null_seeds=(),
        progress=False,
        skip_unsupported=True,
    )
    assert list(both) == ["variance"]


def test_every_variable_is_declared(result, family_model):
    assert_declared(result)
    assert_declared(result_of(planes_of(family_model("smollm3", "bridge"))))


def test_the_frame_has_a_row_a_head(result):
    assert len(result.frame()) == 16
    expected = {"interaction", "score_sum_without_first_token", "rank_k", "centred_participation_q"}
    assert expected <= set(result.frame().columns)
    assert {f"{name}{OUT}" for name in WITH_AND_WITHOUT} <= set(result.dataset)


@pytest.mark.slow
def test_it_comes_back_from_disk_and_draws_the_same(result, tmp_path):
    loaded = tl_posgen.load(result.save(tmp_path / "planes.nc"))["planes"]
    assert loaded.dataset.equals(result.dataset)
    assert loaded.kinds == ["phases", "magnitude", "shares"]
    for kind in loaded.kinds:
        assert loaded.plot(kind).to_json() == result.plot(kind).to_json()
    assert loaded.findings() == result.findings()


def test_phases_have_a_marker_a_plane_for_queries_and_keys(result):
    figure = result.plot("phases")
    assert [trace.name for trace in figure.data] == ["queries", "keys"] * 6
    layer, head = (int(one) for one in result.summary["position_highest_head"].split("."))
    one, null = (data.sel(layer=layer, head=head) for data in (result.dataset, result.null))
    np.testing.assert_allclose(figure.data[1].r, one[f"concentration_k{OUT}"])
    np.testing.assert_allclose(np.radians(figure.data[1].theta), one[f"phase_k{OUT}"])
    np.testing.assert_allclose(figure.data[6].r, null[f"concentration_q{OUT}"])


def test_the_heads_drawn_by_default_are_the_extreme_ones_and_stand_in_the_summary(result):
    titles = [note.text for note in result.plot("phases").layout.annotations]
    for part, title in zip(PARTS, titles, strict=False):
        layer, head = result.dataset[part].to_series().idxmax()
        assert result.summary[f"{part}_highest_head"] == f"{layer}.{head}"
        assert title == f"most {part}: L{layer} H{head} · mini"


def test_magnitudes_are_drawn_by_wavelength_trained_beside_null(result):
    traces = result.plot(kind="magnitude").data
    assert len(traces) == 2 * 2 * 4
    np.testing.assert_allclose(traces[1].y, result.dataset[f"magnitude_q{OUT}"].mean("head").sel(layer=1))
    np.testing.assert_allclose(traces[1].x, result.dataset["wavelength"].sel(layer=1))
    np.testing.assert_allclose(traces[4].y, result.dataset[f"magnitude_k{OUT}"].mean("head").sel(layer=0))


def test_shares_have_a_row_a_head_and_a_column_a_plane(result):
    maps = result.plot(kind="shares").data
    assert [np.shape(panel.z) for panel in maps] == [(16, 16)] * 4
    expected = result.dataset[f"content_by_plane{OUT}"].sel(layer=0, head=3)
    np.testing.assert_allclose(maps[1].z[3], expected)  # Llama's planes are already in order of wavelength


@pytest.mark.parametrize("name", ["neox", "gemma3", "smollm3"])
def test_every_kind_can_be_drawn_of_unusual_layers(family_model, name):
    result = result_of(planes_of(family_model(name, "bridge")))
    for kind, axis in (("phases", "r"), ("magnitude", "y"), ("shares", "z")):
        drawn = [np.asarray(trace[axis], float) for trace in result.plot(kind=kind).data]
        assert any(np.isfinite(values).any() for values in drawn)


def test_heads_that_were_not_asked_for_are_no_rows(mini, result):
    some = result_of(planes_of(mini, where={"layers": [1], "heads": [0, 2]}))
    assert some.summary["n_heads"] == 2
    assert float(some.table()["planes"].sum()) == 16


def test_an_unknown_picture_is_refused(result):
    with pytest.raises(InputError, match="nonsense"):
        result.plot("nonsense")


def test_the_sentences_say_the_summary_with_the_null_or_without(result):
    assert json.loads(json.dumps(result.summary)) == result.summary
    forms = {name: ".3f" for name in SHOWN} | {f"meets_{name}": ".0%" for name in CONDITIONS}
    forms |= {"additive": ".0%", "score_sum": ".2f"}
    sentences, alone = (" ".join(one.findings()) for one in (result, replace(result, nulls=())))
    for name, form in forms.items():
        own, nulls = result.dataset[name], [null[name] for null in result.nulls]
        assert result.summary[name] == pytest.approx(float(own.mean()))
        mean = np.mean([float(null.mean()) for null in nulls])
        spread = np.std([float(null.mean()) for null in nulls], ddof=1)
        assert f"{float(own.mean()):{form}} (random init {mean:{form}} ± {spread:{form}})" in sentences
        assert f"{float(own.mean()):{form}} (no null measured)" in alone


def test_the_short_table_counts_every_plane_once(result):
    table = result.table()
    assert float(table["planes"].sum()) == 16
    np.testing.assert_allclose(table[["position", "content"]].sum(), 1)

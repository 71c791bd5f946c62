"""Conditions beyond the training length on the bundled model, with a short stand-in for that length."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr
from declared import assert_declared
from scipy.stats import t

from tl_posgen import load, load_model
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.loss import prompts_of_one_length, token_losses
from tl_posgen.models.streaming.stream import chosen
from tl_posgen.models.tokens import to_prompts
from tl_posgen.position.length import LengthExtrapolation, length_extrapolation, lm_infinite
from tl_posgen.position.length.length_extrapolation import within_noise
from tl_posgen.position.length.length_figures import CONDITIONS
from tl_posgen.position.length.output_drift import OutputMoments, entropy_and_normaliser, output_drift
from tl_posgen.report.sentences import with_interval

WINDOWS = {"n_global": 2, "block": 4, "n_blocks": 1}
OPTIONS = {"length": 16, "inside": 16, "times": 3, "n_prompts": 4, "progress": False, **WINDOWS}


@pytest.fixture(scope="session")
def result(mini, alice):
    return length_extrapolation(mini, alice, null_seeds=(0, 1), **OPTIONS)


@pytest.fixture(scope="session")
def of_one_head(mini, alice):
    return length_extrapolation(
        mini, alice, conditions=["lm_infinite"], layers=[1], heads=[2], null_seeds=(), **OPTIONS
    )


def test_inside_the_training_length_the_windows_change_nothing(result):
    inside = result.dataset.sel(bin=result.dataset.bin < 12)
    for condition in ("lm_infinite", "retrieval"):
        np.testing.assert_allclose(
            inside.loss.sel(condition=condition), inside.loss.sel(condition="vanilla"), atol=1e-4
        )


def test_beyond_it_they_do(result):
    beyond = result.dataset.loss.isel(bin=-1)
    assert len(set(beyond.values.round(6))) == len(CONDITIONS)


def test_windows_keep_the_entropy_down(result):
    entropy = result.dataset.entropy.isel(bin=-1).mean(("layer", "head"))
    assert entropy.sel(condition="lm_infinite") < entropy.sel(condition="vanilla")


def test_the_reference_does_not_drift_from_itself(result):
    first = result.dataset.sel(condition="vanilla", segment=0)
    np.testing.assert_allclose(first.frechet, 0, atol=1e-6)
    np.testing.assert_allclose(first.mahalanobis, 1, atol=1e-6)
    np.testing.assert_allclose(first.norm_ratio, 1, atol=1e-6)
    assert (first.noise_level > 0).all()


def test_drift_is_that_of_the_outputs_with_halves_of_different_prompts(mini, alice, result):
    kept = []
    for tokens in to_prompts(mini, alice, length=48, n_prompts=4):
        run_capture(mini, tokens[None], kept.append, frozenset({"v", "pattern"}), layers=[2])
    outputs = [capture.pattern @ capture.v for capture in kept]
    inside, after = (
        [OutputMoments.from_outputs(o[:, part]) for o in outputs] for part in (slice(8, 16), slice(32, 48))
    )
    halves = inside[0] + inside[2], inside[1] + inside[3]
    beyond = after[0] + after[1] + after[2] + after[3]
    expected = output_drift(halves, beyond)
    found = result.dataset.sel(condition="vanilla", layer=2, segment=2)
    for name in ("frechet", "mahalanobis", "norm_ratio", "off_axes", "noise_level"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.fixture(scope="module")
def planes(mini, alice):
    """By condition and layer, coordinates [prompt, position, axis] and the plane's share, from captured pattern and v
    in float64 and eigenvectors of the covariance."""
    tokens = to_prompts(mini, alice, length=48, n_prompts=4)
    conditions = {"vanilla": [], "lm_infinite": lm_infinite(mini, 16, WINDOWS["n_global"])}
    outputs = {}
    for condition, hooks in conditions.items():
        for prompt in tokens:
            with mini.hooks(fwd_hooks=hooks):
                take = outputs.setdefault(condition, []).append
                run_capture(mini, prompt[None], take, frozenset({"v", "pattern"}))
    found = {}
    for layer in (0, 2, 3):
        o = {
            condition: torch.stack(
                [torch.cat([*(one.pattern.double() @ one.v.double())], 1) for one in kept if one.layer == layer]
            )
            for condition, kept in outputs.items()
        }
        inside = o["vanilla"][:, 8:16].flatten(0, 1)
        values, vectors = (x.flip(-1) for x in torch.linalg.eigh(inside.T.cov(correction=0)))
        axes = vectors[:, :2] * vectors[:, :2].gather(0, vectors[:, :2].abs().argmax(0, keepdim=True)).sign()
        for condition, one in o.items():
            coordinates = (one - inside.mean(0)) @ axes / values[:2].sqrt()
            found[condition, layer] = coordinates, float(values[:2].sum() / values.sum())
    return found


def test_the_planes_are_those_of_captured_outputs(result, planes):
    data = result.dataset
    assert data["shown_layer"].values.tolist() == [0, 2, 3]
    for (condition, layer), (expected, share) in planes.items():
        one = data.sel(condition=condition, shown_layer=layer)
        np.testing.assert_allclose(one["plane_coordinates"], expected, atol=2e-4)
        assert float(one["plane_share"]) == pytest.approx(share, abs=1e-5)
        for segment, part in enumerate((slice(8, 16), slice(16, 32), slice(32, 48))):
            off = expected[:, part].mean((0, 1)).norm()
            assert float(one["plane_offset"].sel(segment=segment)) == pytest.approx(float(off), abs=2e-4)
    means = planes["vanilla", 2][0][:, 8:16].mean(1)
    even, odd = means[::2].mean(0), means[1::2].mean(0)
    assert float(data["plane_noise"].sel(shown_layer=2)) == pytest.approx(float((even - odd).norm()), abs=2e-4)


def test_the_planes_are_drawn_for_every_condition_beside_the_null(result, tmp_path):
    loaded = load(result.save(tmp_path / "r.nc"))[result.name]
    figure = loaded.plot("outputs")
    panels = figure.data[::2]  # points, then the ring
    assert len(panels) == 2 * 3 * len(CONDITIONS)
    places = [(data, layer, one) for data in (result.dataset, result.null) for layer in (0, 2, 3) for one in CONDITIONS]
    for trace, title, (data, layer, condition) in zip(panels, figure.layout.annotations, places, strict=False):
        one = data.sel(condition=condition, shown_layer=layer)
        drawn = one["plane_coordinates"].values[:, ::2].reshape(-1, 2)
        np.testing.assert_array_equal(np.stack([trace.x, trace.y], -1), drawn)
        np.testing.assert_array_equal(trace.marker.color, np.tile(np.arange(1, 49, 2) / 16, 4))
        off = float(one["plane_offset"].isel(segment=slice(1, None)).mean())
        assert title.text == (
            f"{CONDITIONS[condition]}, layer {layer}<br>{data.attrs['model']}: "
            f"share {float(one['plane_share']):.0%}, off {off:.2f}"
        )


def test_both_backends_give_the_same_planes(result, alice):
    bridge = load_model("mini", backend="bridge")
    options = {**OPTIONS, "conditions": ["interpolation"], "layers": [0, 2], "null_seeds": ()}
    found = length_extrapolation(bridge, alice, **options).dataset
    assert found["shown_layer"].values.tolist() == [0, 2]
    expected = result.dataset.sel(condition="vanilla", shown_layer=[0, 2])
    np.testing.assert_allclose(
        found["plane_coordinates"].sel(condition="vanilla"), expected["plane_coordinates"], atol=2e-3
    )


def test_the_sentence_of_the_planes_says_the_median_over_layers(result):
    sentence = result.findings()[-2]
    for condition, label in CONDITIONS.items():
        offsets = result.dataset["plane_offset"].sel(condition=condition).isel(segment=slice(1, None)).mean("segment")
        assert f"{label} {float(offsets.median()):.2f} (random init " in sentence
        assert result.summary[f"plane_offsets_{condition}"] == offsets.values.tolist()


def test_chosen_heads_alone_are_measured_and_edited(result, of_one_head):
    some, every = of_one_head.dataset, result.dataset
    assert some["condition"].values.tolist() == ["vanilla", "lm_infinite"]
    vanilla = every.sel(condition="vanilla", layer=[1], head=[2])
    for name in ("frechet", "entropy", "noise_level"):
        np.testing.assert_allclose(some.sel(condition="vanilla")[name], vanilla[name], rtol=1e-5, atol=1e-7)
    edited = some["loss_segment"].sel(condition="lm_infinite", segment=2)
    assert float(edited) != float(every["loss_segment"].sel(condition="lm_infinite", segment=2))
    assert float(edited) != float(every["loss_segment"].sel(condition="vanilla", segment=2))


def test_streamed_passes_give_the_same(mini, alice, result):
    """The untouched model's by rows; layers whose scores are edited form them, and the others do not."""
    with chosen(True):
        streamed = length_extrapolation(mini, alice, null_seeds=(), **OPTIONS).dataset
    for name in ("loss", "entropy", "normaliser", "frechet", "norm_ratio", "noise_level"):
        np.testing.assert_allclose(streamed[name], result.dataset[name], rtol=1e-4, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(streamed["plane_coordinates"], result.dataset["plane_coordinates"], atol=2e-3)


def test_the_share_within_the_noise_level_is_one_rule_for_sentence_and_summary(result):
    for condition in CONDITIONS:
        data = result.dataset.sel(condition=condition)
        frechet = data["frechet"].isel(segment=slice(1, None)).mean("segment")
        share = np.mean(frechet.values <= data["noise_level"].values)
        assert result.summary[f"within_noise_{condition}"] == share
        assert any(f"within the noise level in {share:.0%} of heads" in one for one in result.findings())
    frechet = result.dataset["frechet"].sel(condition="vanilla").isel(segment=slice(1, None)).mean("segment")
    quieter = result.dataset.assign(noise_level=xr.full_like(result.dataset["noise_level"], float(frechet.median())))
    assert result.measure.summarise(quieter)["within_noise_vanilla"] == 0.5


def test_heads_without_a_number_do_not_count_within_the_noise_level(result):
    one = result.dataset.sel(condition="vanilla", segment=1)
    frechet = one["frechet"].copy()
    frechet[0, 0] = np.nan
    expected = (one["frechet"] <= one["noise_level"]).values.ravel()[1:].mean()
    assert float(within_noise(frechet, one["noise_level"])) == pytest.approx(expected)


def test_the_sentences_say_the_summary_with_the_null_or_without(result):
    assert json.loads(json.dumps(result.summary)) == result.summary
    said, alone = result.findings(), replace(result, nulls=()).findings()
    assert len(said) == len(alone) == len(CONDITIONS) + 2
    nulls = [result.measure.summarise(null) for null in result.nulls]
    for condition, sentence, without in zip(CONDITIONS, said, alone, strict=False):
        data = result.dataset.sel(condition=condition).isel(segment=slice(1, None))
        loss = float(data["loss_segment"].mean())
        rise = with_interval(result.summary, f"rise_{condition}", "+.2f")
        assert f"loss {loss:.2f}, {rise} against the untouched one inside, outputs" in sentence
        assert result.summary[f"rise_{condition}"] == pytest.approx(loss - result.summary["loss_inside"])
        assert f"norm ratio {float(data['norm_ratio'].mean('segment').median()):.2f} (" in sentence
        losses = [null[f"loss_beyond_{condition}"] for null in nulls]
        assert f"(random init {np.mean(losses):.2f} ± {np.std(losses, ddof=1):.2f}, " in sentence
        assert "(no null measured)" in without
    noise = [null["noise_level"] for null in nulls]
    own = f"{result.summary['loss_inside']:.2f} and the noise level {float(result.dataset['noise_level'].median()):.2f}"
    assert f"{own} (random init {np.mean(noise):.2f} ± {np.std(noise, ddof=1):.2f})" in said[-1]


def test_the_rise_of_the_loss_is_paired_by_prompt(mini, alice, result):
    """Against the losses of two prompts, taken one by one."""
    rows = prompts_of_one_length(mini, alice, OPTIONS["inside"] * OPTIONS["times"], OPTIONS["n_prompts"], beyond=True)
    hooks, inside = lm_infinite(mini, OPTIONS["inside"], WINDOWS["n_global"]), OPTIONS["inside"]
    under, own = token_losses(mini, rows, hooks), token_losses(mini, rows)
    segments = torch.stack([under[:, start : start + inside].mean(1) for start in range(inside, rows.shape[1], inside)])
    rise = (segments.mean(0) - own[:, :inside].mean(1)).double().numpy()
    half = t.ppf(0.975, len(rise) - 1) * rise.std(ddof=1) / len(rise) ** 0.5
    for end, side in (("", 0), ("_low", -1), ("_high", 1)):
        found = float(result.dataset[f"rise{end}"].sel(condition="lm_infinite"))
        assert found == pytest.approx(rise.mean() + side * half, rel=1e-3)


def test_the_last_segment_is_the_end_of_the_prompt(result):
    last = result.dataset["loss_segment"].sel(condition="retrieval", segment=2)
    assert result.summary["loss_last_retrieval"] == float(last)


def test_one_training_length_has_nothing_beyond(mini, alice):
    once = length_extrapolation(mini, alice, null_seeds=(), **{**OPTIONS, "times": 1})
    assert once.summary["within_noise_vanilla"] is None
    assert once.findings() == ["Nothing was run beyond the training length."]
    assert len(once.table()) == len(CONDITIONS)


def test_every_variable_is_declared(result, of_one_head):
    assert_declared(result)
    assert_declared(of_one_head)


@pytest.mark.slow
def test_it_comes_back_from_disk_and_draws_the_same(result, tmp_path):
    assert len(result.frame()) == len(CONDITIONS) * 3
    loaded = load(result.save(tmp_path / "r.nc"))["length_extrapolation"]
    assert loaded.dataset.equals(result.dataset)
    assert loaded.kinds == ["loss", "drift", "outputs", "attention"]
    for kind in loaded.kinds:
        assert loaded.plot(kind).to_json() == result.plot(kind).to_json()
    assert loaded.findings() == result.findings()


def test_the_loss_is_drawn_by_position_with_its_interval(result):
    figure = result.plot("loss")
    assert [trace.name for trace in figure.data] == list(CONDITIONS) * 2
    one = result.dataset.sel(condition="retrieval")
    np.testing.assert_array_equal(figure.data[2].y, one["loss"])
    np.testing.assert_allclose(figure.data[2].error_y.array, one["loss_high"] - one["loss"])
    np.testing.assert_array_equal(figure.data[6].y, result.null.sel(condition="retrieval")["loss"])
    assert {shape.x0 for shape in figure.layout.shapes} == {16}


def test_drift_and_attention_are_drawn_beside_the_null(result):
    drift = {trace.name: trace for trace in result.plot("drift").data[:8]}
    ratio = (result.dataset["frechet"] / result.dataset["noise_level"]).median(("layer", "head"))
    np.testing.assert_allclose(drift["vanilla"].y, ratio.sel(condition="vanilla"))
    np.testing.assert_array_equal(drift["vanilla"].x, [1, 2, 3])
    entropy = result.null["entropy"].mean(("layer", "head")).sel(condition="interpolation")
    traces = {trace.name: trace for trace in result.plot("attention").data[:8]}
    np.testing.assert_allclose(traces["random init (seed 0), interpolation"].y, entropy)


def test_the_short_table_has_a_row_per_condition_and_segment(result):
    table = result.table()
    assert table.shape == (len(CONDITIONS) * 3, 8)
    assert table.notnull().all(axis=None)
    last = table.query("condition == 'lm_infinite'").iloc[-1]
    data = result.dataset.sel(condition="lm_infinite", segment=2)
    assert last["within_noise"] == float((data["frechet"] <= data["noise_level"]).mean())
    assert last["entropy"] == pytest.approx(float(data["entropy"].sel(bin=[32, 36, 40, 44]).mean()))


@pytest.mark.parametrize(
    "wrong",
    [
        {"inside": 2},
        {"inside": 16.0},
        {"times": 0},
        {"times": "4"},
        {"conditions": ("magic",)},
        {"conditions": "vanilla"},
        {"n_global": -1},
        {"block": 0},
        {"n_blocks": None},
    ],
    ids=str,
)
def test_bad_options_are_refused(wrong, unchecked):
    with pytest.raises(InputError, match=next(iter(wrong))):
        LengthExtrapolation(**wrong)


@pytest.mark.parametrize("wrong", [{"n_prompts": 1}, {"times": 9999}], ids=str)
def test_bad_prompts_are_refused(mini, alice, wrong):
    with pytest.raises(InputError):
        length_extrapolation(mini, alice, **{**OPTIONS, **wrong})


def test_another_length_is_refused_and_the_same_is_not(mini, alice):
    with pytest.raises(InputError, match=r"times x inside = 3 x 16 .*LengthExtrapolation\(inside=40\)"):
        length_extrapolation(mini, alice, **{**OPTIONS, "length": 40})
    options = {**OPTIONS, "times": 1, "conditions": ()}
    found = length_extrapolation(mini, alice, null_seeds=(), **options)
    assert found.provenance["length"] == 16


def test_four_prompts_are_cut_where_no_number_is_given(mini, alice):
    options = {"inside": 8, "times": 1, "conditions": (), "null_seeds": (), "progress": False}
    assert length_extrapolation(mini, alice, **options).provenance["prompts"] == 4


def test_slopes_are_run_too_and_prompts_that_are_given_are_not_counted(family_model):
    tokens = torch.randint(2, 60, (2, 48), generator=torch.Generator().manual_seed(1))
    found = length_extrapolation(
        family_model("bloom", "bridge"), tokens, inside=16, times=3, null_seeds=(), progress=False
    )
    assert found.provenance["prompts"] == 2
    assert np.isfinite(found.dataset["frechet"]).all()


def test_entropy_and_normaliser_are_those_of_the_scores(mini, alice):
    captures = []
    tokens = to_prompts(mini, alice, length=24, n_prompts=1)[0][None]
    run_capture(mini, tokens, captures.append, frozenset({"attn_scores", "pattern"}), layers=[1])
    scores = captures[0].attn_scores
    weights = scores.double().softmax(-1)
    references = -weights.xlogy(weights).sum(-1), scores.double().logsumexp(-1)
    for mine, reference in zip(entropy_and_normaliser(scores, captures[0].pattern), references, strict=True):
        np.testing.assert_allclose(mine.mean(-1), reference.mean(-1), atol=1e-5)


def test_a_model_that_cannot_run_such_prompts_names_the_backend_that_can(family_model):
    hooked, tokens = family_model("llama", "hooked"), torch.randint(2, 60, (2, 1024))
    inside = hooked.cfg.n_ctx
    with pytest.raises(InputError, match='backend="bridge"'):
        length_extrapolation(hooked, tokens, length=inside, progress=False)


def test_learned_positions_are_refused(family_model):
    model = family_model("gpt2", "bridge")
    with pytest.raises(UnsupportedModelError, match="length_extrapolation needs rotary positions or ALiBi"):
        length_extrapolation(model, torch.arange(2, 60)[None], inside=16, times=1, progress=False)

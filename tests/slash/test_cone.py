"""Why slash heads are of rank one, on real models: against brute force from the inputs and the weights."""

import numpy as np
import pytest
import torch
import xarray as xr
from families import FAMILIES, lively, tokenizer
from scipy.stats import spearmanr

import tl_posgen
from tl_posgen.errors import UnsupportedModelError
from tl_posgen.models import run_capture
from tl_posgen.models.tokens import to_prompts
from tl_posgen.result import Result
from tl_posgen.rope.rotation import rotate
from tl_posgen.slash import cone
from tl_posgen.slash.cone import axis_agreement, axis_part

LAYER = 3
VARIANTS = [("all", 0), ("without_first_token", 1)]
QUIET = {"null_seeds": (), "progress": False}


@pytest.fixture(scope="module")
def result(single):
    return single["cone"]


@pytest.fixture(scope="module")
def layer(mini, alice):
    """Capture, inputs and projections of one layer of the same prompt."""
    found = []
    prompt = to_prompts(mini, alice, length=80, n_prompts=1)[0]
    run_capture(mini, prompt[None], found.append, {"inputs"}, layers=[LAYER])
    return found[0], found[0].inputs, found[0].projections


@pytest.fixture(scope="module")
def gpt2(family_model):
    """A model that turns nothing, and has biases."""
    return cone(family_model("gpt2", "bridge"), torch.arange(2, 22)[None], **QUIET)


def axis_of(inputs: torch.Tensor) -> torch.Tensor:
    return torch.linalg.svd(inputs.double()).Vh[0]


@pytest.mark.parametrize(("variant", "first"), VARIANTS)
def test_ranks_are_those_of_the_singular_values_of_what_enters_rope(result, layer, variant, first):
    data = result.dataset.sel(variant=variant, layer=LAYER)
    for side, x in (("q", layer[0].q), ("k", layer[0].k)):
        values = torch.linalg.svdvals(x[:, first:].double())
        p, plain = (values**2 / (values**2).sum(-1, keepdim=True)), values / values.sum(-1, keepdim=True)
        np.testing.assert_allclose(data[f"r1_{side}"], p[:, 0], rtol=1e-6)
        np.testing.assert_allclose(data[f"rank95_{side}"], (p.cumsum(-1) < 0.95).sum(-1) + 1)
        for name, shares in ((f"effective_rank_{side}", p), (f"effective_rank_plain_{side}", plain)):
            np.testing.assert_allclose(data[name], (-(shares * shares.log()).sum(-1)).exp(), rtol=1e-4)


@pytest.mark.parametrize(("variant", "first"), VARIANTS)
def test_cosines_are_with_the_top_right_singular_vector(result, layer, variant, first):
    h = layer[1][first:].double()
    cosines = torch.nn.functional.normalize(h, dim=-1) @ axis_of(h)
    cosines = cosines * (h @ axis_of(h)).sum().sign()
    data = result.dataset.sel(variant=variant, layer=LAYER)
    np.testing.assert_allclose(data["cosine_mean"], cosines.mean(), rtol=1e-6)
    np.testing.assert_allclose(data["cosine_std"], cosines.std(correction=0), rtol=1e-6)
    expected = np.histogram(cosines, np.linspace(-1, 1, 41))[0] / len(h)
    np.testing.assert_allclose(data["cosine_share"], expected)


def test_gain_and_share_are_those_of_the_axis_under_the_weights(result, layer):
    _, h, projections = layer
    u, data = axis_of(h), result.dataset.sel(variant="all", layer=LAYER)
    for side, weight in (("q", projections.w_q), ("k", projections.per_query_head(projections.w_k))):
        w = weight.double()
        gain = (u @ w).norm(dim=-1) / (w.square().sum((1, 2)) / w.shape[1]).sqrt()
        share = (h.double() @ u[:, None] @ u[None] @ w).square().sum((1, 2)) / (h.double() @ w).square().sum((1, 2))
        np.testing.assert_allclose(data[f"gain_{side}"], gain, rtol=1e-6)
        np.testing.assert_allclose(data[f"axis_share_{side}"], share, rtol=1e-6)


@pytest.mark.parametrize("kept", ["measured", "axis_only", "off_axis"])
@pytest.mark.parametrize(("variant", "first"), VARIANTS)
def test_the_counterfactual_is_attention_from_a_part_of_the_inputs(result, layer, variant, first, kept):
    capture, inputs, projections = layer
    h = inputs[first:].double()
    along = h @ axis_of(h)[:, None] @ axis_of(h)[None]
    h = {"measured": h, "axis_only": along, "off_axis": h - along}[kept].float()
    positions = torch.arange(len(h))
    rope = capture.geometry.rope
    q, k = rotate(projections.queries(h), positions, rope), rotate(projections.keys(h), positions, rope)
    scores = capture.geometry.scale * q @ k.mT
    pattern = scores.masked_fill(~torch.ones(len(h), len(h), dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    data = result.dataset.sel(variant=variant, layer=LAYER)
    for distance in (0, 1, 7):
        expected = pattern.diagonal(-distance, -2, -1).mean(-1)
        np.testing.assert_allclose(data["score"].sel(input=kept, distance=distance), expected, atol=1e-5)
    at_best = data["score"].sel(input=kept).sel(distance=data["best_distance"])
    np.testing.assert_allclose(data[f"best_{kept}"], at_best)


def test_measured_scores_are_those_of_the_measure_slash(single, result):
    slash = single["slash"].dataset
    for variant, suffix in (("all", ""), ("without_first_token", "_without_first_token")):
        ours = result.dataset["score"].sel(input="measured", variant=variant)
        np.testing.assert_allclose(ours, slash[f"score{suffix}"], atol=1e-5)
    np.testing.assert_array_equal(result.dataset["best_distance"].sel(variant="all"), slash["best_distance"])
    uniform = slash["uniform"].sel(distance=slash["best_distance"])
    np.testing.assert_allclose(result.dataset["best_uniform"].sel(variant="all"), uniform)


def test_intervals_are_of_the_mean_of_a_group_of_heads(mini, alice):
    found = cone(mini, alice, length=64, n_prompts=4, null_seeds=(), progress=False)
    own, data = found.summary, found.dataset.sel(variant="all")
    dominant = data["dominant"].astype(bool)
    without = data["r1_q_left_out"].where(dominant).mean(("layer", "head")).values
    each = without.sum() - 3 * without  # of groups of one prompt each: the mean of prompt g alone
    half = 3.1824 * each.std(ddof=1) / 2
    assert own["r1_q_dominant"] == pytest.approx(each.mean())
    assert own["r1_q_dominant_low"] == pytest.approx(own["r1_q_dominant"] - half, abs=1e-4)
    uniform, measured, alone = (data[f"best_{name}"] for name in ("uniform", "measured", "axis_only"))
    above = [(one - uniform).where(dominant).sum() for one in (alone, measured)]
    assert own["axis_part"] == pytest.approx(float(above[0] / above[1]))
    assert own["axis_part_low"] < own["axis_part"] < own["axis_part_high"]
    assert f"[{own['r1_q_dominant_low']:.3f}, {own['r1_q_dominant_high']:.3f}]" in found.findings()[0]


@pytest.mark.parametrize(("measured", "share"), [(0.35, 0.5), (0.255, None), (0.25, None), (0.2, None)])
def test_no_share_is_told_of_a_score_no_higher_than_uniform(measured, share):
    names = {"measured": measured, "axis_only": (measured + 0.25) / 2, "uniform": 0.25}
    data = xr.Dataset({f"best_{name}": (("layer", "head"), [[value, 9.0]]) for name, value in names.items()})
    heads = {"dominant": [[True, False]], "score": [[0.3, 0.0]]}
    data = data.assign({name: (("layer", "head"), value) for name, value in heads.items()})
    assert axis_part(data)["axis_part"] == (None if share is None else pytest.approx(share))


def test_rank_correlation_is_over_heads(result):
    data = result.dataset.sel(variant="all")
    for side in "qk":
        expected = spearmanr(data["best_measured"].values.flat, data[f"r1_{side}"].values.flat).statistic
        assert float(data[f"score_r1_spearman_{side}"]) == pytest.approx(expected)


def test_a_trained_model_amplifies_the_axis_and_its_null_does_not(result):
    gain, null = (float(one["gain_k"].sel(variant="all").min()) for one in (result.dataset, result.null))
    assert gain > 1.5
    assert null < 1.2


def test_the_slash_of_the_trained_model_needs_the_axis(result):
    heads = result.dataset.sel(variant="all")
    strong = heads.where(heads["best_measured"] > 0.25)
    assert int(strong["best_measured"].count()) >= 2
    assert float((strong["best_off_axis"] / strong["best_measured"]).max()) < 0.3


def biased(directory, factor: float):
    """A tiny Qwen2 with every bias of queries multiplied, and two prompts' worth of random tokens through `cone`."""
    model = lively(FAMILIES["qwen2"].config())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("q_proj.bias"):
                parameter.mul_(factor)
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    tokens = torch.randint(2, 64, (2, 24), generator=torch.Generator().manual_seed(0))
    model = tl_posgen.load_model(directory, backend="bridge")
    return cone(model, tokens, **QUIET).dataset


def test_a_large_bias_gives_rank_one_for_free_and_is_told_from_the_input_part(tmp_path):
    data, large = biased(tmp_path / "1", 1.0), biased(tmp_path / "100", 100.0)
    assert float(large["r1_sum_q"].min()) > 0.95 > 0.8 > float(data["r1_sum_q"].max())
    assert float(large["bias_share_q"].min()) > 0.95
    first = [one["r1_input_q"].sel(layer=0) for one in (data, large)]
    np.testing.assert_allclose(*first)


def test_queries_are_measured_after_their_norm(family_model):
    """Qwen3's norm gives all queries of a head one length, up to its weight."""
    model, tokens = family_model("qwen3", "bridge"), torch.arange(2, 26)[None]
    data = cone(model, tokens, **QUIET).dataset.sel(variant="all", layer=0)
    found = []
    run_capture(model, tokens, found.append, layers=[0])
    values = torch.linalg.svdvals(found[0].q.double()) ** 2
    np.testing.assert_allclose(data["r1_q"], values[:, 0] / values.sum(-1), rtol=1e-6)
    assert float(abs(data["r1_q"] - data["r1_sum_q"]).min()) > 1e-3


def test_grouped_heads_share_what_is_measured_of_their_keys(family_model):
    model, tokens = family_model("llama", "bridge"), torch.arange(2, 26)[None]
    data = cone(model, tokens, **QUIET).dataset.sel(variant="all")
    for name in ("r1_k", "gain_k", "axis_share_k", "r1_input_k"):
        np.testing.assert_allclose(data[name].sel(head=[0, 2]), data[name].sel(head=[1, 3]))
        assert abs(data[name].sel(head=1) - data[name].sel(head=2)).min() > 1e-4
    last = cone(model, tokens, heads=[3], **QUIET).dataset.sel(variant="all", head=3)
    for name in ("gain_q", "gain_k", "axis_share_k", "best_off_axis", "best_axis_only"):
        np.testing.assert_allclose(last[name], data[name].sel(head=3), atol=1e-6)


def test_prompts_agree_on_one_axis_and_disagree_on_orthogonal_ones():
    e = torch.eye(3, dtype=torch.float64)
    assert axis_agreement([e[0], -e[0]]) == pytest.approx(1)
    assert axis_agreement([e[0], e[1], e[0]]) == pytest.approx(1 / 3)
    assert np.isnan(axis_agreement([e[0]]))


def test_the_frame_has_a_row_a_head_and_choice_of_tokens_and_it_comes_back_from_disk(result, tmp_path):
    assert len(result.frame()) == 2 * 16
    loaded = tl_posgen.load(result.save(tmp_path / "cone.nc"))["cone"]
    xr.testing.assert_equal(loaded.dataset, result.dataset)


def test_a_layer_without_projections_is_refused_before_anything_runs(mini, alice, monkeypatch):
    import tl_posgen.models.wrapped as wrapped

    def refuse(*_):
        raise UnsupportedModelError("layer 0: its W_Q is not one matrix a head")

    monkeypatch.setattr(wrapped, "projections_of", refuse)
    monkeypatch.setattr("tl_posgen.feed.run_capture", None)
    with pytest.raises(UnsupportedModelError, match="not one matrix a head"):
        cone(mini, alice, length=12, n_prompts=1, **QUIET)


# What is shown


def test_rank_boxes_hold_every_head_of_its_group(result):
    traces = result.plot(kind="rank").data
    dominant = result.dataset.sel(variant="all").stack(place=("layer", "head"))
    dominant = dominant.isel(place=np.flatnonzero(dominant["dominant"]))
    np.testing.assert_array_equal(traces[0].y, [*dominant["r1_q"].values, *dominant["r1_k"].values])
    assert sum(len(trace.y) for trace in traces) == 2 * 2 * (16 + 16)


def test_there_is_a_histogram_a_layer_and_side(result):
    traces = result.plot(kind="cosines").data
    assert len(traces) == 2 * 4
    np.testing.assert_array_equal(traces[2].y, result.dataset["cosine_share"].sel(variant="all", layer=1))
    np.testing.assert_array_equal(traces[3].y, result.null["cosine_share"].sel(variant="all", layer=1))


@pytest.mark.parametrize(("kind", "name"), [("gain", "gain"), ("share", "axis_share")])
def test_maps_of_the_axis_stand_beside_the_null(result, kind, name):
    maps = result.plot(kind=kind).data
    np.testing.assert_array_equal(maps[1].z, result.dataset[f"{name}_k"].sel(variant="all"))
    np.testing.assert_array_equal(maps[2].z, result.null[f"{name}_q"].sel(variant="all"))


def test_the_counterfactual_has_two_points_a_head(result):
    points = [trace for trace in result.plot(kind="counterfactual").data if trace.mode == "markers"]
    assert sum(len(trace.x) for trace in points) == 2 * 2 * (16 + 16)
    shown = np.sort(np.concatenate([trace.y for trace in points if "only the axis" in trace.name]))
    expected = [*result.dataset["best_axis_only"].values.ravel(), *result.null["best_axis_only"].values.ravel()]
    np.testing.assert_allclose(shown, np.sort(expected))


def test_biases_are_drawn_and_told_only_where_there_are_any(result, gpt2):
    assert "bias" not in result.kinds
    assert not any("Biases hold" in sentence for sentence in result.findings())
    assert "bias" in gpt2.kinds
    box = gpt2.plot(kind="bias").data[0]
    assert box.x[0] == "Q, input part"
    assert set(box.y) <= set(gpt2.dataset[["r1_input_q", "r1_sum_q", "r1_input_k", "r1_sum_k"]].to_array().values.flat)
    share = max(float(gpt2.dataset[f"bias_share_{side}"].mean()) for side in "qk")
    assert gpt2.findings()[-2].startswith(f"Biases hold up to {share:.0%} of the energy of Q or K; without them r1 is ")


def test_what_the_axis_means_without_rope_is_said(gpt2, family_model):
    assert "rank one alone makes no slash" in gpt2.findings()[-1]
    bloom = cone(family_model("bloom", "bridge"), torch.arange(2, 22)[None], **QUIET)
    assert "the slopes stay in the score of the axis alone" in bloom.findings()[-1]


def test_counts_of_several_random_inits_are_told_as_averages(result):
    none = result.null.assign(dominant=result.null["dominant"] & False)
    one = none.assign(dominant=none["dominant"] | ((none["head"] == 0) & (none["layer"] == 0)))
    told = Result("cone", result.dataset, (one, none, none)).findings()[0]
    assert "in 0.333 slash-dominant heads on average" in told
    assert "in 15.7 other heads on average" in told


def test_the_table_holds_the_means_of_each_group_of_heads(result):
    first = result.table().iloc[0]
    data = result.dataset.sel(variant="all")
    dominant = data["dominant"].values.astype(bool)
    assert first["heads"] == f"{dominant.sum()} slash-dominant"
    assert first["r1 Q"] == pytest.approx(data["r1_q"].values[dominant].mean())
    assert first["axis only"] == pytest.approx(data["best_axis_only"].values[dominant].mean())


def test_the_sentences_tell_the_numbers_beside_the_null(result):
    data, null = (one.sel(variant="all") for one in (result.dataset, result.null))
    ranks, axis, kept = result.findings()
    dominant = data["dominant"].values.astype(bool)
    r1 = [data[name].values[dominant].mean() for name in ("r1_q", "r1_k")]
    assert ranks.startswith(f"r1 of Q and K is {r1[0]:.3f} and {r1[1]:.3f} in {dominant.sum()} slash-dominant heads, ")
    q, k = (float(null[name].mean()) for name in ("r1_q", "r1_k"))
    assert f"(random init {q:.3f} and {k:.3f} in 16 heads, none slash-dominant)" in ranks
    gain, of_null = (float(one["gain_k"].mean()) for one in (data, null))
    assert f"{gain:.2f} (random init {of_null:.2f})" in axis
    alone, measured, rest, uniform = (
        data[f"best_{name}"].values[dominant].mean() for name in ("axis_only", "measured", "off_axis", "uniform")
    )
    assert kept == (
        f"With only the axis part entering W_Q and W_K, slash-dominant heads score {alone:.3f} at their best distance "
        f"(measured {measured:.3f}); with all but the axis {rest:.3f} (uniform attention {uniform:.3f})."
    )
    assert result.summary["axis_part"] == pytest.approx((alone - uniform) / (measured - uniform))


def test_the_sentences_say_so_where_no_head_is_dominant(result):
    """The null as if it were the model."""
    sentences = Result("cone", result.null).findings()
    assert any("nothing can be asked of the axis" in sentence for sentence in sentences)


def test_an_unknown_kind_is_refused(result):
    with pytest.raises(ValueError, match="nonsense"):
        result.plot(kind="nonsense")

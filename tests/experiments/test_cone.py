"""Why slash heads are of rank one, on real models: against brute force from the inputs and the weights."""

import numpy as np
import pytest
import torch
import xarray as xr
from families import FAMILIES, lively, save_family, tokenizer

import tl_posgen
from tl_posgen.errors import InputError
from tl_posgen.experiments.cone import axis_agreement, cone
from tl_posgen.maths.rope import rotate
from tl_posgen.models.projections import run_projections
from tl_posgen.models.tokens import bundled_text, to_prompts

LAYER = 3
OPTIONS = {"length": 80, "n_prompts": 1, "progress": False}
VARIANTS = [("all", 0), ("without_first", 1)]


@pytest.fixture(scope="module")
def mini():
    return tl_posgen.load_model("mini")


@pytest.fixture(scope="module")
def result(mini):
    return cone(mini, bundled_text(), **OPTIONS)


@pytest.fixture(scope="module")
def layer(mini):
    """Capture, inputs and projections of one layer of the same prompt."""
    found = []
    prompt = to_prompts(mini, bundled_text(), length=80, n_prompts=1)[0]
    run_projections(mini, prompt, lambda *one: found.append(one), layers=[LAYER])
    return found[0]


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


def test_measured_scores_are_those_of_the_slash_analyzer(mini, result):
    slash = tl_posgen.analyze(mini, bundled_text(), analyzers=["slash"], null_seed=None, **OPTIONS)["slash"].dataset
    for variant, suffix in (("all", ""), ("without_first", "_without_first")):
        ours = result.dataset["score"].sel(input="measured", variant=variant)
        np.testing.assert_allclose(ours, slash[f"score{suffix}"], atol=1e-5)


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
    return cone(model, tokens, null_seed=None, progress=False).dataset


def test_a_large_bias_gives_rank_one_for_free_and_is_told_from_the_input_part(tmp_path):
    data, large = biased(tmp_path / "1", 1.0), biased(tmp_path / "100", 100.0)
    assert float(large["r1_sum_q"].min()) > 0.95 > 0.8 > float(data["r1_sum_q"].max())
    assert float(large["bias_share_q"].min()) > 0.95
    first = [one["r1_input_q"].sel(layer=0) for one in (data, large)]
    np.testing.assert_allclose(*first)


def test_queries_are_measured_after_their_norm(tmp_path):
    """Qwen3's norm gives all queries of a head one length, up to its weight."""
    model = tl_posgen.load_model(save_family("qwen3", tmp_path), backend="bridge")
    tokens = torch.arange(2, 26)
    data = cone(model, tokens[None], null_seed=None, progress=False).dataset.sel(variant="all", layer=0)
    found = []
    run_projections(model, tokens, lambda *one: found.append(one), layers=[0])
    values = torch.linalg.svdvals(found[0][0].q.double()) ** 2
    np.testing.assert_allclose(data["r1_q"], values[:, 0] / values.sum(-1), rtol=1e-6)
    assert float(abs(data["r1_q"] - data["r1_sum_q"]).min()) > 1e-3


def test_prompts_agree_on_one_axis_and_disagree_on_orthogonal_ones():
    e = torch.eye(3, dtype=torch.float64)
    assert axis_agreement([e[0], -e[0]]) == pytest.approx(1)
    assert axis_agreement([e[0], e[1], e[0]]) == pytest.approx(1 / 3)
    assert np.isnan(axis_agreement([e[0]]))


def test_the_frame_has_a_row_a_head_and_choice_of_tokens_and_it_comes_back_from_disk(result, tmp_path):
    assert len(result.frame()) == 2 * 16
    loaded = tl_posgen.load(result.save(tmp_path / "cone.nc"))["cone"]
    xr.testing.assert_equal(loaded.dataset, result.dataset)


@pytest.mark.parametrize("wrong", [{"kappa": 0.0}, {"distances": [79]}, {"distances": []}])
def test_impossible_settings_are_refused(mini, wrong):
    with pytest.raises(InputError):
        cone(mini, bundled_text(), null_seed=None, **OPTIONS, **wrong)

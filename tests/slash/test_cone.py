"""Why slash heads are of rank one, on real models: against brute force from the inputs and the weights."""

import numpy as np
import pytest
import torch
from families import FAMILIES, lively, tokenizer
from made_up import dataset_of, result_of
from rotated_heads import captures_of

import tl_posgen
import tl_posgen.models.session as session
from tl_posgen.errors import UnsupportedModelError
from tl_posgen.models.tokens import to_prompts
from tl_posgen.rope.rotation import rotate
from tl_posgen.slash import Cone

MEASURE = "cone"
FROM = "single"

pytestmark = pytest.mark.longer

LAYER = 3
VARIANTS = [("all", 0), ("without first", 1)]
TOKENS = torch.arange(2, 26)[None]
QUIET = {"nulls": 0, "progress": False}


@pytest.fixture(scope="module")
def layer(mini, alice):
    """Capture, inputs and projections of one layer of the same prompt."""
    [found] = captures_of(mini, to_prompts(mini, alice, length=80, n_prompts=1), "inputs", layers=[LAYER])
    return found, found.inputs, found.projections


def test_heads_are_those_of_the_highest_score_on_the_axis(result):
    found = result.heads(2, by="slash_score", input="axis only", tokens="all")
    scores = result.sel(tokens="all", input="axis only")["slash_score"].to_series()
    assert found["slash_score"].tolist() == scores.nlargest(2).tolist()


def axis_of(inputs: torch.Tensor) -> torch.Tensor:
    return torch.linalg.svd(inputs.double()).Vh[0]


@pytest.mark.parametrize(("tokens", "first"), VARIANTS)
def test_ranks_are_those_of_the_singular_values_of_what_enters_rope(result, layer, tokens, first):
    data = result.trained.sel(tokens=tokens, layer=LAYER)
    for side, x in (("q", layer[0].q), ("k", layer[0].k)):
        found = data.sel(side=side)
        energy = torch.linalg.svdvals(x[:, first:].double()) ** 2
        np.testing.assert_allclose(found["r1"], energy[:, 0] / energy.sum(-1), rtol=1e-6)
        fewer = energy.cumsum(-1) < 0.95 * energy.sum(-1, keepdim=True)
        assert found["rank95"].values.tolist() == (fewer.sum(-1) + 1).tolist()


@pytest.mark.parametrize(("tokens", "first"), VARIANTS)
def test_cosines_are_with_the_top_right_singular_vector(result, layer, tokens, first):
    h = layer[1][first:].double()
    cosines = torch.nn.functional.normalize(h, dim=-1) @ axis_of(h)
    cosines = cosines * (h @ axis_of(h)).sum().sign()
    data = result.trained.sel(tokens=tokens, layer=LAYER)
    np.testing.assert_allclose(data["cosine"], cosines.mean(), rtol=1e-6)


def test_the_gain_is_that_of_the_axis_under_the_weights(result, layer):
    _, h, projections = layer
    u, data = axis_of(h), result.trained.sel(tokens="all", layer=LAYER)
    for side, weight in (("q", projections.w_q), ("k", projections.per_query_head(projections.w_k))):
        w = weight.double()
        gain = (u @ w).norm(dim=-1) / (w.square().sum((1, 2)) / w.shape[1]).sqrt()
        np.testing.assert_allclose(data["gain"].sel(side=side), gain, rtol=1e-6)


@pytest.mark.parametrize("kept", ["measured", "axis only", "off axis"])
@pytest.mark.parametrize(("tokens", "first"), VARIANTS)
def test_the_counterfactual_is_attention_from_a_part_of_the_inputs(result, layer, tokens, first, kept):
    capture, inputs, projections = layer
    h = inputs[first:].double()
    along = h @ axis_of(h)[:, None] @ axis_of(h)[None]
    h = {"measured": h, "axis only": along, "off axis": h - along}[kept].float()
    positions = torch.arange(len(h))
    rope = capture.geometry.rope
    q, k = rotate(projections.queries(h), positions, rope), rotate(projections.keys(h), positions, rope)
    scores = capture.geometry.scale * q @ k.mT
    pattern = scores.masked_fill(~torch.ones(len(h), len(h), dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    data = result.trained.sel(tokens=tokens, layer=LAYER)
    assert data["distance"].values.tolist() == [0, 1, 2, 3, 4]
    for distance in data["distance"].values.tolist():
        expected = pattern.diagonal(-distance, -2, -1).mean(-1)
        np.testing.assert_allclose(data["score"].sel(input=kept, distance=distance), expected, atol=1e-5)
    expected = [
        pattern[head].diagonal(-best).mean() for head, best in enumerate(data["slash_distance"].values.tolist())
    ]
    np.testing.assert_allclose(data["slash_score"].sel(input=kept), expected, atol=1e-5)


@pytest.mark.parametrize(("measured", "share"), [(0.35, 0.5), (0.255, None), (0.25, None), (0.2, None)])
def test_no_share_is_told_of_a_score_no_higher_than_uniform(measured, share):
    heads = ("tokens", "layer", "head")
    variables = {
        "slash_score": (("input", "layer", "head"), [[[measured, 9.0]], [[(measured + 0.25) / 2, 9.0]]]),
        "best_uniform": (heads, [[[0.25, 9.0]]] * 2),
        "slash_distance": (heads, [[[1, 1]]] * 2),
        "dominant": (heads, [[[True, False]]] * 2),
    }
    numbers = result_of(Cone(), dataset_of(variables, input=["measured", "axis only"])).numbers
    found = Cone().ratio_above_no_inputs(numbers, "axis only")
    assert found.value == pytest.approx(np.nan if share is None else share, nan_ok=True)


@pytest.mark.parametrize("first", [0, 1])
def test_biases_are_a_part_of_their_own_beside_those_of_the_inputs(family_model, backend, first):
    model, tokens = family_model("qwen2", backend), TOKENS.roll(1, 1)
    data = Cone()(model, tokens, **QUIET).sel(tokens=["all", "without first"][first])
    for capture in captures_of(model, tokens, "inputs"):
        made, rope, here = capture.projections, capture.geometry.rope, data.sel(layer=capture.layer)
        h = capture.inputs[first:].double()
        along, at = h @ axis_of(h)[:, None] @ axis_of(h)[None], torch.arange(len(h))
        weights, biases = (made.w_q, made.per_query_head(made.w_k)), made.biases
        parts = {"axis only": (along, 0), "off axis": (h - along, 0), "no bias": (h, 0), "bias only": (0 * h, 1)}
        parts |= {"axis and bias": (along, 1), "off axis and bias": (h - along, 1), "measured": (h, 1)}
        assert set(parts) == set(data["input"].values)
        for part, (x, with_bias) in parts.items():
            q, k = (x @ w.double() + with_bias * b.double()[:, None] for w, b in zip(weights, biases, strict=True))
            if part == "no bias":
                energy = torch.linalg.svdvals(k) ** 2
                np.testing.assert_allclose(here["r1_without_bias"].sel(side="k"), energy[:, 0] / energy.sum(-1), 1e-5)
            scores = capture.geometry.scale * rotate(q, at, rope) @ rotate(k, at, rope).mT
            pattern = scores.masked_fill(~capture.geometry.visible(len(h)), -torch.inf).softmax(-1)
            expected = pattern.diagonal(-1, -2, -1).mean(-1)
            np.testing.assert_allclose(here["score"].sel(input=part, distance=1), expected, atol=1e-5)


@pytest.mark.parametrize("biased", [False, True])
def test_the_share_of_a_part_is_of_what_inputs_add_to_biases_or_to_uniform_attention(biased):
    """By biases alone the head scores .4 of .8, the axis adds all of the rest and all but the axis a quarter of it;
    of a random init that has no biases the same numbers stand for uniform attention."""
    none = 0.4 if biased else 0.1
    parts = {"measured": 0.8, "axis only": 0.8, "off axis": none + (0.8 - none) / 4}
    heads = ("tokens", "layer", "head")

    def slash_score():
        return {"slash_score": (("tokens", "input", "layer", "head"), [[[[one]] for one in parts.values()]] * 2)}

    rest = {"best_uniform": (heads, [[[0.1]]] * 2), "slash_distance": (heads, [[[1]]] * 2)}
    rest["dominant"] = (heads, [[[True]]] * 2)
    init = dataset_of(slash_score() | rest, input=list(parts))
    if biased:  # without biases a part makes something else
        parts |= {"axis and bias": 0.8, "off axis and bias": parts["off axis"], "bias only": 0.4, "no bias": 0.2}
        parts |= {"axis only": 0.11, "off axis": 0.12}
    numbers = result_of(Cone(), dataset_of(slash_score() | rest, input=list(parts)), init).numbers
    ratio = Cone().ratio_above_no_inputs
    assert ratio(numbers, "axis only").value == pytest.approx(1)
    assert ratio(numbers, "off axis").value == pytest.approx(0.25)
    assert ratio(numbers, "axis only", less="off axis").value == pytest.approx(0.75)
    of_init = 1 - (0.8 - none) * 0.75 / 0.7
    assert ratio(numbers, "off axis").by_null["random init"] == pytest.approx((of_init,))
    assert Cone().ratio_of_biases(numbers).value == pytest.approx(0.3 / 0.7 if biased else 0)


def test_a_large_bias_gives_rank_one_for_free_and_is_told_from_the_input_part(tmp_path):
    """Of a tiny Qwen2 with its own biases of queries, and with a hundred times these."""
    model, tokens, found = lively(FAMILIES["qwen2"].config()), TOKENS.roll(1, 1), []
    for factor in (1, 100):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("q_proj.bias"):
                    parameter.mul_(factor)
        model.save_pretrained(tmp_path / str(factor))
        tokenizer().save_pretrained(tmp_path / str(factor))
        loaded = tl_posgen.load_model(tmp_path / str(factor), backend="bridge")
        result = Cone()(loaded, tokens, **QUIET)
        found.append(result.sel(side="q"))
    data, large = found
    q, k = (f"{result.numbers('bias_share', side=side).value:.0%}" for side in "qk")
    assert f"hold {q} of the energy of Q and {k} of that of K, mean over heads" in result.findings()[0]
    assert q != k
    assert float(large["r1"].min()) > 0.95 > 0.8 > float(data["r1"].max())
    assert float(large["bias_share"].min()) > 0.95
    first = {"layer": 0}  # which reads the same inputs
    np.testing.assert_allclose(large["r1_without_bias"].sel(first), data["r1_without_bias"].sel(first), rtol=1e-6)
    assert float(large["r1_without_bias"].max()) < 0.8


def test_a_model_without_biases_has_no_parts_of_them(result):
    assert result.trained["input"].values.tolist() == ["measured", "axis only", "off axis"]
    assert "r1_without_bias" not in result.trained


def test_queries_are_measured_after_their_norm(family_model):
    model = family_model("qwen3", "bridge")
    data = Cone()(model, TOKENS, **QUIET).sel(tokens="all", layer=0, side="q")
    values = torch.linalg.svdvals(captures_of(model, TOKENS, layers=[0])[0].q.double()) ** 2
    np.testing.assert_allclose(data["r1"], values[:, 0] / values.sum(-1), rtol=1e-6)


def test_grouped_heads_share_what_is_measured_of_their_keys(family_model):
    model = family_model("llama", "bridge")
    data = Cone()(model, TOKENS, **QUIET).sel(tokens="all")
    keys = data.sel(side="k")
    for name in ("r1", "gain"):
        np.testing.assert_allclose(keys[name].sel(head=[0, 2]), keys[name].sel(head=[1, 3]))
        assert abs(keys[name].sel(head=1) - keys[name].sel(head=2)).min() > 1e-4
    last = Cone()(model, TOKENS, heads=[(0, 3), (1, 3)], **QUIET).sel(tokens="all", head=3)
    for name in ("gain", "slash_score"):
        np.testing.assert_allclose(last[name], data[name].sel(head=3), atol=1e-6)


def test_a_layer_without_projections_is_refused_before_anything_runs(mini, alice, monkeypatch):
    def refuse(*_):
        raise UnsupportedModelError("layer 0: its W_Q is not one matrix a head")

    monkeypatch.setattr(session, "projections_of", refuse)
    monkeypatch.setattr("tl_posgen.core.feed.run_capture", None)
    with pytest.raises(UnsupportedModelError, match="not one matrix a head"):
        Cone()(mini, alice, length=12, n_prompts=1, **QUIET)

"""The variance measure: moments over prompts, and what the figures draw."""

from html import unescape

import numpy as np
import pytest
import torch
import xarray as xr
from captures import collected
from rotated_heads import captures_of

import tl_posgen
from tl_posgen.errors import InputError
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.position.decomposition import Variance
from tl_posgen.position.decomposition.numbers.variance_shares import TripleMoments, variance_shares

MEASURE = "variance"

WITHOUT_FIRST = {"tokens": "without first"}


def test_parts_are_shares_of_what_softmax_sees(result):
    data = result.trained
    share = {str(part): data["share"].sel(part=part) for part in data["part"].values}
    seen = 1 - share["q"]
    np.testing.assert_allclose(data["position"], (share["d"] + share["qd"]) / seen)
    np.testing.assert_allclose(data["content"], (share["k"] + share["qk"]) / seen)
    np.testing.assert_allclose(data["interaction"], (share["kd"] + share["qkd"]) / seen)
    np.testing.assert_allclose(data["additive_r"], np.sqrt(data["position"] + data["content"]))
    np.testing.assert_allclose(data["additive_r_of_scores"], np.sqrt(1 - share["kd"] - share["qkd"]))
    curve = next(one for one in result.plot("depth").data if one.name == "distance alone + key alone")
    of_layers = np.sqrt((share["k"] + share["d"]) / seen).sel(WITHOUT_FIRST).mean("head")
    np.testing.assert_allclose(curve.y, of_layers, rtol=1e-6)


@pytest.mark.parametrize(("tokens", "first"), [("all", 0), ("without first", 1)])
def test_shares_are_those_of_all_tokens_of_all_prompts(mini, prompts, result, tokens, first):
    kept = captures_of(mini, prompts, layers=[2])
    geometry = kept[0].geometry
    q, k = (torch.cat([getattr(one, name)[:, first:] for one in kept], 1).double() for name in "qk")
    moments = TripleMoments.from_qk(q, k, geometry.rope)
    expected = variance_shares(moments, geometry.rope, geometry.scale, 64)
    found = result.sel(tokens=tokens, layer=2)
    np.testing.assert_allclose(found["share"].transpose("head", "part"), expected.shares, rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(found["size"].sel(of="scores"), expected.within_rows.total.sqrt(), rtol=1e-5)
    np.testing.assert_allclose(found["mean_energy"].sel(side="k"), moments.k.mean_energy, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom"])
def test_attention_to_the_first_token_is_that_of_the_models_pattern(family_model, name):
    """Of all queries behind it, whether the pass forms a pattern or not; a window hides the token from most."""
    model, tokens = family_model(name), torch.randint(2, 60, (5, 24), generator=torch.Generator().manual_seed(3))
    kept = {}
    hooks = [
        (f"blocks.{layer}.attn.hook_pattern", lambda x, hook, n=layer: kept.update({n: x[:, :, 1:, 0].double()}))
        for layer in range(2)
    ]
    with torch.no_grad():
        model.run_with_hooks(tokens, fwd_hooks=hooks)
    expected = torch.stack([kept[layer].mean(-1).mean(0) for layer in range(2)])
    for how in ({"measures": "variance"}, {"measures": ["variance", "slash"]}, {"streaming": True}):
        result = tl_posgen.analyze(model, tokens, progress=False, **{"measures": "variance"} | how)["variance"]
        np.testing.assert_allclose(result.trained["first_token"], expected, rtol=1e-4, atol=1e-6)
    number = result.numbers("first_token")
    assert number.low < number.value < number.high
    assert len(number.nulls) == 2
    assert f"The first token takes {number:.0%} of the attention" in result.sentences[2]


def test_a_token_in_front_is_said_and_belongs_to_what_is_kept(mini, alice, tmp_path):
    cut = {"measures": "variance", "length": 24, "n_prompts": 2, "nulls": 0, "progress": False}
    comma = mini.tokenizer(",", add_special_tokens=False).input_ids[0]
    shares, said = [], []
    for keep in (None, tmp_path, tmp_path):
        for first in (None, ","):
            report = tl_posgen.analyze(mini, alice, first=first, keep=keep, **cut)
            shares.append(report["variance"].numbers("first_token").value)
            said.append(report.provenance["first_token"])
            assert report.provenance.get("first") == (comma if first else None)
            assert report.summary()["first_token"] == said[-1] in unescape(report.html())
    assert said == ["BOS '<s>'", "no BOS but word ','"] * 3
    assert shares[0] == shares[2] == shares[4] != shares[1] == shares[3] == shares[5]
    takes = f"{said[-1]}, which takes {report['variance'].numbers('first_token'):.0%} of the attention"
    assert f"First token of each prompt: {takes}" in unescape(report.html())


def test_distances_and_weights_are_those_asked_for(capture):
    few = collected(Variance(n_distances=5, weights="causal"), capture)
    geometry = capture.geometry
    moments = TripleMoments.from_qk(capture.q, capture.k, geometry.rope, first_token=False)
    expected = variance_shares(moments, geometry.rope, geometry.scale, 5, weights="causal")
    np.testing.assert_allclose(few["share"].sel(WITHOUT_FIRST | {"part": "d"}).squeeze("layer"), expected.share("d"))


def test_sizes_are_those_of_the_shares_that_softmax_sees(result):
    for data in result.by_kind.values():
        size = data["size"].sel(WITHOUT_FIRST)
        seen = size.sel(of="scores", drop=True) ** 2
        for part in ("position", "content", "interaction"):
            np.testing.assert_allclose(
                size.sel(of=part), (seen * data[part].sel(WITHOUT_FIRST)) ** 0.5, rtol=1e-9, atol=1e-12
            )


def test_two_tokens_say_nothing_of_what_varies(mini):
    result = Variance()(mini, torch.tensor([[3, 4]]), nulls=0, progress=False)
    assert result.trained["position"].isnull().all()
    assert "one token besides the first says nothing" in result.findings()[-1]


@pytest.mark.longer
def test_shares_by_place_add_up_to_the_shares_and_change_nothing_else(mini, alice):
    data = Variance(absolute=True)(mini, alice, length=24, n_prompts=8, progress=False).trained
    np.testing.assert_allclose(data["by_place"].sum("place"), data["share"], atol=1e-12)
    by_key = data["by_place"].sel(part=["k", "qk", "kd", "qkd"], place=["key", "both"]).sum(("part", "place"))
    np.testing.assert_allclose(data["absolute"], by_key / (1 - data["share"].sel(part="q")))
    assert float(abs(data["absolute"].sel(WITHOUT_FIRST)).max()) < 0.1  # keys of mini do not know where they stand
    plain = Variance()(mini, alice, length=24, n_prompts=8, nulls=0, progress=False)
    xr.testing.assert_identical(data[list(plain.trained)].drop_vars("place", errors="ignore"), plain.trained)
    assert "places" not in plain.kinds


def test_too_few_attached_prompts_are_refused(mini):
    with tl_posgen.attach(mini, [Variance(absolute=True)]) as run:
        mini(torch.arange(20)[None])
    with pytest.raises(InputError, match="8 at least, not 1"):
        run.report()


@pytest.mark.longer
def test_places_of_queries_and_keys_are_those_that_vectors_were_made_with():
    """Without RoPE, places and text of queries and keys independent: the share of places alone is that of the true
    place vectors' scores, and of the text of one side's variance."""
    n, n_tokens, generator = 16, 64, torch.Generator().manual_seed(0)
    geometry = LayerGeometry(0, "none", 4, 4, 8, scale=0.3)
    strength = torch.tensor([0.0, 0.5, 1.0, 2.0])
    places = [torch.randn(4, n_tokens, 8, generator=generator) * strength[:, None, None] for _ in "qk"]
    sides = [one + torch.randn(n, 4, n_tokens, 8, generator=generator) + 0.5 for one in places]
    captures = [
        LayerCapture(geometry, range(4), number, None, *pair) for number, pair in enumerate(zip(*sides, strict=True))
    ]
    of_places = collected(Variance(absolute=True), *captures).sel(WITHOUT_FIRST).squeeze("layer")["places_alone"]
    q, k = (one[:, 1:].double() + 0.5 for one in places)  # what prompts share
    k = k - k.mean(1, keepdim=True)
    shared = (q @ k.mT).square().mean((1, 2))
    # E (q . k)^2, the text of both standard normal in 8 coordinates
    whole = shared + q.square().sum(-1).mean(1) + k.square().sum(-1).mean(1) + 8
    np.testing.assert_allclose(of_places, shared / whole, atol=0.02)
    assert float(of_places[0]) < 0.01 < 0.5 < float(of_places[-1])


@pytest.mark.longer
def test_learned_positions_are_in_the_content_and_something_is_concluded(learned_positions, tinystories):
    cut = {"length": 64, "n_prompts": 8, "nulls": 0, "progress": False}
    result = Variance(absolute=True)(learned_positions, tinystories, **cut)
    assert "RoPE did not put there" in result.findings()[0]
    told = [one for one in result.findings() if not one.startswith("The first token takes")]
    assert told == [told[0], result.caveat]  # position is zero by construction: nothing said
    assert float(result.sel(**WITHOUT_FIRST)["absolute"].mean()) > 0.5


def test_the_headlines_keep_their_names(report):
    axes = ["three_axis_r", "three_axis_r_within_rows"]
    parts = ["additive_r", *(f"{part}_share" for part in ("position", "content", "interaction")), "size"]
    parts.append("first_token_attention")
    named = [*axes, *parts, "mean_key_r", "residual_share", "residual_std"]
    assert report.frame().columns[: 2 + len(named)].tolist() == ["layer", "head", *named]
    assert [short for short, _ in report["variance"].headline_labels().values()] == [
        "additive r",
        "position",
        "content",
        "interaction",
        "size",
        "first token",
    ]

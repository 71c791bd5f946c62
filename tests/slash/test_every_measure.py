"""Slash measures with chosen heads, odd prompts and other encodings."""

import numpy as np
import pytest
import torch
import xarray as xr
from captures import collected, run

import tl_posgen
from tl_posgen.core.numbers import Numbers
from tl_posgen.errors import InputError
from tl_posgen.models import geometry_of
from tl_posgen.slash import BandAblation, Cone, Slash, SlashAblation, SlashPlanes, SlashTransfer

pytestmark = pytest.mark.longer

THIRDS = {"schemes": ["thirds"]}  # half of the conditions
QUICK = ["slash", "slash_planes", SlashAblation(**THIRDS), "slash_transfer", "cone", BandAblation(**THIRDS), "loss"]
TOKENS = torch.arange(24)[None] + 10
QUIET = {"nulls": 0, "progress": False}


def test_scores_are_those_of_the_measure_slash_in_the_model_and_in_its_random_init(small):
    for side in ("trained", "null"):
        names = ("slash", "cone", "slash_planes", "slash_transfer")
        slash, cone, planes, transfer = (getattr(small[name], side) for name in names)
        for data in (cone.sel(input="measured"), planes, transfer.sel(source="natural")):
            np.testing.assert_allclose(data["score"], slash["score"].sel(distance=data["distance"]), atol=1e-5)
            whole = data.sel(tokens="all")
            np.testing.assert_allclose(whole["slash_score"], slash["slash_score"], atol=1e-5)
            np.testing.assert_array_equal(whole["slash_distance"], slash["slash_distance"])


def test_a_report_has_each_score_of_a_head_once(small):
    frame = small.frame()
    assert [name for name in frame if "slash_score" in name] == ["slash_score", "random_slash_score"]
    random = small["slash_transfer"].trained["slash_score"].sel(tokens="all", source="random")
    np.testing.assert_allclose(frame["random_slash_score"], random.values.ravel())


@pytest.mark.parametrize(("name", "words"), [("cone", "nothing can be asked of the axis"), ("slash_planes", "no band")])
def test_the_sentences_say_so_where_no_head_is_dominant(single, name, words):
    """The null as if it were the model."""
    result = single[name]
    null = Numbers(result.measure, result.dataset.isel(init=[1]).assign_coords(init=["trained"]))
    assert any(words in sentence for sentence in result.measure.findings(null))


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3, 12])
def test_very_short_prompts_are_measured_told_and_drawn(llama, n):
    near = {"distances": (0,)}
    measures = [Slash(**near), SlashPlanes(**near), SlashAblation(**THIRDS), SlashTransfer(**near), Cone(**near)]
    report = tl_posgen.analyze(
        llama, TOKENS[:, :n], measures=[*measures, BandAblation(**THIRDS, **near), "loss"], **QUIET
    )
    assert report["slash"].trained.sizes["distance"] == n
    assert report["loss"].trained.sizes["position"] == n - 1
    for result in report.values():
        assert result.findings()
        assert all(result.plot(kind).data for kind in result.kinds)


@pytest.mark.parametrize("measure", [Slash(), SlashPlanes(), SlashAblation(**THIRDS), Cone()])
def test_each_prompt_counts_once_and_a_distance_where_it_exists(llama, measure):
    captures = [run(llama, torch.arange(n)[None] + 10, measure.needs) for n in (2, 9, 24)]
    parts = [collected(measure, *of_prompt) for of_prompt in captures]
    for number, of_prompt in enumerate(captures):
        for one in of_prompt:
            one.prompt = number
    whole = collected(measure, *(one for of_prompt in captures for one in of_prompt))
    for name in {"score", "uniform", "contribution", "r1"} & set(whole):
        expected = xr.concat([one[name] for one in parts], "prompt", join="outer").mean("prompt")
        np.testing.assert_allclose(whole[name], expected.transpose(*whole[name].dims), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "bloom", "mpt", "smollm3"])
def test_other_encodings_are_measured_or_refused(family_model, family):
    model, tokens = family_model(family, "bridge"), torch.arange(2, 22)[None]
    report = tl_posgen.analyze(model, tokens, measures=QUICK, skip_unsupported=True, **QUIET)
    assert ("band_ablation" in report) == (family == "smollm3")
    for result in report.values():
        assert result.findings()
        assert all(result.plot(kind).data for kind in result.kinds)


def test_a_layer_that_rotates_nothing_beside_one_that_does(family_model):
    model, tokens = family_model("smollm3", "bridge"), torch.arange(2, 22)[None]
    rotary = [bool(geometry.rope.rotary_dim) for geometry in geometry_of(model)]
    rotates, plain = rotary.index(True), rotary.index(False)
    report = tl_posgen.analyze(model, tokens, measures=[QUICK[2], QUICK[5]], layers=[plain], **QUIET)
    assert report["slash_ablation"].trained["condition"].values.tolist() == ["unchanged", "rank_one", "means"]
    assert "No layer measured here has rotary planes" in report["slash_ablation"].findings()[-1]
    both = tl_posgen.analyze(model, tokens, measures="slash_ablation", **QUIET)["slash_ablation"].trained["score"]
    unchanged, still = (both.sel(condition=one) for one in ("unchanged", "no_rope"))
    np.testing.assert_allclose(still.sel(layer=plain), unchanged.sel(layer=plain), atol=1e-5)
    assert abs(still - unchanged).sel(layer=rotates).max() > 1e-3


@pytest.mark.parametrize("name", ["slash_planes", "cone"])
def test_a_prompt_of_one_token_is_refused_where_the_first_is_left_out(mini, name):
    with pytest.raises(InputError, match="a prompt of one token"), tl_posgen.attach(mini, [name]):
        mini(TOKENS[:, :1])

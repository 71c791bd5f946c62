"""The variance measure with shares by place: what it gives on models, what it refuses, and scores compared directly."""

import numpy as np
import pytest
import torch
import xarray as xr

import tl_posgen
from tl_posgen.cli.measure_commands import built, command_of_measure
from tl_posgen.errors import InputError
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.position.decomposition import Variance
from tl_posgen.position.decomposition.variance import FEWEST_PROMPTS
from tl_posgen.report.tables import compact

pytestmark = pytest.mark.longer

OUT = {"tokens": "without first"}


@pytest.fixture(scope="module")
def result(mini, alice):
    return Variance(absolute=True)(mini, alice, length=24, n_prompts=8, progress=False)


def test_shares_by_place_add_up_to_the_shares_and_change_nothing_else(mini, alice, result):
    data = result.own
    np.testing.assert_allclose(data["by_place"].sum("place"), data["share"], atol=1e-12)
    by_key = data["by_place"].sel(part=["k", "qk", "kd", "qkd"], place=["key", "both"]).sum(("part", "place"))
    np.testing.assert_allclose(data["absolute"], by_key / (1 - data["share"].sel(part="q")))
    assert float(abs(data["absolute"].sel(OUT)).max()) < 0.1  # keys of mini do not know where they stand
    plain = Variance()(mini, alice, length=24, n_prompts=8, null_seeds=(), progress=False)
    xr.testing.assert_identical(data[list(plain.own)].drop_vars("place", errors="ignore"), plain.own)
    assert "places" not in plain.kinds


def test_it_is_said_shown_and_drawn_beside_random_init(result):
    sentence = result.findings()[0]
    assert f"where the key stands makes {result.numbers('absolute'):.1%}" in sentence
    most = result.numbers.extreme("absolute")
    assert f"{result.numbers('absolute', layer=most.layer, head=most.head):.1%}." in sentence
    assert "in content, " in sentence
    assert np.isfinite(result.numbers.intervals("absolute")["low"]).all()
    np.testing.assert_array_equal(result.frame()["absolute"], result.own["absolute"].sel(OUT).values.ravel())
    assert "absolute_share" in result.headline_frame()
    assert "share of the key's place" in compact(result).columns
    bars = result.plot("places").data
    assert [bar.name for bar in bars[:3]] == ["position", "content, key's place", "content, key's token"]
    for side in range(2):
        total = sum(bar.y for bar in bars[5 * side : 5 * side + 5])
        np.testing.assert_allclose(total, 1)


def test_few_prompts_and_prompts_of_other_lengths_are_refused(mini, alice):
    measure = Variance(absolute=True)
    with pytest.raises(InputError, match="8 at least, not 7; give n_prompts=16"):
        measure(mini, alice, length=24, n_prompts=7, progress=False)
    with pytest.raises(InputError, match="of one length"):
        measure(mini, [alice[: 40 + 9 * n] for n in range(8)], progress=False)
    with tl_posgen.attach(mini, [measure]) as run:
        mini(torch.arange(20)[None])
    with pytest.raises(InputError, match="8 at least, not 1"):
        run.report()


def test_places_of_queries_and_keys_are_those_that_vectors_were_made_with(collected):
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
    of_places = collected(Variance(absolute=True), *captures).sel(OUT).squeeze("layer")["places_alone"]
    q, k = (one[:, 1:].double() + 0.5 for one in places)  # what prompts share
    k = k - k.mean(1, keepdim=True)
    shared = (q @ k.mT).square().mean((1, 2))
    # E (q . k)^2, the text of both standard normal in 8 coordinates
    whole = shared + q.square().sum(-1).mean(1) + k.square().sum(-1).mean(1) + 8
    np.testing.assert_allclose(of_places, shared / whole, atol=0.02)
    assert float(of_places[0]) < 0.01 < 0.5 < float(of_places[-1])


def test_learned_positions_are_in_the_content_and_something_is_concluded(learned_positions, tinystories):
    cut = {"length": 64, "n_prompts": 8, "null_seeds": (), "progress": False}
    result = Variance(absolute=True)(learned_positions, tinystories, **cut)
    assert "RoPE did not put there" in result.findings()[0]
    assert result.findings() == [result.findings()[0], result.caveat]  # position is zero by construction: nothing said
    assert float(result.sel(**OUT)["absolute"].mean()) > 0.5


def test_the_command_takes_as_many_prompts_as_shares_by_place_want():
    chosen = command_of_measure("variance")
    assert chosen is not None
    (prompts,) = (one for one in built("variance", chosen).params if one.name == "prompts")
    assert prompts.default == 16 >= FEWEST_PROMPTS

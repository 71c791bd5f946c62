"""What planes cost when they are perturbed, on the bundled model: losses, shares, correlations, and what is shown."""

import numpy as np
import pytest
import torch
import xarray as xr
from rotated_heads import captures_of
from scipy import stats

from tl_posgen.core.engine import analyze
from tl_posgen.core.measure import ENDS
from tl_posgen.errors import InputError
from tl_posgen.models.loss import token_losses
from tl_posgen.models.tokens import to_prompts
from tl_posgen.position.planes import PlanePerturbation, perturb_planes, plane_perturbation
from tl_posgen.position.planes.plane_perturbation import (
    CARRIED,
    COSTS,
    MOST_CELLS,
    OF,
    cost_share_correlations,
    plane_shares,
)
from tl_posgen.rope.frequency_bands import BANDS, bands_by_thirds
from tl_posgen.rope.planes import turning_factors
from tl_posgen.rope.rotation import complex_planes

pytestmark = pytest.mark.slow

CUT = {"length": 24, "n_prompts": 4, "progress": False}
EDITS = ("shuffle_positions", "phase_noise")
MAPPED = ("shuffle_phases", "shuffle_positions")


@pytest.fixture(scope="session")
def report(mini, alice):
    asked = PlanePerturbation(edits=EDITS, strengths=(0.5, 1), map_edits=MAPPED, map_by="bands")
    return analyze(mini, alice, measures=["planes", asked], layers=[0, 2], null_seeds=(0,), **CUT)


@pytest.fixture(scope="session")
def result(report):
    return report["plane_perturbation"]


def tokens_of(model, text):
    return torch.stack(to_prompts(model, text, length=24, n_prompts=4))


def test_deep_models_are_mapped_if_asked(mini, alice, monkeypatch):
    monkeypatch.setattr(plane_perturbation, "MOST_LAYERS", 3)
    asked = PlanePerturbation(edits=EDITS[:1], strengths=(1,))
    found = asked(mini, alice, null_seeds=(), **{**CUT, "n_prompts": 1})
    assert found.measure.map_edits == ()
    assert "map_rise" not in found.own
    assert PlanePerturbation(map_edits=MAPPED).prepare(mini, []).map_edits == MAPPED


def test_rises_are_those_of_the_hooked_model(mini, alice, result):
    tokens, data, (high, _, low) = tokens_of(mini, alice), result.own, bands_by_thirds(16)
    shuffled = data["rise"].sel(edit="shuffle_positions", strength=0.5, cost="edit")
    of_band = data["band_rise"].sel(edit="shuffle_positions", band="low", cost="edit")
    cases = [(shuffled.sel(of=of), {"edit": "shuffle_positions", "of": OF[of], "strength": 0.5}) for of in OF]
    cases.append((of_band, {"edit": "shuffle_positions", "band": low}))
    for cost in COSTS:
        control = {"control": cost == "control"}
        noisy = data["rise"].sel(edit="phase_noise", of="both", strength=0.5, cost=cost)
        cases.append((noisy, {"edit": "phase_noise", "strength": np.pi / 2, **control}))
        cell = data["map_rise"].sel(map_edit="shuffle_phases", layer=2, planes="high", cost=cost)
        cases.append((cell, {"edit": "shuffle_phases", "layers": [2], "band": high, **control}))
    for found, how in cases:
        hooks = perturb_planes(mini, **{"layers": [0, 2], **how})
        rise = token_losses(mini, tokens, hooks) - token_losses(mini, tokens)
        np.testing.assert_allclose(found, rise.mean(-1), atol=1e-6)


def test_the_difference_is_taken_prompt_by_prompt(result):
    rise = result.own["rise"].sel(edit="phase_noise", of="both", strength=1)
    gap = rise.sel(cost="edit") - rise.sel(cost="control")
    found = result.measure.less_control(result.numbers, "phase_noise")
    half = stats.t.ppf(0.975, len(gap) - 1) * float(gap.std(ddof=1)) / len(gap) ** 0.5
    np.testing.assert_allclose([found.low, found.high], [gap.mean() - half, gap.mean() + half], rtol=1e-4, atol=1e-6)


def test_positions_shuffled_cost_the_trained_model_loss_and_the_random_one_none(result):
    assert result.numbers("rise", edit="shuffle_positions").value > 0.2
    assert float(abs(result.null["rise"].mean("prompt")).max()) < 0.05


def test_prompts_of_several_batches_are_those_of_one(mini, alice, monkeypatch):
    measure = PlanePerturbation(edits=["mean_phase"], strengths=[1], map_edits=[])
    whole = measure(mini, alice, null_seeds=(), **CUT).own["rise"]
    monkeypatch.setattr(plane_perturbation, "BATCH", 1)
    found = measure(mini, alice, null_seeds=(), **CUT).own["rise"]
    np.testing.assert_allclose(found.sel(cost="edit"), whole.sel(cost="edit"), atol=1e-6)  # nothing is drawn in a mean


def test_shares_are_those_of_all_triples(mini, alice, report):
    """f and g of every query, key and distance in float64, plane by plane, the first token left out."""
    expected = {part: [] for part in CARRIED}
    for layer in (0, 2):
        captures = captures_of(mini, tokens_of(mini, alice), layers=[layer])
        geometry = captures[0].geometry
        zq, zk = (
            complex_planes(torch.cat([getattr(one, side)[:, 1:] for one in captures], 1).double(), geometry.rope)
            for side in "qk"
        )
        turn = turning_factors(torch.arange(24), geometry.rope, geometry.d_head)
        mean_key, mean_turn = zk.mean(1, keepdim=True), turn.mean(0)
        f = geometry.scale * ((zq * mean_key.conj())[:, :, None] * (turn - mean_turn)).real  # [head, query, d, plane]
        g = geometry.scale * ((zq * mean_turn)[:, :, None] * (zk - mean_key).conj()[:, None]).real
        for part, w in (("position", f), ("content", g)):
            expected[part].append((w * w.sum(-1, keepdim=True)).mean((0, 1, 2)))
        squares = [z.abs().square().sum(1) for z in (zq, zk)]
        expected["energy"].append(torch.stack([one / one.sum(-1, keepdim=True) for one in squares]).mean((0, 1)))
    found = plane_shares(report["planes"].own, [0, 2], by_planes=True)["share"]
    for part, layers in expected.items():
        whole = torch.stack(layers)
        whole = whole if part == "energy" else whole / whole.sum()
        np.testing.assert_allclose(found.sel(part=part), whole, rtol=1e-5, atol=1e-9)


def test_bands_are_the_sums_of_their_planes(report):
    planes = report["planes"].own
    alone, thirds = (plane_shares(planes, [0, 2], by_planes)["share"] for by_planes in (True, False))
    assert thirds["planes"].values.tolist() == list(BANDS)
    for band, mask in zip(BANDS, bands_by_thirds(16).numpy(), strict=True):
        np.testing.assert_allclose(thirds.sel(planes=band), alone.values[..., mask].sum(-1))
    np.testing.assert_allclose(thirds.sel(part=list(CARRIED[:2])).sum(("layer", "planes")), 1)


def made_up(n_prompts=6, seed=0):
    rng = np.random.default_rng(seed)
    share = rng.random((len(CARRIED), 2, 5))
    share[:, 1, 4] = np.nan  # a layer of fewer planes
    rise = rng.normal(size=(2, 2, 5, 2, n_prompts))
    rise[:, 1, 4] = np.nan
    data = {"share": (("part", "layer", "planes"), share)}
    data["map_rise"] = (("map_edit", "layer", "planes", "cost", "prompt"), rise)
    coords = {"part": list(CARRIED), "map_edit": ["mean_phase", "shuffle_positions"], "cost": ["edit", "control"]}
    return xr.Dataset(data, coords)


def test_correlations_are_spearmans_over_the_cells_that_are_there():
    data = made_up()
    found, mean = cost_share_correlations(data), data["map_rise"].mean("prompt")
    value, known = found.sel(end="value"), data["share"].sel(part="position").notnull().values
    for edit in data["map_edit"].values:
        for cost in data["cost"].values:
            y = mean.sel(map_edit=edit, cost=cost).values[known]
            at = {"map_edit": edit, "cost": cost}
            for part in CARRIED:
                expected = stats.spearmanr(data["share"].sel(part=part).values[known], y).statistic
                assert float(value["rho"].sel(**at, part=part)) == pytest.approx(expected)
            gap = value["rho"].sel(**at, part="position") - value["rho"].sel(**at, part="content")
            ends = [float(found["rho_gap"].sel(**at, end=end)) for end in ENDS]
            assert ends[0] == pytest.approx(float(gap))
            assert ends[1] <= ends[0] <= ends[2]
            x = mean.sel(map_edit="shuffle_positions", cost="edit").values[known]
            of_position = float(value["rho_positions"].sel(**at))
            if at == {"map_edit": "shuffle_positions", "cost": "edit"}:
                assert np.isnan(of_position)  # with itself
            else:
                assert of_position == pytest.approx(stats.spearmanr(x, y).statistic)


def test_intervals_of_rho_are_those_of_resampled_prompts():
    data = made_up(n_prompts=5)
    each = (
        data["map_rise"].sel(map_edit="mean_phase", cost="edit").transpose("prompt", ...).values.reshape(5, -1)[:, :9]
    )
    share = data["share"].sel(part="content").values.ravel()[:9]
    counts = np.random.default_rng(0).multinomial(5, np.full(5, 0.2), size=2000)
    drawn = [stats.spearmanr(row @ each / 5, share).statistic for row in counts]
    rho, *ends = cost_share_correlations(data)["rho"].sel(map_edit="mean_phase", cost="edit", part="content").values
    expected = rho + stats.t.ppf([0.025, 0.975], 4) * (5 / 4) ** 0.5 * np.std(drawn, ddof=1)
    np.testing.assert_allclose(ends, np.clip(expected, -1, 1), atol=1e-4)


def test_without_shuffled_positions_there_is_no_cost_of_position():
    found = cost_share_correlations(made_up().isel(map_edit=[0]))
    assert set(found) == {"rho", "rho_gap"}


def test_a_larger_model_is_mapped_by_bands(mini, alice, monkeypatch):
    assert MOST_CELLS >= 4 * 16  # the bundled model, plane by plane
    measure = PlanePerturbation(edits=["mean_phase"], strengths=[1], map_edits=["mean_phase"])
    monkeypatch.setattr(plane_perturbation, "MOST_CELLS", 63)
    found = measure(mini, alice, null_seeds=(), **CUT)
    assert found.own["planes"].values.tolist() == list(BANDS)
    for kind in found.kinds:
        found.plot(kind)


def test_one_prompt_leaves_no_interval_and_no_map_no_figure_of_it(mini, alice):
    how = {"length": 16, "n_prompts": 1, "null_seeds": (), "progress": False, "layers": [0]}
    found = PlanePerturbation(edits=["mean_phase"], strengths=[0.5], map_edits=["mean_phase"], map_by="bands")(
        mini, alice, **how
    )
    assert np.isnan(found.own["rho"].sel(end=["low", "high"])).all()
    assert "[" not in found.findings()[0]
    assert "at strength 0.5" in found.findings()[0]
    alone = PlanePerturbation(edits=["mean_magnitude"], strengths=[0.5], map_edits=[])(mini, alice, **how)
    assert alone.kinds == ["curves", "bands"]


@pytest.mark.parametrize(("name", "family_backend"), [("gemma3", "bridge"), ("neox", "hooked"), ("smollm3", "bridge")])
def test_layers_of_other_planes_or_none_partial_rotary_and_windows(family_model, name, family_backend):
    tokens = torch.randint(2, 60, (2, 20), generator=torch.Generator().manual_seed(0))
    measure = PlanePerturbation(edits=["shuffle_positions"], strengths=[1], map_edits=MAPPED)
    found = measure(family_model(name, family_backend), tokens, progress=False)
    assert found.own["map_rise"].notnull().any()
    assert float(found.own["share"].sel(part="position").sum()) == pytest.approx(1)
    for kind in found.kinds:
        found.plot(kind)


# What is shown


def test_the_sentences_say_the_numbers(result):
    own, sentences = result.numbers, result.findings()
    for edit in EDITS:
        numbers = own("rise", edit=edit), result.measure.less_control(own, edit)
        for sentence, number in zip(sentences, numbers, strict=True):
            assert f"{result.measure.words[edit]} {number.with_interval:+.3f}" in sentence


def test_the_table_has_a_row_an_edit(result):
    table, own = result.table().set_index("edit"), result.numbers
    assert list(table.index) == list(EDITS)
    assert table.loc["phase_noise", "both"] == own("rise", edit="phase_noise").value
    assert table.loc["phase_noise", "from"] == result.measure.less_control(own, "phase_noise").low
    assert table.loc["phase_noise", "low"] == own("band_rise", edit="phase_noise", band="low").value
    assert len(result.frame()) == len(EDITS) * 3 * 2 * 2


def test_figures_show_the_numbers(result):
    curves = [trace for trace in result.plot("curves").data if trace.name == "both"]
    expected = result.numbers.intervals("rise", edit=EDITS[0], strength=None)
    np.testing.assert_allclose(curves[0].y[1:], expected["value"])
    np.testing.assert_allclose(curves[0].error_y.array[1:], expected["high"] - expected["value"])
    maps, rise = result.plot("map").data, result.own["map_rise"].mean("prompt")
    assert len(maps) == 3 * 2 + 3
    np.testing.assert_array_equal(maps[0].z, rise.sel(map_edit=MAPPED[0], cost="edit"))
    np.testing.assert_array_equal(maps[6].z, result.own["share"].sel(part="position"))
    points = [one for one in result.plot("scatter").data if one.name == "edit"]
    np.testing.assert_array_equal(points[0].x, result.own["share"].sel(part="position").values.ravel())


def test_prompts_of_two_lengths_are_refused(mini):
    with pytest.raises(InputError, match="prompts of 8 to 10 tokens"):
        PlanePerturbation()(mini, [list(range(5, 13)), list(range(5, 15))], progress=False)

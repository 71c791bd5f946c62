"""What planes cost when they are perturbed, on the bundled model: losses, shares, correlations, and what is shown."""

import json

import numpy as np
import pytest
import torch
import xarray as xr
from declared import assert_declared
from scipy import stats

import tl_posgen
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.loss import token_losses
from tl_posgen.models.tokens import to_prompts
from tl_posgen.position.planes import PlanePerturbation, perturb_planes, plane_costs, plane_perturbation
from tl_posgen.position.planes.plane_costs import MOST_CELLS, OF
from tl_posgen.position.planes.plane_shares import PARTS, cost_share_correlations, plane_shares
from tl_posgen.rope.frequency_bands import BANDS, bands_by_thirds
from tl_posgen.rope.planes import turning_factors
from tl_posgen.rope.rotation import complex_planes
from tl_posgen.summary import jsonable

pytestmark = pytest.mark.slow

CUT = {"length": 24, "n_prompts": 4, "progress": False}
EDITS = ("shuffle_positions", "phase_noise")
MAPPED = ("shuffle_phases", "shuffle_positions")


@pytest.fixture(scope="session")
def report(mini, alice):
    asked = PlanePerturbation(edits=EDITS, strengths=(0.5, 1), map_edits=MAPPED, map_by="bands")
    return tl_posgen.analyze(mini, alice, measures=["planes", asked], layers=[0, 2], null_seeds=(0,), **CUT)


@pytest.fixture(scope="session")
def result(report):
    return report["plane_perturbation"]


def tokens_of(model, text):
    return torch.stack(to_prompts(model, text, length=24, n_prompts=4))


def rises(model, tokens, **how):
    hooks = perturb_planes(model, **how)
    return (token_losses(model, tokens, hooks) - token_losses(model, tokens)).mean(-1).numpy()


def test_rises_are_those_of_the_hooked_model(mini, alice, result):
    tokens, data = tokens_of(mini, alice), result.dataset
    for of in OF:
        found = data["rise_each"].sel(edit="shuffle_positions", of=of, strength=0.5, cost="edit")
        how = {"edit": "shuffle_positions", "of": OF[of], "strength": 0.5, "layers": [0, 2]}
        np.testing.assert_allclose(found, rises(mini, tokens, **how), atol=1e-6)
    found = data["rise_each"].sel(edit="phase_noise", of="both", strength=0.5)
    noise = {"edit": "phase_noise", "strength": np.pi / 2, "layers": [0, 2]}
    np.testing.assert_allclose(found.sel(cost="edit"), rises(mini, tokens, **noise), atol=1e-6)
    np.testing.assert_allclose(found.sel(cost="control"), rises(mini, tokens, **noise, control=True), atol=1e-6)
    low = {"edit": "shuffle_positions", "layers": [0, 2], "band": bands_by_thirds(16)[2]}
    found = data["band_rise_each"].sel(edit="shuffle_positions", band="low", cost="edit")
    np.testing.assert_allclose(found, rises(mini, tokens, **low), atol=1e-6)
    cell = {"edit": "shuffle_phases", "layers": [2], "band": bands_by_thirds(16)[0]}
    found = data["map_rise"].sel(map_edit="shuffle_phases", layer=2, planes="high")
    np.testing.assert_allclose(found.sel(cost="edit"), rises(mini, tokens, **cell).mean(), atol=1e-6)
    np.testing.assert_allclose(found.sel(cost="control"), rises(mini, tokens, **cell, control=True).mean(), atol=1e-6)


def test_the_difference_is_taken_prompt_by_prompt(result):
    for name in ("rise", "band_rise", "map_rise"):
        one = result.dataset[name]
        gap = one.sel(cost="edit") - one.sel(cost="control")
        np.testing.assert_allclose(one.sel(cost="less_control"), gap, atol=1e-12)
    each = result.dataset["rise_each"].sel(cost="less_control")
    low, high = (result.dataset[f"rise_{end}"].sel(cost="less_control") for end in ("low", "high"))
    half = stats.t.ppf(0.975, each.sizes["prompt"] - 1) * each.std("prompt", ddof=1) / each.sizes["prompt"] ** 0.5
    np.testing.assert_allclose(low, each.mean("prompt") - half, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(high, each.mean("prompt") + half, rtol=1e-4, atol=1e-6)


def test_positions_shuffled_cost_the_trained_model_loss_and_the_random_one_none(result):
    both = result.dataset["rise"].sel(of="both", strength=1, cost="edit")
    assert float(both.sel(edit="shuffle_positions")) > 0.2
    assert float(abs(result.null["rise"]).max()) < 0.05


def test_prompts_of_several_batches_are_those_of_one(mini, alice, monkeypatch):
    options = {"edits": ["mean_phase"], "strengths": [1], "map_edits": [], "null_seeds": (), **CUT}
    whole = plane_perturbation(mini, alice, **options).dataset["rise_each"]
    monkeypatch.setattr(plane_costs, "BATCH", 1)
    found = plane_perturbation(mini, alice, **options).dataset["rise_each"]
    np.testing.assert_allclose(found.sel(cost="edit"), whole.sel(cost="edit"), atol=1e-6)  # nothing is drawn in a mean


def test_shares_are_those_of_all_triples(mini, alice, report):
    """f and g of every query, key and distance of layer 2 in float64, plane by plane, the first token left out."""
    q, k = [], []

    def take(layer):
        q.append(layer.q[:, 1:].double())
        k.append(layer.k[:, 1:].double())

    captures = {}
    position, content, energy = {}, {}, {}
    for layer in (0, 2):
        q.clear()
        k.clear()
        for tokens in tokens_of(mini, alice):
            run_capture(mini, tokens[None], lambda one: (take(one), captures.update({one.layer: one})), layers=[layer])
        geometry = captures[layer].geometry
        zq, zk = (complex_planes(torch.cat(x, 1), geometry.rope) for x in (q, k))
        turn = turning_factors(torch.arange(24), geometry.rope, geometry.d_head)
        mean_key, mean_turn = zk.mean(1, keepdim=True), turn.mean(0)
        f = geometry.scale * ((zq * mean_key.conj())[:, :, None] * (turn - mean_turn)).real  # [head, query, d, plane]
        g = geometry.scale * ((zq * mean_turn)[:, :, None] * (zk - mean_key).conj()[:, None]).real
        for found, w in ((position, f), (content, g)):
            found[layer] = (w * w.sum(-1, keepdim=True)).mean((0, 1, 2)).numpy()
        squares = [z.abs().square().sum(1) for z in (zq, zk)]
        energy[layer] = torch.stack([one / one.sum(-1, keepdim=True) for one in squares]).mean((0, 1)).numpy()
    found = plane_shares(report["planes"].dataset, [0, 2], by_planes=True)
    for name, expected in (("position", position), ("content", content)):
        whole = np.stack([expected[layer] for layer in (0, 2)])
        np.testing.assert_allclose(found[name], whole / whole.sum(), rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(found["energy"], np.stack([energy[layer] for layer in (0, 2)]), rtol=1e-5)


def test_bands_are_the_sums_of_their_planes(report):
    planes = report["planes"].dataset
    alone, thirds = (plane_shares(planes, [0, 2], by_planes) for by_planes in (True, False))
    assert thirds["planes"].values.tolist() == list(BANDS)
    for band, mask in zip(BANDS, bands_by_thirds(16).numpy(), strict=True):
        for part in PARTS:
            np.testing.assert_allclose(thirds[part].sel(planes=band), alone[part].values[:, mask].sum(1))
    for part in PARTS[:2]:
        assert float(thirds[part].sum()) == pytest.approx(1)


def made_up(n_prompts=6, seed=0):
    rng = np.random.default_rng(seed)
    cells = ("layer", "planes")
    shares = {part: (cells, rng.random((2, 5))) for part in PARTS}
    shares["position"][1][1, 4] = np.nan  # a layer of fewer planes
    each = rng.normal(size=(n_prompts, 2, 2, 5, 3))
    each[:, :, 1, 4] = np.nan
    data = {**shares, "map_rise_each": (("prompt", "map_edit", *cells, "cost"), each)}
    return xr.Dataset(
        data, {"map_edit": ["mean_phase", "shuffle_positions"], "cost": ["edit", "control", "less_control"]}
    )


def test_correlations_are_spearmans_over_the_cells_that_are_there():
    data = made_up()
    found, mean = cost_share_correlations(data), data["map_rise_each"].mean("prompt")
    known = data["position"].notnull().values
    assert int(found["n_cells"]) == 9
    for edit in data["map_edit"].values:
        for cost in data["cost"].values:
            y = mean.sel(map_edit=edit, cost=cost).values[known]
            at = {"map_edit": edit, "cost": cost}
            for part in PARTS:
                expected = stats.spearmanr(data[part].values[known], y).statistic
                assert float(found["rho"].sel(**at, share=part)) == pytest.approx(expected)
            gap = found["rho"].sel(**at, share="position") - found["rho"].sel(**at, share="content")
            assert float(found["rho_gap"].sel(**at)) == pytest.approx(float(gap))
            assert float(found["rho_gap_low"].sel(**at)) <= float(found["rho_gap_high"].sel(**at))
            x = mean.sel(map_edit="shuffle_positions", cost="edit").values[known]
            of_position = float(found["rho"].sel(**at, share="cost_of_position"))
            if at == {"map_edit": "shuffle_positions", "cost": "edit"}:
                assert np.isnan(of_position)  # with itself
            else:
                assert of_position == pytest.approx(stats.spearmanr(x, y).statistic)


def test_intervals_of_rho_are_those_of_resampled_prompts():
    data = made_up(n_prompts=5)
    each, share = data["map_rise_each"].values[:, 0, ..., 0].reshape(5, -1)[:, :9], data["content"].values.ravel()[:9]
    counts = np.random.default_rng(0).multinomial(5, np.full(5, 0.2), size=2000)
    drawn = [stats.spearmanr(row @ each / 5, share).statistic for row in counts]
    found = cost_share_correlations(data).sel(map_edit="mean_phase", cost="edit", share="content")
    ends = float(found["rho"]) + stats.t.ppf([0.025, 0.975], 4) * (5 / 4) ** 0.5 * np.std(drawn, ddof=1)
    np.testing.assert_allclose([found["rho_low"], found["rho_high"]], np.clip(ends, -1, 1), atol=1e-4)


def test_the_cells_that_carry_half_are_the_fewest_that_do(result):
    data, own = result.dataset, result.summary
    for share in ("position", "content"):
        carried = np.sort(data[share].values.ravel())[::-1]
        n = own[f"half_of_{share}_cells"]
        assert carried[:n].sum() >= 0.5 > carried[: n - 1].sum()
        for edit in MAPPED:
            costs, least = data["map_rise"].sel(map_edit=edit, cost="edit"), carried[n - 1]
            expected = float(costs.where(data[share] >= least).sum() / costs.sum())
            found = own[f"half_of_{share}_{edit}"]
            assert found == pytest.approx(expected, nan_ok=True)
            if not np.isnan(found):
                assert f"{n} cells with half of {share} {found:.0%}" in " ".join(result.findings())


def test_without_shuffled_positions_there_is_no_cost_of_position():
    found = cost_share_correlations(made_up().isel(map_edit=[0]))
    assert found["share"].values.tolist() == list(PARTS)


def test_a_larger_model_is_mapped_by_bands(mini, alice, monkeypatch):
    assert MOST_CELLS >= 4 * 16  # the bundled model, plane by plane
    options = {"edits": ["mean_phase"], "strengths": [1], "map_edits": ["mean_phase"], "null_seeds": (), **CUT}
    monkeypatch.setattr(plane_costs, "MOST_CELLS", 63)
    found = plane_perturbation(mini, alice, **options)
    assert found.dataset["planes"].values.tolist() == list(BANDS)
    assert found.summary["n_cells"] == 12
    assert "layer x band" in found.findings()[-1]
    assert_declared(found)
    for kind in found.kinds:
        found.plot(kind)


def test_without_a_map_there_are_curves_and_bands_only(mini, alice):
    options = {"edits": ["mean_magnitude"], "strengths": [0.5], "map_edits": [], "null_seeds": (), **CUT}
    found = plane_perturbation(mini, alice, **options)
    assert found.kinds == ["curves", "bands"]
    assert found.summary["map_edits"] == []
    sentences = found.findings()
    assert len(sentences) == 2
    assert "at strength 0.5" in sentences[0]
    assert "no null measured" in sentences[0]


def test_one_prompt_leaves_no_interval(mini, alice):
    options = {"edits": ["mean_phase"], "strengths": [1], "map_edits": ["mean_phase"], "map_by": "bands"}
    found = plane_perturbation(
        mini, alice, length=16, n_prompts=1, null_seeds=(), progress=False, layers=[0], **options
    )
    assert np.isnan(found.dataset["rho_low"]).all()
    assert np.isnan(found.dataset["rise_low"]).all()
    assert "[" not in found.findings()[0]


@pytest.mark.parametrize(("name", "family_backend"), [("gemma3", "bridge"), ("neox", "hooked"), ("smollm3", "bridge")])
def test_layers_of_other_planes_or_none_partial_rotary_and_windows(family_model, name, family_backend):
    tokens = torch.randint(2, 60, (2, 20), generator=torch.Generator().manual_seed(0))
    options = {"edits": ["shuffle_positions"], "strengths": [1], "map_edits": MAPPED, "progress": False}
    found = plane_perturbation(family_model(name, family_backend), tokens, **options)
    assert_declared(found)
    assert found.dataset["map_rise"].notnull().any()
    assert float(found.dataset["position"].sum()) == pytest.approx(1)
    for kind in found.kinds:
        found.plot(kind)


# What is shown


def test_every_variable_is_declared_and_the_summary_is_json(result):
    assert_declared(result)
    assert json.loads(json.dumps(jsonable(result.summary)))["n_cells"] == 6


def test_the_sentences_say_the_numbers_of_the_summary(result):
    own = result.summary
    sentences = result.findings()
    assert len(sentences) == len(EDITS) + 1 + len(MAPPED)
    for sentence, edit in zip(sentences, EDITS, strict=False):
        for key in (
            f"rise_{edit}_both",
            f"rise_{edit}_q",
            f"rise_{edit}_both_control",
            f"rise_{edit}_both_less_control",
        ):
            assert f"{own[key]:+.3f}" in sentence
        assert "random init" in sentence
    for sentence, edit in zip(sentences[-2:], MAPPED, strict=True):
        for share in PARTS:
            assert f"{share} {own[f'rho_{edit}_{share}']:.2f} [" in sentence
        assert f"{own[f'map_sum_{edit}']:+.3f}" in sentence
    assert "With the cost of shuffled positions" in sentences[-2]
    assert "With the cost of shuffled positions" not in sentences[-1]


def test_the_table_has_a_row_an_edit(result):
    table = result.table().set_index("edit")
    assert list(table.index) == list(EDITS)
    assert table.loc["phase_noise", "both"] == result.summary["rise_phase_noise_both"]
    assert table.loc["phase_noise", "from"] == result.summary["rise_phase_noise_both_less_control_low"]
    assert table.loc["phase_noise", "low"] == result.summary["band_phase_noise_low"]


def test_figures_show_the_numbers_after_saving_and_loading(result, tmp_path):
    loaded = tl_posgen.load(result.save(tmp_path / "r.nc"))["plane_perturbation"]
    assert loaded.kinds == ["curves", "bands", "map", "scatter"]
    assert loaded.findings() == result.findings()
    for kind in result.kinds:
        assert loaded.plot(kind).to_json() == result.plot(kind).to_json()
    curves = [trace for trace in result.plot("curves").data if trace.name == "both"]
    np.testing.assert_allclose(curves[0].y[1:], result.dataset["rise"].sel(edit=EDITS[0], of="both", cost="edit"))
    maps = result.plot("map").data
    assert len(maps) == 3 * 2 + 3
    np.testing.assert_array_equal(maps[0].z, result.dataset["map_rise"].sel(map_edit=MAPPED[0], cost="edit"))
    np.testing.assert_array_equal(maps[6].z, result.dataset["position"])
    points = [one for one in result.plot("scatter").data if one.name == "edit"]
    np.testing.assert_array_equal(points[0].x, result.dataset["position"].values.ravel())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"edits": ["melt"]}, "edits"),
        ({"edits": []}, "at least one"),
        ({"strengths": []}, "at least one"),
        ({"strengths": [0]}, "strength 0 changes nothing"),
        ({"strengths": [1.5]}, "strength 1.5"),
        ({"map_edits": ["mean_phase", "mean_phase"]}, "only once"),
        ({"map_by": "heads"}, "map_by"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_unusable_options_are_refused(wrong, said):
    with pytest.raises(InputError, match=said):
        PlanePerturbation(**wrong)


def test_a_model_without_rope_and_prompts_of_two_lengths_are_refused(family_model, mini):
    with pytest.raises(UnsupportedModelError, match="no layer of this model has RoPE"):
        plane_perturbation(family_model("gpt2", "bridge"), torch.arange(40)[None] + 2, progress=False)
    with pytest.raises(InputError, match="plane_perturbation: prompts of 8 to 10 tokens"):
        plane_perturbation(mini, [list(range(5, 13)), list(range(5, 15))], progress=False)

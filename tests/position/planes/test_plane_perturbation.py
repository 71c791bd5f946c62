"""What planes cost when they are perturbed, on the bundled model: losses, shares, correlations, and what is shown."""

import numpy as np
import pytest
import torch
from rotated_heads import captures_of
from scipy import stats

from tl_posgen.core.engine import analyze
from tl_posgen.hooks import perturb_planes
from tl_posgen.models.loss import token_losses
from tl_posgen.models.session import session_of
from tl_posgen.models.tokens import to_prompts
from tl_posgen.position.planes import PlanePerturbation, plane_perturbation
from tl_posgen.position.planes.plane_perturbation import (
    CARRIED,
    COSTS,
    MOST_CELLS,
    plane_shares,
)
from tl_posgen.rope.frequency_bands import BANDS, bands_by_thirds
from tl_posgen.rope.planes import turning_factors
from tl_posgen.rope.rotation import complex_planes

MEASURE = "plane_perturbation"

pytestmark = pytest.mark.slow

CUT = {"length": 24, "n_prompts": 4, "progress": False}
EDITS = ("shuffle_positions", "phase_noise")
MAPPED = ("shuffle_phases", "shuffle_positions")


@pytest.fixture(scope="session")
def report(mini, alice):
    asked = PlanePerturbation(edits=EDITS, strengths=(0.5, 1), map_edits=MAPPED, map_by="bands")
    return analyze(mini, alice, measures=["planes", asked], layers=[0, 2], nulls=1, **CUT)


def tokens_of(model, text):
    return torch.stack(to_prompts(model, text, length=24, n_prompts=4))


def test_deep_models_are_mapped_if_asked(mini, alice, monkeypatch):
    monkeypatch.setattr(plane_perturbation, "MOST_LAYERS", 3)
    asked = PlanePerturbation(edits=EDITS[:1], strengths=(1,))
    found = asked(mini, alice, nulls=0, **{**CUT, "n_prompts": 1})
    assert found.measure.map_edits == ()
    assert "map_rise" not in found.trained
    assert PlanePerturbation(map_edits=MAPPED).prepare(session_of(mini), []).map_edits == MAPPED


def test_losses_are_those_of_the_hooked_model(mini, alice, result):
    tokens, (high, _, low) = tokens_of(mini, alice), bands_by_thirds(16)
    found, plain = result.trained["loss"], token_losses(mini, tokens).mean(-1)
    positions = {"edit": "shuffle_positions"}
    cases = [
        (found.sel(condition="unchanged", cost="control"), {**positions, "strength": 0}),
        (
            found.sel(condition="shuffle_positions at 0.5 of q", cost="edit"),
            {**positions, "of": ("q",), "strength": 0.5},
        ),
        (found.sel(condition="shuffle_positions of k", cost="edit"), {**positions, "of": ("k",)}),
        (found.sel(condition="shuffle_positions, low planes", cost="edit"), {**positions, "band": low}),
    ]
    for cost in COSTS:
        control = {"control": cost == "control"}
        noisy = found.sel(condition="phase_noise at 0.5", cost=cost)
        cases.append((noisy, {"edit": "phase_noise", "strength": np.pi / 2, **control}))
        cell = result.trained["map_rise"].sel(map_edit="shuffle_phases", layer=2, planes="high", cost=cost)
        cases.append((cell + plain.numpy(), {"edit": "shuffle_phases", "layers": [2], "band": high, **control}))
    for one, how in cases:
        hooks = perturb_planes(mini, **{"layers": [0, 2], **how})
        np.testing.assert_allclose(one, token_losses(mini, tokens, hooks).mean(-1), atol=1e-6)


def test_prompts_of_several_batches_are_those_of_one(mini, alice, monkeypatch):
    measure = PlanePerturbation(edits=["mean_phase"], strengths=[1], map_edits=[])
    whole = measure(mini, alice, nulls=0, **CUT).trained["loss"]
    monkeypatch.setattr(plane_perturbation, "prompts_at_once", lambda *_: 1)
    found = measure(mini, alice, nulls=0, **CUT).trained["loss"]
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
    found = plane_shares(report["planes"].trained, [0, 2], by_planes=True)
    for part, layers in expected.items():
        whole = torch.stack(layers)
        whole = whole if part == "energy" else whole / whole.sum()
        np.testing.assert_allclose(found.sel(part=part), whole, rtol=1e-5, atol=1e-9)


def test_bands_are_the_sums_of_their_planes(report):
    planes = report["planes"].trained
    alone, thirds = (plane_shares(planes, [0, 2], by_planes) for by_planes in (True, False))
    assert thirds["planes"].values.tolist() == list(BANDS)
    for band, mask in zip(BANDS, bands_by_thirds(16).numpy(), strict=True):
        np.testing.assert_allclose(thirds.sel(planes=band), alone.values[..., mask].sum(-1))
    np.testing.assert_allclose(thirds.sel(part=list(CARRIED[:2])).sum(("layer", "planes")), 1)


def test_rho_is_spearmans_over_the_cells_that_are_there(family_model):
    tokens = torch.randint(2, 60, (2, 20), generator=torch.Generator().manual_seed(0))
    asked = PlanePerturbation(edits=["mean_phase"], strengths=[1], map_edits=["mean_phase"])
    result = asked(family_model("gemma3", "bridge"), tokens, nulls=0, progress=False)
    cost = result.trained["map_rise"].sel(map_edit="mean_phase", cost="control").mean("prompt").values.ravel()
    share = result.trained["share"].sel(part="content").values.ravel()
    known = np.isfinite(share) & np.isfinite(cost)
    rho = result.measure.rho(result.numbers, "mean_phase", "content", "control")
    assert rho.value == pytest.approx(stats.spearmanr(cost[known], share[known]).statistic)


def test_a_larger_model_is_mapped_by_bands(mini, alice, monkeypatch):
    assert MOST_CELLS >= 4 * 16  # the bundled model, plane by plane
    measure = PlanePerturbation(edits=["mean_phase"], strengths=[1], map_edits=["mean_phase"])
    monkeypatch.setattr(plane_perturbation, "MOST_CELLS", 63)
    found = measure(mini, alice, nulls=0, **CUT)
    assert found.trained["planes"].values.tolist() == list(BANDS)
    for kind in found.kinds:
        found.plot(kind)


@pytest.mark.parametrize(("name", "family_backend"), [("gemma3", "bridge"), ("neox", "hooked"), ("smollm3", "bridge")])
def test_layers_of_other_planes_or_none_partial_rotary_and_windows(family_model, name, family_backend):
    tokens = torch.randint(2, 60, (2, 20), generator=torch.Generator().manual_seed(0))
    measure = PlanePerturbation(edits=["shuffle_positions"], strengths=[1], map_edits=MAPPED)
    found = measure(family_model(name, family_backend), tokens, progress=False)
    assert found.trained["map_rise"].notnull().any()
    assert float(found.trained["share"].sel(part="position").sum()) == pytest.approx(1)
    for kind in found.kinds:
        found.plot(kind)

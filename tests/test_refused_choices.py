"""What a measure refuses of chosen layers, heads and options is refused before the first forward pass."""

import pytest
from quick_options import KINDS, NAMES, OPTIONS

import tl_posgen
from tl_posgen.errors import PosgenError
from tl_posgen.interventions import Interventions
from tl_posgen.models.session import session_of

CUT = {"length": 18, "n_prompts": 2, "nulls": 0, "progress": False}
WHERE = [{"layers": [1]}, {"heads": [(1, 0)]}]
TEXT = "Down, down, down. Would the fall never come to an end? " * 20


@pytest.fixture
def passes(monkeypatch):
    """The passes of a model that is known already: a list that grows with each."""
    seen, handles = [], []

    def of(model):
        session = session_of(model)
        session.layers()
        session.cached_difference()
        handles.append(session.embedding.register_forward_pre_hook(lambda *_: seen.append(None)))
        return seen

    yield of
    for handle in handles:
        handle.remove()


class NoConditions(Interventions):
    """rise = L(none) - L. One without conditions."""

    def conditions(self, run):
        return {}


@pytest.mark.parametrize(
    ("family", "name", "options", "where", "message"),
    [
        ("smollm3", "planes", {}, {"layers": [1]}, "layers 1: none of them has RoPE"),
        ("smollm3", "plane_perturbation", {}, {"layers": [1]}, "none of them has RoPE"),
        ("smollm3", "plane_use", {}, {"layers": [1]}, "none of them has RoPE"),
        ("smollm3", "plane_roles", {}, {"layers": [1]}, "none of them has RoPE"),
        ("llama", "coupling", {}, {"heads": [(0, 0)]}, "coupling is of whole blocks: leave heads out"),
        ("llama", "token_coupling", {}, {"heads": [(0, 0)]}, "coupling is of whole blocks: leave heads out"),
        ("llama", "substitution", {"from_layer": 2}, {}, "from_layer 2 leaves no layer"),
        ("llama", "no_conditions", {}, {}, "conditions gives nothing"),
        ("smollm3", "length_extrapolation", {"inside": 18, "times": 2, "block": 10**15}, {}, "block=1000000000000000"),
    ],
)
def test_a_choice_is_refused_before_the_passes_that_measures_share(
    family_model, passes, family, name, options, where, message
):
    kind = KINDS.get(name, NoConditions)
    model = family_model(family)
    made = passes(model)
    with pytest.raises(PosgenError, match=message):
        tl_posgen.analyze(model, TEXT, measures=["variance", kind.with_options(options)], **CUT, **where)
    assert not made


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_no_measure_refuses_chosen_layers_or_heads_later(family_model, small_model, passes, name):
    measures = ["variance", KINDS[name].with_options(OPTIONS.get(name, {}))]
    for model in (family_model("smollm3"), small_model):
        made = passes(model)
        for where in WHERE:
            made.clear()
            refused = ""
            try:
                tl_posgen.analyze(model, TEXT, measures=measures, skip_unsupported=True, **CUT, **where)
            except PosgenError as refusal:
                refused = str(refusal)
            assert not (refused and made), refused


def test_layers_without_planes_are_refused_when_measures_are_attached(family_model):
    model = family_model("smollm3")
    attached = tl_posgen.attach(model, ["planes"], layers=[1])
    with pytest.raises(PosgenError, match="none of them has RoPE"):
        attached.__enter__()

"""Models whose layers have different numbers of heads: every head is measured and edited, and no other is."""

import copy

import numpy as np
import pytest
import torch
from families import FAMILIES, UNEVEN

import tl_posgen
from tl_posgen import analyze
from tl_posgen.core.measure import HEAD
from tl_posgen.editing.ablate_heads import ablate_heads
from tl_posgen.editing.replace_scores import replace_scores
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.models.selection import select_heads
from tl_posgen.models.session import session_of

pytestmark = pytest.mark.skipif(UNEVEN[0] not in FAMILIES, reason="this transformers has no Laguna")
TOKENS = torch.randint(2, 62, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=[(4, 8), (8, 4)], ids=UNEVEN)
def uneven(request, family_model):
    """The heads of each layer, and the model."""
    first, second = request.param
    return request.param, family_model(f"laguna_{first}_{second}", "bridge")


def measured(values):
    """[layer, head]: whether a head has a value."""
    return values.notnull().any([dim for dim in values.dims if dim not in HEAD]).transpose(*HEAD).values


def test_a_report_is_of_the_heads_that_the_layers_have(uneven):
    heads, model = uneven
    names, how = ["three_axis", "slash"], {"nulls": {"random init": (0,)}}
    report = analyze(model, TOKENS, measures=names, progress=False, **how)
    places = [(layer, head) for layer in (0, 1) for head in range(heads[layer])]
    for frame in (report.frame(), report.frame("random init")):
        assert list(zip(frame["layer"], frame["head"], strict=True)) == places
    for name, variable in (("three_axis", "r"), ("slash", "slash_score")):
        np.testing.assert_array_equal(measured(report[name].trained[variable]), np.arange(8) < np.array(heads)[:, None])
    assert "12 heads" in " ".join(report["three_axis"].findings() + report["slash"].findings())
    r = report["three_axis"].trained["r"].sel(tokens="all")
    mean = np.mean([float(r.sel(layer=layer, head=head).mean()) for layer, head in places])
    assert report["three_axis"].numbers("r", tokens="all").value == pytest.approx(mean)


@pytest.mark.slow
def test_substitution_is_of_the_heads_that_the_layers_have(uneven):
    heads, model = uneven
    report = analyze(model, TOKENS, measures="substitution", nulls=0, progress=False)
    values = report["substitution"].trained["r"]
    np.testing.assert_array_equal(measured(values), np.arange(8) < np.array(heads)[:, None])


def test_a_head_that_its_layer_lacks_is_refused_with_what_it_has(uneven):
    heads, model = uneven
    few = heads.index(4)
    assert select_heads(model) == {layer: list(range(heads[layer])) for layer in (0, 1)}
    assert select_heads(model, heads=[(1 - few, 7)]) == {1 - few: [7]}
    for chosen in (f"{few}.5", (few, 5)):
        with pytest.raises(InputError, match=rf"head 5 does not exist: layer {few} has heads 0 to 3"):
            select_heads(model, heads=chosen)


def test_the_output_of_a_head_is_that_of_the_plain_model_without_its_columns(uneven):
    heads, model = uneven
    many = heads.index(8)
    with session_of(model).backend.plain() as hf_model, torch.no_grad():
        plain = copy.deepcopy(hf_model)
        plain.model.layers[many].self_attn.o_proj.weight[:, 6 * 8 : 7 * 8] = 0
        expected = plain(TOKENS).logits
    found = model.run_with_hooks(TOKENS, fwd_hooks=ablate_heads(model, [(many, 6)], "zero"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=5e-5)
    assert (found - model(TOKENS)).abs().max() > 0.01


def test_scores_of_a_head_are_replaced_alone(uneven):
    heads, model = uneven
    seen = []
    hooks = replace_scores(model, lambda capture: seen.append(list(capture.heads)) or capture.scores(), heads="1.3")
    many = heads.index(8)
    others = replace_scores(model, lambda capture: 0 * capture.scores(), heads=[(many, 7)])
    with tl_posgen.streaming(model):
        same, other = (model.run_with_hooks(TOKENS, fwd_hooks=some) for some in (hooks, others))
    torch.testing.assert_close(same, model(TOKENS), rtol=1e-4, atol=5e-5)
    assert {tuple(some) for some in seen} == {(3,)}
    assert (other - same).abs().max() > 0.01


def test_projections_that_cannot_be_had_are_refused_with_the_layer(uneven):
    heads, model = uneven
    with pytest.raises(UnsupportedModelError, match=rf"layer {heads.index(8)}: TransformerLens splits W_Q .* has 8"):
        analyze(model, TOKENS, measures="cone", nulls=0, progress=False)

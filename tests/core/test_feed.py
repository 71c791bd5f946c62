"""Passes that go wrong half way, and measures that reuse their tensors, while every layer goes to every measure."""

from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch
import xarray as xr

import tl_posgen
from tl_posgen import Measure, Variable
from tl_posgen.core import feed
from tl_posgen.errors import InputError
from tl_posgen.models.loading.load import load_model
from tl_posgen.position import MeanKey, ThreeAxis

TOKENS = torch.arange(5, 25)[None]


@dataclass(frozen=True)
class Energy(Measure):
    """E|k|^2 by head, in a tensor that every layer overwrites.

    Args:
        breaks: whether it raises in the last layer of the first prompt.
    """

    breaks: bool = False
    buffer: dict = field(default_factory=dict, compare=False)

    question = "How large are the keys?"
    variables = {"energy": Variable("energy of keys")}
    figures = {}

    def of_layer(self, layer):
        if self.breaks and layer.layer == 3 and layer.prompt == 0:
            raise ZeroDivisionError
        buffer = self.buffer.setdefault(0, torch.zeros(len(layer.heads)))
        return {"energy": buffer.copy_(layer.k.square().mean((1, 2)))}

    def findings(self, numbers):
        return []


def test_a_measure_may_overwrite_its_tensors(mini):
    found = tl_posgen.analyze(mini, TOKENS, measures=[Energy()], nulls=0, progress=False)
    energies = []
    tl_posgen.models.run_capture(mini, TOKENS, lambda layer: energies.append(layer.k.square().mean((1, 2))))
    torch.testing.assert_close(
        torch.tensor(found["energy"].trained["energy"].values), torch.stack(energies).double(), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("family", ["llama", "mistral", "bloom"])  # with a window, and with ALiBi
def test_layers_that_are_computed_at_once_have_their_own_numbers(family_model, monkeypatch, family):
    model, found = family_model(family), []
    prompts = [torch.arange(n)[None] for n in (30, 12, 30, 2)]
    measures = [ThreeAxis(), ThreeAxis(ridge=0.5), MeanKey()]
    for waiting in (1, 100, 10**9):  # a layer, some and all of them at once
        monkeypatch.setattr(feed, "WAITING", waiting)
        found.append([one(model, prompts, nulls=0, progress=False).trained for one in measures])
    for alone, *others in zip(*found, strict=True):
        for together in others:
            xr.testing.assert_allclose(alone, together, rtol=1e-10)


def test_a_layer_in_which_a_measure_failed_is_in_no_report(mini):
    with tl_posgen.attach(mini, [Energy(breaks=True)]) as run:
        with pytest.raises(ZeroDivisionError):
            mini(TOKENS)
        mini(TOKENS)
    for _ in range(2):
        with pytest.raises(InputError, match=r"prompt 0 was captured in 3 of 4 layers"):
            run.report()


@pytest.mark.parametrize("shape", [(3, 20), (1, 30)])
def test_a_pass_that_begins_in_the_middle_is_refused(mini, shape):
    if type(mini).__name__ == "TransformerBridge":
        pytest.skip("a block of a bridge does not run by itself")
    with tl_posgen.attach(mini, "three_axis"), torch.no_grad():
        mini(TOKENS)
        with pytest.raises(InputError):
            mini.blocks[2](torch.randn(*shape, mini.cfg.d_model))


def test_a_pass_that_starts_at_a_layer_is_refused_also_behind_a_whole_one(mini):
    with torch.no_grad():
        resid = mini(TOKENS, stop_at_layer=1)
    with tl_posgen.attach(mini, "three_axis") as run, torch.no_grad():
        mini(TOKENS)
        before = run.report()["three_axis"].trained
        try:
            with pytest.raises(InputError, match="layer 1: the pass skipped layer 0, which begins it"):
                mini(resid, start_at_layer=1)
        except NotImplementedError as error:
            pytest.skip(str(error))
    with tl_posgen.attach(mini, "three_axis", layers=[2, 3]) as run, torch.no_grad():
        mini(resid, start_at_layer=1)  # of these layers it is whole
    xr.testing.assert_allclose(run.report()["three_axis"].trained["r"], before["r"].sel(layer=[2, 3]), rtol=1e-5)


def test_layers_before_the_one_at_which_a_bridge_starts_are_not_those_of_the_pass(family_directory):
    """TransformerLens 4 marks blocks so, and runs those before on tokens in the place of the residual stream."""
    model = load_model(family_directory("llama"), "bridge")
    with tl_posgen.attach(model, "three_axis"), torch.no_grad():
        model(TOKENS)
        for block in model.blocks:
            block._start_at_layer_idx = 1
        with pytest.raises(InputError, match="layer 1: the pass skipped layer 0, which begins it"):
            model(TOKENS)


@dataclass(frozen=True)
class Lacking(Energy):
    """The size of keys, of all layers but the last that are computed at once."""

    def of_layers(self, layer_values):
        return layer_values[:-1]


def test_too_few_values_of_several_layers_are_counted(mini):
    with pytest.raises(InputError, match="lacking: of_layers gives 3 values of 4 layers; give one of each"):
        Lacking()(mini, TOKENS, nulls=0, progress=False)


@dataclass(frozen=True)
class Undeclared(Energy):
    """The size of attention, or of values, which it does not say that it needs."""

    part: str = "pattern"

    def of_layer(self, layer):
        return {"energy": getattr(layer, self.part).square().mean((1, 2))}


@pytest.mark.parametrize("part", ["pattern", "v"])
def test_what_a_measure_reads_without_needing_it_is_named(mini, part):
    message = rf"undeclared: of_layer reads {part}, which .*'NoneType' .* declare needs = frozenset\(\{{'{part}'\}}\)$"
    with pytest.raises(InputError, match=message):
        Undeclared(part=part)(mini, TOKENS, nulls=0, progress=False)


def test_another_none_is_the_measures_own_mistake(mini):
    """Such as the window of a layer that has none, beside a part that is declared."""

    class Windowed(Energy):
        needs = frozenset({"pattern"})

        def of_layer(self, layer):
            return {"energy": layer.pattern.mean((1, 2)) + layer.geometry.window}

    with pytest.raises(TypeError, match="NoneType"):
        Windowed()(mini, TOKENS, nulls=0, progress=False)


@dataclass(frozen=True)
class Shaped(Measure):
    "x = a number of a head. Of a shape that its variable has or has not."

    of: str = "head"
    variables = {"x": Variable("x", headline="x"), "pair": Variable("pair", dims=("tokens", "layer", "head"))}

    def of_layer(self, layer):
        one = torch.ones(len(layer.heads))
        given = {"head": {"x": one}, "row": {"x": torch.ones(1)}, "more": {"x": one[:, None]}, "name": {"y": one}}
        return {
            **given,
            "pair": ({"pair": one}, {"pair": one}),
            "single": {"pair": one},
            "two": ({"x": one}, {"x": one}),
        }[self.of]


@pytest.mark.parametrize(
    ("of", "message"),
    [
        ("row", r"shaped: of_layer gives x with the shape \[1\], and the dims of its Variable are \[head\], 4 heads"),
        ("more", r"gives x with the shape \[4, 1\]"),
        ("name", "of_layer gives 'y', which is none of its variables: x, pair"),
        ("single", r"gives pair with the shape \[4\], .* \[tokens, head\].*give a pair of mappings"),
        ("two", r"gives x with the shape \[2, 4\].*else one mapping"),
    ],
)
def test_values_of_another_shape_than_declared_are_refused_by_name(mini, of, message):
    with pytest.raises(InputError, match=message):
        Shaped(of=of)(mini, TOKENS, nulls=0, progress=False)
    for fine in ("head", "pair"):
        assert Shaped(of=fine)(mini, TOKENS, nulls=0, progress=False).name == "shaped"


@pytest.mark.parametrize(("n", "done"), [(2, 0), (3, 2)])
def test_prompts_that_an_attached_measure_cannot_take_are_refused_before_null_models_run(mini, n, done, passes):
    with tl_posgen.attach(mini, ["planes"]) as run:
        mini(torch.arange(5, 5 + n)[None])
    refused = nullcontext() if done else pytest.raises(InputError, match="give 3 tokens at least")
    with refused:
        run.report(nulls=1)
    assert sum(passes) == done

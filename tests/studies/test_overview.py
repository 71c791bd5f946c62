"""What a study says over models."""

import json

import numpy as np
import pytest
import xarray as xr
from made_up import result_of

from tl_posgen.core.numbers import TRAINED, Numbers
from tl_posgen.studies.overview import Overview

NAME = "three_axis_r_within_rows"


def told(values, sizes):
    """The sentence on models with these values of one number, and so many parameters."""
    shape = (1, len(values), 1, 1, 1, 1)
    data = {
        NAME: (("init", "model", "revision", "text", "layer", "head"), np.reshape(values, shape)),
        "finished": (("model", "revision", "text"), np.ones(shape[1:4], dtype=bool)),
        "parameters": ("model", np.array(sizes, dtype=float)),
    }
    coords = {"init": [TRAINED], "model": list("abcdef"[: len(values)]), "revision": ["main"], "text": ["bundled"]}
    data = xr.Dataset(data, {**coords, "layer": [0], "head": [0]}, {"measures": ["three_axis"]})
    data[NAME].attrs["measure"] = "three_axis"
    (sentence,) = Overview().findings(Numbers(Overview(), data))
    return sentence


def test_a_number_is_correlated_with_size_over_the_models_that_have_it():
    """Of those that lack it the size counts neither for the correlation nor for how many models there are."""
    values, sizes = [0.5, 0.6, 0.4, 0.7], [1e5, 1e6, 3e4, 1e8]
    r = np.corrcoef(values, np.log(sizes))[0, 1]
    expected = f"over 4 models; with ln parameters r = {r:.2f}."
    assert told(values, sizes).endswith(expected)
    assert told([*values, np.nan], [*sizes, 2e3]).endswith(expected)


@pytest.mark.parametrize("values", [[0.5, 0.6, np.nan, np.nan], [0.5, 0.6, 0.7, np.nan]])
def test_two_or_three_models_have_no_correlation_with_size(values):
    assert "with ln parameters" not in told(values, [1e5, 1e6, 1e7, 1e8])


def study_of(tokenizations, **values):
    """The result of a study over models on one text: numbers in nats by model, or by model and condition."""
    shape, models = (len(tokenizations), 1, 1), list("abcdef"[: len(tokenizations)])
    coords = {"init": [TRAINED], "model": models, "revision": ["main"], "text": ["bundled"]}
    data = {
        "finished": (("model", "revision", "text"), np.ones(shape, dtype=bool)),
        "tokenization": (("model", "revision", "text"), np.reshape(tokenizations, shape).astype(float)),
        "parameters": ("model", 10.0 ** np.arange(len(models))),
        "step": (("model", "revision"), np.zeros(shape[:2])),
    }
    for name, table in values.items():
        attrs, by_condition = {"measure": name.split("_")[0], "units": "nats"}, np.ndim(table) == 2
        dims = ["init", "model", "revision", "text"]
        if by_condition:
            coords["condition"] = ["slow", "fast", *(f"c{n}" for n in range(2, np.shape(table)[1]))]
            attrs |= {"effect": "rise of the loss in nats", "short": "rise", "words": json.dumps({"slow": "slower"})}
        array = np.array(table, dtype=float)
        array = array.reshape((1, *shape, *array.shape[1:]))
        data[name] = ([*dims, "condition"] if by_condition else dims, array, attrs)
    measures = [name.split("_")[0] for name in values]
    labelled = xr.Dataset(data, coords, {"measures": measures}).assign_coords(init_label=("init", ["made up"]))
    return result_of(Overview(), labelled)


def test_losses_are_ranked_among_models_that_read_the_same_tokens():
    losses = {"loss_loss": [3.0, 2.0, 5.0]}
    alike, two, unlike = (study_of(read, **losses) for read in ([0, 0, 0], [0, 1, 0], [0, 1, 2]))
    assert alike.findings() == ["The loss in nats per token lies between 2.000 (b) and 5.000 (c) over 3 models."]
    assert two.findings() == [
        "The loss in nats per token lies between 3.000 (a) and 5.000 (c) over 2 models that read the same tokens."
    ]
    assert unlike.findings() == [
        "Not compared, as the models read a text as different tokens: the loss in nats per token."
    ]
    titles = [[text.text for text in result.plot("models").layout.annotations] for result in (alike, unlike)]
    assert titles == [["loss"], ["loss<br>tokens differ between models"]]


def test_conditions_share_a_sentence_and_have_a_figure_of_their_own():
    result = study_of([0, 0], other_rise=[[0.1, 1.0], [0.3, 2.0]], loss_loss=[3.0, 2.0])
    assert result.findings()[0] == (
        "Other, rise of the loss in nats over 2 models: fast +1.000 (a) to +2.000 (b); slower +0.100 (a) to +0.300 (b)."
    )
    assert result.kinds == ["conditions", "models", "size"]
    curves = result.plot("conditions").data
    assert [(curve.name, [*curve.y], [*curve.x]) for curve in curves] == [
        ("a", ["fast", "slower"], [1.0, 0.1]),
        ("b", ["fast", "slower"], [2.0, 0.3]),
    ]
    assert study_of([0, 0], other_rise=[[0.1, 1.0], [0.3, 2.0]]).kinds == ["conditions", "size"]


def test_the_largest_conditions_are_those_of_the_models_in_the_sentence():
    """Of either sign, of the models that read the same tokens, and among those that these models have."""
    n = 9
    cancelling = [[5.0, *np.linspace(0.01, 0.08, n - 1)], [-5.0, *np.linspace(0.01, 0.08, n - 1)]]
    (sentence,) = study_of([0, 0], other_rise=cancelling).findings()
    assert "the 6 largest of 9: slower -5.000 (b) to +5.000 (a); c8 +0.080;" in sentence
    rising, falling = np.arange(float(n)), np.arange(float(n))[::-1]
    sentences = study_of([0, 0, 1, 1], other_rise=[10 * rising, 10 * rising, falling, falling]).findings()
    assert ["c8" in sentences[0], "slower +8.000" in sentences[1], "c8" in sentences[1]] == [True, True, False]
    lacking = np.where(rising > 4, np.nan, rising)
    sentences = study_of([0, 0, 1, 1], other_rise=[10 * rising, 10 * rising, lacking, lacking]).findings()
    assert "that read the same tokens: c4 +4.000; c3 +3.000; c2 +2.000; fast +1.000; slower" in sentences[1]


def test_no_figure_against_size_of_what_cannot_be_compared():
    assert "size" not in study_of([0, 1], loss_loss=[3.0, 2.0]).kinds


def test_a_model_without_the_number_is_named_and_a_single_one_is_not_drawn_against_size():
    result = study_of([0, 0], other_rise=[[0.1, 1.0], [np.nan, np.nan]], loss_loss=[3.0, 2.0])
    assert result.findings()[0].startswith("Other, rise of the loss in nats in a (not defined: b): fast +1.000; slower")
    assert [text.text for text in result.plot("size").layout.annotations] == ["loss"]


def test_panels_without_a_number_are_left_out():
    result = study_of([0, 0], other_x=[np.nan, np.nan], loss_loss=[3.0, 2.0])
    for kind in ("models", "size"):
        assert [text.text for text in result.plot(kind).layout.annotations] == ["loss"]

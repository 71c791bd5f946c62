"""Figures of numbers that are not defined say so, and are drawn."""

import re

import pytest
import torch
from plotly.graph_objects import Scatter

import tl_posgen
from tl_posgen.models import bundled_text
from tl_posgen.report.figures import NOTHING, Panels

CUT = {"length": 18, "n_prompts": 1, "nulls": 0, "progress": False}
EDITS = {
    "W_Q of the layer": lambda model: model.blocks[0].attn.W_Q,
    "the embedding": lambda model: model.embed.weight if hasattr(model.embed, "weight") else model.embed.W_E,
}


DRAWN = ["planes", "profiles", "slash", "variance"]


@pytest.mark.longer
@pytest.mark.parametrize("zero", EDITS)
def test_a_layer_whose_scores_are_all_zero_is_drawn_and_has_its_page(small, zero):
    model = tl_posgen.load_model(small)
    with torch.no_grad():
        EDITS[zero](model).zero_()
        for name, weight in model.named_parameters():
            if re.search(r"b_[QK]$|[qk]_proj.*bias$", name):
                weight.zero_()
    report = tl_posgen.analyze(model, bundled_text(), measures=DRAWN, layers=[0], **CUT)
    assert report.page_files()
    drawn = [result.plot(kind) for result in report.values() for kind in result.kinds]
    assert NOTHING in [one.text for figure in drawn for one in figure.layout.annotations]


@pytest.mark.parametrize(("y", "said"), [([float("nan")] * 2, True), ([float("nan"), 1.0], False)])
def test_panels_say_that_there_is_nothing_to_show_where_no_trace_has_a_number(y, said):
    panels = Panels(["a", "b"])
    panels.add(0, Scatter(x=[0, 1], y=y, name="r"))
    texts = [one.text for one in panels.titled("r").layout.annotations]
    assert (NOTHING in texts) == said
    assert NOTHING in [one.text for one in Panels([], specs=[[], []]).titled("r").layout.annotations]

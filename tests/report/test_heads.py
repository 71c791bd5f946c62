"""What the panel of a head reads."""

import base64
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import tl_posgen
from tl_posgen.errors import InputError
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.tokens import to_prompts, token_strings
from tl_posgen.report.heads import LONGEST, heads_of
from tl_posgen.rules import Rules

pytestmark = pytest.mark.longer


@pytest.fixture(scope="module")
def report(mini, alice):
    return tl_posgen.analyze(
        mini,
        alice,
        measures=["three_axis", "slash", "loss", "attention_examples"],
        length=128,
        n_prompts=1,
        heads=[(layer, head) for layer in range(4) for head in (1, 3)],
    )


def test_every_head_has_its_numbers_and_its_thinned_curves(report):
    heads = heads_of(report.results)
    assert heads["names"] == [f"L{layer}H{head}" for layer in range(4) for head in (1, 3)]
    r = next(one for one in heads["numbers"] if one["label"] == "r of position + query + key")
    np.testing.assert_allclose(r["values"], report["three_axis"].frame()["r"], rtol=1e-3)
    assert heads["nulls"] == ["random init", "shuffled"]
    for kind, values in zip(heads["nulls"], r["nulls"], strict=True):
        np.testing.assert_allclose(values, report["three_axis"].table(kind)["r"], rtol=1e-3)
    score = next(one for one in heads["curves"] if one["title"].startswith("slash score"))
    assert score["along"] == "distance"
    assert (score["ticks"]["tickvals"][1], score["ticks"]["ticktext"][1]) == (2, "1")  # the previous token
    assert len(score["x"]) <= LONGEST
    own = report["slash"].sel(tokens="all")["score"].isel(distance=[int(x) - 1 for x in score["x"]])
    expected = own.stack(unit=("layer", "head")).transpose("unit", "distance").values
    np.testing.assert_allclose(np.array(score["rows"], dtype=float), expected, rtol=1e-3)
    assert all(low <= high for low, high in zip(score["null"]["low"], score["null"]["high"], strict=True))


def test_every_head_has_its_attention_among_the_first_tokens(report, mini, alice):
    (found,) = heads_of(report.results)["patterns"]
    n, row = len(found["tokens"]), to_prompts(mini, alice, length=128, n_prompts=1)[0]
    steps = np.frombuffer(base64.b64decode(found["steps"]), np.uint8).reshape(8, 2, n, n)
    patterns = {}
    run_capture(mini, row[None], lambda one: patterns.update({one.layer: one.pattern}), {"pattern"})
    for place, (layer, head) in enumerate((layer, head) for layer in range(4) for head in (1, 3)):
        np.testing.assert_allclose(steps[place, 0] / 255, patterns[layer][head, :n, :n], atol=0.5 / 255 + 1e-5)
    np.testing.assert_allclose(steps[:, 1].sum(-1) / 255, 1, atol=n / 255 / 2)
    assert found["kinds"] == ["true", "three-axis fit"]
    assert found["tokens"] == token_strings(mini, row[:n])
    assert found["known"] == [True] * 8
    some = report["attention_examples"]
    fewer = replace(some, dataset=some.dataset.isel(unit=slice(3)))
    (found,) = heads_of({**report.results, "attention_examples": fewer})["patterns"]
    assert found["known"] == [True] * 3 + [False] * 5


def test_a_report_without_heads_has_none_and_its_page_no_panel(report):
    assert heads_of({"loss": report["loss"]}) is None
    page = tl_posgen.Report({"loss": report["loss"]}, report.provenance).html()
    assert 'id="heads">null</script>' in page
    assert '<dialog id="panel">' not in page
    assert '<dialog id="panel">' in report.html()


def test_one_head_shows_its_numbers_with_nulls_its_curves_and_its_maps(report):
    view = report.head("L3H1")
    frame, own = view.frame().set_index(["measure", "quantity"]), report["three_axis"].numbers
    r = own("r", tokens="without first", layer=3, head=1)
    row = frame.loc["three_axis", "r of position + query + key, without first token"]
    assert (row["value"], row["random init"], row["shuffled"]) == (r.value, r.inits[0], r.by_null["shuffled"][0])
    lines = repr(view).splitlines()
    assert f"{r.with_interval}" in " ".join(lines)
    assert "three_axis" in map(str.strip, lines)
    assert max(map(len, lines)) <= 80
    assert repr(report["slash"].head((3, 1))).split()[0] == "L3H1"
    traces = view.plot().data
    curve = next(one for one in heads_of(report.results)["curves"] if one["title"].startswith("slash score"))
    place = heads_of(report.results)["names"].index("L3H1")
    assert any(trace.name == "L3H1" and list(trace.y) == curve["rows"][place] for trace in traces)
    maps = report["attention_examples"].trained["of_every_head"].sel(unit="L3H1").values
    assert [trace.z.tolist() for trace in traces if trace.type == "heatmap"] == [one.tolist() for one in maps]
    assert "<table" in view._repr_html_()
    for head, message in (
        ("L9H1", r"no result has a number of L9H1; there are layers 0 to 3, heads 1, 3"),
        (["L3H1", "L0H1"], "these are 2 heads; give one"),
    ):
        with pytest.raises(InputError, match=message):
            report.head(head)
    for side in (report, report["slash"]):
        told = 'head(3, 1): give a name, head("L3H1"), or a pair, head((3, 1))'
        with pytest.raises(InputError, match=re.escape(told)):
            side.head(3, 1)


def test_figures_are_drawn_of_chosen_heads_alone(report):
    curves = report["slash"].plot("profiles", heads="L3H1").data
    of_heads = [trace for trace in curves if str(trace.name).startswith("head ")]
    assert [trace.name for trace in of_heads] == ["head 1"]
    (whole,) = [one for one in report["slash"].plot("profiles").data if str(one.hovertemplate).startswith("L3H1<br>")]
    np.testing.assert_array_equal(of_heads[0].y, whole.y)
    some = report["three_axis"].of_heads(["L3H1", (0, 3)])
    assert some.frame()[["layer", "head"]].to_numpy().tolist() == [[0, 3], [3, 1]]
    both = report["three_axis"].frame().set_index(["layer", "head"])["r"]
    assert some.numbers("r").value == pytest.approx((both[3, 1] + both[0, 3]) / 2)
    example = report["attention_examples"]
    place = int(example.trained["layer"][0]), int(example.trained["head"][0])
    assert len(example.plot(heads=place).data) == 3
    for name, head, message in (
        ("slash", "L3H0", "slash has no head L3H0; it has L0H1, L0H3"),
        ("loss", "L3H1", "loss has no numbers of single heads; leave heads out"),
    ):
        with pytest.raises(InputError, match=message):
            report[name].plot(heads=head)


def test_a_figure_of_the_whole_model_is_refused_for_chosen_heads(mini):
    tokens = torch.arange(2, 26)[None].repeat(2, 1)
    result = Rules(rules=["window"], budget=6)(mini, tokens, nulls=0, progress=False)
    assert len(result.plot("recall", heads="L3H1").data)
    with pytest.raises(InputError, match="heads: 'rise' of rules is of the whole model"):
        result.plot("rise", heads="L3H1")

"""What the panel of a head reads."""

import base64
from dataclasses import replace

import numpy as np
import pytest

import tl_posgen
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.tokens import to_prompts, token_strings
from tl_posgen.report.heads import LONGEST, heads_of

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
    assert found["kinds"] == ["true", "additive"]
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

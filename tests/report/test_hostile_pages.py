"""Hostile tokens and a hostile model name on the page of every measure, in a real browser."""

import random
import shutil

import pytest
from quick_options import KINDS, NAMES
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import tl_posgen
from tl_posgen.models.conversion.files import MINI
from tl_posgen.position.length.length_extrapolation import LengthExtrapolation

pytestmark = pytest.mark.soak  # every measure on one page: a minute or more
NAME = "<img src=x onerror=alert(0)><script>alert(0)"
HOSTILE = [
    "</script><script>alert(1)</script>", "<img/src=x/onerror=alert(2)>", "<b>bold</b>", "&lt;i&gt;", "\"'`${alert(3)}",
    "</style><svg/onload=alert(4)>", "-->", "<!--", "]]>", "\u202eright", "<a/href='javascript:alert(5)'>x</a>",
    "<iframe/srcdoc='<script>alert(6)</script>'>", "{{7*7}}", "\\u003cscript\\u003e", "W" * 300,
]  # fmt: skip
MEASURES = [  # every measure of a model and a text; two have options that a short text needs
    KINDS[name].with_options({"budget": 4} if name == "rules" else {})
    for name in NAMES
    if name != "length_extrapolation"
]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Every measure that takes a model and a text; the mini model with words that would run, were they not escaped."""
    directory = tmp_path_factory.mktemp("hostile") / NAME
    directory.mkdir()
    for file in ("config.json", "model.safetensors"):
        shutil.copy(MINI / file, directory)
    words = ["<s>", *HOSTILE, *(f"w{index}" for index in range(2047 - len(HOSTILE)))]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<s>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="<s>").save_pretrained(directory)
    draw = random.Random(0)
    text = " ".join(draw.choice(HOSTILE if draw.random() < 0.7 else words[-200:]) for _ in range(400))
    model = tl_posgen.load_model(directory)
    cut = {"length": 34, "n_prompts": 2, "nulls": 0, "layers": [0, 1], "progress": False}
    return tl_posgen.analyze(
        model, text, measures=[*MEASURES, LengthExtrapolation(inside=34, times=2)], skip_unsupported=True, **cut
    )


@pytest.fixture(scope="module")
def page(browser, report, tmp_path_factory):
    context = browser.new_context(offline=True, viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(120_000)
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("dialog", lambda dialog: (page.problems.append(f"ran: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda request: page.problems.append(request.url) if "://" in request.url[:8] else None)
    written = report.write(tmp_path_factory.mktemp("report"))
    page.goto(written.as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")  # what is folded is not drawn
    page.wait_for_selector("text=Head Selector")
    for figure in page.locator(".plot").all():  # drawn when they come into view
        figure.scroll_into_view_if_needed()
        figure.locator("svg.main-svg").first.wait_for()
    page.problems = [problem for problem in page.problems if not problem.startswith("file:") or "index" not in problem]
    yield page
    context.close()


def test_no_token_becomes_markup_and_none_of_its_scripts_runs(page):
    assert page.problems == []
    for made in ("img[src=x]", "svg[onload]", "iframe", "a[href^=javascript]", "script:text('alert(')"):
        assert page.locator(made).count() == 0, made
    assert page.evaluate("[...document.querySelectorAll('b')].filter(b => b.textContent == 'bold').length") == 0


def test_every_measure_has_its_section_and_its_figures(page, report):
    assert page.locator("section#provenance").count() == 1
    for name in report:
        assert page.locator(f"section#{name}").count() == 1
    assert page.locator(".plot:has(svg.main-svg)").count() > 10


def test_the_layout_holds(page):
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0
    assert page.evaluate("document.compatMode") == "CSS1Compat"
    assert NAME in page.locator("h1").inner_text()
    assert page.evaluate("document.querySelector('section#provenance').parentElement.closest('section')") is None

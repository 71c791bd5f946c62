"""The report page in a real browser, with no network."""

import shutil

import pytest

import tl_posgen
from tl_posgen.models.tokens import bundled_text
from tl_posgen.position import AttentionExamples

pytestmark = pytest.mark.slow

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def page_path(tmp_path_factory):
    text = "<b>bold</b> </script><script>alert(1)</script> " + bundled_text()
    measures = ["three_axis", "variance", "mean_key", AttentionExamples(examples=1)]
    report = tl_posgen.analyze("mini", text, measures=measures, length=32, n_prompts=1, progress=False)
    return report.write(tmp_path_factory.mktemp("report"))


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no browser here: neither chromium nor google-chrome is installed")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page(browser, page_path):
    context = browser.new_context(offline=True)
    page = context.new_page()
    page.set_default_timeout(120_000)
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("dialog", lambda dialog: page.problems.append("a token ran as a script"))
    page.on("request", lambda request: page.problems.append(request.url) if request.url.startswith("http") else None)
    page.goto(page_path.as_uri())
    page.wait_for_selector("text=Head Selector")
    yield page
    context.close()


def test_the_page_asks_for_nothing_and_raises_no_error(page):
    assert page.problems == []


def test_every_figure_is_drawn(page):
    figures = page.locator(".plotly-graph-div")
    assert figures.count() >= 6
    for index in range(figures.count()):
        assert figures.nth(index).locator("svg.main-svg").count() > 0
        assert figures.nth(index).bounding_box()["height"] > 200


def test_token_views_show_the_tokens_as_text(page):
    assert page.locator(".view").count() == 2
    assert page.locator(".view").first.locator("text=additive").count() > 0
    assert page.locator("b:text('bold')").count() == 0


def test_it_leads_with_findings_beside_the_null(page):
    findings = page.locator("ul.findings li")
    assert findings.count() >= 3
    assert "random init" in findings.first.inner_text()


def test_the_sections_carry_their_tables_and_the_provenance(page):
    assert page.locator("section#three_axis table tbody tr").count() == 16
    assert "transformer-lens" in page.locator("section#provenance").inner_text()

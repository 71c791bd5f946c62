"""The report page in a real browser, with no network."""

import re

import numpy as np
import pytest

import tl_posgen
from tl_posgen.models.tokens import bundled_text
from tl_posgen.position import AttentionExamples
from tl_posgen.report.circuits import token_colours

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def page_path(tmp_path_factory):
    text = "<b>bold</b> </script><script>alert(1)</script> " + bundled_text()
    measures = ["three_axis", "variance", "mean_key", AttentionExamples(examples=1)]
    report = tl_posgen.analyze("mini", text, measures=measures, length=32, n_prompts=1, progress=False)
    return report.write(tmp_path_factory.mktemp("report"))


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
    page.wait_for_selector("text=Head Selector", state="attached")
    yield page
    context.close()


def test_every_figure_is_drawn_when_it_comes_into_view(page):
    figures = page.locator(".plot")
    assert figures.count() >= 6
    assert figures.filter(visible=True).count() == 5  # one a measure, two of variance; the others are folded
    page.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
    for index in range(figures.count()):
        figures.nth(index).scroll_into_view_if_needed()
        figures.nth(index).locator("svg.main-svg").first.wait_for()
        assert figures.nth(index).bounding_box()["height"] > 200


def test_a_click_on_a_head_of_a_map_opens_its_panel(page):
    page.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
    plot = page.locator("section#three_axis .plot").nth(1)  # behind the layers
    plot.scroll_into_view_if_needed()
    box = plot.locator(".subplot .plot, .subplot.xy").first.bounding_box()
    page.mouse.click(box["x"] + box["width"] / 8, box["y"] + box["height"] / 8)
    panel = page.locator("dialog#panel")
    panel.wait_for()
    assert panel.locator("#which").inner_text() == "L3H0"
    assert panel.locator("#numbers tr").count() > 5
    curves = panel.locator("#curves figure")
    assert curves.count() == 4  # a, b and c of the three-axis fit, r of the mean-key split
    assert curves.first.locator(".scatterlayer .trace").count() == 5  # the random init's span, and four heads
    page.locator("#close").click()
    assert not panel.is_visible()


def test_heads_in_sentences_and_tables_and_the_atlas_open_panels_that_have_addresses(page):
    page.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
    panel, which = page.locator("dialog#panel"), page.locator("#which")
    link = page.locator("ul.findings a.head").first
    name = link.inner_text()
    link.click()
    assert (which.inner_text(), page.evaluate("location.hash")) == (name, f"#head={name}")
    page.locator("#close").click()
    page.locator("section#variance .scroll tbody tr").nth(6).locator("a.head").click()
    assert which.inner_text() == "L1H2"
    page.evaluate("location.hash = '#head=L2H3'")
    page.wait_for_function("document.getElementById('which').textContent === 'L2H3'")
    page.locator("#close").click()
    assert not panel.is_visible()
    atlas = page.locator("section#variance .plot").first
    atlas.scroll_into_view_if_needed()
    assert "Head atlas" in atlas.get_attribute("aria-label")
    box = atlas.locator(".scatterlayer .trace").last.locator("path.point").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.wait_for_timeout(200)  # plotly looks for the point under the mouse now and then
    page.mouse.down()
    page.mouse.up()
    panel.wait_for()
    page.locator("#close").click()


def test_the_first_panel_is_that_of_the_head_of_most_position_and_no_figure_can_be_uploaded(page):
    page.reload()
    page.locator("#open").click()
    first = page.locator("#which").inner_text()
    page.locator("#order").select_option(label="position")
    assert page.locator("#which").inner_text() == first
    page.locator("#order").select_option("")
    page.locator("#close").click()
    page.locator("svg.main-svg").first.wait_for()
    assert page.locator("[data-title*=Share]").count() == 0
    assert page.locator("[data-title*=ownload]").count() > 0


def test_the_panel_has_the_token_maps_of_its_head_and_gives_them_back(page):
    view = page.locator(".view").first
    head = view.get_attribute("data-head")
    n_views = page.locator("section#attention_examples .view").count()
    page.locator("#open").click()
    page.locator("#head").select_option(head)
    shown = page.locator("#panel #maps .view")
    assert shown.count() == 1
    assert page.locator("#nomaps").is_hidden()
    page.locator("#close").click()
    assert page.locator("section#attention_examples .view").count() == n_views


def test_the_panel_of_any_head_shows_its_attention_beside_that_of_the_fit(page):
    named = page.locator(".view").evaluate_all("views => views.map((view) => view.dataset.head)")
    head = next(
        name
        for name in page.locator("#head option").evaluate_all("all => all.map((one) => one.value)")
        if name not in named
    )
    page.locator("#open").click()
    page.locator("#head").select_option(head)
    columns = page.locator("#patterns .beside p")
    assert columns.count() == 2
    assert columns.first.inner_text().startswith("attention, true")
    tokens = columns.first.locator(".token")
    assert page.locator("#patterns .chosen").count() == 2
    tokens.nth(5).hover()
    assert "Attention of token 5," in page.locator("#patterns figcaption").inner_text()
    shares = [float(tokens.nth(place).get_attribute("title")) for place in range(6)]
    assert sum(shares) == pytest.approx(1, abs=0.02)
    assert tokens.nth(6).get_attribute("title") == ""
    page.locator("#close").click()


def test_the_order_of_heads_is_that_of_the_measure(page):
    page.locator("#open").click()
    page.locator("#order").select_option("0")
    values = [float(text.split(": ")[1]) for text in page.locator("#head option").all_inner_texts()]
    assert values == sorted(values, reverse=True)
    cells = page.locator("#numbers tr").first.locator("td").all_inner_texts()
    assert cells[2] == "1 of 16"
    assert len(cells) == page.locator("#panel th").count() == 5  # with both null models
    page.locator("#close").click()


def test_token_views_show_the_tokens_as_text_and_the_page_asks_for_nothing_and_raises_no_error(page):
    assert page.problems == []
    assert page.locator(".view").count() == 2  # two heads
    assert page.locator(".view").first.locator("text=three-axis fit").count() > 0
    assert page.locator("b:text('bold')").count() == 0


def test_it_leads_with_findings_beside_the_null_and_carries_tables_and_provenance(page):
    findings = page.locator("ul.findings").first.locator("li")
    assert findings.count() == 3
    assert "random init" in findings.first.inner_text()
    assert "without the first token" in page.locator("main > p.soft").inner_text()
    assert page.locator("section#three_axis table tbody tr").count() == 16
    assert "transformer-lens" in page.locator("section#provenance").text_content()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 700])
def test_it_reads_at_either_width_by_day_and_night(browser, page_path, width, scheme):
    context = browser.new_context(offline=True, viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.goto(page_path.as_uri())
    page.locator(".plot svg.main-svg").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    ink = page.evaluate("getComputedStyle(document.querySelector('.plot .xtick text')).fill")
    brightness = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (ground, ink)]
    assert (brightness[0] > brightness[1] + 300) if scheme == "light" else (brightness[1] > brightness[0] + 300)
    context.close()


def test_printing_draws_every_figure_as_wide_as_the_sheet(browser, page_path):
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(page_path.as_uri())
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    widths = page.evaluate("figures.map((div) => div.querySelector('svg.main-svg').clientWidth)")
    assert len(widths) >= 6
    assert set(widths) == {690}
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator(".plot").first.bounding_box()["width"] > 1000
    page.close()


def test_a_coloured_token_is_text(browser, tmp_path):
    """The component of circuitsvis that colours tokens reads them as HTML."""
    tokens = ["<svg/onload=alert(1)>", "<b>bold</b>", "&lt;i&gt;", "<s>"]
    (tmp_path / "tokens.html").write_text(token_colours(tokens, np.arange(4.0)).local_src, encoding="utf-8")
    page, ran = browser.new_page(), []
    page.on("dialog", lambda dialog: (ran.append(dialog.message), dialog.dismiss()))
    page.goto((tmp_path / "tokens.html").as_uri())
    page.wait_for_selector(".colored-tokens")
    shown = page.locator(".colored-tokens").inner_text().replace("\u2060", "")
    assert all(token in shown for token in tokens)
    assert page.locator("svg[onload]").count() == 0
    assert ran == []
    page.close()

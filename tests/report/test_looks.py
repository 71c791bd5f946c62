"""Each kind of page at both widths, by day and by night; the pictures go where TL_POSGEN_LOOKS says."""

import importlib.util
import os
from pathlib import Path

import pytest

import tl_posgen
from tl_posgen.models.tokens import bundled_text
from tl_posgen.position import Perturbation

OF_THE_PAGE = importlib.util.spec_from_file_location("of_the_page", Path(__file__).with_name("test_page.py"))
PAGE = importlib.util.module_from_spec(OF_THE_PAGE)
OF_THE_PAGE.loader.exec_module(PAGE)
browser = PAGE.browser

pytestmark = pytest.mark.screenshot
KINDS = {
    "analyze": None,
    "slash": ["slash", "slash_transfer", "slash_ablation"],
    "perturb": Perturbation(ratios=(0, 0.1), n_cloze=0),
    "coupling": "coupling",
    "planes": ["planes"],
}
OVERLAPS = """() => {
  const written = (one) => { const all = document.createRange(); all.selectNodeContents(one); return all; };
  const boxes = [...document.querySelectorAll("h1, h2, h3, figcaption, .plot .annotation-text")]
    .map((one) => [one.textContent, written(one).getBoundingClientRect()]).filter(([, box]) => box.width && box.height);
  const meet = (one, other) => one.left < other.right - 1 && other.left < one.right - 1
    && one.top < other.bottom - 1 && other.top < one.bottom - 1;
  return boxes.flatMap(([text, box], place) =>
    boxes.slice(place + 1).filter(([, other]) => meet(box, other)).map(([other]) => `${text} / ${other}`));
}"""


@pytest.fixture(scope="module", params=KINDS)
def written(request, tmp_path_factory):
    """A page and its kind."""
    cut = {"length": 32, "n_prompts": 2, "progress": False}
    report = tl_posgen.analyze("mini", bundled_text(), measures=KINDS[request.param], **cut)
    return request.param, report.write(tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 700])
def test_no_heading_meets_another_and_nothing_is_asked_for(browser, written, tmp_path, width, scheme):
    kind, path = written
    context = browser.new_context(offline=True, viewport={"width": width, "height": 1000}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(120_000)
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    page.on("request", lambda asked: problems.append(asked.url) if asked.url.startswith("http") else None)
    page.goto(path.as_uri())
    for figure in page.locator(".plot").all():
        figure.scroll_into_view_if_needed()
        figure.locator("svg.main-svg").first.wait_for()
    assert problems == []
    assert page.evaluate(OVERLAPS) == []
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    place = Path(os.environ.get("TL_POSGEN_LOOKS", tmp_path)) / f"page_{kind}_{width}_{scheme}.png"
    page.screenshot(path=place, full_page=True)
    assert place.stat().st_size > 10_000
    context.close()

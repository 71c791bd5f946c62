"""Each kind of page at both widths, by day and by night; the pictures go where TL_POSGEN_LOOKS says."""

import os
import tempfile
from functools import partial
from pathlib import Path

import pytest
from made_up import grown

import tl_posgen
from tl_posgen.core.report import Report
from tl_posgen.models.tokens import bundled_text
from tl_posgen.position import LengthExtrapolation, Perturbation, PlanePerturbation, Substitution
from tl_posgen.slash import slash_toy

pytestmark = pytest.mark.screenshot
CHECKPOINTS = sorted((Path(__file__).parents[2] / "examples" / "mini_model" / "checkpoints").iterdir())
CUT = {"length": 32, "n_prompts": 2, "progress": False}


def of_measures(*measures):
    return tl_posgen.analyze("mini", bundled_text(), measures=measures or None, **CUT)


def alone(result):
    return Report({result.name: result}, result.provenance)


def compared():
    reports = [tl_posgen.analyze("mini", bundled_text(), fwd_hooks=hooks, **CUT) for hooks in ((), [ZERO])]
    return tl_posgen.compare(*reports)


def of_many_heads():
    """As if of 48 layers of 40 heads."""
    report = of_measures("three_axis", "variance", "planes", "slash", "residual", "coupling")
    return Report({name: grown(result) for name, result in report.items()}, report.provenance)


def study():
    with tempfile.TemporaryDirectory() as out:
        tables = [{"name": str(path), "tokenizer": "mini"} for path in CHECKPOINTS[:2]]
        told = {
            "name": "small",
            "models": ["mini", *tables],
            "length": 32,
            "n_prompts": 1,
            "measures": ["three_axis", "slash"],
        }
        tl_posgen.sweep(told, out=out, progress=False)
        return tl_posgen.report_study(out)


def claims():
    with tempfile.TemporaryDirectory() as keep:
        return tl_posgen.judge_claims("mini", bundled_text(), papers=["coupling"], keep=keep, **CUT)


ZERO = ("blocks.1.attn.hook_z", lambda value, hook: value * 0)
KINDS = {  # those of every command
    "analyze": of_measures,
    "substitute": partial(of_measures, Substitution(widths=(8,)), "split_examples"),
    "distance": partial(of_measures, "dummy_distance"),
    "perturb": partial(of_measures, Perturbation(ratios=(0, 0.1), n_cloze=4)),
    "length": partial(of_measures, LengthExtrapolation(inside=32, times=2)),
    "planes": partial(of_measures, "planes"),
    "perturb-planes": partial(of_measures, PlanePerturbation(strengths=(0.3, 1))),
    "profiles": partial(of_measures, "profiles"),
    "slash": partial(of_measures, "slash", "slash_planes", "cone", "slash_transfer", "slash_ablation", "band_ablation"),
    "toy": lambda: alone(slash_toy(seeds=(0, 1), steps=60, progress=False)),
    "coupling": partial(of_measures, "coupling", "token_coupling"),
    "emerge": lambda: alone(tl_posgen.emergence(CHECKPOINTS[:3], bundled_text(), tokenizer="mini", **CUT)),
    "many heads": of_many_heads,
    "compare": compared,
    "sweep": study,
    "claims": claims,
}
OVERLAPS = """() => {
  const written = (one) => { const all = document.createRange(); all.selectNodeContents(one); return all; };
  const named = "h1, h2, h3, figcaption, .annotation-text, .plot [class^=x][class$=title]";
  const boxes = [...document.querySelectorAll(named)]
    .map((one) => [one.textContent, written(one).getBoundingClientRect()]).filter(([, box]) => box.width && box.height);
  const meet = (one, other) => one.left < other.right - 1 && other.left < one.right - 1
    && one.top < other.bottom - 1 && other.top < one.bottom - 1;
  return boxes.flatMap(([text, box], place) =>
    boxes.slice(place + 1).filter(([, other]) => meet(box, other)).map(([other]) => `${text} / ${other}`));
}"""

CUT_OFF = """() => [...document.querySelectorAll(".plot")].flatMap((plot) => {
  const frame = plot.parentNode.getBoundingClientRect();
  return [...plot.querySelectorAll(".cartesianlayer .subplot, .annotation-text, .legend, .colorbar")]
    .map((one) => [one.textContent.slice(0, 40), one.getBoundingClientRect()])
    .filter(([, box]) => box.width && (box.right > frame.right + 2 || box.left < frame.left - 2))
    .map(([text]) => text);
})"""

UNDER_TOOLBAR = """() => [...document.querySelectorAll(".plot")].flatMap((plot) => {
  const bar = plot.querySelector(".modebar").getBoundingClientRect();
  return [...plot.querySelectorAll(".main-svg text")].filter((one) => {
    const box = one.getBoundingClientRect();
    return box.width && box.right > bar.left + 1 && box.left < bar.right - 1 && box.top < bar.bottom - 1
      && box.bottom > bar.top + 1;
  }).map((one) => one.textContent);
})"""


@pytest.fixture(scope="module", params=KINDS)
def written(request, tmp_path_factory):
    """A page and its kind."""
    return request.param, KINDS[request.param]().write(tmp_path_factory.mktemp(request.param))


SIGHTS = [
    (1280, "light"),
    (700, "dark"),
    pytest.param(1280, "dark", marks=pytest.mark.soak),
    pytest.param(700, "light", marks=pytest.mark.soak),
]


@pytest.mark.parametrize(("width", "scheme"), SIGHTS)
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
    page.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })")
    for figure in page.locator(".plot").all():
        figure.scroll_into_view_if_needed()
        figure.and_(page.locator("[data-drawn=whole]")).wait_for()
    assert problems == []
    assert page.evaluate(OVERLAPS) == []
    assert page.evaluate(CUT_OFF) == []
    assert page.evaluate(UNDER_TOOLBAR) == []
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    place = Path(os.environ.get("TL_POSGEN_LOOKS", tmp_path)) / f"page_{kind}_{width}_{scheme}.png"
    page.screenshot(path=place, full_page=True)
    assert place.stat().st_size > 10_000
    context.close()

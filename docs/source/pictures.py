"""docs/*.png, drawn from what was measured: plotly figures, photographed by a headless Chromium."""

import base64
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import plotly.io
from making import EXAMPLES
from measure_pages import PARTS as OF_MEASURES

from tl_posgen.frequencies.joined_figure import join_costs_and_gap
from tl_posgen.report.figures import COLOURS, Panels, error_bars, line

DOCS = Path(__file__).parents[1]
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


class Picture(NamedTuple):
    """A figure of a part's result; its width in pixels, its height where the figure's own is too large."""

    part: str
    result: str
    kind: str
    width: int = 900
    height: int | None = None


PICTURES = {
    "atlas": Picture("SmolLM2-135M-Instruct analysis", "variance", "atlas", 760),
    "depth": Picture("SmolLM2-135M-Instruct analysis", "variance", "depth", 1160),
    "distances": Picture("stories260K distance", "dummy_distance", "agreement", 860),
    "correlation": Picture("stories260K weighted", "substitution", "correlation", 860),
    "length": Picture("mini claims", "length_extrapolation", "loss", 860),
    "emergence": Picture("mini emergence", "emergence", "means", 1000),
    "slash_ablations": Picture("mini slash", "slash_ablation", "ablations", 1000),
    "slash_toy": Picture("toy all, 3", "slash_toy", "maps", 1120),
    "coupling": Picture("mini claims", "coupling", "map", 720),
    "writers": Picture("mini writers", "sources", "layers", 860),
    "places": Picture("atome_vanilla_1m places", "variance", "places", 1000),
}


WIDTH, WIDEST = 900, 1160  # of a measure's picture, and of one with more columns than the first has room for
WIDE = ("dummy_distance", "residual")
PAGE = "demo results"  # the part whose page is photographed
SECONDS = 20  # for a page to draw itself
BLANK = 0.985  # a picture with more than this share of one colour shows nothing
LARGEST_SHARE = """async png => {  // of the pixels of a PNG, the share of the most frequent colour
    const image = new Image();
    image.src = "data:image/png;base64," + png;
    await image.decode();
    const context = new OffscreenCanvas(image.width, image.height).getContext("2d");
    context.drawImage(image, 0, 0);
    const pixels = new Uint32Array(context.getImageData(0, 0, image.width, image.height).data.buffer);
    const counts = new Map();
    for (const pixel of pixels) counts.set(pixel, (counts.get(pixel) ?? 0) + 1);
    return Math.max(...counts.values()) / pixels.length;
}"""
SIGHTS = [(width, scheme) for width in (1280, 700) for scheme in ("light", "dark")]


def far_gaps() -> Any:
    """Return a figure of the loss of text of each model over turns of a plane, above its loss without a gap."""
    files = [EXAMPLES / "clock" / f"far_gaps{of}.csv" for of in ("", "_smollm2")]
    by_model = pd.concat(map(pd.read_csv, files), ignore_index=True).groupby("model", sort=False)
    panels = Panels([str(model).removesuffix("-135M-Instruct") for model, _ in by_model], columns=2, row_height=240)
    conditions = {"unchanged": "unchanged", "hold_planes": "planes of less than a turn held at L/2"}
    for panel, (_, rows) in enumerate(by_model):
        for colour, (condition, label) in zip(COLOURS[:2], conditions.items(), strict=True):
            rise, low, high = (rows[f"{condition}_{end}"].to_numpy() for end in ("rise", "low", "high"))
            bars = error_bars(rise, low, high)
            panels.add(panel, line(rows["turns"], rise, label, colour, mode="lines+markers", error_y=bars))
        panels.add(panel, line(rows["turns"], rows["alone_rise"], "without the first half", COLOURS[-1], dash="dot"))
    title, subtitle = "Loss of text across a gap, above that without one", "4 prompts of 128 tokens, 95% intervals"
    return panels.axes("gap, in turns", "nats a token").titled(title, subtitle)


def by_size() -> Any:
    """Return a figure of the study of real models: each quantity over the number of parameters, and its null models."""
    rows = pd.read_csv(EXAMPLES / "studies" / "real.csv").sort_values("parameters")
    titles = {
        "position": "position",
        "content": "content",
        "interaction": "interaction",
        "additive_r": "additive r",
        "size": "size, logits",
        "dominant": "slash-dominant heads",
        "coupling": "coupling",
        "copy_far": "loss of a copy across 1.5 contexts",
        "text_far": "loss of text across 1.5 contexts",
    }
    panels = Panels(list(titles.values()), columns=3, row_height=220)
    for panel, quantity in enumerate(titles):
        points = rows[rows["quantity"] == quantity]
        bars = error_bars(points["value"].to_numpy(), points["low"].to_numpy(), points["high"].to_numpy())
        look: dict[str, Any] = {"mode": "markers", "marker": {"size": 8}, "error_y": bars, "cliponaxis": False}
        panels.add(panel, line(points["parameters"], points["value"], "trained", COLOURS[0], **look))
        for colour, symbol, null in ((COLOURS[1], "circle-open", "random_init"), (COLOURS[-1], "x", "shuffled")):
            marker = {"symbol": symbol, "color": colour, "size": 8}
            panels.add(
                panel,
                line(
                    points["parameters"],
                    points[null],
                    null.replace("_", " "),
                    colour,
                    mode="markers",
                    marker=marker,
                    cliponaxis=False,
                ),
            )
    panels.figure.update_xaxes(
        type="log",
        range=[8.05, 9.32],
        tickvals=[1.35e8, 2.7e8, 6.3e8, 1.78e9],
        ticktext=["135M", "270M", "0.5B", "1.5B"],
    )
    panels.figure.update_yaxes(rangemode="tozero")
    title = "SmolLM2, Gemma 3, Qwen2.5-Coder 0.5B and 1.5B"
    return panels.axes("model").titled(title, "4 prompts of 256 tokens of WikiText, mean over heads, 95% intervals")


def draw(names: Any = None) -> None:
    """Draw these pictures, or all; those of parts whose model is not here stay as they are."""
    from measuring import results_of
    from parts import PARTS

    with browser_of() as browser:
        for name, picture in PICTURES.items():
            if (names and name not in names) or PARTS[picture.part].missing:
                continue
            figure = results_of(picture.part)[picture.result].plot(picture.kind)
            (DOCS / f"{name}.png").write_bytes(photograph(browser, figure, picture.width, picture.height))
            print(f"wrote docs/{name}.png")
        for name, figure_of in {"far_gaps": far_gaps, "by_size": by_size}.items():
            if not names or name in names:
                (DOCS / f"{name}.png").write_bytes(photograph(browser, figure_of(), 900))
        if not names or "page" in names:
            report: Any = results_of(PAGE)
            photograph_page(browser, report.html())
        of_measures = {}
        for part in OF_MEASURES:
            if not PARTS[part].missing and (not names or part in names):
                of_measures |= results_of(part)
        of_measures = join_costs_and_gap(of_measures)
        for name, result in of_measures.items():
            if result.kinds:
                width = WIDEST if name in WIDE else WIDTH
                (DOCS / "measures" / f"{name}.png").write_bytes(photograph(browser, result.plot(), width))
                print(f"wrote docs/measures/{name}.png")


@contextmanager
def browser_of() -> Iterator[Any]:
    """A headless Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


def photograph_page(browser: Any, html: str) -> None:
    """The top of a report's page: wide and narrow, by day and by night."""
    for width, scheme in SIGHTS:
        page = browser.new_page(viewport={"width": width, "height": 1400}, color_scheme=scheme)
        page.set_content(html)
        page.locator(".plot").first.locator("svg.main-svg").first.wait_for()
        page.wait_for_timeout(2000)
        (DOCS / f"page_{width}_{scheme}.png").write_bytes(page.screenshot())
        page.close()


def photograph(browser: Any, content: Any, width: int = 1100, height: int | None = None) -> bytes:
    """Return a PNG of a plotly figure, or of the body of an HTML page once it has drawn itself.

    Raises:
        ValueError: almost all of it is one colour.
    """
    size = {"width": width, "height": 200 if isinstance(content, str) else 450}
    if not isinstance(content, str):
        size["height"] = int(height or content.layout.height or 450)
        content.update_layout(title_pad_t=20, **size)
    page = browser.new_page(viewport=size, device_scale_factor=1)
    try:
        page.set_default_timeout(180_000)
        page.route(re.compile("^https?:"), lambda route: route.abort())
        if isinstance(content, str):
            style = "font-family: sans-serif; margin: 0; padding: 10px"
            page.set_content(f"<!DOCTYPE html><body style='{style}'>{content}</body>")
            picture = settled(page)
        else:
            page.set_content(plotly.io.to_html(content, include_plotlyjs=True, config={"staticPlot": True}))
            page.wait_for_selector(".main-svg")
            page.wait_for_timeout(500)  # fonts, and labels that move out of each other's way
            picture = page.locator(".plotly-graph-div").screenshot()
        share = page.evaluate(LARGEST_SHARE, base64.b64encode(picture).decode())
    finally:
        page.close()
    if share > BLANK:
        raise ValueError(f"{share:.1%} of the picture is one colour: nothing was drawn")
    return picture


def settled(page: Any) -> bytes:
    """Return a PNG of the page's body as soon as it no longer changes and shows something, or after SECONDS."""
    before, picture = b"", page.locator("body").screenshot()
    for _ in range(2 * SECONDS):
        if picture == before and page.evaluate(LARGEST_SHARE, base64.b64encode(picture).decode()) <= BLANK:
            break
        page.wait_for_timeout(500)
        before, picture = picture, page.locator("body").screenshot()
    return picture

"""docs/*.png, drawn from what was measured: plotly figures, photographed by a headless Chromium."""

import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import plotly.io
from measuring import PARTS, results_of

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
    "atlas": Picture("demo results", "variance", "atlas", 760),
    "claims": Picture("mini claims", "claims", "table", 1150),
    "distances": Picture("stories260K distance", "dummy_distance", "agreement", 860),
    "tables": Picture("stories260K distance", "dummy_distance", "tables", 860),
    "correlation": Picture("stories260K weighted", "substitution", "correlation", 860),
    "length": Picture("mini claims", "length_extrapolation", "loss", 860),
    "emergence": Picture("mini emergence", "emergence", "means", 1000),
    "slash_ablations": Picture("mini slash", "slash_ablation", "ablations", 1000),
    "slash_toy": Picture("toy all, 3", "slash_toy", "maps", 1120),
    "coupling": Picture("mini claims", "coupling", "map", 720),
    "alignment": Picture("babyllama105 slash", "coupling", "alignment", 860),
}


def draw(names: Any = None) -> None:
    """Draw these pictures, or all; those of parts whose model is not here stay as they are."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for name, picture in PICTURES.items():
            if (names and name not in names) or PARTS[picture.part].missing:
                continue
            figure = results_of(picture.part)[picture.result].plot(picture.kind)
            figure.update_layout(
                width=picture.width, height=picture.height or figure.layout.height or 450, title_pad_t=20
            )
            page = browser.new_page(
                viewport={"width": picture.width, "height": int(figure.layout.height)}, device_scale_factor=1
            )
            page.set_content(plotly.io.to_html(figure, include_plotlyjs=True, config={"staticPlot": True}))
            page.wait_for_selector(".main-svg")
            page.wait_for_timeout(500)  # fonts, and labels that move out of each other's way
            page.locator(".plotly-graph-div").screenshot(path=DOCS / f"{name}.png")
            page.close()
            print(f"wrote docs/{name}.png")
        browser.close()

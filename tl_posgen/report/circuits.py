"""circuitsvis pages that are safe to embed: tokens escaped, numbers finite and rounded, maps cropped."""

import html
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

CROP = 128
_LESS_THAN = "\ue000"  # stands for "<" while circuitsvis writes its page; see `_escaped`


def attention_maps(maps: np.ndarray, tokens: Sequence[str], names: Sequence[str], **options):
    """Return a circuitsvis `attention_heads` page of maps [map, query, key], the first 128 tokens of each.

    Returns:
        circuitsvis' RenderedHTML: displays itself in a notebook; `.local_src` works without a network.
    """
    from circuitsvis.attention import attention_heads

    finite = np.nan_to_num(np.asarray(maps, dtype=np.float64)[:, :CROP, :CROP], nan=0.0, posinf=0.0, neginf=0.0)
    rows = finite.round(4).tolist()
    return _escaped(attention_heads(rows, _marked(tokens[:CROP]), attention_head_names=_marked(names), **options))


def token_colours(tokens: Sequence[str], values: np.ndarray, **options):
    """Return a circuitsvis `colored_tokens` page: one number per token, red above zero, blue below, NaN white.

    Returns:
        as `attention_maps`.
    """
    from circuitsvis.tokens import colored_tokens

    finite = np.nan_to_num(np.asarray(values, dtype=np.float64), nan=0.0, posinf=0.0, neginf=0.0).round(4)
    reach = float(np.quantile(abs(finite), 0.98)) or 1.0
    colours = {"positive_color": "red", "negative_color": "blue", "min_value": -reach, "max_value": reach}
    safe = [re.sub("[<&]", "\\g<0>\u2060", token) for token in tokens]  # read as HTML: this breaks tags and entities
    return _escaped(colored_tokens(_marked(safe), finite.tolist(), **(colours | options)))


def titled(page, label: str):
    """Return the page below a line with its label."""
    from circuitsvis.utils.render import RenderedHTML

    line = f"<p>{html.escape(label)}</p>"
    return RenderedHTML(line + page.local_src, line + page.cdn_src)


def stacked(pages: Sequence[Any], heading: str):
    """Return one page with several below each other, under a heading in HTML; they share one script."""
    from circuitsvis.utils.render import RenderedHTML

    parts = [split_script(page) for page in pages]
    scripts = "".join(f"<script>{script}</script>" for script in dict.fromkeys(script for script, _ in parts))
    return RenderedHTML(
        heading + scripts + "".join(fragment for _, fragment in parts),
        heading + "".join(page.cdn_src for page in pages),
    )


def split_script(page) -> tuple[str, str]:
    """Return (circuitsvis' script, the page without it), so that many pages share the 1.3 MB script."""
    source = page.local_src
    start = source.index('<script crossorigin type="module">') + len('<script crossorigin type="module">')
    stop = source.rindex("CircuitsVis.render(")
    return source[start:stop].strip(), source[:start] + source[stop:]


def on_one_line(text: str) -> str:
    r"""Return a text with signs in the place of line breaks and tabs, which tokens hold.

    Example:
        >>> on_one_line("a\n\tb")
        'a↵⇥b'
    """
    return text.replace("\n", "↵").replace("\t", "⇥")


def _marked(texts: Sequence[str]) -> list[str]:
    """Return tokens on one line each, with "<" marked: circuitsvis writes tokens into a script unescaped."""
    return [on_one_line(text).replace("<", _LESS_THAN) for text in texts]


def _escaped(page):
    r"""Return the page with every marked "<" as the JavaScript escape \u003c, so that no token can close the script."""
    from circuitsvis.utils.render import RenderedHTML

    def clean(source: str) -> str:
        for written in (_LESS_THAN, "\\ue000"):
            source = source.replace(written, "\\u003c")
        # `<div .../>` is not self-closing in HTML: the div would swallow the elements after it
        return source.replace('style="margin: 15px 0;"/>', 'style="margin: 15px 0;"></div>', 1)

    return RenderedHTML(clean(page.local_src), clean(page.cdn_src))

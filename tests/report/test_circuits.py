"""Token-level pages: safe to embed, and sharing one script."""

import json
import re

import numpy as np

from tl_posgen.report.circuits import CROP, attention_maps, split_script, titled, token_colours


def props(page: str) -> dict:
    return json.loads(re.search(r"CircuitsVis\.AttentionHeads,\s*(\{.*\})\s*\)", page, re.S).group(1))


def test_a_token_cannot_close_the_script():
    page = attention_maps(np.zeros((1, 2, 2)), ["</script><b>", "a"], ["map"])
    _, fragment = split_script(page)
    assert fragment.count("</script>") == 1
    assert props(fragment)["tokens"] == ["</script><b>", "a"]


def test_values_are_finite_and_cropped():
    maps = np.full((1, CROP + 5, CROP + 5), -np.inf)
    maps[0, 0, 0] = 0.123456
    _, fragment = split_script(attention_maps(maps, ["t"] * (CROP + 5), ["map"]))
    drawn = np.array(props(fragment)["attention"])
    assert drawn.shape == (1, CROP, CROP)
    assert drawn[0, 0, 0] == 0.1235
    assert np.isfinite(drawn).all()


def test_pages_share_one_script():
    pages = [attention_maps(np.eye(2)[None], ["a", "b"], [name]) for name in ("one", "two")]
    scripts, fragments = zip(*(split_script(page) for page in pages), strict=True)
    assert scripts[0] == scripts[1]
    assert "CircuitsVis" in scripts[0]
    assert all(len(fragment) < 2000 for fragment in fragments)


def test_tokens_coloured_by_numbers_are_escaped_and_finite():
    page = token_colours(["</script>", "a\n", "b"], np.array([1.0, np.nan, -0.5]))
    _, fragment = split_script(page)
    assert fragment.count("</script>") == 1
    drawn = json.loads(re.search(r"CircuitsVis\.ColoredTokens,\s*(\{.*\})\s*\)", fragment, re.S).group(1))
    assert drawn["tokens"] == ["<\u2060/script>", "a↵", "b"]  # this component reads HTML
    assert drawn["values"] == [1.0, 0.0, -0.5]
    assert drawn["minValue"] == -drawn["maxValue"] < 0


def test_a_page_begins_with_what_it_draws():
    page = titled(attention_maps(np.eye(2)[None], ["a", "b"], ["one"]), "head <1>")
    assert page.local_src.startswith("<p>head &lt;1&gt;</p>")
    assert page.cdn_src.startswith("<p>head &lt;1&gt;</p>")

"""Token-level pages: safe to embed, and sharing one script."""

import json
import re

import numpy as np

from tl_posgen.report.circuits import CROP, attention_maps, split_script


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

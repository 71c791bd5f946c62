"""A measure of another distribution: found by name, used everywhere, and free to be called like a module of ours."""

import json
import re
from importlib.metadata import entry_points

import pytest
import torch

import tl_posgen
from tl_posgen.core import registry

INSTALLED = "figures" in {point.name for point in entry_points(group=registry.GROUP)}
pytestmark = pytest.mark.skipif(not INSTALLED, reason="tests/plugin is not installed; make test installs it")
CUT = {"length": 24, "n_prompts": 2, "progress": False}


def expected(model, tokens):
    """|E k|^2 / E |k|^2 from TransformerLens' own hook, mean over prompts."""
    shares = []
    for prompt in tokens:
        _, cache = model.run_with_cache(prompt[None])
        keys = torch.stack([cache[f"blocks.{layer}.attn.hook_k"][0] for layer in range(model.cfg.n_layers)]).double()
        shares.append(keys.mean(1).square().sum(-1) / keys.square().sum(-1).mean(1))
    share = torch.stack(shares).mean(0)
    return share.repeat_interleave(model.cfg.n_heads // share.shape[1], dim=1)


@pytest.mark.longer
def test_analyze_takes_it_by_name_beside_ours(mini, alice):
    report = tl_posgen.analyze(mini, alice, measures=["figures", "slash"], **CUT)
    tokens = torch.stack(tl_posgen.models.tokens.to_prompts(mini, alice, length=24, n_prompts=2))
    share = torch.from_numpy(report["figures"].trained["share"].values)
    torch.testing.assert_close(share, expected(mini, tokens), rtol=1e-5, atol=1e-7)
    assert "mean_key_share" in report.frame().columns
    assert report["figures"].trained["share"].attrs["long_name"] == "mean key share"


def test_its_sentence_has_its_number_and_its_null_and_loaded_it_draws_its_own_figure_again(mini, alice, tmp_path):
    result = tl_posgen.analyze(mini, alice, measures="figures", **CUT)["figures"]
    sentence, caveat = result.findings()
    own, null, shuffled = re.findall(r"\d+%", sentence)
    assert shuffled == f"{float(result.by_kind['shuffled']['share'].mean()):.0%}"
    assert own == f"{float(result.trained['share'].mean()):.0%}"
    assert null == f"{float(result.null['share'].mean()):.0%}"
    assert caveat.endswith("keys are taken before they rotate.")
    again = tl_posgen.load(result.save(tmp_path / "figures.nc"))["figures"]
    assert again.plot().data[0].x.tolist() == pytest.approx(result.trained["share"].mean("head").values.tolist())
    assert again.show(1) is not None


def test_attach_takes_it_and_its_options(mini):
    tokens = torch.arange(20)[None]
    with tl_posgen.attach(mini, [registry.find("figures")(first=3)]) as run:
        mini(tokens)
    _, cache = mini.run_with_cache(tokens)
    keys = cache["blocks.0.attn.hook_k"][0, 3:, 0].double()
    share = keys.mean(0).square().sum() / keys.square().sum(-1).mean()
    assert float(run.report()["figures"].trained["share"][0, 0]) == pytest.approx(float(share), rel=1e-5)


def test_the_list_of_measures_says_whose_it_is(command):
    rows = command("measures")[1].splitlines()
    assert [row.split()[:2] for row in rows if "(of " in row] == [["figures", "(of"]]


@pytest.mark.longer
def test_the_command_line_takes_it_and_its_page_shows_its_picture(command, tmp_path, alice):
    text = tmp_path / "text.txt"
    text.write_text(alice[:4000])
    options = ["--measures", "figures", "--text", str(text), "--length", "24", "--prompts", "1", "--out", str(tmp_path)]
    code, printed, _ = command("analyze", *options)
    assert code == 0
    numbers = json.loads((tmp_path / "summary.json").read_text())["measures"]["figures"]
    share = next(one["value"] for one in numbers if one["name"] == "share")
    assert f"Mean keys hold {share:.0%}" in " ".join(printed.split())
    page = (tmp_path / "index.html").read_text()
    assert f"Mean key share {share:.2f}" in page
    assert "<h3>layer 0</h3>" in page

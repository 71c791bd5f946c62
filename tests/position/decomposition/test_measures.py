"""What all six measures keep: every declared variable, sentences of their numbers, headlines, heads of one's choice."""

import numpy as np
import pytest

from tl_posgen.core.engine import analyze

MEASURES = ["three_axis", "variance", "mean_key", "residual", "across_prompts", "attention_examples"]
OUT = {"tokens": "without first"}


@pytest.mark.parametrize("name", MEASURES)
def test_every_declared_variable_is_found(report, name):
    assert set(report[name].measure.variables) == set(report[name].own.data_vars)


@pytest.mark.parametrize(("name", "key", "form", "labels"), [
    ("three_axis", "r", ".3f", {}),
    ("three_axis", "r", ".3f", OUT),
    ("three_axis", "r_within_rows", ".3f", {}),
    ("variance", "position", ".0%", OUT),
    ("variance", "content", ".0%", OUT),
    ("variance", "interaction", ".0%", OUT),
    ("mean_key", "r", ".3f", {"d0": 1000}),
    ("residual", "share", ".0%", {}),
    ("residual", "top_share", ".0%", OUT),
    ("residual", "effective_rank", ".1f", OUT),
    ("across_prompts", "position", ".1%", OUT),
    ("across_prompts", "share", ".1%", OUT | {"function": "key"}),
    ("across_prompts", "share", ".1%", OUT | {"function": "line"}),
])  # fmt: skip
def test_sentences_show_means_over_heads_beside_those_of_the_null(report, name, key, form, labels):
    result, labels = report[name], {"tokens": "all", **labels}
    own, *nulls = (float(data[key].sel(labels).mean()) for data in (result.own, *result.nulls))
    low, high = (f"{getattr(result.numbers(key, **labels), end):{form}}" for end in ("low", "high"))
    expected = f"{own:{form}} [{low}, {high}] (random init {np.mean(nulls):{form}} ± {np.std(nulls, ddof=1):{form}})"
    assert any(expected in sentence for sentence in result.findings())


@pytest.mark.parametrize(("name", "key", "labels"), [
    ("three_axis", "r_within_rows", {"tokens": "all"}),
    ("variance", "position", OUT),
    ("variance", "interaction", OUT),
    ("residual", "share", OUT),
    ("across_prompts", "position", OUT),
])  # fmt: skip
def test_sentences_name_the_head_where_it_is_highest(report, name, key, labels):
    series = report[name].sel(**labels)[key].to_series()
    layer, head = series.idxmax()
    assert any(f"layer {layer} head {head} ({series.max():.3f})" in one for one in report[name].findings())


def test_the_headlines_keep_their_names(report):
    shares = [f"share_{name}" for name in ("q", "k", "d", "qk", "qd", "kd", "qkd")]
    axes = ["three_axis_r", "three_axis_r_within_rows"]
    named = [*axes, "position_share", *shares, "mean_key_r", "residual_share", "residual_std"]
    assert report.frame().columns[: 2 + len(named)].tolist() == ["layer", "head", *named]


# Heads of one's choice


def test_heads_of_different_layers_are_measured_and_no_others(mini, prompts, report):
    heads = [(0, 1), (2, 3), (2, 0)]
    few = analyze(mini, prompts, measures=MEASURES, heads=heads, null_seeds=(), progress=False)
    for name, key in [
        ("three_axis", "r_within_rows"),
        ("variance", "position"),
        ("mean_key", "r"),
        ("residual", "share"),
        ("residual", "pair_share"),
        ("across_prompts", "position"),
    ]:
        found, whole = (one[name].sel(**OUT)[key] for one in (few, report))
        first = {dim: 0 for dim in found.dims if dim not in ("layer", "head")}
        chosen, same = (one.isel(first).transpose("layer", "head").to_series() for one in (found, whole))
        chosen = chosen.dropna()
        assert sorted(chosen.index) == sorted(heads), name
        assert chosen.to_numpy() == pytest.approx(same[chosen.index].to_numpy(), rel=1e-4, abs=1e-5)
    assert "mean over 3 heads" in few["three_axis"].findings()[0]
    assert all(result.plot(kind).data for result in few.values() for kind in result.kinds)
    shown = few["attention_examples"].own
    assert set(zip(shown["layer"].values, shown["head"].values, strict=True)) <= set(heads)

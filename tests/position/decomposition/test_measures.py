"""All measures: sentences of their numbers, headlines, heads of one's choice."""

import numpy as np
import pytest

from tl_posgen.core.engine import analyze

ALL, OUT = {"tokens": "all"}, {"tokens": "without first"}
HIGHEST = [  # that sentences name, with its head
    ("three_axis", "r_within_rows", ALL),
    *(("variance", part, OUT) for part in ("position", "interaction")),
    ("residual", "share", OUT),
]


@pytest.mark.parametrize(("name", "key", "form", "labels"), [
    *(("three_axis", "r", ".3f", labels) for labels in (ALL, OUT)),
    ("three_axis", "r_within_rows", ".3f", ALL),
    *(("variance", part, ".0%", OUT) for part in ("position", "content", "interaction")),
    ("variance", "additive_r", ".3f", OUT),
    ("mean_key", "r", ".3f", ALL | {"d0": 63}),
    ("residual", "share", ".0%", ALL),
    ("residual", "top_share", ".0%", OUT),
])  # fmt: skip
def test_sentences_show_means_over_heads_beside_those_of_the_null(report, name, key, form, labels):
    result = report[name]
    own, *nulls, shuffled = (float(data[key].sel(labels).mean()) for data in (result.own, *result.nulls))
    low, high = (f"{getattr(result.numbers(key, **labels), end):{form}}" for end in ("low", "high"))
    random = f"random init {np.mean(nulls):{form}} ± {np.std(nulls, ddof=1):{form}}"
    expected = f"{own:{form}} [{low}, {high}] ({random}, shuffled {shuffled:{form}}"
    assert any(expected in sentence for sentence in result.findings())


def test_sentences_name_the_head_where_it_is_highest(report):
    for name, key, labels in HIGHEST:
        series = report[name].sel(**labels)[key].to_series()
        layer, head = series.idxmax()
        assert any(f"L{layer}H{head} ({series.max():.3f})" in one for one in report[name].findings()), name


def test_the_headlines_keep_their_names(report):
    axes = ["three_axis_r", "three_axis_r_within_rows"]
    parts = ["additive_r", *(f"{part}_share" for part in ("position", "content", "interaction")), "std"]
    named = [*axes, *parts, "mean_key_r", "residual_share", "residual_std"]
    assert report.frame().columns[: 2 + len(named)].tolist() == ["layer", "head", *named]
    assert [short for short, _ in report["variance"].headline_labels().values()] == ["r", "pos", "cont", "inter", "std"]


@pytest.mark.parametrize("name", ["three_axis", "variance", "mean_key"])
def test_every_random_init_is_another_model(report, name):
    trained, one, other = (report[name].frame(init=init).iloc[:, 2] for init in ("trained", 0, 1))
    assert not np.allclose(trained, one)
    assert not np.allclose(one, other)


@pytest.mark.longer
def test_heads_of_different_layers_are_measured_and_no_others(mini, prompts, report):
    heads = [(0, 1), (2, 3), (2, 0)]
    few = analyze(mini, prompts, measures=list(report), heads=heads, null_seeds=(), progress=False)
    for name, key, labels in [*HIGHEST, ("mean_key", "r", OUT)]:
        found, whole = (one[name].sel(**labels)[key] for one in (few, report))
        first = {dim: 0 for dim in found.dims if dim not in ("layer", "head")}
        chosen, same = (one.isel(first).transpose("layer", "head").to_series() for one in (found, whole))
        chosen = chosen.dropna()
        assert sorted(chosen.index) == sorted(heads), name
        assert chosen.to_numpy() == pytest.approx(same[chosen.index].to_numpy(), rel=1e-4, abs=1e-5)
    assert "mean over 3 heads" in few["three_axis"].findings()[0]
    assert "Not defined" not in " ".join(few["residual"].findings())
    assert all(result.plot(kind).data for result in few.values() for kind in result.kinds)
    shown = few["attention_examples"].own
    assert set(zip(shown["layer"].values, shown["head"].values, strict=True)) <= set(heads)

"""All measures: sentences of their numbers, headlines, heads of one's choice."""

import pytest

from tl_posgen.core.engine import analyze

ALL, OUT = {"tokens": "all"}, {"tokens": "without first"}
HIGHEST = [  # that sentences name, with its head
    ("three_axis", "r_within_rows", ALL),
    *(("variance", part, OUT) for part in ("position", "interaction")),
    ("residual", "share", OUT),
]


def test_the_headlines_keep_their_names(report):
    axes = ["three_axis_r", "three_axis_r_within_rows"]
    parts = ["additive_r", *(f"{part}_share" for part in ("position", "content", "interaction")), "std"]
    named = [*axes, *parts, "mean_key_r", "residual_share", "residual_std"]
    assert report.frame().columns[: 2 + len(named)].tolist() == ["layer", "head", *named]
    assert [short for short, _ in report["variance"].headline_labels().values()] == [
        "additive r",
        "pos",
        "cont",
        "inter",
        "std",
    ]


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

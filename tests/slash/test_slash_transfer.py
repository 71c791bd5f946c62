"""Slash-dominant heads kept on random tokens."""

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

import tl_posgen
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.tokens import to_prompts
from tl_posgen.report.sentences import with_interval
from tl_posgen.slash import slash_transfer
from tl_posgen.slash.layer_means import SUFFIXES
from tl_posgen.slash.slash_transfer import random_prompts

CUT = {"length": 112, "n_prompts": 2}


@pytest.fixture(scope="module")
def result(report):
    return report["slash_transfer"]


def test_random_prompts_keep_first_tokens_and_lengths_and_nothing_else():
    tokens = [torch.arange(50), torch.arange(7, 20)]
    drawn = random_prompts(tokens, 1000, seed=1)
    assert [len(prompt) for prompt in drawn] == [50, 13]
    assert [int(prompt[0]) for prompt in drawn] == [0, 7]
    assert (drawn[0] == tokens[0]).sum() < 5
    assert torch.equal(drawn[0], random_prompts(tokens, 1000, seed=1)[0])
    assert not torch.equal(drawn[0], random_prompts(tokens, 1000, seed=2)[0])


def test_scores_on_random_tokens_are_those_of_an_analysis_of_them(mini, alice, result):
    tokens = to_prompts(mini, alice, **CUT)
    drawn = torch.stack(random_prompts(tokens, mini.cfg.d_vocab, seed=0))
    direct = tl_posgen.analyze(mini, drawn, measures="slash", null_seeds=(), progress=False)["slash"].dataset
    for name in ("score", "score_without_first_token"):
        np.testing.assert_allclose(result.dataset[name].sel(source="random"), direct[name], atol=1e-6)


def test_scores_on_text_are_those_of_the_measure_slash(report, result):
    slash = report["slash"].dataset
    np.testing.assert_array_equal(result.dataset["score"].sel(source="natural"), slash["score"])
    np.testing.assert_array_equal(result.dataset["natural"], slash["best_score"])
    uniform = slash["uniform"].sel(distance=slash["best_distance"])
    np.testing.assert_array_equal(result.dataset["uniform_score"], uniform)
    np.testing.assert_array_equal(result.null["natural"], report["slash"].null["best_score"])


def test_agreement_is_over_the_heads_of_both_sources(result):
    natural, random = (result.dataset.score.sel(source=source, distance=1) for source in ("natural", "random"))
    at = result.dataset.sel(at=1, variant="all")
    assert float(at.pearson) == pytest.approx(np.corrcoef(natural.values.flat, random.values.flat)[0, 1])
    assert float(at.spearman) == pytest.approx(spearmanr(natural.values.flat, random.values.flat).statistic)
    both, any_of_them = ((natural >= 0.1) & (random >= 0.1), (natural >= 0.1) | (random >= 0.1))
    assert float(at.jaccard) == pytest.approx(float(both.sum() / any_of_them.sum()))
    assert int(at.n_natural) == int((natural >= 0.1).sum())
    assert int(at.n_random) == int((random >= 0.1).sum())


def test_the_interval_is_fishers_over_heads(result):
    r = result.dataset["pearson"].values
    n = result.dataset.sizes["layer"] * result.dataset.sizes["head"]
    for end, side in (("low", -1), ("high", 1)):
        expected = np.tanh(np.arctanh(r) + side * 1.96 / np.sqrt(n - 3))
        np.testing.assert_allclose(result.dataset[f"pearson_{end}"], expected)
        assert result.summary[f"pearson_{end}"] == result.dataset[f"pearson_{end}"].sel(variant="all").values.tolist()


@pytest.mark.parametrize("of", ["bundled", "stories"])
def test_slash_heads_of_a_trained_model_stay_so_on_random_tokens(request, mini, alice, of):
    model, text = mini, alice
    if of == "stories":
        model, text = (request.getfixturevalue(name) for name in ("stories", "tinystories"))
    result = slash_transfer(model, text, length=192, n_prompts=1, distances=[0, 1], null_seeds=(), progress=False)
    strongest = result.frame().nlargest(3 if of == "stories" else 2, "natural")
    assert (strongest["best_distance"] == 1).all()
    assert (strongest["random"] > 10 * strongest["uniform_score"]).all()
    assert float(result.dataset.pearson.sel(at=1, variant="all")) > 0.8


def test_examples_are_the_patterns_of_the_strongest_heads_on_both_texts(mini, alice, result):
    data = result.dataset
    place = tuple(map(int, data["natural"].to_series().idxmax()))
    assert (int(data.example_layer[0]), int(data.example_head[0])) == place
    tokens = to_prompts(mini, alice, length=112, n_prompts=1)
    for source, prompt in {"natural": tokens[0], "random": random_prompts(tokens, mini.cfg.d_vocab, 0)[0]}.items():
        kept = []
        run_capture(mini, prompt[None], kept.append, frozenset({"pattern"}), layers=[place[0]])
        expected = kept[0].pattern[place[1]]
        np.testing.assert_allclose(data.pattern.sel(source=source).isel(example=0), expected, atol=1e-6)


def test_its_heads_are_ranked_by_their_score_on_text(report, result):
    top = report.heads("slash_transfer", top=3)
    assert top.columns.tolist() == ["layer", "head", "natural"]
    assert top["natural"].tolist() == np.sort(result.dataset["natural"].values.flat)[::-1][:3].tolist()


def test_the_short_table_has_a_row_a_distance(result):
    short = result.table()
    assert short.shape == (5, 8)
    np.testing.assert_array_equal(short["r"], result.dataset.pearson.sel(variant="all"))


def test_the_sentences_tell_the_numbers_and_the_null(result):
    whole, null = (data.sel(variant="all") for data in (result.dataset, result.null))
    most = int(whole.n_natural.argmax("at"))
    assert result.summary["at"] == most == 1
    first, second = result.findings()
    named = ("pearson", "pearson_low", "pearson_high")
    own, rest = ({name: float(result.dataset[name].sel(variant=one, at=1)) for name in named} for one in SUFFIXES)
    assert first == (
        "At D = 1 slash scores on random tokens follow those on text over heads with "
        f"r = {with_interval(own, 'pearson')} (random init {float(null.pearson[1]):.3f}; without the first token "
        f"{with_interval(rest, 'pearson')}); {int(whole.n_natural[1])} heads are dominant on text, "
        f"{int(whole.n_random[1])} on random tokens, overlap (Jaccard) {float(whole.jaccard[1]):.2f}."
    )
    layer, head = whole["natural"].to_series().idxmax()
    one = whole.sel(layer=layer, head=head)
    of_null = null.stack(place=("layer", "head")).isel(place=null["natural"].values.argmax())
    assert second == (
        f"The strongest, layer {layer} head {head} ({float(one.natural):.3f}) at D = {int(one.best_distance)} on text, "
        f"scores {float(one.random):.3f} (random init {float(of_null.random):.3f}) on random tokens."
    )


def test_it_comes_back_from_disk_with_a_row_a_head(result, tmp_path):
    frame = result.frame()
    assert len(frame) == 16
    assert {"natural", "random", "random_without_first_token", "uniform_score"} <= set(frame)
    loaded = tl_posgen.load(result.save(tmp_path / "r.nc"))["slash_transfer"]
    assert loaded.dataset.equals(result.dataset)
    assert loaded.provenance["seed"] == 0


def test_the_scatter_has_a_point_a_head(result):
    traces = result.plot(kind="scatter").data
    assert len(traces) == 2 * 5 * 3
    trained, null = traces[3:5]
    assert len(null.x) == len(trained.x) == 16
    np.testing.assert_array_equal(trained.y, result.dataset["score"].sel(source="random", distance=1).values.flat)
    np.testing.assert_array_equal(null.x, result.null["score"].sel(source="natural", distance=1).values.flat)


def test_the_scatter_titles_tell_the_correlation_and_the_null(result):
    r, of_null = (float(data.pearson.sel(variant="all", at=1)) for data in (result.dataset, result.null))
    titles = [annotation.text for annotation in result.plot(kind="scatter").layout.annotations]
    assert titles[1].startswith(f"D = 1: r {r:.2f} (random init {of_null:.2f})<br>ρ ")


def test_the_maps_are_patterns_on_text_and_on_random_tokens_beside_the_null(mini, alice, result, tmp_path):
    figure = tl_posgen.load(result.save(tmp_path / "r.nc"))["slash_transfer"].plot("maps")
    assert len(figure.data) == 2 * (2 + 1)
    text = to_prompts(mini, alice, length=112, n_prompts=1)
    drawn, strongest = random_prompts(text, mini.cfg.d_vocab, 0), result.dataset["natural"].to_series().nlargest(2)
    rows = zip(strongest.index, zip(figure.data[:4:2], figure.data[1:4:2], strict=True), strict=True)
    for (layer, head), traces in rows:
        for prompt, trace in zip((text[0], drawn[0]), traces, strict=True):
            kept = []
            run_capture(mini, prompt[None], kept.append, layers=[layer])
            one, triangle = kept[0], torch.ones(112, 112).tril() > 0
            products = one.geometry.scale * one.rotated_q[head].double() @ one.rotated_k[head].double().T
            expected = products.masked_fill(~triangle, -torch.inf).softmax(-1)
            np.testing.assert_allclose(trace.z[triangle], expected[triangle], atol=1e-5)
            assert np.isnan(trace.z[~triangle]).all()
    null = result.null["pattern"].isel(example=0).sel(source="random").values
    np.testing.assert_array_equal(np.nan_to_num(figure.data[5].z), null)
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (0, 1)
    titles = [annotation.text for annotation in figure.layout.annotations]
    (layer, head), score = strongest.index[0], strongest.iloc[0]
    assert titles[0] == f"L{layer}H{head} on text: slash score {score:.3f} at D = 1 · mini"
    at = result.dataset["random"].sel(layer=layer, head=head)
    assert titles[1].startswith(f"L{layer}H{head} on random tokens: slash score {float(at):.3f} at")
    assert titles[4].endswith("· random init (seed 0)")


def test_a_page_shows_a_head_on_text_beside_random_tokens(result):
    page = result.show(example=1).local_src
    assert '"text", "random"' in page
    labels = result.measure.tokens.labels(result.dataset)
    assert len(labels) == 3
    assert f"layer {int(result.dataset.example_layer[1])}, head" in labels[1]


def test_an_unknown_kind_is_refused(result):
    with pytest.raises(ValueError, match="nonsense"):
        result.plot(kind="nonsense")

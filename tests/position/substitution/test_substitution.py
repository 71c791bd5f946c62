"""Substituted scores: the reference values of real models, and the search's honesty."""

import json
import re

import numpy as np
import pytest
import torch
from declared import assert_declared

import tl_posgen
from tl_posgen.errors import InputError
from tl_posgen.models.loading.random_like import random_like
from tl_posgen.models.loss import prompts_of_one_length, token_losses
from tl_posgen.models.tokens import to_prompts
from tl_posgen.position.claims import two_axes
from tl_posgen.position.decomposition import variance
from tl_posgen.position.decomposition.pair_weights_fit import LONGEST
from tl_posgen.position.substitution import (
    Substitution,
    by_constant,
    by_free_split,
    by_split,
    substitute,
    substitution,
    triangle,
)
from tl_posgen.position.substitution.optimise_split import BY_WIDTH, FAMILIES, WIDTHS, free_splits
from tl_posgen.position.substitution.substituted_loss import conditions_of, recovered
from tl_posgen.position.substitution.substitution import two_sets
from tl_posgen.summary import jsonable

pytestmark = pytest.mark.slow

QUIET = {"progress": False, "null_seeds": ()}
CONDITIONS = (
    *("unchanged", "uniform_attention", "three_axis", "three_axis_near_8", "three_axis_attention"),
    *("mean_key_0", "mean_key_64", "mean_key_1000", "triangle_8", "triangle_256", "mean_query_8", "k_q_simplify"),
    *("own_profile", "query_profile", "position", "content"),
)
STORIES = {
    **{"unchanged": 1.754, "uniform_attention": 4.193, "three_axis": 4.186, "mean_key_64": 3.268},
    **{"three_axis_near_8": 2.585, "three_axis_attention": 3.170, "mean_query_8": 2.479, "k_q_simplify": 4.358},
    **{"triangle_8": 1.870, "own_profile": 2.117, "query_profile": 1.793, "position": 2.570},
}
FEW = {"widths": (4,), "dummy_distances": (0,)}
MINI = (
    *(3.4464, 4.7218, 4.2407, 3.9327, 3.9509, 3.5687, 4.1845, 4.4452, 3.5230, 4.2772, 4.0952, 4.3603),
    *(3.5773, 3.5660, 4.2145, 4.2576),
)


@pytest.fixture(scope="session")
def result(mini, alice):
    return substitution(mini, alice, length=24, n_prompts=4, **FEW, search_steps=3, search_prompts=4, progress=False)


@pytest.fixture(scope="session")
def unsearched(mini, alice):
    return substitution(mini, alice, length=16, n_prompts=4, **FEW, search=False, null_seeds=(0, 1), progress=False)


def test_stories260k_has_the_reference_losses(stories, tinystories):
    tokens = torch.tensor(stories.tokenizer(tinystories[:8000]).input_ids[:1024]).view(4, 256)
    found = substitution(stories, tokens, widths=(8,), dummy_distances=(64,), search=False, **QUIET).dataset
    for condition, loss in STORIES.items():
        assert float(found.loss_mean.sel(condition=condition)) == pytest.approx(loss, abs=0.01), condition
    assert float(found.loss_mean.sel(condition="content")) > 4.2
    assert float(found.recovered.sel(condition="triangle_8")) == pytest.approx(0.95, abs=0.005)
    assert float(found.r.sel(condition="three_axis").mean()) > 0.85  # a good correlation, and yet:
    assert float(found.recovered.sel(condition="three_axis")) < 0.01
    assert float(found.recovered.sel(condition="three_axis_near_8")) > 0.6  # the same form, other weights


def test_the_bundled_model_has_its_reference_losses(mini, alice):
    found = substitution(mini, alice, length=64, n_prompts=2, search=False, **QUIET)
    losses = found.dataset.loss_mean.to_series().to_dict()
    assert losses == pytest.approx(dict(zip(CONDITIONS, MINI, strict=True)), abs=2e-4)
    # the better correlation recovers less
    assert found.summary["r_triangle_256"] == pytest.approx(0.9185, abs=2e-4)
    assert found.summary["r_triangle_8"] == pytest.approx(0.8984, abs=2e-4)
    assert found.summary["recovered_triangle_256"] < 0.4 < 0.9 < found.summary["recovered_triangle_8"]


def test_shares_run_from_uniform_to_unchanged(result):
    recovered = result.dataset.recovered
    assert float(recovered.sel(condition="unchanged")) == 1
    assert float(recovered.sel(condition="uniform_attention")) == 0


def test_where_attention_is_worth_nothing_no_share_is_told(mini, alice):
    untrained = random_like(mini, 0)
    found = substitution(untrained, alice, length=16, n_prompts=2, **FEW, search=False, **QUIET)
    assert found.summary["nothing_to_recover"]
    (sentence,) = found.findings()
    assert sentence.endswith("(no null measured): there is nothing to recover.")
    assert found.table()[["recovered", "low", "high"]].isna().all(axis=None)
    assert set(found.plot("loss").data[0].text) == {""}
    assert "nan" not in found.plot("correlation").layout.title.text


@pytest.mark.parametrize("worth", [0.0, 0.009, -0.5])
def test_a_share_of_nothing_is_no_number(worth):
    assert np.isnan(recovered(np.ones((3, 2)), np.ones(2), np.ones(2) + worth)).all()
    np.testing.assert_allclose(recovered(np.ones((1, 2)), np.ones(2), np.full(2, 1.011)), 1)


def test_what_is_so_by_definition_has_no_width_and_a_mixture_has_its_own():
    unchanged, uniform = np.array([1.0, 2.0, 4.0]), np.array([3.0, 3.5, 4.5])
    mixed = [share * unchanged + (1 - share) * uniform for share in (1.0, 0.0, 0.25)]
    for column in recovered(np.array(mixed), unchanged, uniform):
        np.testing.assert_allclose(column, [1, 0, 0.25], atol=1e-12)
    share, low, high = recovered(np.array([[1.0, 3.0, 4.1]]), unchanged, uniform)
    assert low < share < high
    assert np.isnan(recovered(np.ones((1, 2)), np.full(2, 2.0), np.array([2.06, 2.0]))[1:]).all()


def test_the_random_init_has_no_share_to_show(unsearched):
    assert abs(unsearched.null_summary["worth"]) < 0.01
    assert unsearched.null.recovered.isnull().all()
    assert unsearched.dataset.recovered.notnull().all()


def test_the_unchanged_model_has_no_attention_error(result):
    unchanged = result.dataset.sel(condition="unchanged")
    np.testing.assert_allclose(unchanged.attention_kl, 0, atol=1e-9)
    np.testing.assert_allclose(unchanged.r, 1)


def test_descent_lowers_the_loss_it_descends_on(result):
    chosen_on = result.dataset.search_loss_chosen_on
    assert float(chosen_on.sel(family="distribution")) < float(chosen_on.sel(family="triangle"))
    assert float(chosen_on.sel(family="free")) < float(chosen_on.sel(family="triangle"))


def test_imitation_lowers_the_divergence_of_the_predictions(result):
    divergence = result.dataset.search_prediction_kl
    assert float(divergence.sel(family="imitating")) < float(divergence.sel(family="triangle"))


def test_no_prompt_is_both_searched_and_reported_on(mini, alice):
    rows = prompts_of_one_length(mini, alice, 24, 5)
    reported, others = two_sets(mini, rows, None, 2, 32)
    assert torch.equal(reported, rows[:2])
    assert torch.equal(others, rows[2:])
    everything, none = two_sets(mini, rows, None, None, 32)
    assert torch.equal(everything, rows)
    assert none is None  # then one half is kept to report on


def test_other_prompts_are_cut_from_the_rest_of_the_text(mini, alice):
    reported, others = two_sets(mini, alice, 24, 2, 3)
    rows = prompts_of_one_length(mini, alice, 24, 5)
    assert torch.equal(torch.cat([reported, others]), rows)


def test_a_short_text_is_searched_on_one_half(mini, alice):
    rows = prompts_of_one_length(mini, alice, 24, 4)
    found = substitution(mini, rows, **FEW, search_steps=0, head_costs=False, **QUIET)
    assert (found.dataset.attrs["held_out_prompts"], found.dataset.attrs["search_prompts"]) == (2, 2)


def test_the_free_split_of_a_triangle_is_that_triangles(mini, alice):
    tokens = prompts_of_one_length(mini, alice, 24, 2)
    free = token_losses(mini, tokens, substitute(mini, by_free_split(free_splits(mini, 5.0))))
    fixed = token_losses(mini, tokens, substitute(mini, by_split(triangle(5))))
    torch.testing.assert_close(free, fixed, atol=1e-5, rtol=1e-5)


def test_every_width_is_the_best_on_the_prompts_of_the_search(result, mini, alice):
    others = prompts_of_one_length(mini, alice, 24, 6)[2:]
    for family, by in BY_WIDTH.items():
        losses = [float(token_losses(mini, others, substitute(mini, by(width))).mean()) for width in WIDTHS]
        suffix = "" if family == "triangle" else f"_{family}"
        assert result.summary[f"search_width{suffix}"] == WIDTHS[int(np.argmin(losses))]
        assert float(result.dataset.search_loss_chosen_on.sel(family=family)) == pytest.approx(min(losses), rel=1e-6)


def test_the_fit_by_attention_is_left_out_of_long_prompts():
    options = Substitution()
    conditions = [list(conditions_of(options, length)) for length in (LONGEST, LONGEST + 1)]
    assert [name for name in conditions[0] if name not in conditions[1]] == ["three_axis_attention"]


def test_what_was_searched_is_a_distribution_per_head(result):
    np.testing.assert_allclose(result.dataset.distribution.sum("distance"), 1)


def test_doses_run_from_the_stand_in_to_the_unchanged_model(result, mini, alice):
    dose, loss = result.dataset.dose_loss.sel(stand_in="triangle_4"), result.dataset.loss_mean
    assert float(dose.sel(residual_share=0)) == float(loss.sel(condition="triangle_4"))
    assert float(dose.sel(residual_share=1)) == float(loss.sel(condition="unchanged"))
    half = substitute(mini, by_split(triangle(4)), residual=0.5)
    tokens = prompts_of_one_length(mini, alice, 24, 2)
    assert float(dose.sel(residual_share=0.5)) == pytest.approx(float(token_losses(mini, tokens, half).mean()))


def test_the_interval_holds_the_share(result):
    data = result.dataset
    assert (data.recovered_low <= data.recovered).all()
    assert (data.recovered <= data.recovered_high).all()


def test_the_authors_settings_leave_early_layers_and_high_scores_alone(mini, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": mini.cfg.d_vocab, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=6, initializer_range=0.3)).save_pretrained(tmp_path)
    mini.tokenizer.save_pretrained(tmp_path)
    deep = tl_posgen.load_model(tmp_path)
    tokens = torch.arange(24).view(2, 12) + 1
    options = {"widths": (4,), "dummy_distances": (1000,), "search": False, "progress": False}
    options |= {"gamma": 0.97, "from_layer": 4}
    found = substitution(deep, tokens, **options)
    r = found.dataset.r.sel(condition="mean_key_1000")
    assert r.isel(layer=slice(4)).isnull().all()
    assert r.isel(layer=slice(4, None)).notnull().all()
    everything = substitution(deep, tokens, **(options | {"gamma": 1.0}), null_seeds=())
    kl = [float(x.dataset.attention_kl.sel(condition="mean_key_1000").mean()) for x in (found, everything)]
    assert 0 < kl[0] < kl[1]
    assert found.null is not None


def test_chosen_heads_are_replaced_searched_and_costed_alone(mini, alice):
    chosen = [(1, 0), (1, 3), (2, 2)]
    options = {"length": 16, "n_prompts": 2, **FEW, "search_prompts": 2, "search_steps": 1, "head_costs": True}
    data = substitution(mini, alice, heads=chosen, from_layer=1, **options, **QUIET).dataset
    for values in (data.r.sel(condition="triangle_4"), data.uniform_cost, data.turn.isel(free_family=0, plane=0)):
        assert np.argwhere(values.transpose("layer", "head").notnull().values).tolist() == [list(x) for x in chosen]
    d_head = mini.cfg.d_head
    numbers = dict(zip(FAMILIES, (1, 1, 1, 24, 2 * d_head, 2 * d_head, d_head, d_head), strict=True))
    expected = [n if family in BY_WIDTH else len(chosen) * n for family, n in numbers.items()]
    assert data.search_parameters.values.tolist() == expected
    hooks = substitute(mini, by_split(triangle(4)), layers=[1], heads=[0, 3])
    hooks += substitute(mini, by_split(triangle(4)), layers=[2], heads=[2])
    losses = token_losses(mini, prompts_of_one_length(mini, alice, 16, 2), hooks).mean(1)
    np.testing.assert_allclose(data.loss.sel(condition="triangle_4"), losses, rtol=1e-6)
    with pytest.raises(InputError, match="from_layer 3 leaves no layer"):
        substitution(mini, alice, heads=chosen, from_layer=3, **options, **QUIET)


def test_the_null_is_the_random_init_of_the_same_seed(unsearched, mini, alice):
    tokens = prompts_of_one_length(mini, alice, 16, 2)
    for seed, null in enumerate(unsearched.nulls):
        expected = token_losses(random_like(mini, seed), tokens).mean(1)
        np.testing.assert_allclose(null.loss.sel(condition="unchanged"), expected)
        assert null.attrs["model"] == f"random init (seed {seed})"


def test_every_head_has_its_costs(result, mini):
    assert result.dataset.residual_cost.shape == (mini.cfg.n_layers, mini.cfg.n_heads)
    assert result.dataset.uniform_cost.notnull().all()


def test_head_costs_are_taken_where_a_split_is_searched_unless_said_otherwise(unsearched):
    assert "residual_cost" not in unsearched.dataset
    asked = [Substitution(search=search).costs_heads for search in (True, False)]
    assert asked == [True, False]
    assert not Substitution(head_costs=False).costs_heads


def test_tokens_are_coloured_by_the_change_of_their_loss(unsearched, mini, alice):
    data = unsearched.dataset
    lines = unsearched.measure.tokens.labels(data)
    assert [line.split(":")[0] for line in lines[1:]] == [
        "position",
        "content",
        "three-axis fit, all pairs",
        "uniform attention",
    ]
    tokens = to_prompts(mini, alice, length=data.sizes["shown_target"] + 1, n_prompts=1)[0][None]
    changed = token_losses(mini, tokens, substitute(mini, by_constant)) - token_losses(mini, tokens)
    shown = data["token_change"].sel(condition="uniform_attention").values
    np.testing.assert_allclose(shown, changed[0].numpy(), atol=1e-5)
    assert f"{shown[5]:.4f}".rstrip("0") in unsearched.show(4).local_src


def test_every_variable_is_declared(result, unsearched):
    assert_declared(result)
    assert_declared(unsearched)


def test_every_figure_is_drawn_again_from_the_file(result, unsearched, tmp_path):
    assert result.kinds == ["loss", "dose", "correlation", "search", "splits", "heads"]
    assert unsearched.kinds == ["loss", "dose", "correlation"]
    loaded = tl_posgen.load(result.save(tmp_path / "r.nc"))["substitution"]
    assert loaded.dataset.identical(result.dataset)
    assert loaded.summary == pytest.approx(result.summary, nan_ok=True)
    for kind in result.kinds:
        assert loaded.plot(kind).to_json() == result.plot(kind).to_json()
    with pytest.raises(InputError, match="kind='search'"):
        unsearched.plot("search")


def test_figures_draw_the_data(result):
    data = result.dataset
    own, null = result.plot("loss").data
    assert own.y.tolist() == data.loss_mean.values.tolist()
    assert list(own.text) == [f"{share:.0%}" for share in data.recovered.values]
    assert null.y.tolist() == result.null.loss_mean.values.tolist()
    dose = {trace.name: trace for trace in result.plot("dose").data}
    np.testing.assert_array_equal(dose["triangle of width 4<br>mini"].y, data.dose_loss.sel(stand_in="triangle_4"))
    points = {trace.name: trace for trace in result.plot("correlation").data}
    assert points["triangle of width 4"].x[0] == pytest.approx(result.summary["r_triangle_4"])
    assert points["triangle of width 4"].y[0] == result.summary["loss_triangle_4"] - result.summary["loss_unchanged"]
    (bars,) = result.plot("search").data
    np.testing.assert_array_equal(bars.y, data.search_recovered)
    splits = result.plot("splits").data
    np.testing.assert_allclose(splits[0].y, data.distribution.sel(layer=0).mean("head"))
    assert sum(bool(trace.showlegend) for trace in splits) == data.sizes["layer"]


def test_sentences_and_titles_say_the_summary(result):
    json.dumps(jsonable(result.summary), allow_nan=False)
    own, text = result.summary, " ".join(result.findings())
    data = result.dataset
    assert own["r_three_axis"] == pytest.approx(float(data.r.sel(condition="three_axis").mean()))
    assert own["recovered_three_axis"] == float(data.recovered.sel(condition="three_axis"))
    assert own["search_recovered_free"] == float(data.search_recovered.sel(family="free")) == own["split_recovered"]
    assert f"r = {own['r_three_axis']:.3f}; in their place it recovers {own['recovered_three_axis']:.1%}" in text
    assert own["best"] == "triangle_4"
    best, free = (
        "{:.1%} [{:.1%}, {:.1%}]".format(*(own[name.format(end)] for end in ("", "_low", "_high")))
        for name in ("recovered_best{}", "search_recovered_free{}")
    )
    assert f"(triangle of width 4, the best of 6 splits on these prompts) recovers {best} of the" in text
    assert f"of the {own['worth']:.3f} [{own['worth_low']:.3f}, {own['worth_high']:.3f}] nats between" in text
    assert f"(random init {result.null_summary['worth']:.4f} nats)" in text
    assert f"a mean rotation and a reference key per head {free}." in text
    assert f"their KL from the unchanged model's is {own['search_prediction_kl_triangle']:.3f} nats" in text
    assert f"share recovered {own['r_rank']:.2f}, of" in result.plot("correlation").layout.title.text


def test_no_sentence_and_no_legend_has_an_internal_name(result):
    drawn = [result.plot(kind) for kind in ("loss", "dose", "correlation", "splits")]
    legends = [str(trace.name) for figure in drawn for trace in figure.data]
    titles = [figure.layout.title.text for figure in drawn]
    titles += [note.text for figure in drawn for note in figure.layout.annotations]
    ticks = [str(x) for x in drawn[0].data[0].x]
    assert "triangle of width 4" in ticks
    for words in (*result.findings(), *legends, *titles, *ticks):
        assert not re.search(r"_\d|[a-z]_[a-z]|Rbar|mean turn", words), words


@pytest.mark.parametrize(("name", "encoding"), [("gpt2", "absolute"), ("bloom", "alibi")])
def test_what_holds_by_construction_without_rope_is_said_and_nothing_else(family_model, name, encoding):
    model = family_model(name, "bridge")
    tokens = torch.randint(0, model.cfg.d_vocab, (2, 12), generator=torch.Generator().manual_seed(0))
    options = {"widths": (4,), "dummy_distances": (2,), "search": False, "null_seeds": (), "progress": False}
    found = substitution(model, tokens, **options)
    assert found.provenance["encoding"] == encoding
    loss = found.dataset.loss_mean
    for split in ("mean_key_2", "triangle_4", "own_profile", "query_profile"):
        assert float(loss.sel(condition=split)) == pytest.approx(float(loss.sel(condition="unchanged")), abs=1e-4)
    assert found.findings() == [found.caveat]
    assert "by construction" in found.caveat
    assert two_axes(variance(model, tokens, null_seeds=(), progress=False), found).verdict == "open"


def test_findings_stand_without_a_null_and_with_several(unsearched):
    measure, own = unsearched.measure, unsearched.summary
    null = unsearched.null_summary
    assert f"(random init {null['worth']:.4f} ± {null.spread('worth'):.4f} nats)" in unsearched.findings()[0]
    assert "(no null measured); position alone" in measure.findings(own, None)[0]
    assert own["split_recovered"] == own["recovered_query_profile"]
    assert len(unsearched.findings()) == 2


def test_one_prompt_is_enough_without_a_search(mini):
    found = substitution(mini, torch.arange(16)[None] + 300, **FEW, search=False, **QUIET)
    assert found.dataset.recovered_low.isnull().all()
    assert found.summary["recovered_triangle_4"] == found.dataset.recovered.sel(condition="triangle_4")
    assert len(found.findings()) == 2


def test_the_table_ends_with_the_searched_splits(result):
    table = result.table()
    assert table["condition"].iloc[-1] == "searched: content"
    assert table.set_index("condition")["loss"]["unchanged"] == float(
        result.dataset.loss_mean.sel(condition="unchanged")
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"gamma": 0},
        {"gamma": 2},
        {"gamma": float("nan")},
        {"from_layer": 9},
        {"from_layer": -1},
        {"widths": ()},
        {"widths": (0,)},
        {"dummy_distances": (-1,)},
        {"dummy_distances": (float("inf"),)},
        {"search_prompts": 0},
        {"search_steps": -1},
        {"length": 9999},
        {"heads": [(0, 9)]},
    ],
)
def test_bad_input_is_refused(mini, alice, wrong):
    with pytest.raises(InputError):
        substitution(mini, alice, **{"length": 24, "n_prompts": 2, **wrong}, progress=False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"gamma": "all"},
        {"gamma": True},
        {"from_layer": 1.0},
        {"widths": 8},
        {"widths": "8"},
        {"dummy_distances": ("near",)},
        {"search": "free"},
        {"search_steps": None},
        {"head_costs": "all"},
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_wrong_types_are_refused_by_name(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        Substitution(**wrong)


def test_a_search_needs_two_prompts(mini):
    with pytest.raises(InputError, match="two"):
        substitution(mini, torch.arange(24)[None], n_prompts=1, progress=False)

"""Explanations of one row of scores: exact sums over terms, planes and sources, in every family; what is refused."""

import json

import numpy as np
import pytest
import torch
import xarray as xr
from captures import run
from families import UNEVEN, family_cases

import tl_posgen
from tl_posgen.errors import InputError, OutputError, UnsupportedModelError
from tl_posgen.models.session import session_of
from tl_posgen.prompt import reference_of, residual_sources
from tl_posgen.prompt.numbers import TERMS

TEXT = "it was the best of times, it was the worst of times. it was the age of wisdom."
PROMPT = "Down, down, down. Would the fall never end? I wonder how many miles I have fallen by this time?"
TOKENS = torch.randint(2, 60, (14,), generator=torch.manual_seed(0))


def largest_gap(model, tokens, found, cap=None):
    """max |sum over terms, planes and sources - the model's own score|, both less the baseline."""
    attrs, keys = found.trained.attrs, found.trained["key"].values
    (capture,) = run(model, tokens[None], {"attn_scores"}, layers=[attrs["layer"]])
    row = capture.attn_scores[attrs["head"], attrs["query"]].double().numpy()[keys]
    before_cap = row if cap is None else cap * np.arctanh(row / cap)
    weights = found.trained["attention"].values
    np.testing.assert_allclose(weights, np.exp(row - row.max()) / np.exp(row - row.max()).sum(), rtol=1e-6)
    total = found.trained["contribution"].sum(("term", "plane", "source")).values
    total = total + (found.trained["alibi"].values if "alibi" in found.trained else 0)
    others = (before_cap.sum() - before_cap) / (len(keys) - 1)
    base = others if "against_key" not in attrs else before_cap[list(keys).index(attrs["against_key"])]
    return abs(total - (before_cap - base)).max()


@pytest.mark.parametrize(("name", "backend"), family_cases("qwen3", "gemma2", "bloom", without=UNEVEN))
def test_terms_add_up_to_the_models_scores(family_model, name, backend):
    model = family_model(name, backend)
    cap, reference = 50.0 if name == "gemma2" else None, reference_of(model, TEXT, layers=[1])
    for side in ("key", "query"):
        found = tl_posgen.explain(model, TOKENS, 1, 2, against=-2, reference=reference, side=side)
        assert largest_gap(model, TOKENS, found, cap) < 2e-5
        assert found.trained.attrs["largest_difference"] < 2e-5
        contribution = found.trained["contribution"]
        assert {"embed", "L0H3", "L0 MLP"} <= set(contribution["source"].values)
        if not found.trained.attrs["note"].startswith("nothing rotates"):
            assert float(abs(contribution.sum(("plane", "source"))).max("key").min()) > 1e-3  # no term is empty
        else:
            assert float(abs(contribution.sel(term=["position", "interaction"])).max()) < 1e-6


@pytest.mark.parametrize(
    ("name", "backend", "exact"),
    [
        *(("llama", "hooked", 1e-12), ("neox", "hooked", 1e-12), ("gpt2", "hooked", 1e-12)),
        *(("gptj", "bridge", 1e-12), ("gpt2", "bridge", 1e-12)),
        *(("llama", "bridge", 1e-6), ("qwen3", "bridge", 1e-6), ("qwen3", "hooked", 1e-6)),  # RMSNorm in float32 there
    ],
)
def test_sums_are_exact_in_float64(family_model, family_directory, name, backend, exact):
    family_model(name, backend)  # skips where there is no HookedTransformer
    model = tl_posgen.load_model(family_directory(name), dtype="float64", backend=backend)
    found = tl_posgen.explain(model, TOKENS, 1, 1, reference=TEXT)
    assert largest_gap(model, TOKENS, found) < exact


def test_terms_are_those_of_the_split(mini, reference):
    parts = tl_posgen.split(mini, PROMPT, heads="2.3", reference=reference).isel(head=0, query=-1)
    for side in ("key", "query"):
        found = tl_posgen.explain(mini, PROMPT, head="2.3", against=3, reference=reference, side=side)
        summed = found.trained["contribution"].sum(("plane", "source"))
        for term in ("position", "key_part", "query_key"):
            expected = parts[term] - parts[term][3]
            np.testing.assert_allclose(summed.sel(term=term), expected, atol=1e-4)


def test_parts_of_the_users_give_what_the_sources_give(mini):
    tokens = tl_posgen.models.to_prompts(mini, PROMPT)[0]
    reference = reference_of(mini, layers=[1], n_prompts=1, sources=False)
    found = tl_posgen.explain(mini, tokens, 1, 2, against=0, reference=reference)
    written = residual_sources(mini, tokens, 1)
    values = dict(zip(written.names, written.values, strict=True))
    parts = {"rest of it": sum(value for name, value in values.items() if name != "L0H1"), "L0H1": values["L0H1"]}
    by_hand = tl_posgen.explain(mini, tokens, 1, 2, against=0, reference=reference, parts=parts)
    one, other = (each.trained["contribution"].sel(source="L0H1") for each in (by_hand, found))
    np.testing.assert_allclose(one, other, atol=1e-5)
    assert {"reference mean", "rest of it"} < set(by_hand.trained["source"].values)


def test_parts_of_the_users_must_add_up_or_leave_a_rest(mini, reference):
    tokens = tl_posgen.models.to_prompts(mini, PROMPT)[0]
    stream = run(mini, tokens[None], {"resid"}, layers=[2])[0].resid
    parts = {"half": stream / 2, "feature": stream / 4}
    options = {"head": "2.1", "reference": reference}
    with pytest.raises(InputError, match=r"do not add up .* off by .* where it reaches .*; give rest=True"):
        tl_posgen.explain(mini, tokens, parts=parts, **options)
    found = tl_posgen.explain(mini, tokens, parts=parts, rest=True, **options)
    assert list(found.trained["source"].values) == ["half", "feature", "rest", "reference mean"]
    assert largest_gap(mini, tokens, found) < 2e-5
    np.testing.assert_allclose(
        found.trained["contribution"].sel(source="rest"), found.trained["contribution"].sel(source="feature"), atol=1e-5
    )
    whole = tl_posgen.explain(mini, tokens, parts={"all of it": stream}, **options)
    assert largest_gap(mini, tokens, whole) < 2e-5


def test_frames_have_a_row_for_each_key_and_label(mini, reference):
    found = tl_posgen.explain(mini, PROMPT, head="L3H1", query=9, against=4, reference=reference)
    n_sources, n_planes = found.trained.sizes["source"], found.trained.sizes["plane"]
    assert len(found.frame(by=())) == 10
    assert len(found.frame()) == 40
    assert len(found.frame(by=("source", "plane"))) == 10 * n_sources * n_planes
    whole = found.frame(by=())
    for by in (("term",), ("plane",), ("source",), ("term", "plane", "source")):
        rows = found.frame(by)
        assert list(rows.columns) == ["key", "token", *by, "contribution"]
        np.testing.assert_allclose(rows.groupby("key")["contribution"].sum(), whole["contribution"], atol=1e-9)
    assert whole["contribution"][4] == pytest.approx(0, abs=1e-12)
    largest = found.largest(3, key=2)
    assert set(largest["key"]) == {2}
    assert largest["contribution"].abs().is_monotonic_decreasing
    assert found.frame("plane", 2).equals(found.frame("plane").query("key == 2").reset_index(drop=True))
    with pytest.raises(InputError, match="key 10: the query sees keys 0 to 9"):
        found.frame(key=10)
    with pytest.raises(InputError, match="by='head': choose any of term, plane, source"):
        found.frame(by="head")


@pytest.mark.parametrize("by", [("term",), ("source",), ("plane", "source")])
def test_alibi_is_a_row_of_its_own(family_model, by):
    found = tl_posgen.explain(family_model("bloom"), TOKENS, 1, 0, against=2, reference=TEXT)
    rows = found.frame(by)
    np.testing.assert_allclose(rows.groupby("key")["contribution"].sum(), found.frame(by=())["contribution"], atol=1e-9)
    np.testing.assert_allclose(found.frame(by=())["contribution"], found.trained["score"], atol=1e-4)
    alone = rows[(rows[list(by)] == "alibi").any(axis=1)]
    assert len(alone) == 14
    assert "nothing rotates" in found.trained.attrs["note"]


def test_a_query_in_a_window_explains_the_keys_that_it_sees(family_model):
    found = tl_posgen.explain(family_model("mistral"), TOKENS, 0, 1, query=10, reference=TEXT)
    assert found.trained["key"].values.tolist() == list(range(5, 11))
    assert found.trained["token"].sizes["key"] == 6


def test_two_prompts_leave_what_makes_the_difference(mini, reference):
    tokens = tl_posgen.models.to_prompts(mini, PROMPT)[0]
    other = tokens.clone()
    other[5] = 700
    found = tl_posgen.explain(mini, tokens, 3, 1, against=2, other=other, reference=reference)
    one, two = (tl_posgen.explain(mini, x, 3, 1, against=2, reference=reference) for x in (tokens, other))
    for name in ("contribution", "score"):
        np.testing.assert_allclose(found.trained[name], one.trained[name] - two.trained[name], atol=1e-12)
    assert " | " in found.trained["token"].values[5]
    assert found.key == int(abs(one.trained["attention"] - two.trained["attention"]).values.argmax())
    with pytest.raises(InputError, match="check deletes terms of one prompt"):
        found.check()
    beside_the_mean = tl_posgen.explain(mini, other, 3, 1, reference=reference)
    with pytest.raises(InputError, match="minus: against_key none is taken from against_key 2; explain both alike"):
        one.minus(beside_the_mean)


def test_explanations_of_other_means_hooks_or_parts_are_not_subtracted(mini, reference):
    found = tl_posgen.explain(mini, PROMPT, 3, 1, reference=reference)
    of_text = tl_posgen.explain(mini, PROMPT, 3, 1, reference=TEXT)
    with pytest.raises(InputError, match=r"minus: reference .* explain both alike"):
        found.minus(of_text)
    with mini.hooks(fwd_hooks=[("blocks.2.hook_mlp_out", lambda x, hook: 0 * x)]):
        hooked = tl_posgen.explain(mini, PROMPT, 3, 1, reference=reference)
        assert hooked.check(n=5)["attention"]["largest"] > 0
    assert hooked.provenance["added_hooks"] == ["blocks.*.hook_mlp_out: " + hooked.provenance["added_hooks"][0][23:]]
    with pytest.raises(InputError, match="minus: added_hooks"):
        found.minus(hooked)
    with pytest.raises(InputError, match=r"check: the head.s attention is off by .* explain the prompt again"):
        hooked.check(n=5)
    _, cache = mini.run_with_cache(PROMPT)
    given = tl_posgen.explain(mini, PROMPT, 3, 1, parts={"all": cache["resid_pre", 3][0]}, reference=reference)
    with pytest.raises(InputError, match="minus: parts none is taken from parts all"):
        given.minus(found)
    with pytest.raises(InputError, match="minus: NoneType is no explanation"):
        found.minus(None)


def test_a_reference_of_other_weights_is_refused(mini, reference):
    null = tl_posgen.random_like(mini, seed=0)
    message = "read by another model, mini, or before the weights of this one were changed"
    for use in (
        lambda: tl_posgen.explain(null, PROMPT, 3, 1, reference=reference),
        lambda: tl_posgen.split(null, PROMPT, 3, reference=reference),
        lambda: tl_posgen.hooks.remove_source(null, "L0 MLP", heads="3.1", reference=reference),
    ):
        with pytest.raises(InputError, match=message):
            use()


def test_a_score_less_itself_has_no_terms(mini, reference):
    found = tl_posgen.explain(mini, PROMPT, 3, 1, query=0, reference=reference)
    assert "All its terms are zero: a score less itself." in found.findings()
    with pytest.raises(InputError, match="check: all terms are zero"):
        found.check()


def test_the_explained_key_and_the_baseline_are_drawn_among_the_largest(mini, reference):
    tokens = torch.arange(5, 205)
    found = tl_posgen.explain(mini, tokens, 3, 1, key=106, against=7, reference=reference)
    bars = [trace for trace in found.plot().data if trace.type == "bar" and trace.xaxis == "x"]
    labels = {str(label).split()[0] for trace in bars for label in trace.x}
    assert {"106", "7"} <= labels
    assert len(labels) == 48
    titles = [annotation.text for annotation in found.plot().layout.annotations]
    assert any("48 of 200" in title for title in titles)


def test_a_head_that_is_sure_is_not_measured_against_itself(mini):
    """The score of the key that has the attention is far above the mean of the others, and 0 for a query with one."""
    found = tl_posgen.explain(mini, PROMPT, head="L3H1", query=9)
    score, attention = found.trained["score"].values, found.trained["attention"].values
    assert score[attention.argmax()] > 2 * abs(score @ attention - score[attention.argmax()])
    assert found.trained.attrs["against"] == "the mean of the other keys"
    assert not tl_posgen.explain(mini, PROMPT, head="L3H1", query=0).frame(by=())["score"].any()


def test_an_explanation_shows_the_key_that_stands_out(mini):
    found = tl_posgen.explain(mini, PROMPT, head="L3H1", query=9)
    row = found.table().iloc[0]
    told = (
        f"key {row['key']} {row['token']!r} has attention {row['attention']:.2f} and stands {row['score']:+.2f} logits"
    )
    sentence, by_source, reference = found.findings()
    assert sentence.startswith(f"L3H1, query 9 {found.trained.attrs['query_token']!r} of mini: {told}")
    assert f"position {row['position']:+.2f}, key part {row['key_part']:+.2f}" in sentence
    assert sentence in repr(found)
    largest = found.largest(2, int(row["key"]))
    for term, source, value in largest[["term", "source", "contribution"]].itertuples(index=False):
        assert f"{term.replace('_', ' ')} of {source} {value:+.2f}" in by_source
    assert reference.startswith("Means of the bundled book")
    cell = found._repr_html_()
    assert "<li>L3H1, query 9 " in cell
    assert "<table" in cell
    assert "tl-posgen-" in cell


def test_deleting_terms_does_what_they_say(mini, reference):
    """All terms of a key deleted, as large as they are, leave its score at the baseline: the mean of the others."""
    usual, found = (tl_posgen.explain(mini, PROMPT, 3, 1, against=one, reference=reference) for one in (None, 0))
    row, n = found._row, found.trained.sizes["key"]
    key = usual.key
    _, edited = row.predicted(torch.from_numpy(usual.trained["score"].values) * (torch.arange(n) == key))
    logs = edited.log()
    assert float(logs[key]) == pytest.approx(float(logs[torch.arange(n) != key].mean()), abs=1e-4)
    untouched = row.predicted(torch.zeros(n))
    np.testing.assert_allclose(untouched[1], found.trained["attention"], rtol=1e-4)
    scores = torch.from_numpy(found.trained["score"].values)
    _, flat = row.predicted(scores)
    np.testing.assert_allclose(flat, np.full(n, 1 / n), rtol=1e-3)
    logits = tl_posgen.models.session_of(mini).backend.model(row.tokens[None])[0, -1].double().log_softmax(-1)
    torch.testing.assert_close(untouched[0], logits, rtol=0, atol=1e-4)


def test_the_check_sets_the_largest_terms_beside_drawn_ones(mini, reference):
    found = tl_posgen.explain(mini, PROMPT, 3, 1, reference=reference)
    checked = found.check(n=10, seed=0)
    assert checked.index.tolist() == ["largest", "drawn"]
    assert checked["size"].tolist() == pytest.approx([checked["size"]["largest"]] * 2)
    assert checked["terms"]["largest"] == 10 < checked["terms"]["drawn"]
    assert checked["attention"]["largest"] > 2 * checked["attention"]["drawn"] > 0
    assert checked["prediction"]["largest"] > 2 * checked["prediction"]["drawn"] > 0
    assert checked.equals(found.check(n=10, seed=0))
    with pytest.raises(InputError, match="n = 0: give a whole number, 1 or more"):
        found.check(n=0)


def test_half_precision_names_its_rounding():
    model = tl_posgen.load_model("mini", dtype="bfloat16")
    found = tl_posgen.explain(model, PROMPT, 2, 1, reference=PROMPT[:40])
    assert "rounding" in found.trained["source"].values
    assert 0 < found.trained.attrs["largest_difference"] < 0.1


def test_pictures_name_model_head_query_and_reference_and_tokens_as_they_are(mini, reference):
    """Plotly reads &lt; and &amp;, but shows &quot; as it is."""
    found = tl_posgen.explain(mini, 'a "b" <i> & c, down, down', head="3.1", query=8, against=2, reference=reference)
    figure = found.plot()
    for words in ("L3H1", "(8)", "mini", "key 2,", "bundled book"):
        assert words in figure.layout.title.text
    bars = [trace for trace in figure.data if trace.type == "bar"]
    assert {trace.name for trace in bars} == {"position", "key part", "query key", "interaction"}
    totals = sum(np.nan_to_num(np.array(trace.y)) for trace in bars if trace.xaxis == "x")
    np.testing.assert_allclose(totals, found.trained["score"], atol=1e-4)
    shown = [str(label) for trace in bars for label in trace.x]
    assert any("&lt;" in label for label in shown)
    assert "&quot;" not in str(figure.to_dict())
    page = found.show()
    assert len(page.local_src) < 2e6  # one script for all
    assert page.local_src.count("ColoredTokens") >= 5


def test_a_table_has_a_row_a_key_and_a_page_loads_nothing(mini, reference, tmp_path):
    found = tl_posgen.explain(mini, PROMPT, head="3.1", against=2, reference=reference)
    table = found.table()
    assert list(table.columns) == ["key", "token", "attention", "score", *TERMS]
    assert table["key"][1] == 2  # the shown key and the baseline come first
    assert table["attention"][2:].is_monotonic_decreasing
    assert found.key == table["key"][0] != 2
    assert tl_posgen.explain(mini, PROMPT, head="3.1", key=-2, reference=reference).key == len(table) - 2
    np.testing.assert_allclose(table[list(TERMS)].sum(axis=1), table["score"], atol=1e-4)
    page = found.write(tmp_path / "why").read_text(encoding="utf-8")
    assert page.count("ColoredTokens.render") == 0 < page.count("ColoredTokens")
    assert "src=" not in page.split("<body>")[1].split("</script>")[-1]
    for words in ("L3H1, query 27 ", "of mini", "Why L3H1 attends from"):
        assert words in page
    summary = json.loads((tmp_path / "why" / "summary.json").read_text(encoding="utf-8"))["measures"]["explanation"]
    assert summary == table.to_dict("records")
    other = tl_posgen.explain(mini, PROMPT, head="3.1", against=3, reference=reference)
    with pytest.raises(OutputError, match="holds another run's index"):
        other.write(tmp_path / "why")
    assert other.write(tmp_path / "why", force=True) == tmp_path / "why" / "index.html"


@pytest.mark.parametrize("options", [{}, {"key": 3}, {"against": 2, "other": 700}])
def test_a_file_gives_everything_back_but_the_model(mini, reference, tmp_path, options):
    tokens = tl_posgen.models.to_prompts(mini, "\n\0" + PROMPT)[0]
    if "other" in options:
        options = {**options, "other": tokens.index_fill(0, torch.tensor([5]), options["other"])}
    found = tl_posgen.explain(mini, tokens, head="3.1", query=9, reference=reference, **options)
    report = tl_posgen.load(found.save(tmp_path / "why.nc"))
    again = report["explanation"]
    xr.testing.assert_identical(again.dataset, found.dataset)
    assert again.provenance == found.provenance
    assert (again.key, again.findings()) == (found.key, found.findings())
    assert again.largest(5, 2).equals(found.largest(5, 2))
    assert again.table().equals(found.table())
    assert again.plot() == found.plot()
    assert again.show().local_src.count("ColoredTokens") == found.show().local_src.count("ColoredTokens")
    assert repr(report)[len("Report") :] == repr(again)[len("Explanation") :] == repr(found)[len("Explanation") :]
    for name, array in again.trained.data_vars.items():
        declared = again.measure.variables[name]
        assert (array.dims, array.attrs) == (declared.dims, declared.attributes)
    with pytest.raises(InputError, match="check deletes terms of one prompt in its model"):
        again.check()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"query": 99}, r"query 99 is outside the prompt of \d+ tokens; give 0 to"),
        ({"query": -99}, "query -99 is outside the prompt"),
        ({"query": 1.0}, r"query 1\.0 is outside"),
        ({"query": 3, "against": 4}, r"against 4: query 3 sees keys 0 to 3 only; choose one of them"),
        ({"against": 99}, "against 99 is outside the prompt"),
        ({"head": None}, "head=None: give one head"),
        ({"head": "7.1"}, "layer 7 does not exist"),
        ({"side": "value"}, "side 'value': choose key or query"),
        ({"prompt": ["one text", "another text"]}, "2 prompts: give one text"),
        ({"other": "Down, down."}, r"other= has \d+ tokens, and the prompt \d+; give as many"),
        ({"other": PROMPT, "parts": {"a": torch.zeros(1)}}, "parts are of one prompt"),
        ({"parts": {}}, "parts: give name -> tensor"),
        ({"parts": {"a": torch.zeros(3, 4)}}, r"part 'a': \[3, 4\]; the residual stream .* is \[\d+, 128\]"),
        ({"parts": {"a": 3}}, "part 'a': int; the residual stream"),
        ({"reference": 3}, "reference=int: give a text"),
        ({"rest": True}, "rest=True names what parts leave; give parts"),
        ({"rest": "no"}, "rest = 'no': give"),
        ({"parts": {0: torch.zeros(1)}}, "parts: 0 is no name"),
    ],
)
def test_what_cannot_be_explained_is_refused_before_any_work(mini, unchecked, options, message):
    session_of(mini).layers()  # looked at before the hook is there

    def fail(*_):
        raise AssertionError("a forward pass was made")

    with mini.hooks(fwd_hooks=[("hook_embed", fail)]), pytest.raises(InputError, match=message):
        tl_posgen.explain(mini, **{"prompt": PROMPT, "head": "3.1", **options})


def test_keys_that_cannot_be_traced_are_refused(family_model):
    model, traced = family_model("llama", "bridge"), "cannot be traced to what earlier layers wrote"
    with model.hooks(fwd_hooks=[("blocks.1.ln1.hook_out", lambda x, hook: x.flip(-1))]):
        with pytest.raises(UnsupportedModelError, match=traced):
            tl_posgen.explain(model, TOKENS, 1, 0, reference=TEXT)
        with pytest.raises(
            UnsupportedModelError, match=rf"{traced}; means alone: reference_of\(\.\.\., sources=False\)"
        ):
            reference_of(model, TEXT, layers=[1])


def test_no_word_of_a_text_closes_a_script(mini, tmp_path):
    hostile = "</script><script>alert(1)</script> <b>& so on"
    found = tl_posgen.explain(mini, hostile, head="3.1", reference=hostile)
    assert hostile[:20] in found.trained.attrs["reference"]
    page = found.write(tmp_path).read_text(encoding="utf-8")
    assert "<script>alert" not in page
    assert "<b>& so" not in page

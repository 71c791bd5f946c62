"""The main job on real models: prompts in, a report out; three ways in, one engine."""

import json
import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import xarray as xr

import tl_posgen
from tl_posgen.core.measure import DEFINED, Measure, Variable
from tl_posgen.errors import InputError
from tl_posgen.models.capture.cache import needed_names
from tl_posgen.models.loading.null_kinds import shuffled_like
from tl_posgen.models.session import Session
from tl_posgen.position import LengthExtrapolation, MeanKey
from tl_posgen.slash import Slash

pytestmark = pytest.mark.longer

TOKENS = torch.arange(60)[None] + 300
QUICK = {"nulls": 0, "progress": False}


@pytest.mark.slow
def test_a_loaded_report_writes_the_page_and_the_summary_of_the_first(mini, alice, tmp_path):
    def without_random_ids(page: str) -> str:
        return re.sub(r"[0-9a-f]{8}-[0-9a-f-]{20,}|circuits-vis-[0-9a-f-]+", "", page)

    report = tl_posgen.analyze(mini, alice, length=96, n_prompts=2, progress=False)
    first = report.write(tmp_path / "first")
    again = tl_posgen.load(tmp_path / "first").write(tmp_path / "again")
    assert without_random_ids(again.read_text()) == without_random_ids(first.read_text())
    first, again = (json.loads((tmp_path / one / "summary.json").read_text()) for one in ("first", "again"))
    assert again == first


def test_attach_feeds_measures_from_any_forward_pass_and_removes_its_hooks(mini):
    intact = mini(TOKENS)
    with tl_posgen.attach(mini, ["three_axis"]) as run:
        inside = mini(TOKENS)
    direct = tl_posgen.analyze(mini, TOKENS, measures=["three_axis"], **QUICK)
    attached = run.report()
    assert torch.equal(inside, intact)
    xr.testing.assert_allclose(attached["three_axis"].dataset["r"], direct["three_axis"].dataset["r"])
    assert not any(point.fwd_hooks for point in mini.hook_dict.values())


@pytest.mark.parametrize(
    ("name", "said"), [("slash_transfer", "runs the model itself"), ("loss", "attach: loss needs the logits")]
)
def test_attach_refuses_what_runs_the_model_or_needs_logits_and_a_block_without_a_pass(mini, name, said):
    with pytest.raises(InputError, match=said), tl_posgen.attach(mini, name):
        pass
    with tl_posgen.attach(mini) as run:
        pass
    with pytest.raises(InputError, match="no forward pass"):
        run.report()


def test_a_cache_gives_what_a_forward_pass_gives(mini):
    measures = ["three_axis", "variance", MeanKey(d0=8), "slash"]
    _, cache = mini.run_with_cache(TOKENS, names_filter=needed_names(mini, needs={"pattern"}))
    cached = tl_posgen.analyze_cache(mini, cache, tokens=TOKENS, measures=measures)
    direct = tl_posgen.analyze(mini, TOKENS, measures=measures, **QUICK)
    for name in direct:
        for variable, values in direct[name].dataset.items():
            if values.dtype.kind in "fib":
                xr.testing.assert_allclose(cached[name].dataset[variable], values, rtol=1e-5)
    for key in ("prompts", "length", "tokens_sha256"):
        assert cached.provenance[key] == direct.provenance[key]


def test_a_cache_of_one_prompt_needs_no_tokens(mini):
    _, cache = mini.run_with_cache(TOKENS, names_filter=needed_names(mini))
    assert tl_posgen.analyze_cache(mini, cache, measures="three_axis").provenance["prompts"] == 1


LONGER = LengthExtrapolation(inside=16, times=2, conditions=("interpolation",))
RUNNING = ["loss", "slash", "slash_transfer", LONGER]  # each runs the model, prompt by prompt


@pytest.mark.parametrize(("measures", "nulls", "most"), [(None, 1, 5), (RUNNING, 0, 1)])
def test_as_many_sessions_are_made_however_many_the_prompts(small_model, alice, monkeypatch, measures, nulls, most):
    """The session is handed on: no forward pass makes one again."""
    made, make = [], Session.__init__

    def counted(self, *parts):
        made.append(type(self))
        make(self, *parts)

    monkeypatch.setattr(Session, "__init__", counted)
    hooks = [("blocks.0.attn.hook_v", lambda value, hook: value)]
    run = {"measures": measures, "length": 16, "nulls": nulls, "fwd_hooks": hooks, "progress": False}
    tl_posgen.analyze(small_model, alice, n_prompts=2, **run)
    few = len(made)
    tl_posgen.analyze(small_model, alice, n_prompts=4, **run)
    assert few == len(made) - few <= most


@dataclass(frozen=True)
class QueryNorm(Measure):
    """E |q| before RoPE."""

    question = "How long are queries?"
    variables = {"norm": Variable("query norm")}

    def of_layer(self, layer):
        return {"norm": layer.q.norm(dim=-1).mean(1)}


def test_a_saved_result_of_a_measure_that_is_nowhere_is_still_mapped(mini, tmp_path, monkeypatch):
    saved = QueryNorm()(mini, TOKENS, **QUICK)
    monkeypatch.delitem(DEFINED, "query_norm")  # as in another session
    loaded = tl_posgen.load(saved.save(tmp_path / "norm.nc"))["query_norm"]
    np.testing.assert_allclose(loaded.plot().data[0].z, saved.trained["norm"])


def test_finished_results_are_taken_up_and_those_of_other_prompts_refused(mini, alice):
    cut = {"length": 32, "n_prompts": 2, "progress": False}
    slash = tl_posgen.analyze(mini, alice, measures="slash", **cut)
    whole = tl_posgen.analyze(mini, alice, measures="slash_transfer", **cut)
    rest = tl_posgen.analyze(mini, alice, measures="slash_transfer", after=slash, **cut)
    assert list(rest) == list(whole)
    xr.testing.assert_identical(rest["slash_transfer"].dataset, whole["slash_transfer"].dataset)
    with pytest.raises(InputError, match="slash was measured with another tokens_sha256"):
        tl_posgen.analyze(mini, alice[500:], measures="slash_transfer", after=slash, **cut)


def test_shuffled_weights_in_the_place_of_the_model_are_those_of_a_copy(mini, alice):
    cut = {"measures": ["variance", "slash"], "length": 16, "n_prompts": 2, "progress": False}
    nulls = {"random init": (0,), "shuffled": (0, 3)}
    before = {name: one.clone() for name, one in mini.state_dict().items()}
    beside = tl_posgen.analyze(mini, alice, **cut, nulls=nulls)
    in_place = tl_posgen.analyze("mini", alice, **cut, nulls=nulls)
    alone = tl_posgen.analyze(shuffled_like(mini, 3), alice, **cut, nulls=0)
    for name in cut["measures"]:
        xr.testing.assert_equal(beside[name].dataset, in_place[name].dataset)
        assert beside[name].dataset["init"].values.tolist() == ["trained", "0", "shuffled 0", "shuffled 3"]
    shuffled = beside["variance"].sel(init="shuffled 3")["additive_r"]
    np.testing.assert_allclose(shuffled, alone["variance"].trained["additive_r"])
    assert all(torch.equal(one, before[name]) for name, one in mini.state_dict().items())


def test_what_runs_the_model_has_shuffled_weights_where_they_are_asked_for(mini, alice):
    cut = {"length": 12, "n_prompts": 1, "progress": False}
    loss, slash = (
        tl_posgen.analyze(mini, alice, measures=["loss", "slash_transfer"], **cut, nulls=nulls)
        for nulls in (1, {"random init": (0,), "shuffled": (2,)})
    )
    assert loss["loss"].numbers.nulls == ["0", "shuffled 0"]
    assert loss["slash_transfer"].numbers.nulls == ["0"]
    assert slash["slash_transfer"].numbers.nulls == ["0", "shuffled 2"]
    assert loss.provenance["nulls"] == loss["loss"].provenance["nulls"] == {"random init": [0], "shuffled": [0]}
    assert loss["slash_transfer"].provenance["nulls"] == {"random init": [0]}
    with pytest.raises(InputError, match=r"with other null models \(\{.*: \[0\]\}, now \{.*'shuffled': \[2\]\}\)"):
        tl_posgen.analyze(mini, alice, measures="slash", after=loss, **cut, nulls=slash.provenance["nulls"])


def test_attached_measures_have_both_null_models_of_the_same_tokens_and_the_distance_that_they_say(mini):
    with tl_posgen.attach(mini) as run:
        mini(TOKENS)
    report = run.report(nulls=(nulls := {"random init": (3,), "shuffled": (0,)}))
    assert report["mean_key"].measure.d0 == 1000
    assert "as at distance 1000" in report["mean_key"].findings()[0]
    assert report["variance"].numbers.nulls == ["3", "shuffled 0"]
    direct = tl_posgen.analyze(mini, TOKENS, measures="variance", nulls=nulls, progress=False)
    xr.testing.assert_allclose(report["variance"].dataset["position"], direct["variance"].dataset["position"])


def test_each_of_several_random_inits_is_that_of_its_seed(mini, alice):
    three, single = (
        tl_posgen.analyze(mini, alice, measures="slash", length=32, n_prompts=1, nulls=nulls, progress=False)
        for nulls in (3, {"random init": (1,)})
    )
    xr.testing.assert_equal(three["slash"].nulls[1]["score"], single["slash"].null["score"])


def test_the_global_random_state_is_left_alone(small_model):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    tl_posgen.analyze(small_model, "Alice was beginning to get very tired.", progress=False)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("n", "distance", "said"), [(1, 0, "prompt 0 has only 1 token"), (20, 50, "distance 50")])
def test_attach_and_caches_ask_what_analyze_asks(mini, n, distance, said):
    tokens, asked = torch.arange(5, 5 + n)[None], [Slash(distances=(distance,))]
    with tl_posgen.attach(mini, asked) as run, torch.no_grad():
        _, cache = mini.run_with_cache(tokens)
    for ask in (run.report, lambda: tl_posgen.analyze_cache(mini, cache, measures=asked)):
        with pytest.raises(InputError, match=said):
            ask()


@pytest.mark.parametrize("factor", [0.0, 0.5])
def test_patterns_that_a_hook_scaled_are_named(mini, factor):
    def ablate(pattern, hook):
        pattern[:, 1] *= factor
        return pattern

    with tl_posgen.attach(mini, ["slash"]) as run, torch.no_grad():
        mini.run_with_hooks(torch.arange(5, 45)[None], fwd_hooks=[("blocks.1.attn.hook_pattern", ablate)])
    assert run.report()["slash"].dataset.attrs["edited_patterns"] == [1]


def test_seeds_are_looked_at_before_a_model_is_loaded_or_attached_to(mini):
    with pytest.raises(InputError, match="nulls"):
        tl_posgen.analyze("no-such/model", "text", nulls=-1)
    with pytest.raises(InputError, match="seed = -1"), tl_posgen.attach(mini, "slash", seed=-1):
        pass

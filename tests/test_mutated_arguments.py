"""Arguments drawn at random: every call gives the same numbers, or ends in one line that says what is wrong.

`make soak` draws more, and runs the measures whose options were accepted.
"""

import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tl_posgen
from tl_posgen import PosgenError
from tl_posgen.cli import main
from tl_posgen.core import registry
from tl_posgen.joining import cut_keys
from tl_posgen.position import at_dummy_distance, by_split, lm_infinite, perturb_planes, substitute, triangle
from tl_posgen.slash import ablate_bands

pytestmark = pytest.mark.usefixtures("unchecked")
ANY = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
TOKENS = torch.arange(2, 14)[None]
QUIET = {"null_seeds": (), "progress": False}

NUMBERS = st.sampled_from([0, 1, -1, 2, 3, 12, 13, 2**31, 2**63, 10**30, 0.0, 0.5, -0.5, 1.0, 1e308, -1e308])
ODD = st.sampled_from([None, True, False, "", "x", "0", "three_axis", "a\0b", "\ud800", b"x", object(), ..., {}])
ODD |= st.sampled_from([float("nan"), float("inf"), float("-inf"), 1j, Path("nowhere"), np.float32(0.5), np.int64(1)])
TENSORS = st.sampled_from([(), (0,), (1,), (12,), (1, 0), (1, 12), (2, 12), (1, 2, 3), (12, 12)]).flatmap(
    lambda shape: st.sampled_from([
        torch.zeros(shape), torch.full(shape, torch.nan), torch.ones(shape, dtype=torch.int64),
        torch.ones(shape, dtype=torch.bool), torch.full(shape, -1), torch.full(shape, 10**6), np.ones(shape),
    ])
)  # fmt: skip
PAIRS = st.tuples(NUMBERS | ODD, NUMBERS | ODD)
ONE = NUMBERS | ODD | TENSORS | PAIRS
FRAMES = st.sampled_from([
    pd.DataFrame(), pd.DataFrame({"layer": [0]}), pd.DataFrame({"layer": [0, 0], "head": [1, 1]}),
    pd.DataFrame({"layer": [0.5], "head": [0]}), pd.DataFrame({"layer": [9], "head": [0]}),
])  # fmt: skip
VALUES = ONE | FRAMES | st.lists(ONE, max_size=3) | st.lists(ONE, max_size=2).map(tuple)
VALUES |= st.dictionaries(st.sampled_from(["input_ids", "layer", "three_axis"]), ONE, max_size=2)


def mutated(draw, base):
    """Some arguments replaced, or two swapped."""
    arguments = dict(base)
    names = draw(st.lists(st.sampled_from(sorted(base)), min_size=1, max_size=2))
    if len(names) == 2 and draw(st.booleans()):
        first, second = names
        arguments[first], arguments[second] = arguments[second], arguments[first]
        return arguments
    return arguments | {name: draw(VALUES) for name in names}


def one_line(refusal):
    assert str(refusal).strip()
    assert "\n" not in str(refusal)


@pytest.fixture(scope="module")
def calls(mini, alice, tmp_path_factory):
    """name -> (function, arguments that it takes)."""
    _, cache = mini.run_with_cache(TOKENS)
    where = {"layers": [0], "heads": [1]}
    saved = tl_posgen.analyze(mini, TOKENS, measures="three_axis", **QUIET).save(tmp_path_factory.mktemp("x") / "r.nc")

    def attached(tokens, **options):
        with tl_posgen.attach(mini, **options) as run:
            mini(TOKENS)
        return run.report()

    return {
        "analyze": (
            lambda prompts, **options: tl_posgen.analyze(mini, prompts, progress=False, **options),
            {"prompts": TOKENS, "measures": "three_axis", "length": None, "n_prompts": None, "seed": 0,
             "null_seeds": (), "after": None, **where},
        ),
        "analyze a text": (
            lambda prompts, **options: tl_posgen.analyze(mini, prompts, progress=False, **options),
            {"prompts": alice[:200], "measures": ["three_axis"], "length": 12, "n_prompts": 1, "seed": 0, **where},
        ),
        "attach": (attached, {"tokens": TOKENS, "measures": ["three_axis"], "seed": 0, **where}),
        "analyze_cache": (
            lambda cache, **options: tl_posgen.analyze_cache(mini, cache, **options),
            {"cache": cache, "tokens": TOKENS, "measures": "three_axis", "seed": 0, **where},
        ),
        "load": (tl_posgen.load, {"path": saved}),
        "at_dummy_distance": (lambda **options: at_dummy_distance(mini, **options), {"beyond": 8, **where}),
        "lm_infinite": (lambda **options: lm_infinite(mini, **options), {"n_local": 8, **where}),
        "substitute": (
            lambda width, **options: substitute(mini, by_split(triangle(width)), **options), {"width": 8, **where}
        ),
        "ablate_bands": (lambda **options: ablate_bands(mini, **options), {"kind": "no_rope", "band": None, **where}),
        "perturb_planes": (
            lambda **options: perturb_planes(mini, **options),
            {"edit": "phase_noise", "band": [1], "of": ("q",), "strength": 0.5, "control": False, "seed": 0, **where},
        ),
        "cut_keys": (
            lambda **options: cut_keys(mini, **options),
            {"share": 0.5, "control": False, "first_token": False, "seed": 0, **where},
        ),
        "options": (
            lambda **options: registry.find("three_axis").with_options(options),
            {"ridge": 0.0, "gauge": "flat_keys", "diagonal": True, "weights": (2.0, 0.5)},
        ),
    }  # fmt: skip


@pytest.fixture(scope="module")
def right(mini):
    """Every head's r on these tokens."""
    return tl_posgen.analyze(mini, TOKENS, measures="three_axis", **QUIET)["three_axis"].sel(tokens="all")["r"]


def hold(data, calls, right):
    name = data.draw(st.sampled_from(sorted(calls)))
    call, base = calls[name]
    arguments = mutated(data.draw, base)
    try:
        found = call(**arguments)
    except PosgenError as refusal:
        one_line(refusal)
        return
    if not isinstance(found, tl_posgen.Report) or "three_axis" not in found:
        return
    r = found["three_axis"].sel(tokens="all")["r"]
    same = name in ("attach", "analyze_cache") or arguments.get("prompts") is TOKENS
    if same and arguments.get("length") is None and isinstance(arguments.get("measures"), str | list):
        np.testing.assert_allclose(r, right.sel(layer=r["layer"], head=r["head"]), rtol=1e-9)


@settings(max_examples=100, derandomize=True, **ANY)
@given(data=st.data())
def test_any_arguments_end_well_or_in_one_line(calls, right, data):
    hold(data, calls, right)


@pytest.mark.soak
@settings(max_examples=20_000, **ANY)
@given(data=st.data())
def test_any_arguments_at_length(calls, right, data):
    hold(data, calls, right)


MEASURES = [name for name in registry.names() if fields(registry.find(name))]


def options_of(data):
    measure = registry.find(data.draw(st.sampled_from(MEASURES)))
    known = sorted(one.name for one in fields(measure))
    names = data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=2, unique=True))
    try:
        return measure, measure.with_options({name: data.draw(VALUES) for name in names})
    except PosgenError as refusal:
        one_line(refusal)
        return measure, None


@settings(max_examples=100, derandomize=True, **ANY)
@given(data=st.data())
def test_any_options_are_taken_or_refused_in_one_line(data):
    options_of(data)


@pytest.mark.soak
@settings(max_examples=3_000, **ANY)
@given(data=st.data())
def test_any_options_that_are_taken_can_be_measured_with(mini, data):
    measure, options = options_of(data)
    if options is not None and measure.is_fed:
        try:
            report = tl_posgen.analyze(mini, TOKENS.expand(2, -1), measures=[options], **QUIET)
            report.findings()
        except PosgenError as refusal:
            one_line(refusal)


WORDS = {
    "analyze": {"--measures": "three_axis", "--layers": "0", "--heads": "0,1"},
    "planes": {"--eps": "0.5"},
    "slash": {"--kappa": "0.1", "--distances": "0-2"},
    "distance": {"--distances": "2,8"},
    "perturb": {"--ratios": "0,0.5"},
    "length": {"--times": "2"},
    "coupling": {"--k": "2"},
    "emerge": {"checkpoint": "nowhere"},
    "check": {},
    "measures": {},
}
SHARED = {"--model": "mini", "--length": "8", "--prompts": "1", "--seed": "0", "--backend": "auto"}
BAD = st.sampled_from([
    "", "-1", "1e400", "nan", "x", "0-", "-", "3-1", "0,,1", "9999", "0-99999999", "9" * 40, "\udcff", "--", "a b",
    "/dev/null", "..", "nowhere/at/all", "0.5", "inf", "*", "${HOME}", "--help", "\n", "0x10", "१",
])  # fmt: skip


def run_command(data, monkeypatch, capsys, out):
    """A command one of whose words cannot be used, most times: exit code 0, or 2 and a line that begins with error."""
    name = data.draw(st.sampled_from(sorted(WORDS)))
    options = WORDS[name] | (SHARED if name not in ("check", "measures", "emerge") else {})
    options |= {"--model": "mini"} if name == "check" else {}
    changed = data.draw(
        st.lists(st.sampled_from([*options, "--unknown", "extra"]), min_size=1, max_size=2, unique=True)
    )
    words = [name]
    for option, value in options.items():
        value = data.draw(BAD) if option in changed else value
        words += [option, value] if option.startswith("--") else [value]
    words += [one for one in ("--unknown", "extra") if one in changed]
    words += [] if name in ("check", "measures") else ["--no-null", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["tl-posgen", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    _, error = capsys.readouterr()
    assert "Traceback" not in error, words
    assert int(stop.value.code or 0) in (0, 2), words
    if stop.value.code:
        assert error.strip(), words
        last = error.strip().splitlines()[-1]
        assert last.startswith(("error: ", "Error: ", "╰")), (words, last)


@settings(max_examples=8, derandomize=True, **ANY)
@given(data=st.data())
def test_any_words_on_the_command_line_end_well_or_in_one_line(data, monkeypatch, capsys, tmp_path):
    run_command(data, monkeypatch, capsys, tmp_path / "report")


@pytest.mark.soak
@settings(max_examples=500, **ANY)
@given(data=st.data())
def test_any_words_at_length(data, monkeypatch, capsys, tmp_path):
    run_command(data, monkeypatch, capsys, tmp_path / "report")

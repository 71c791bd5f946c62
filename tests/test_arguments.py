"""Arguments of functions and words of commands: refused by name in one line, or the same numbers as ever.

First values that an annotation does not allow, then those that annotations cannot tell, then any at random. `make soak`
draws more, and runs the measures whose options were accepted. The type checker of the tests is switched off, as it is
for users.
"""

import inspect
from dataclasses import fields
from functools import cache
from pathlib import Path

import numpy as np
import option_values
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tl_posgen
from tl_posgen import PosgenError, coupling, slash
from tl_posgen.core import registry
from tl_posgen.core.options import annotations_of
from tl_posgen.coupling.jacobians import residual_jacobians
from tl_posgen.hooks import (
    ablate_bands,
    at_dummy_distance,
    by_split,
    lm_infinite,
    perturb_planes,
    remove_source,
    substitute,
    triangle,
)
from tl_posgen.models.conversion.files import MINI
from tl_posgen.studies.emergence import emergence

pytestmark = pytest.mark.usefixtures("unchecked")
ANY = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
TEXT = "Down, down, down. Would the fall never come to an end? I wonder how many miles I have fallen by this time."
TOKENS = torch.arange(2, 14)[None]
SCORES = pd.DataFrame({"model": ["mini"], "score": [0.4]})
QUIET = {"nulls": 0, "progress": False}
CUT = {"length": 16, "n_prompts": 1, **QUIET}
WHERE = {"layers": [0], "heads": (0, 1)}
model = cache(lambda: tl_posgen.load_model("mini"))


def attached(tokens, **options):
    with tl_posgen.attach(model(), **options) as run:
        model()(TOKENS)
    return run.report()


def substituted(width, **options):
    return substitute(model(), by_split(triangle(width)), **options)


CALLS = {  # name -> (function, arguments that it takes)
    "analyze": (
        tl_posgen.analyze,
        {"prompts": TOKENS, "measures": "three_axis", "length": None, "n_prompts": None, "seed": 0, "after": None,
         **WHERE, **QUIET},
    ),
    "analyze a text": (tl_posgen.analyze, {"prompts": TEXT, "measures": ["three_axis"], "seed": 0, **WHERE, **CUT}),
    "attach": (attached, {"tokens": TOKENS, "measures": ["three_axis"], "seed": 0, **WHERE}),
    "analyze_cache": (
        tl_posgen.analyze_cache, {"cache": {}, "tokens": TOKENS, "measures": "three_axis", "seed": 0, **WHERE},
    ),
    "load": (tl_posgen.load, {}),
    "at_dummy_distance": (at_dummy_distance, {"beyond": 8, **WHERE}),
    "lm_infinite": (lm_infinite, {"n_local": 8, **WHERE}),
    "substitute": (substituted, {"width": 8, **WHERE}),
    "ablate_bands": (ablate_bands, {"kind": "no_rope", "band": None, **WHERE}),
    "perturb_planes": (
        perturb_planes,
        {"edit": "phase_noise", "band": [1], "of": ("q",), "strength": 0.5, "control": False, "seed": 0, **WHERE},
    ),
}  # fmt: skip
LONGER_CALLS = {  # tried with one wrong argument alone
    "judge_claims": (tl_posgen.judge_claims, {"prompts": TEXT, **CUT}),
    "remove_source": (remove_source, {"source": "embed"}),
    "find_slash_heads": (tl_posgen.find_slash_heads, {"prompts": TEXT, "length": 16, "n_prompts": 1}),
    "substitute by": (substitute, {"by": by_split(triangle(8))}),
    "coupling_scores": (coupling.coupling_scores, {"scores": SCORES, "prompts": TEXT, **CUT}),
    "residual_jacobians": (residual_jacobians, {"tokens": TOKENS[0], "source": 0}),
    "emergence": (emergence, {"checkpoints": [MINI], "prompts": TEXT, **CUT}),
    "random_like": (tl_posgen.random_like, {"seed": 0}),
    "load_model": (tl_posgen.load_model, {"name_or_directory": "mini"}),
    "slash_toy": (slash.slash_toy, {"steps": 2, "progress": False}),
}
TAKE_MORE = {  # parameters that take more than they are annotated with
    "model": "a name, a directory, an object",
    "layers": "one index stands for a list of it",
    "n_local": "any width",
    "n_global": "any width",
    "backend": "compared as it is",
    "device": "compared as it is",
    "judge_claims.length": "None leaves the text whole",
    "judge_claims.n_prompts": "None takes all that the text has",
}
PARAMETERS = [
    (name, one.name)
    for name, (function, _) in (CALLS | LONGER_CALLS).items()
    for one in inspect.signature(function).parameters.values()
    if not {one.name, f"{name}.{one.name}"} & TAKE_MORE.keys()
    if one.annotation is not bool and option_values.is_drawn(one.annotation)
    if name != "analyze a text"
]


def called(name, arguments):
    """What a function returns for these arguments and the model, if it takes one."""
    function = (CALLS | LONGER_CALLS)[name][0]
    takes_model = "model" in inspect.signature(function).parameters and name != "emergence"
    return function(**({"model": model()} if takes_model else {}) | arguments)


def one_line(refusal):
    assert str(refusal).strip()
    assert "\n" not in str(refusal)


@pytest.mark.parametrize(("name", "parameter"), PARAMETERS)
@settings(max_examples=10, **ANY)
@given(data=st.data())
def test_values_that_the_annotation_does_not_allow_are_refused_by_name(name, parameter, data):
    function, arguments = (CALLS | LONGER_CALLS)[name]
    value = data.draw(option_values.wrong(inspect.signature(function).parameters[parameter].annotation))
    with pytest.raises(PosgenError) as refusal:
        called(name, arguments | {parameter: value})
    one_line(refusal.value)
    said, shown = ("".join(text.split()) for text in (str(refusal.value), repr(value)))
    assert parameter in said or shown in said


# Arguments that annotations cannot tell

ANALYZE = {
    "a model that is a number": ({"model": 5}, "int is not a model"),
    "a model that is nothing": ({"model": None}, "NoneType is not a model"),
    "a bare module": ({"model": torch.nn.Linear(2, 2)}, "Linear"),
    "prompts that are a number": ({"prompts": 5}, "prompts"),
    "prompts that are nothing": ({"prompts": None}, "give the text"),
    "prompts that are a dictionary": ({"prompts": {"text": TEXT}}, "prompts"),
    "prompts that are a path": ({"prompts": Path("alice.txt")}, "prompts"),
    "prompts of fractions": ({"prompts": [[0.5, 1.5]]}, "integers"),
    "layers in words": ({"layers": "0"}, "layer"),
    "a fractional layer": ({"layers": [0.5]}, "layer"),
    "layers that can be read once": ({"layers": iter([0])}, "give a list of integers"),
    "heads in words": ({"heads": "all"}, "head"),
    "an index of no layer": ({"heads": [1]}, "1 says no layer; name heads by layer and head"),
    "a triple for a head": ({"heads": [(0, 1, 2)]}, "head"),
    "heads that can be read once": ({"heads": (head for head in ["L0H0"])}, "heads=<generator.*or a list of these"),
    "a null seed twice": ({"nulls": {"shuffled": (1, 1)}}, r"shuffled has \[1, 1\]; each seed may stand only once"),
    "null seeds without a kind": ({"nulls": [0]}, r"nulls=\[0\]: give how many .*, 0 for .*{'random init': \(0, 1\), "),
    "fewer null models than none": ({"nulls": -1}, "nulls=-1: give how many random inits"),
    "a number of null models in words": ({"nulls": "1"}, "nulls='1': give how many random inits"),
    "a part of a null model": ({"nulls": 0.5}, "nulls=0.5: give how many random inits"),
    "more null models than anyone needs": ({"nulls": 10**12}, "at most 10,000"),
    "one seed in the place of seeds": ({"nulls": {"shuffled": 0}}, r"shuffled has 0; give whole numbers .*\(0,\)"),
    "a negative seed of a null model": ({"nulls": {"random init": (-1,)}}, r"random init has \(-1,\); give whole"),
    "a kind of null model that there is not": (
        {"nulls": {"tea": (0,)}},
        "no kind of null model 'tea'; there are random",
    ),
    "measures that are a number": ({"measures": 5}, "5"),
    "measures that are numbers": ({"measures": [5]}, "5"),
    "measures in a set": ({"measures": {"slash"}}, "'slash'} is no measure: .*or a list of them"),
    "the class of all measures": ({"measures": [tl_posgen.Measure]}, "measure takes no single model"),
    "an option that is no measure": ({"measures": [tl_posgen.Variable("r")]}, "is no measure"),
    "an unknown measure": ({"measures": ["nonsense"]}, "no measure 'nonsense'; known: attention_examples"),
    "a measure with a slip": ({"measures": ["tree_axis"]}, r"'tree_axis'; did you mean 'three_axis'\? known: "),
    "one measure twice": ({"measures": ["three_axis", "three_axis"]}, "three_axis is given twice"),
    "no measure": ({"measures": []}, "no measures chosen"),
    "a function over checkpoints": ({"measures": ["emergence"]}, "takes no single model"),
}


OTHERS = {
    "load": ("load", {"path": 5}, "5"),
    "load_model": ("load_model", {"name_or_directory": 5}, "5"),
    "claims of token ids": ("judge_claims", {"prompts": [TEXT]}, "prompts"),
    "papers in a word": ("judge_claims", {"papers": "slash"}, "papers"),
    "checkpoints in a word": ("judge_claims", {"checkpoints": "step0"}, "checkpoints"),
    "a number to keep parts in": ("judge_claims", {"keep": 5}, "keep"),
    "the name of a model for hooks": ("ablate_bands", {"model": "mini"}, "str is not a model"),
    "a band of words": ("ablate_bands", {"kind": "drop", "band": "high"}, "layer 0: band: 'high' is no boolean"),
    "a band that is a number": ("ablate_bands", {"kind": "drop", "band": 3}, "band: 3 is no"),
    "a band of floats": (
        "ablate_bands", {"kind": "drop", "band": torch.ones(16)}, r"band: a tensor of torch\.float32",
    ),
    "a function to a word": ("ablate_bands", {"kind": "drop", "band": lambda rope: "low"}, "band: 'low' is no"),
    "a function to nothing": ("ablate_bands", {"kind": "drop", "band": lambda rope: None}, "band: None is no"),
    "an angle that is NaN": ("slash_toy", {"angle": float("nan")}, "angle"),
    "a learning rate that is NaN": ("slash_toy", {"learning_rate": float("nan")}, "learning_rate"),
    "a seed of the toy that is too large": ("slash_toy", {"seeds": (2**70,)}, "seeds"),
    "scores that are a number": ("coupling_scores", {"scores": 5}, "scores = 5"),
    "a tokenizer that is a number": ("coupling_scores", {"tokenizer": 5}, "tokenizer = 5"),
    "no widths": ("coupling_scores", {"widths": ()}, "widths"),
    "a text for token ids": ("residual_jacobians", {"tokens": "Down"}, "token ids"),
    "two prompts for one": ("residual_jacobians", {"tokens": [[1, 2], [3, 4]]}, "tokens of 2 prompts"),
    "a token that there is not": ("residual_jacobians", {"tokens": [10**7, 1]}, "outside the vocabulary"),
    "streams in words": ("residual_jacobians", {"streams": "x"}, "streams"),
    "checkpoints of emergence in a word": ("emergence", {"checkpoints": "step0"}, "checkpoints = 'step0'"),
    "a checkpoint that is a number": ("emergence", {"checkpoints": [5]}, r"checkpoints = \[5\]"),
    "a tokenizer of emergence that is a number": ("emergence", {"tokenizer": 5}, "tokenizer = 5"),
    "a cache that is a number": ("analyze_cache", {"cache": 5}, "cache"),
    "a band of too few planes": ("ablate_bands", {"kind": "keep", "band": torch.ones(7).bool()}, r"\[7\] booleans"),
    "no band to drop": ("ablate_bands", {"kind": "drop", "band": None}, "layer 0"),
}  # fmt: skip


WRONG = {case: ("analyze a text", *one) for case, one in ANALYZE.items()} | OTHERS


@pytest.mark.parametrize("case", WRONG)
def test_every_function_names_what_is_wrong(case):
    name, arguments, said = WRONG[case]
    with pytest.raises(PosgenError, match=said) as refusal:
        called(name, (CALLS | LONGER_CALLS)[name][1] | arguments)
    one_line(refusal.value)


def test_the_harness_and_the_registry_name_it_too():
    for call, said in (
        (lambda: registry.find(["three_axis"]), r"the name of a measure = \['three_axis'\]: give a word"),
        (lambda: registry.find(None), "the name of a measure = None: give a word"),
    ):
        with pytest.raises(PosgenError, match=said):
            call()


# Arguments at random

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
    names = draw(st.lists(st.sampled_from(sorted(base.keys() - {"progress"})), min_size=1, max_size=2))
    if len(names) == 2 and draw(st.booleans()):
        first, second = names
        arguments[first], arguments[second] = arguments[second], arguments[first]
        return arguments
    return arguments | {name: draw(VALUES) for name in names}


@pytest.fixture(scope="module")
def further(tmp_path_factory):
    """Name -> arguments that are made here: a cache, a saved report."""
    _, cached = model().run_with_cache(TOKENS)
    report = tl_posgen.analyze(model(), TOKENS, measures="three_axis", **QUIET)
    return {"analyze_cache": {"cache": cached}, "load": {"path": report.save(tmp_path_factory.mktemp("x") / "r.nc")}}


@pytest.fixture(scope="module")
def right():
    """Every head's r on these tokens."""
    return tl_posgen.analyze(model(), TOKENS, measures="three_axis", **QUIET)["three_axis"].sel(tokens="all")["r"]


def hold(data, further, right):
    name = data.draw(st.sampled_from(sorted(CALLS)))
    arguments = mutated(data.draw, CALLS[name][1] | further.get(name, {}))
    try:
        found = called(name, arguments)
    except PosgenError as refusal:
        one_line(refusal)
        return
    if not isinstance(found, tl_posgen.Report) or "three_axis" not in found:
        return
    r = found["three_axis"].sel(tokens="all")["r"]
    same = name in ("attach", "analyze_cache") or arguments.get("prompts") is TOKENS
    if same and arguments.get("length") is None and isinstance(arguments.get("measures"), str | list):
        np.testing.assert_allclose(r, right.sel(layer=r["layer"], head=r["head"]), rtol=1e-9)


@settings(max_examples=100, **ANY)
@given(data=st.data())
def test_any_arguments_end_well_or_in_one_line(further, right, data):
    hold(data, further, right)


@pytest.mark.soak
@settings(max_examples=20_000, **ANY)
@given(data=st.data())
def test_any_arguments_at_length(further, right, data):
    hold(data, further, right)


FED = [name for name in registry.names() if fields(registry.find(name)) and registry.find(name).is_fed]


@pytest.mark.soak
@settings(max_examples=3_000, **ANY)
@given(data=st.data())
def test_any_options_that_are_taken_can_be_measured_with(data):
    kind = registry.find(data.draw(st.sampled_from(FED)))
    known = annotations_of(kind)
    names = data.draw(st.lists(st.sampled_from(sorted(known)), min_size=1, max_size=2, unique=True))
    try:
        measure = kind.with_options({name: data.draw(option_values.right(known[name]) | VALUES) for name in names})
        tl_posgen.analyze(model(), TOKENS.expand(2, -1), measures=[measure], **QUIET).findings()
    except PosgenError as refusal:
        one_line(refusal)


# Words of commands

WORDS = {
    "analyze": {"--measures": "three_axis", "--layers": "0", "--heads": "L0H0,0.1"},
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


def run_command(data, command, out):
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
    words += [] if name in ("check", "measures") else ["--nulls", "0", "--out", str(out)]
    code, _, error = command(*words)
    assert "Traceback" not in error, words
    assert code in (0, 2), words
    if code:
        assert error.strip(), words
        last = error.strip().splitlines()[-1]
        assert last.startswith(("error: ", "Error: ", "╰")), (words, last)


@settings(max_examples=8, **ANY)
@given(data=st.data())
def test_any_words_on_the_command_line_end_well_or_in_one_line(data, command, tmp_path):
    run_command(data, command, tmp_path / "report")


@pytest.mark.soak
@settings(max_examples=500, **ANY)
@given(data=st.data())
def test_any_words_at_length(data, command, tmp_path):
    run_command(data, command, tmp_path / "report")

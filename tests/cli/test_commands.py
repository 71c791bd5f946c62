"""The command line: what it prints and what it writes."""

from importlib import import_module

import pytest
from families import save_small

import tl_posgen
from tl_posgen.cli.commands import name_options
from tl_posgen.cli.options import parse_heads, parse_indices
from tl_posgen.core import null_models
from tl_posgen.errors import InputError

MEASURES = {
    "substitute": [],
    "distance": ["--distances", "0,8", "--limits", "4"],
    "perturb": ["--ratios", "0.5", "--n-cloze", "2"],
    "planes": [],
    "perturb-planes": ["--strengths", "1", "--map-edits", ""],
    "frequencies": ["--edits", "drop", "--groups", "planes", "--half", "6", "--n-copies", "1", "--needle", "4"],
    "profiles": ["--n-repeated", "1"],
    "slash": ["--distances", "0-1"],
    "coupling": ["--k", "5,10"],
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Two directories of models without a tokenizer of their own."""
    directory = tmp_path_factory.mktemp("checkpoints")
    found = [save_small(directory / f"step{number}", seed=number) for number in (1, 2)]
    for file in directory.glob("*/tokenizer*"):
        file.unlink()
    return found


@pytest.mark.longer
def test_the_main_job_prints_a_table_and_writes_three_files(done, cut):
    printed, summary = done("analyze", *cut(32, 1), "--layers", "0-1")
    assert "random" in printed
    assert "Report:" in printed
    assert {head["layer"] for head in summary["heads"]} == {0, 1}


@pytest.mark.longer
def test_no_null_is_said_to_be_missing(monkeypatch, done, small, cut):
    """Options are never accepted and ignored: without a null no random init is built."""
    monkeypatch.setattr(null_models.NullModels, "build", lambda *_, **__: pytest.fail("a null model was built"))
    words = ["--model", small, "--measures", "three_axis,slash"]
    printed, summary = done("analyze", *words, *cut(32, 1), "--nulls", 0)
    assert " ".join(printed.split()).count("No null model was measured.") == 1
    assert "(seed 0)" not in printed
    assert summary["random init"] is summary["shuffled"] is None
    assert all(not number["inits"] for numbers in summary["measures"].values() for number in numbers)


def test_help_has_the_default_of_each_measure_that_an_option_goes_to(command):
    printed = " ".join(command("slash", "--help")[1].replace("│", " ").split())
    assert "[default: thirds,wavelength in slash_ablation; thirds in band_ablation]" in printed
    assert "[default: 0.1]" in printed


def test_check_prints_every_layer(run):
    code, printed, _ = run("check", "--model", "mini", out=None)
    assert code == 0
    assert "rotary" in printed


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURES)
def test_a_command_prints_its_table_and_writes_its_report(done, small, cut, name):
    printed, summary = done(name, "--model", small, *cut(24, 2), *MEASURES[name], "--full")
    assert ": random init (seed 0)" in " ".join(printed.split())  # a narrow table breaks its title
    for measure in summary["measures"]:
        assert f"{measure.replace('_', ' ')}: small" in " ".join(printed.split())


RUNS = dict.fromkeys([*MEASURES, "analyze", "length"], "tl_posgen.core.engine.analyze") | {
    "coupling-scores": "tl_posgen.coupling.coupling_scores",
    "emerge": "tl_posgen.studies.emergence.emergence",
    "claims": "tl_posgen.claims.judge_claims",
}


@pytest.mark.parametrize("name", RUNS)
def test_null_models_are_handed_on_by_every_command(monkeypatch, refused, text, name):
    """To the function that measures; `test_no_null_is_said_to_be_missing` follows one of them to its end."""

    def told(*_, nulls, **__):
        raise InputError(f"null models: {nulls}")

    module, _, function = RUNS[name].rpartition(".")
    monkeypatch.setattr(import_module(module), function, told)
    models = ["one"] if name in ("emerge", "coupling-scores") else []
    assert "null models: 1" in refused(name, *models, "--text", text)
    assert "null models: 0" in refused(name, *models, "--text", text, "--nulls", 0)


@pytest.mark.longer
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("2", ["0", "1", "shuffled 0"]),
        ("random init: 0; shuffled: 1,4", ["0", "shuffled 1", "shuffled 4"]),
        ("random init: 1-2; shuffled matrices: 0", ["1", "2", "shuffled matrices 0"]),
    ],
)
def test_null_models_are_those_of_the_command_line(done, cut, tmp_path, words, expected):
    done("analyze", "--measures", "variance", *cut(16, 1), "--nulls", words)
    assert tl_posgen.load(tmp_path / "report")["variance"].numbers.nulls == expected


@pytest.mark.slow
def test_emergence_takes_checkpoints_in_order(done, checkpoints, cut):
    printed, _ = done("emerge", *checkpoints, "--tokenizer", "mini", "--coupling", *cut(24, 2))
    assert printed.index("step1") < printed.index("step2")


def test_the_toy_trains(done):
    done("toy", "--steps", 4, "--seeds", 1)


@pytest.mark.slow
def test_coupling_scores_reads_a_table_of_models(done, checkpoints, tmp_path, cut):
    table = tmp_path / "models.csv"
    table.write_text("\n".join(["model,score", *(f"{path},{score}" for score, path in enumerate(checkpoints))]))
    assert "2 models" in done("coupling-scores", table, "--tokenizer", "mini", *cut(24, 2))[0]


@pytest.mark.slow
def test_claims_go_on_from_finished_parts(done, small, tmp_path, cut):
    words = ["claims", "--papers", "coupling", "--model", small, *cut(24, 2)]
    printed, _ = done(*words)
    table = tl_posgen.load(tmp_path / "report")["claims"].frame()
    assert set(table["claim"]) == {f"coupling {number}" for number in (1, 2, 3, 4, "4b", "4c", 5, 6)}
    assert all(verdict in printed for verdict in table["verdict"])
    parts = tmp_path / "report" / "parts"
    before = {path.name: path.stat().st_mtime_ns for path in parts.iterdir()}
    of_each = ["coupling", "coupling", "token_coupling", "token_coupling"]  # of the model and of its random init
    assert sorted(name.split("-")[0] for name in before) == of_each
    done(*words, "--force")
    assert {path.name: path.stat().st_mtime_ns for path in parts.iterdir()} == before


@pytest.mark.parametrize(
    ("message", "command", "said"),
    [
        ("give n_prompts=2 or more", "analyze", "give --prompts 2 or more"),
        ("layers=[0, 9]: no layer 9", "analyze", "--layers [0, 9]: no layer 9"),
        ('load it with backend="bridge"', "analyze", 'load it with --backend "bridge"'),
        ("give force=True", "analyze", "give --force"),
        ("give tokenizer=, a directory", "analyze", "give --tokenizer, a directory"),
        ("kappa = 3.0: choose", "slash", "--kappa 3.0: choose"),
        ("k [5000]: choose from 1 to 128", "coupling", "--k [5000]: choose from 1 to 128"),
        ("from_layer 9 leaves no layer", "substitute", "--from-layer 9 leaves no layer"),
        ("load_model(backend='hooked') takes it", "analyze", "load_model(backend='hooked') takes it"),
        ("layer 9: this model has layers 0 to 3", "analyze", "layer 9: this model has layers 0 to 3"),
        ("--layers 'x': write --layers 0", "analyze", "--layers 'x': write --layers 0"),
        ("give length= to cut", "length", "give length= to cut"),  # it has no such option
        ("nulls", "nothing", "nulls"),
        ("or all with nulls=0", "analyze", "or all with --nulls 0"),
        ("other= has 3 tokens, and the prompt 5", "explain", "--other has 3 tokens, and the prompt 5"),
    ],
)
def test_options_stand_in_the_place_of_the_librarys_keywords(message, command, said):
    assert name_options(message, command) == said


def test_indices_are_read_as_written():
    assert parse_indices("0,2-4", "--layers") == [0, 2, 3, 4]
    assert parse_indices("3,0,3", "--layers") == [3, 0, 3]
    assert parse_indices(None, "--layers") is None
    with pytest.raises(InputError, match="--layers"):
        parse_indices("x", "--layers")


def test_heads_are_read_by_layer_and_index():
    assert parse_heads("L3H1, 0.2,(1, 3)") == [(3, 1), (0, 2), (1, 3)]
    with pytest.raises(InputError, match=r"head '3': write a head as \"L3H1\" or \"3\.1\" \(layer 3, head 1\)"):
        parse_heads("3,1")


def test_the_version_is_that_of_the_package(run):
    code, printed, _ = run("--version", out=None)
    assert (code, printed) == (0, f"tl-posgen {tl_posgen.__version__}\n")

"""The command line: what it prints, what it writes, and one clear line for what a user can mend."""

import json
from importlib import import_module
from pathlib import Path

import pytest
import torch
from families import save_small
from safetensors.torch import load_file, save_file

import tl_posgen
from tl_posgen.cli.options import name_options, parse_indices
from tl_posgen.errors import InputError
from tl_posgen.models.conversion.source import MINI
from tl_posgen.report.columns import short

CHECKPOINT = Path(__file__).parents[1] / "examples" / "mini_model" / "checkpoints" / "step00000"
MEASURES = {
    "substitute": [],
    "distance": ["--distances", "0,8", "--limits", "4"],
    "perturb": ["--ratios", "0.5", "--n-cloze", "2"],
    "planes": [],
    "perturb-planes": ["--strengths", "1", "--map-edits", ""],
    "profiles": ["--cost-prompts", "1"],
    "cut-keys": ["--shares", "0,1", "--controls", "1"],
    "slash": ["--distances", "0-1"],
    "coupling": ["--k", "5,10"],
}
FILES = ["index.html", "results.nc", "summary.json"]


@pytest.fixture
def run(command, tmp_path):
    """The command with --out: its exit code, and what it printed on stdout and stderr."""

    def called(*words, out=tmp_path / "report"):
        return command(*words, *(["--out", out] if out else []))

    return called


@pytest.fixture
def done(run, tmp_path):
    """A command that must succeed: what it printed, and its summary.json."""

    def called(*words):
        code, printed, error = run(*words)
        assert code == 0, error
        assert sorted(path.name for path in (tmp_path / "report").glob("*.*")) == FILES
        return printed, json.loads((tmp_path / "report/summary.json").read_text())

    return called


@pytest.fixture
def refused(run, tmp_path):
    """A command that must fail: exit code 2, one line, no traceback, nothing written."""

    def called(*words):
        code, _, error = run(*words)
        assert code == 2
        assert error.strip().splitlines()[-1].startswith("error: ")
        assert not list(tmp_path.glob("report/*.html"))
        return error

    return called


def copy_of_mini(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((MINI / name).read_bytes())
    return directory


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The Queen of Hearts, she made some tarts, all on a summer day. " * 20, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Two directories of models without a tokenizer of their own."""
    directory = tmp_path_factory.mktemp("checkpoints")
    found = [save_small(directory / f"step{number}", seed=number) for number in (1, 2)]
    for file in directory.glob("*/tokenizer*"):
        file.unlink()
    return found


def cut(text, length, prompts):
    return "--text", text, "--length", length, "--prompts", prompts


def test_the_main_job_prints_a_table_and_writes_three_files(done, text):
    printed, summary = done("analyze", *cut(text, 32, 1), "--layers", "0-1")
    assert "random" in printed
    assert "Report:" in printed
    assert {head["layer"] for head in summary["heads"]} == {0, 1}


@pytest.mark.longer
def test_no_null_is_said_to_be_missing(monkeypatch, done, small, text):
    """Options are never accepted and ignored: without a null no random init is built."""
    from tl_posgen.core import random_inits

    monkeypatch.setattr(random_inits, "random_like", lambda *_: pytest.fail("a random init was built"))
    words = ["--model", small, "--measures", "three_axis,slash"]
    printed, summary = done("analyze", *words, *cut(text, 32, 1), "--no-null")
    assert "no null measured" in " ".join(printed.split())
    assert "(seed 0)" not in printed
    assert summary["null"] is None
    assert all(not number["inits"] for numbers in summary["measures"].values() for number in numbers)


def test_check_prints_every_layer(run):
    code, printed, _ = run("check", "--model", "mini", out=None)
    assert code == 0
    assert "rotary" in printed


def test_the_dtype_is_obeyed_and_kept_in_the_results(done, text, tmp_path):
    import tl_posgen

    place = ["--dtype", "bfloat16", "--device", "cpu"]
    done("analyze", "--measures", "mean_key", *place, "--no-null", *cut(text, 32, 1))
    assert tl_posgen.load(tmp_path / "report").provenance["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtype", "int8"], "give a floating-point one: auto, float32"),
        (["--device", "meta"], "--device 'meta' cannot be used (it holds no numbers); give 'cpu'"),
        (["--device", "cuda:99"], "--device 'cuda:99' cannot be used ("),
        (["--device", "gpu"], "--device 'gpu' cannot be used (torch knows no device of that name)"),
    ],
)
def test_a_model_that_cannot_be_had_so_is_refused(refused, text, options, message):
    assert message in refused("analyze", *cut(text, 32, 1), *options)


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURES)
def test_a_command_prints_its_table_and_writes_its_report(done, small, text, name):
    printed, summary = done(name, "--model", small, *cut(text, 24, 2), *MEASURES[name], "--full")
    assert "null, random init (seed 0)" in printed
    for measure in summary["measures"]:
        assert f"{measure.replace('_', ' ')}: small" in " ".join(printed.split())


RUNS = dict.fromkeys([*MEASURES, "analyze", "length"], "tl_posgen.core.engine.analyze") | {
    "coupling-scores": "tl_posgen.coupling.coupling_scores",
    "emerge": "tl_posgen.studies.emergence.emergence",
    "claims": "tl_posgen.claims.judge_claims",
}


@pytest.mark.parametrize("name", RUNS)
def test_no_null_is_handed_on_by_every_command(monkeypatch, refused, text, name):
    """To the function that measures; `test_no_null_is_said_to_be_missing` follows one of them to its end."""

    def told(*_, null_seeds, **__):
        raise InputError(f"the null has seeds {null_seeds}")

    module, _, function = RUNS[name].rpartition(".")
    monkeypatch.setattr(import_module(module), function, told)
    models = ["one"] if name in ("emerge", "coupling-scores") else []
    assert "the null has seeds [0]" in refused(name, *models, "--text", text)
    assert "the null has seeds []" in refused(name, *models, "--text", text, "--no-null")


@pytest.mark.longer
def test_several_null_seeds_are_all_measured(done, small, text):
    words = ["--model", small, "--measures", "mean_key", *cut(text, 24, 1), "--null-seeds", "0-2"]
    printed, summary = done("analyze", *words)
    assert {len(number["inits"]) for number in summary["measures"]["mean_key"]} == {3}
    assert "±" in printed


def test_measures_lists_every_name_that_analyze_takes(run):
    code, printed, _ = run("measures", out=None)
    assert code == 0
    for name in ("three_axis", "band_ablation", "coupling"):
        assert name in printed
    assert "slash_toy" not in printed


@pytest.mark.longer
def test_length_runs_beyond_the_training_length_without_being_told_how(done, small, text, tmp_path):
    import tl_posgen

    done("length", "--model", small, "--text", text, "--inside", 16, "--times", 3, "--prompts", 2, "--no-null")
    result = tl_posgen.load(tmp_path / "report")["length_extrapolation"]
    assert (result.measure.inside, result.measure.times, result.nulls) == (16, 3, ())


@pytest.mark.slow
def test_emergence_takes_checkpoints_in_order(done, checkpoints, text):
    printed, _ = done("emerge", *checkpoints, "--tokenizer", "mini", "--coupling", *cut(text, 24, 2))
    assert printed.index("step1") < printed.index("step2")


def test_the_toy_trains(done):
    done("toy", "--steps", 4, "--seeds", 1)


@pytest.mark.slow
def test_coupling_scores_reads_a_table_of_models(done, checkpoints, tmp_path, text):
    table = tmp_path / "models.csv"
    table.write_text("\n".join(["model,score", *(f"{path},{score}" for score, path in enumerate(checkpoints))]))
    assert "2 models" in done("coupling-scores", table, "--tokenizer", "mini", *cut(text, 24, 2))[0]


@pytest.mark.slow
def test_claims_go_on_from_finished_parts(done, small, tmp_path, text):
    import tl_posgen

    words = ["claims", "--papers", "coupling", "--model", small, *cut(text, 24, 2)]
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


REFUSED = {
    "a ratio above one": (["perturb", "--ratios", "0,2"], "2"),
    "a ratio that is no number": (["perturb", "--ratios", "many"], "--ratios"),
    "kappa above one": (["slash", "--kappa", "2"], "kappa"),
    "a distance that no prompt reaches": (["slash", "--distances", "60"], "60"),
    "more singular vectors than the model is wide": (["coupling", "--k", "999"], "999"),
    "a layer that does not exist": (["substitute", "--from-layer", "9"], "9"),
    "a checkpoint that does not exist": (["emerge", "nowhere"], "nowhere"),
    "a paper that nobody wrote": (["claims", "--papers", "tea"], "tea"),
    "a null seed that is no number": (["slash", "--null-seeds", "x"], "--null-seeds"),
    "a table that does not exist": (["coupling-scores", "nowhere.csv"], "nowhere.csv"),
    "a backend that does not exist": (["analyze", "--backend", "foo"], "foo"),
    "a measure that does not exist": (["analyze", "--measures", "tea"], "tea"),
    "a model without a name": (["analyze", "--model", ""], "--model ''"),
    "a model with a name that is too long": (["analyze", "--model", "a" * 300], "a name of a model"),
    "a model with a name of two lines": (["analyze", "--model", "two\nlines"], "neither a directory"),
    "no null, and its seeds": (["analyze", "--no-null", "--null-seeds", "0"], "--no-null and --null-seeds contradict"),
    "a prompt beside a text": (["analyze", "--prompt", "Down"], "--prompt is taken whole"),
    "too many layers": (["analyze", "--layers", "0-99999999999"], "write a shorter range"),
    "a budget that stands twice": (
        ["rules", "--budgets", "3,3"],
        "--budgets 3,3: give a list of one at least, each once",
    ),
    "a null seed that stands twice": (["slash", "--null-seeds", "0,0-1"], "each seed may stand only once"),
    "too many null seeds": (["analyze", "--null-seeds", "0-99999999999"], "write a shorter range"),
    "a checkpoint for claims that does not exist": (
        ["claims", "--checkpoints", "nowhere"],
        "nowhere: not a checkpoint",
    ),
    "a checkpoint without a tokenizer": (["emerge", CHECKPOINT], "give --tokenizer"),
    "coupling between one token": (["coupling", "--between-tokens", "--tokens", "3"], "give two positions"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("case", REFUSED)
def test_bad_words_get_one_line_that_names_them(refused, text, case):
    words, named = REFUSED[case]
    assert named in refused(*words, *cut(text, 48, 2)).strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("message", "command", "said"),
    [
        ("give n_prompts=2 or more", "analyze", "give --prompts 2 or more"),
        ("layers=[0, 9]: no layer 9", "analyze", "--layers 0,9: no layer 9"),
        ('load it with backend="bridge"', "analyze", "load it with --backend bridge"),
        ("give force=True", "analyze", "give --force"),
        ("kappa = 3.0: choose", "slash", "--kappa 3.0: choose"),
        ("gamma 2.0 is outside [0, 1]", "substitute", "--gamma 2.0 is outside [0, 1]"),
        ("k [5000]: choose from 1 to 128", "coupling", "--k [5000]: choose from 1 to 128"),
        ("from_layer 9 leaves no layer", "substitute", "--from-layer 9 leaves no layer"),
        ("load_model(backend='hooked') takes it", "analyze", "load_model(backend='hooked') takes it"),
        (
            "layer 9 does not exist: this model has layers 0 to 3",
            "analyze",
            "layer 9 does not exist: this model has layers 0 to 3",
        ),
        ("--layers 'x': write --layers 0", "analyze", "--layers 'x': write --layers 0"),
        ("give length= to cut", "length", "give length= to cut"),  # it has no such option
        ("the length is 3, the model has layers", "analyze", "the length is 3, the model has layers"),
        ("null_seeds", "nothing", "null_seeds"),
    ],
)
def test_options_stand_in_the_place_of_the_librarys_keywords(message, command, said):
    assert name_options(message, command) == said


@pytest.mark.parametrize("option", ["text", "out"])
def test_an_empty_path_is_refused(run, tmp_path, monkeypatch, option):
    monkeypatch.chdir(tmp_path)
    code, _, error = run("analyze", f"--{option}", "", out=None)
    assert (code, error) == (2, f"error: --{option} '': empty; give a path\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", [("--length", "64"), ("--prompts", "2"), ("--consecutive",)])
def test_a_whole_prompt_is_not_cut(run, tmp_path, option):
    code, _, error = run("analyze", "--prompt", "Down, down, down.", *option)
    assert (code, option[0] in error, "taken whole" in error) == (2, True, True)
    assert "--text and --prompt contradict" in run("analyze", "--prompt", "Down", "--text", "a.txt")[2]


def test_a_prompt_stands_in_the_place_of_a_text(done, tmp_path):
    words = "Down, down, down. Would the fall never come to an end?"
    done("analyze", "--measures", "three_axis", "--prompt", words)
    assert tl_posgen.load(tmp_path / "report").provenance["prompts"] == 1


def test_a_path_that_the_system_refuses_is_one_line(refused_at_once):
    assert "File name too long" in refused_at_once("--text", "a" * 300)


RAGGED = {
    "one row too long": "model,score\na,1\nb,2,3,4\n",
    "every row too long": "model,score\na,1,2\nb,2,3\n",
    "one row too short": "model,score\na\nb,2\n",
    "an open quote": 'model,score\n"a,1\n',
    "nothing": "",
}


@pytest.mark.parametrize("case", RAGGED)
def test_a_ragged_table_is_refused(refused, tmp_path, text, case):
    (tmp_path / "table.csv").write_text(RAGGED[case])
    error = refused("coupling-scores", tmp_path / "table.csv", *cut(text, 32, 2))
    assert "table.csv" in error
    assert error.strip().count("\n") == 0


def test_a_text_too_short_for_four_times_the_length_is_refused(refused, text):
    assert "461 tokens" in refused("length", "--text", text)


@pytest.fixture
def refused_at_once(refused, tmp_path):
    """`analyze` with words that must fail with a single line, and no directory left behind that holds anything."""

    def called(*words):
        error = refused("analyze", *words)
        assert error.strip().count("\n") == 0
        assert not list(tmp_path.glob("report/*"))
        return error

    return called


@pytest.mark.parametrize("words", ["", "   \n", "a"])
def test_an_empty_or_one_token_text_is_refused(refused_at_once, tmp_path, words):
    (tmp_path / "short.txt").write_text(words)
    refused_at_once("--text", tmp_path / "short.txt")


def test_a_text_shorter_than_the_length_is_refused_with_its_size(refused_at_once, text):
    assert "461 tokens" in refused_at_once(*cut(text, 400, 40))


@pytest.mark.parametrize("content", [b"\xff\xfe\x00\x01\x80", b"text\x00with\x00nulls" * 50])
def test_a_file_that_is_not_text_is_refused(refused_at_once, tmp_path, content):
    (tmp_path / "picture.png").write_bytes(content)
    assert "picture.png" in refused_at_once("--text", tmp_path / "picture.png")


def test_a_missing_text_is_refused(refused_at_once, tmp_path):
    assert "nowhere.txt" in refused_at_once("--text", tmp_path / "nowhere.txt")


@pytest.mark.parametrize("missing", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_directory_without_weights_tokenizer_or_config_is_refused(refused_at_once, tmp_path, text, missing):
    directory = copy_of_mini(tmp_path)
    (directory / missing).unlink()
    refused_at_once("--model", directory, "--text", text)


def test_nan_weights_are_refused_by_name(refused_at_once, tmp_path, text):
    directory = copy_of_mini(tmp_path)
    weights = load_file(directory / "model.safetensors")
    name = next(name for name in weights if "q_proj" in name)
    weights[name][0, 0] = torch.nan
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    assert "q_proj" in refused_at_once("--model", directory, "--text", text)


def test_a_hub_name_without_network_is_refused(refused_at_once, text):
    assert "nobody/no-such-model" in refused_at_once("--model", "nobody/no-such-model", "--text", text)


def test_an_output_path_that_is_a_file_is_refused_before_any_work(run, tmp_path, text):
    blocked = tmp_path / "file"
    blocked.write_text("kept")
    code, _, error = run("analyze", "--text", text, out=blocked / "report")
    assert code == 2
    assert str(blocked) in error
    assert blocked.read_text() == "kept"


@pytest.mark.parametrize("layers", ["9", "a", "0-1-2", "-1"])
def test_layers_that_do_not_exist_are_refused(refused_at_once, text, layers):
    refused_at_once("--text", text, "--length", 32, f"--layers={layers}")


def test_indices_are_read_as_written():
    assert parse_indices("0,2-4", "--layers") == [0, 2, 3, 4]
    assert parse_indices("3,0,3", "--layers") == [3, 0, 3]
    assert parse_indices(None, "--layers") is None
    with pytest.raises(InputError, match="--heads"):
        parse_indices("x", "--heads")


def test_numbers_are_shortened_without_losing_a_digit():
    shown = [short(x) for x in (0.917, -0.5, 10.25, 0.0, 1.0, 100.0004)]
    assert shown == [".917", "-.500", "10.250", ".000", "1.000", "100.000"]


def test_the_version_is_that_of_the_package(run):
    code, printed, _ = run("--version", out=None)
    assert (code, printed) == (0, f"tl-posgen {tl_posgen.__version__}\n")

"""The command line: one clear line for what a user can mend, and nothing written."""

from itertools import chain
from pathlib import Path

import pytest

CHECKPOINT = Path(__file__).parents[2] / "examples" / "mini_model" / "checkpoints" / "step00000"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dtype", "int8"], "give a floating-point one: auto, float32"),
        (["--device", "meta"], "--device 'meta' cannot be used (Tensor.item() cannot be called on meta"),
        (["--device", "cuda:99"], "--device 'cuda:99' cannot be used ("),
        (["--device", "gpu"], "--device 'gpu' cannot be used (torch knows no device of that name)"),
        (["--layers", "9"], "layer 9 does not exist"),
        *((["--layers", words], f"--layers '{words}': write indices") for words in ("a", "0-1-2", "-1")),
        (["--length", "400", "--prompts", "40"], "461 tokens"),  # all of the text
        (["--text", "nowhere.txt"], "nowhere.txt"),
        (["--text", "a" * 300], "File name too long"),
        (["--model", "nobody/no-such-model"], "nobody/no-such-model"),  # there is no network
    ],
)
def test_what_cannot_be_analysed_is_refused_before_anything_is_written(refused_at_once, cut, words, message):
    usual = cut(32, 1)
    given = dict(zip(usual[::2], usual[1::2], strict=True)) | dict(zip(words[::2], words[1::2], strict=True))
    assert message in refused_at_once(*chain.from_iterable(given.items()))


REFUSED = {
    "a flag that is given twice": (["analyze", "--force", "--force"], "--force is given twice; give it once ("),
    "an option that is given twice": (
        ["gap", "--gaps", "0", "--gaps=4"],
        "--gaps is given twice; give it once, a list",
    ),
    "a ratio that is no number": (["perturb", "--ratios", "many"], "--ratios"),
    "a distance that no prompt reaches": (["slash", "--distances", "60"], "60"),
    "a checkpoint that does not exist": (["emerge", "nowhere"], "nowhere"),
    "a paper that nobody wrote": (["claims", "--papers", "tea"], "tea"),
    "a paper that stands twice": (["claims", "--papers", "slash,slash"], "each once"),
    "null models that are no number": (["slash", "--nulls", "x"], "--nulls 'x': write how many random inits"),
    "a null seed that is no number": (["slash", "--nulls", "shuffled: x"], "--nulls shuffled: 'x': write indices"),
    "a table that does not exist": (["coupling-scores", "nowhere.csv"], "nowhere.csv"),
    "a backend that does not exist": (["analyze", "--backend", "foo"], "foo"),
    "a measure that does not exist": (["analyze", "--measures", "tea"], "tea"),
    "a model without a name": (["analyze", "--model", ""], "--model ''"),
    "a model with a name that is too long": (["analyze", "--model", "a" * 300], "a name of a model"),
    "a model with a name of two lines": (["analyze", "--model", "two\nlines"], "neither a directory"),
    "a prompt beside a text": (["analyze", "--prompt", "Down"], "--prompt is taken whole"),
    "too many layers": (["analyze", "--layers", "0-99999999999"], "write a shorter range"),
    "a share that stands twice": (["perturb", "--ratios", "0.5,0.5"], "--ratios [0.5, 0.5]: give a list of one at"),
    "an empty null seed": (["slash", "--nulls", "shuffled:"], "--nulls"),
    "a null seed that stands twice": (["slash", "--nulls", "shuffled: 0,0-1"], "each seed may stand only once"),
    "a kind of null that there is not": (
        ["slash", "--nulls", "tea: 0"],
        "no kind of null model 'tea'; there are random",
    ),
    "a kind of null that stands twice": (
        ["slash", "--nulls", "shuffled: 0; shuffled: 1"],
        "shuffled is given twice; give all its seeds at once",
    ),
    "too many null models": (["analyze", "--nulls", "99999999999"], "--nulls 99999999999: give how many random inits"),
    "too many null seeds": (["analyze", "--nulls", "shuffled: 0-99999999999"], "write a shorter range"),
    "no checkpoint for claims": (["claims", "--checkpoints", "nowhere"], "nowhere: not a checkpoint"),
    "two checkpoints that are none": (["claims", "--checkpoints", "a", "--checkpoints", "b"], "a: not a checkpoint"),
    "a checkpoint without a tokenizer": (["emerge", CHECKPOINT], "give --tokenizer"),
    "a model without a tokenizer": (["analyze", "--model", CHECKPOINT], "no tokenizer; give --tokenizer, a directory"),
    "coupling between one token": (["token-coupling", "--tokens=-1"], "give two positions"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("case", REFUSED)
def test_bad_words_get_one_line_that_names_them(refused, cut, case):
    words, named = REFUSED[case]
    assert named in refused(*words, *cut(48, 2)).strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("toy --seeds 0", 'Invalid value "0" for --seeds. Must be >= 1.'),
        ("toy --distance 2.5", "--distance 2.5: give a whole number"),
        (f"analyze --prompts {'9' * 20}", f"--prompts {'9' * 20}: give a number below 2^63"),
        ("compare nowhere nowhere", "nowhere: does not exist; give the directory of a report"),
        ("analyze --consecutive false", "false: no option takes this word"),
        ("analyze more", "more: no option takes this word"),
        ("analyze --length", 'Command "analyze" parameter --length requires an argument.'),
        ("sweep", 'Command "sweep" parameter STUDY requires an argument.'),
        ("analyze --nulls shuffled:4-2", "--nulls shuffled: '4-2': a range counts up; write 2-4"),
    ],
)
def test_words_that_do_not_fit_their_command_are_named(command, words, said):
    code, _, error = command(*words.split())
    assert (code, error.startswith(f"error: {said}")) == (2, True), error


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


@pytest.mark.parametrize("content", [b"", b"   \n", b"a", b"\xff\xfe\x00\x01\x80", b"text\x00with\x00nulls" * 50])
def test_an_empty_text_one_of_one_token_and_a_file_that_is_no_text_are_refused(refused_at_once, tmp_path, content):
    (tmp_path / "picture.png").write_bytes(content)
    error = refused_at_once("--text", tmp_path / "picture.png")
    assert len(content) < 5 or "picture.png" in error


def test_an_output_path_that_is_a_file_is_refused_before_any_work(run, tmp_path, text):
    blocked = tmp_path / "file"
    blocked.write_text("kept")
    code, _, error = run("analyze", "--text", text, out=blocked / "report")
    assert code == 2
    assert str(blocked) in error
    assert blocked.read_text() == "kept"


@pytest.mark.parametrize(("name", "near"), [("slah", "slash"), ("tree-axis", "three-axis"), ("tea", None)])
def test_a_command_with_a_slip_is_told_which_one_is_like_it(run, name, near):
    code, _, error = run(name)
    assert code == 2
    assert f"no command '{name}';" in error
    assert ("did you mean" in error) == (near is not None) == (f"'{near}'?" in error)

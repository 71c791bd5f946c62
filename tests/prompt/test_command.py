"""tl-posgen explain: a table, and a page with pictures; what it refuses, in the words of its options."""

import pytest

import tl_posgen

WORDS = "Down, down, down. Would the fall never end?"


@pytest.mark.longer
def test_the_command_prints_terms_and_writes_a_page(command, tmp_path):
    code, printed, error = command("explain", "--prompt", WORDS, "--head", "3.1", "--out", tmp_path / "why")
    assert (code, error) == (0, "")
    told = " ".join(printed.split())
    for words in ("L3H1, query 14 '?' of mini: key", "query key", "largest terms by source of the key", "bundled book"):
        assert words in told
    assert {file.name for file in (tmp_path / "why").iterdir()} == {"index.html", "results.nc", "summary.json"}
    assert tl_posgen.load(tmp_path / "why")["explanation"].findings()[0] in told
    again = command("explain", "--prompt", WORDS, "--head", "3.1", "--key", "2", "--out", tmp_path / "why")
    remedy = "choose another place by --out DIR, or give --force to replace it"
    assert again == (2, "", f"error: {tmp_path / 'why'}: holds another run's index.html; {remedy}\n")
    assert "write a head as" in command("explain", "--prompt", WORDS, "--head", "one", "--out", tmp_path / "why")[2]
    _, printed, _ = command("explain", "--prompt", WORDS, "--head", "3.1", "--key", "2", "--out", tmp_path / "two")
    assert "of mini: key 2 " in " ".join(printed.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--head", "3.1", "--query", "99"], "--query 99 is outside the prompt of"),
        (["--head", "3.1", "--query", "2", "--against", "3"], "--against 3: query 2 sees keys 0 to 2 only"),
        (["--head", "3.1", "--query", "2", "--key", "3"], "--key 3: query 2 sees keys 0 to 2 only"),
        (["--head", "9.1"], "layer 9 does not exist"),
        (["--head", "first"], "write a head as"),
    ],
)
def test_a_refusal_is_one_line_that_names_the_option(command, tmp_path, options, message):
    code, _, error = command("explain", "--prompt", WORDS, *options, "--out", tmp_path / "why")
    assert code == 2
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "why").exists()


def test_the_help_names_the_files_that_are_written(command):
    for name in ("explain", "slash"):
        printed = " ".join(command(name, "--help")[1].replace("│", " ").split())
        assert "Directory for index.html, summary.json and results.nc." in printed

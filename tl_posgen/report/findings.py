"""What was found, in words: sentences with the number, and the null's number beside it."""

from collections.abc import Mapping
from importlib import import_module, util
from types import ModuleType

from tl_posgen.report.encodings import carries_over, note
from tl_posgen.results import Result


def findings(results: Mapping[str, Result]) -> list[str]:
    """One sentence or more per result that has words of its own, and what its model's encoding makes of it."""
    sentences = []
    for name, result in results.items():
        found = getattr(words_of(name), "found", None)
        if found and carries_over(result):
            sentences += found(result)
        if said := note(result):
            sentences.append(said)
    return sentences


def heading(name: str) -> tuple[str, str]:
    """The title and the question of a result's section; its bare name for someone else's result."""
    words = words_of(name)
    return (words.TITLE, words.QUESTION) if words else (name.replace("_", " "), "")


def words_of(name: str) -> ModuleType | None:
    """`tl_posgen.report.words.<name>`, or None where a result has no words of its own."""
    module = f"tl_posgen.report.words.{name}"
    return import_module(module) if util.find_spec(module) else None

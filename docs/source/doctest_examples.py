"""A griffe extension: how the reference reads docstrings, beside what Google's style says."""

import re
from typing import Any

import griffe

SEVERAL = re.compile(r"^( +)(\*{0,2}\w+(?:, \*{0,2}\w+)+): ", re.MULTILINE)


class DoctestExamples(griffe.Extension):
    """A section that is called Example holds doctests; a line that explains several arguments is a line for each."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            text = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
            begins, args, after_args = text.partition("Args:\n")
            section, *later_sections = re.split(r"^(?=\S)", after_args, maxsplit=1, flags=re.MULTILINE)
            obj.docstring.value = begins + args + SEVERAL.sub(one_each, section) + "".join(later_sections)


def one_each(match: re.Match[str]) -> str:
    """The last name has the text; those before it name the last."""
    margin, names = match[1], match[2].split(", ")
    return "".join(f"{margin}{name}: as `{names[-1]}`.\n" for name in names[:-1]) + f"{margin}{names[-1]}: "

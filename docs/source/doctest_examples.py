"""A griffe extension: sections that are called Example hold doctests, as those that are called Examples do."""

import re
from typing import Any

import griffe


class DoctestExamples(griffe.Extension):
    """Without it an Example is shown as a quotation inside a quotation inside a quotation."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)

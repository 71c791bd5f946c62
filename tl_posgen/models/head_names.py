"""Names of heads: L3H1."""

import re
from typing import SupportsInt

from tl_posgen.errors import InputError

NAME = re.compile(r"L?(\d+)(?:\.|H)(\d+)|\((\d+), ?(\d+)\)", re.IGNORECASE)  # L3H1, 3.1 or (3, 1)


def head_name(layer: SupportsInt, head: SupportsInt) -> str:
    """Return the name of a head as sentences, tables and figures have it.

    Example:
        >>> head_name(3, 1)
        'L3H1'
    """
    return f"L{int(layer)}H{int(head)}"


def parse_head(name: str) -> tuple[int, int]:
    """Return the layer and the index of a head's name: "L3H1", "3.1" or "(3, 1)".

    Example:
        >>> parse_head("L3H1"), parse_head("3.1"), parse_head("(3, 1)")
        ((3, 1), (3, 1), (3, 1))
    """
    if (match := NAME.fullmatch(name.strip())) is None:
        raise InputError(f'head {name!r}: write a head as "L3H1" or "3.1" (layer 3, head 1)')
    layer, head = (int(number) for number in match.groups() if number is not None)
    return layer, head

"""Explanations in the terminal: terms of the keys that get most attention, and the largest terms of one."""

from rich.console import Console

from tl_posgen.core.formatting import counted
from tl_posgen.prompt.explanation import Explanation
from tl_posgen.prompt.explanation_figures import with_words
from tl_posgen.report.tables import print_frame

MOST_KEYS, MOST_TERMS = 12, 8


def print_explanation(explanation: Explanation, *, full: bool = False) -> None:
    """Print a table of keys and a table of the largest terms and sources of the key that stands out.

    Args:
        full: print every key and every term.
    """
    console, attrs, key = Console(markup=False), explanation.data.attrs, explanation.stands_out
    against = attrs["against"] if attrs["against_key"] is None else f"key {attrs['against_key']}, {attrs['against']!r}"
    title = f"{attrs['model']}, {explanation.head}: scores of query {attrs['query']}, {attrs['query_token']!r}, less "
    title += against + (", less the same of the other prompt" if "other" in attrs else "")
    table, terms = explanation.table(), explanation.largest(len(explanation.frame(("term", "source"))), key)
    for frame in (table, terms):
        frame["token"] = [repr(token) for token in frame["token"]]
    print_frame(console, table.head(len(table) if full else MOST_KEYS), title)
    token = table.set_index("key")["token"][key]
    name = f"largest terms of key {key}, {token}, by source of the {attrs['side']}"
    print_frame(
        console, with_words(terms).drop(columns=["key", "token"]).head(len(terms) if full else MOST_TERMS), name
    )
    left = len(table) - MOST_KEYS
    if left > 0 and not full:
        print(f"Not shown: {counted(left, 'key')} with less attention; --full shows all.")
    note = f" {attrs['note'][0].upper()}{attrs['note'][1:]}." if attrs["note"] else ""
    print(f"Means of {attrs['reference']}.{note}")

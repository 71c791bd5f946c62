"""Slash-dominant heads beside the others, in numbers: what several results compare."""

from collections.abc import Sequence

import pandas as pd
import xarray as xr

TOKENS = {"all": "all", "without_first": "first left out"}


def by_group(dataset: xr.Dataset, names: Sequence[str]) -> pd.DataFrame:
    """A row for each choice of tokens and group of heads (dominant or not): their number n, and means over them.

    Args:
        dataset: `dominant` and the variables named, over (variant, layer, head).
    """
    frame = dataset[["dominant", *names]].to_dataframe(["variant", "layer", "head"]).reset_index()
    rows = []
    for variant, tokens in TOKENS.items():
        for dominant in (True, False):
            some = frame[(frame["variant"] == variant) & (frame["dominant"] == dominant)]
            if len(some):
                rows.append({"tokens": tokens, "dominant": dominant, "n": len(some), **some[list(names)].mean()})
    return pd.DataFrame(rows)


def short(grouped: pd.DataFrame) -> pd.DataFrame:
    """The same with the group in one column: '31 slash-dominant', '9 other'."""
    kinds = grouped["dominant"].map({True: "slash-dominant", False: "other"})
    frame = grouped.drop(columns=["dominant", "n"])
    frame.insert(1, "heads", grouped["n"].astype(str) + " " + kinds)
    return frame


def in_words(dataset: xr.Dataset, names: Sequence[str], *, tokens: str = "all", form: str = "{:.3f}") -> str:
    """'0.947 and 0.964 in 31 slash-dominant heads, 0.823 and 0.903 in 9 other heads'."""
    grouped = by_group(dataset, names)
    grouped = pd.DataFrame(grouped[grouped["tokens"] == TOKENS[tokens]])
    alone = not grouped["dominant"].any()
    phrases = []
    for row in grouped.to_dict("records"):
        heads = f"{row['n']} heads, none slash-dominant" if alone else heads_in_words(row["n"], row["dominant"])
        phrases.append(f"{' and '.join(form.format(row[name]) for name in names)} in {heads}")
    return ", ".join(phrases)


def heads_in_words(n: int, dominant: bool) -> str:
    """'1 slash-dominant head', '9 other heads'."""
    return f"{n} {'slash-dominant' if dominant else 'other'} head{'' if n == 1 else 's'}"


def of_dominant(dataset: xr.Dataset, names: Sequence[str]) -> list[float] | None:
    """Means over the slash-dominant heads, of all tokens; None where there are none."""
    grouped = by_group(dataset, names)
    grouped = pd.DataFrame(grouped[grouped["dominant"] & (grouped["tokens"] == TOKENS["all"])])
    return grouped[list(names)].to_numpy()[0].tolist() if len(grouped) else None

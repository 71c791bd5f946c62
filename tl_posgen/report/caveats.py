"""Meaning of a measure for a model that knows positions in another way than RoPE."""

from collections.abc import Mapping, Sequence

ENCODINGS = {
    "absolute": "Positions are added to the embeddings here",
    "alibi": "Positions enter as a fixed slope per head here (ALiBi)",
    "none": "Nothing in the attention knows positions here (NoPE)",
}


def caveat(name: str, caveats: Mapping[str, str], encodings: Sequence[str]) -> str | None:
    """Return the restriction of a measure for a model of these encodings, or None if there is none.

    Example:
        >>> caveat("residual", {"none": "there are no planes."}, ["none"])
        'residual: Nothing in the attention knows positions here (NoPE): there are no planes.'
        >>> caveat("residual", {"none": "there are no planes."}, ["rotary"]) is None
        True
    """
    where = " in some layers" if len(encodings) > 1 else ""
    words = [f"{ENCODINGS.get(one, one)}{where}: {caveats[one]}" for one in encodings if one in caveats]
    return f"{name}: {' '.join(words)}" if words else None

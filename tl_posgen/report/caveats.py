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
    words = [f"{known_by(one, encodings)}: {caveats[one]}" for one in encodings if one in caveats]
    return f"{name}: {' '.join(words)}" if words else None


def shared_caveat(measures: Mapping[str, Mapping[str, str]], encodings: Sequence[str]) -> str:
    """Return where the restrictions of several measures come from: the caveats of each by its name."""
    concerned = [one for one in encodings if any(one in caveats for caveats in measures.values())]
    where = "; ".join(known_by(one, encodings) for one in concerned)
    return f"{where}, which restricts what {', '.join(measures)} say: --full, the page and report.findings() tell how."


def known_by(encoding: str, encodings: Sequence[str]) -> str:
    """Return how positions are known where this is one of the encodings."""
    return f"{ENCODINGS.get(encoding, encoding)}{' in some layers' if len(encodings) > 1 else ''}"

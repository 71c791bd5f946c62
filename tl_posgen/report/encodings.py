"""What a measure means for a model that knows positions otherwise than by RoPE: one sentence a measure and encoding.

A result carries its encoding in `provenance["encoding"]`. Nothing is said where a measure means what it says.
"""

from tl_posgen.results import Result

WHERE = {
    "absolute": "Positions are added to the embeddings here",
    "alibi": "Positions enter as a fixed slope per head here (ALiBi)",
    "none": "Nothing in the attention knows positions here (NoPE)",
}
NO_TURN = "nothing rotates, so"
LOST = "This measure does not carry over."
NOTES: dict[str, dict[str, str]] = {
    "three_axis": {
        "absolute": "the key curve c mixes where a key stands with what it is, and a holds only what is a function of "
        "distance; r still says how additive the scores are, not that they are position + meaning. See across_prompts.",
        "alibi": "three axes fit a straight line exactly, so where content is small beside the slope, as at random "
        "init, r is near 1 and the null is no floor. The slope is not in the residual: compare its size in logits.",
        "none": "a(i - j) is what texts themselves have in common at a distance, such as near tokens being alike.",
    },
    "variance": {
        "absolute": f"{NO_TURN} d, qd, kd and qkd are zero by construction: position is inside q and k, and the shares "
        "cannot tell it from meaning. This measure does not carry over; across_prompts does.",
        "alibi": f"{NO_TURN} qd, kd and qkd are zero by construction, and so is the interaction; position is the slope "
        "alone, beside what content moves.",
        "none": f"{NO_TURN} d, qd, kd and qkd are zero by construction. {LOST}",
    },
    "mean_key": {
        "absolute": f"{NO_TURN} f + g is the score itself and r = 1 by construction. {LOST}",
        "alibi": f"{NO_TURN} f + g is the score without its slope and r = 1 by construction. {LOST}",
        "none": f"{NO_TURN} f + g is the score itself and r = 1 by construction. {LOST}",
    },
    "slash": {
        "absolute": "slash scores are of the attention itself and mean the same; but a fixed distance has to come from "
        "position vectors in q and k, so nearly rank-one Q and K are not what makes a slash.",
        "alibi": "slash scores are of the attention itself and mean the same; but steep slopes alone pay near tokens "
        "much attention, so compare with random init rather than with uniform attention.",
        "none": "slash scores are of the attention itself and mean the same; rank-one Q and K cannot make one.",
    },
    "residual": {
        "absolute": "the residual holds what query and key position do together beyond their distance, as well as what "
        "query and key tokens do together; there are no planes to share it among.",
        "alibi": "the slope is fitted exactly and is not in the residual: that is content, or position that earlier "
        "layers wrote into the tokens. The variance that the share is of has the slope in it, at random init most of "
        "all: compare std, in logits. There are no planes.",
        "none": "the residual is content, or position that earlier layers wrote into the tokens. There are no planes.",
    },
    "across_prompts": {
        "absolute": "random position vectors are the same in every prompt too, so random init is no zero; look at how "
        "much of position is a function of distance.",
        "alibi": "the slope is the same in every prompt, at random init too, where little content stands beside it, so "
        "the null is no zero. What the slope adds is all in the straight line.",
    },
    "attention_examples": {
        "absolute": "the additive pattern's key part mixes where a key stands with what it is.",
    },
}


WITHOUT_MEANING = {"mean_key": ("absolute", "alibi", "none"), "variance": ("absolute", "none")}


def encodings_of(result: Result) -> list[str]:
    """The encodings that the model's layers have; none where that is not known."""
    return [name for name in str(result.provenance.get("encoding", "")).split(", ") if name]


def carries_over(result: Result) -> bool:
    """Whether the measure says anything of this model: False where its numbers hold by construction in every layer.

    Example:
        >>> import xarray as xr
        >>> carries_over(Result("mean_key", xr.Dataset(), provenance={"encoding": "alibi"}))
        False
    """
    encodings = encodings_of(result)
    empty = WITHOUT_MEANING.get(result.name, ())
    return not encodings or any(name not in empty for name in encodings)


def note(result: Result) -> str | None:
    """What to keep in mind of this result for the model's encoding, or None where the measure means what it says.

    Example:
        >>> import xarray as xr
        >>> print(note(Result("residual", xr.Dataset(), provenance={"encoding": "none"}))[:61])
        residual: Nothing in the attention knows positions here (NoPE
        >>> note(Result("mean_key", xr.Dataset(), provenance={"encoding": "rotary"})) is None
        True
    """
    encodings, known = encodings_of(result), NOTES.get(result.name, {})
    where = " in some layers" if len(encodings) > 1 else ""
    said = [f"{WHERE[name]}{where}: {known[name]}" for name in encodings if name in known]
    return f"{result.name}: {' '.join(said)}" if said else None

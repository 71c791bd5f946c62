"""In words, what a result does not say: of the model's encoding, of hooks, prompts and scores that were not proved."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tl_posgen.core.formatting import known_by


def restrictions(caveats: Mapping[str, str], encodings: Sequence[str]) -> str:
    """Return a measure's caveats for these encodings of positions, in words; "" without one.

    Example:
        >>> restrictions({"none": "r is 1."}, ["rotary", "none"])
        'Nothing in the attention knows positions here (NoPE) in some layers: r is 1.'
    """
    return " ".join(
        f"{known_by(encoding, encodings)}: {caveats[encoding]}" for encoding in encodings if encoding in caveats
    )


def of_dataset(attrs: Mapping[Any, Any]) -> list[str]:
    """Return warnings about edited scores and patterns, and about a missing proof."""
    warnings = []
    edited, patterns = (  # a file gives them back as an array or a single number
        ", ".join(str(int(layer)) for layer in np.atleast_1d(attrs.get(name, [])))
        for name in ("edited_layers", "edited_patterns")
    )
    if edited:
        warnings.append(f"measured from scores that are not those of q and k, in layer {edited}. {attrs['edited']}")
    if patterns:
        warnings.append(
            f"measured from patterns that are not the softmax of the scores, in layer {patterns}: hooks edit them, "
            "or the model's attention is more than softmax."
        )
    if attrs.get("unproved"):
        warnings.append(
            "recomputed from cached q and k, and not compared with the scores that the pass used: "
            "the cache holds neither hook_attn_scores nor hook_pattern."
        )
    return warnings


def of_provenance(provenance: Mapping[str, Any], *, has_loss: bool) -> list[str]:
    """Return warnings about hooks, a metric in the place of a loss that is measured, and prompts that repeat each other
    or are longer than the context."""
    warnings = []
    if hooks := provenance.get("fwd_hooks"):
        warnings.append(f"measured under hooks, the null models too: {', '.join(hooks)}.")
    if (metric := provenance.get("metric")) and has_loss:
        warnings.append(
            f"in the place of the loss stands the metric {metric}, in its own unit; shares recovered, cost "
            "and harm take higher as worse, so give its negative where lower is worse."
        )
    if repeated := provenance.get("repeated"):
        warnings.append(
            f"{repeated:.0%} of what the prompts say stands in another prompt too, so that intervals over prompts "
            "are too narrow; give a text that does not repeat."
        )
    if beyond := provenance.get("beyond_context"):
        warnings.append("measured on prompts of up to {} tokens, beyond the model's context of {}.".format(*beyond))
    return warnings

"""The table of layers: what each does with positions, read from the model, then proved against its scores."""

import re
from typing import Any

import pandas as pd
import torch

from tl_posgen.errors import UnsupportedModelError
from tl_posgen.models.geometry.probe import Found, Probed
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.models.model import Model
from tl_posgen.models.selection import Layers
from tl_posgen.models.session import Session, session_of

LEGEND = {  # what columns mean that do not say it themselves
    "positions": "how they enter; of rotary ones, which coordinates make a plane (half: m and m + rotary_dim / 2)",
    "planes": "that turn, of all",
    "wavelengths": "tokens a turn, shortest to longest",
    "scale": "factor of q·k",
    "cap": "soft cap of scores",
    "window": "tokens back that are seen",
    "heads": "of queries, and of keys",
    "scores": "streamed where they show only while attention is streamed",
    "proof": "largest |recomputed - the model's own score|",
}


def geometry_of(model: Model | Session, layers: Layers = None) -> tuple[LayerGeometry, ...]:
    """Return the geometry of each layer, proved: score_ij recomputed from q and k equals the model's own score.

    The result is remembered for the model object, so the proof (one forward pass of 48 tokens) is run once.

    Args:
        layers: which; all if left out.

    Raises:
        UnsupportedModelError: a layer cannot be described exactly; the message says which, by how much and likely why.
        InputError: a layer that does not exist.

    Example:
        >>> from tl_posgen import load_model
        >>> first, *_ = geometry_of(load_model("mini"))
        >>> first.encoding, first.error < 1e-4
        ('rotary', True)
    """
    return session_of(model).geometry(layers)


def check(model: Model | Session, *, printed: bool = True) -> pd.DataFrame:
    """Print, layer by layer, what a model does with positions, how well that was proved, and what is not supported.

    A model that cannot be analysed is reported, not refused. It is probed anew, so call this after changing a model.

    Returns:
        One row per layer: layer, supported, encoding, planes, shortest and longest wavelength (tokens per turn),
        rotary_dim, pairing, scale, soft_cap, window, heads, key_value_heads, qk_norm, sinks, streamed (whether its
        scores show only while attention is streamed), proof_error, refusal.

    Example:
        >>> from tl_posgen import load_model
        >>> table = check(load_model("mini"), printed=False)
        >>> bool(table["supported"].all())
        True
    """
    session = session_of(model)
    found = session.found(again=True)
    rows, cells = zip(*(_row_of(layer, one) for layer, one in enumerate(found)), strict=True)
    if printed:
        print(f"{session.origin.name} as a {type(session.model).__name__}")
        shown = pd.DataFrame(cells).fillna("")
        shown = shown.loc[:, (shown != "").any()]
        print(shown.to_string(index=False))
        print("; ".join(f"{name}: {words}" for name, words in LEGEND.items() if name in shown.columns))
        refusals = [str(one) for one in found if not isinstance(one, Probed)]
        for refusal in {re.sub(r"^layer \d+", "", one): one for one in reversed(refusals)}.values():
            print(f"not supported: {refusal}")
    return pd.DataFrame(rows)


def _row_of(layer: int, found: Found) -> tuple[dict[str, Any], dict[str, str]]:
    """Return one layer as a row of the table, and as the terminal shows it."""
    if isinstance(found, UnsupportedModelError):
        row = {"layer": layer, "supported": False, "refusal": str(found)}
        return row, {"layer": str(layer), "positions": "not supported"}
    one = found.geometry
    wavelengths = (2 * torch.pi / one.rope.inv_freq).tolist()
    row = {
        "layer": layer,
        "supported": True,
        "encoding": one.encoding,
        "planes": len(wavelengths),
        "shortest_wavelength": min(wavelengths, default=None),
        "longest_wavelength": max(wavelengths, default=None),
        "rotary_dim": one.rope.rotary_dim,
        "pairing": one.rope.pairing if wavelengths else None,
        "scale": one.scale,
        "soft_cap": one.soft_cap,
        "window": one.window,
        "heads": one.n_heads,
        "key_value_heads": one.n_key_value_heads,
        "d_head": one.d_head,
        "qk_norm": one.qk_norm,
        "sinks": one.sinks,
        "streamed": found.handed_on,
        "proof_error": one.error,
        "refusal": None,
    }
    cells = {
        "layer": str(layer),
        "positions": f"{one.encoding}, {one.rope.pairing}" if wavelengths else one.encoding,
        "planes": f"{len(wavelengths)} of {one.d_head // 2}" if wavelengths else "",
        "wavelengths": f"{min(wavelengths):.3g}..{max(wavelengths):.0f}" if wavelengths else "",
        "scale": f"{one.scale:.4g}",
        "cap": f"{one.soft_cap:.4g}" if one.soft_cap else "",
        "window": f"{one.window}" if one.window else "",
        "heads": f"{one.n_heads}, {one.n_key_value_heads} keys",
        "qk norm": "yes" if one.qk_norm else "",
        "sinks": "yes" if one.sinks else "",
        "scores": "streamed" if found.handed_on else "",
        "proof": f"{one.error:.0e}",
    }
    return row, cells

"""The table of layers: what each does with positions, read from the model, then proved against its scores."""

import re
from typing import Any

import pandas as pd
import torch

from tl_posgen.errors import UnsupportedModelError
from tl_posgen.models.geometry.probe import Probed
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.models.model import Model
from tl_posgen.models.selection import Layers, check_indices
from tl_posgen.models.session import Session, session_of


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
    session = session_of(model)
    return tuple(session.layer(index).geometry for index in check_indices(layers, session.model.cfg.n_layers, "layer"))


def rotating_layers(session: Session, layers: Layers, purpose: str) -> list[LayerGeometry]:
    """Return the geometry of the chosen layers that have RoPE; UnsupportedModelError where none has.

    Args:
        purpose: in the message: what there is none of without RoPE, "planes to hold".
    """
    rotating = [geometry for geometry in geometry_of(session, layers) if geometry.rope.rotary_dim]
    if not rotating:
        raise UnsupportedModelError(f"no chosen layer has RoPE, so there are no {purpose}")
    return rotating


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
    layers, rows = session.layers(again=True), list[dict[str, Any]]()
    for layer, probed in enumerate(layers):
        if isinstance(probed, UnsupportedModelError):
            rows.append({"layer": layer, "supported": False, "refusal": str(probed)})
            continue
        geometry = probed.geometry
        wavelengths = (2 * torch.pi / geometry.rope.inv_freq).tolist()
        rows.append(
            {
                "layer": layer,
                "supported": True,
                "encoding": geometry.encoding,
                "planes": len(wavelengths),
                "shortest_wavelength": min(wavelengths, default=None),
                "longest_wavelength": max(wavelengths, default=None),
                "rotary_dim": geometry.rope.rotary_dim,
                "pairing": geometry.rope.pairing if wavelengths else None,
                "scale": geometry.scale,
                "soft_cap": geometry.soft_cap,
                "window": geometry.window,
                "heads": geometry.n_heads,
                "key_value_heads": geometry.n_key_value_heads,
                "d_head": geometry.d_head,
                "qk_norm": geometry.qk_norm,
                "sinks": geometry.sinks,
                "streamed": probed.left_to_hf,
                "proof_error": geometry.error,
                "refusal": None,
            }
        )
    table = pd.DataFrame(rows)
    if printed:
        print(f"{session.origin.name} as a {type(session.model).__name__}")
        telling = [name for name in table if name not in ("layer", "refusal") and any(row.get(name) for row in rows)]
        alike = [name for name in telling if table[name].nunique(dropna=False) == 1]
        shorter: Any = "{:.4g}".format
        if alike:
            print("every layer:", table[alike].iloc[0].to_string(float_format=shorter), sep="\n")
        differing = ["layer", *(name for name in telling if name not in alike)]
        print(table[differing].to_string(index=False, na_rep="", float_format=shorter))
        print(
            "wavelengths: tokens a turn, of planes that turn; scale: factor of q·k; window:\n"
            "tokens back that are seen; proof_error: largest |recomputed - model's own score|"
        )
        refusals = [str(reason) for reason in layers if not isinstance(reason, Probed)]
        for refusal in {re.sub(r"^layer \d+", "", reason): reason for reason in reversed(refusals)}.values():
            print(f"not supported: {refusal}")
    return table

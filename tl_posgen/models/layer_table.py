"""The table of layers: what each does with positions, read from the model, then proved against its scores."""

from collections.abc import Hashable, Mapping
from typing import Any

import pandas as pd
import torch

from tl_posgen.errors import UnsupportedModelError
from tl_posgen.models.geometry.probe import Found
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
    table = pd.DataFrame([{"layer": layer, **_row_of(found)} for layer, found in enumerate(session.found(again=True))])
    if printed:
        _print_table(table, f"{session.origin.name} as a {type(session.model).__name__}")
    return table


def _row_of(found: Found) -> dict[str, Any]:
    """Return one layer as a row of the table."""
    if isinstance(found, UnsupportedModelError):
        return {"supported": False, "refusal": str(found)}
    geometry = found.geometry
    wavelengths = (2 * torch.pi / geometry.rope.inv_freq).tolist()
    return {
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
        "streamed": found.handed_on,
        "proof_error": geometry.error,
        "refusal": None,
    }


def _print_table(table: pd.DataFrame, title: str) -> None:
    """Print what a terminal has room for, empty columns left out; then, once each, why layers are not supported."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    rows = pd.DataFrame([_cells(row) for row in table.to_dict("records")]).fillna("")
    rows = rows.loc[:, (rows != "").any()]
    grid = Table(*rows.columns, box=SIMPLE_HEAD, padding=0, pad_edge=False)
    for row in rows.itertuples(index=False):
        grid.add_row(*row)
    console = Console()
    console.print(title, markup=False, highlight=False, soft_wrap=True)
    console.print(grid)
    if table["supported"].any():
        legend = "; ".join(f"{name}: {words}" for name, words in LEGEND.items() if name in rows.columns)
        console.print(f"{legend}.", style="dim", highlight=False, soft_wrap=True)
    refusals = table["refusal"].dropna()
    for refusal in refusals[~refusals.str.replace(r"^layer \d+", "", regex=True).duplicated()]:
        console.print(f"not supported: {refusal}", markup=False, highlight=False, soft_wrap=True)


def _cells(row: Mapping[Hashable, Any]) -> dict[str, str]:
    """Format one row for the terminal."""

    def number(name: str, form: str = ".4g") -> str:
        return "" if pd.isna(row[name]) else format(row[name], form)

    if not row["supported"]:
        return {"layer": str(row["layer"]), "positions": "not supported"}
    turning = row["planes"] > 0
    return {
        "layer": str(row["layer"]),
        "positions": f"{row['encoding']}, {row['pairing']}" if turning else row["encoding"],
        "planes": f"{row['planes']:.0f} of {row['d_head'] / 2:.0f}" if turning else "",
        "wavelengths": f"{number('shortest_wavelength', '.3g')}..{row['longest_wavelength']:.0f}" if turning else "",
        "scale": number("scale"),
        "cap": number("soft_cap"),
        "window": number("window"),
        "heads": f"{row['heads']:.0f}, {row['key_value_heads']:.0f} keys",
        "qk norm": "yes" if row["qk_norm"] else "",
        "sinks": "yes" if row["sinks"] else "",
        "scores": "streamed" if row["streamed"] else "",
        "proof": number("proof_error", ".0e"),
    }

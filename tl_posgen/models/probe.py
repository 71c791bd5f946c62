"""The probe: what each layer of a model does with positions, read from the model, then proved against its scores."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import pandas as pd
import torch
from torch import Tensor

from tl_posgen.errors import UnsupportedModelError
from tl_posgen.models.backend import Model, backend_of
from tl_posgen.models.geometry import LayerGeometry
from tl_posgen.models.origin import origin_of
from tl_posgen.models.probe_bridge import bridge_drafts, bridge_limit
from tl_posgen.models.probe_hooked import hooked_drafts, hooked_limit
from tl_posgen.models.proof import prove, refuse_patterns
from tl_posgen.models.sites import Sites, bridge_sites, dispatch, hooked_sites, plain_scores

PROBE_TOKENS = 48  # enough to leave a small window, few enough to cost nothing
HOOKS = ("q", "k", "attn_scores", "q_normed", "k_normed", "cos", "sin")


@dataclass(frozen=True)
class Probed:
    """One layer as the probe found it: its proved geometry, and the hooks to read it from."""

    geometry: LayerGeometry
    sites: Sites


Found: TypeAlias = Probed | UnsupportedModelError  # what a layer is, or why that cannot be said
_found: WeakKeyDictionary[Model, tuple[torch.dtype, tuple[Found, ...]]] = WeakKeyDictionary()


def geometry_of(model: Model) -> tuple[LayerGeometry, ...]:
    """What each layer does with positions, proved: score_ij recomputed from q and k equals the model's own score.

    The result is remembered for the model object, so the proof (one forward pass of 48 tokens) is run once.

    Raises:
        UnsupportedModelError: a layer cannot be described exactly; the message says which, by how much and likely why.

    Example:
        >>> from tl_posgen import load_model
        >>> first, *_ = geometry_of(load_model("mini"))
        >>> first.encoding, first.error < 1e-4
        ('rotary', True)
    """
    return tuple(supported(found).geometry for found in probe(model))


def supported(found: Found) -> Probed:
    if isinstance(found, UnsupportedModelError):
        raise UnsupportedModelError(*found.args)
    return found


def probe(model: Model, *, again: bool = False) -> tuple[Found, ...]:
    """What was found in every layer, supported or not. `again=True` after changing the model's positions by hand."""
    backend_of(model)
    dtype = next(model.parameters()).dtype
    if not again and model in _found and _found[model][0] == dtype:
        return _found[model][1]
    fired = probe_run(model)
    rotates = any("cos" in hooks for hooks in fired.values())
    found = tuple(probe_layer(model, layer, fired[layer], rotates) for layer in range(model.cfg.n_layers))
    _found[model] = (dtype, found)
    return found


def probe_layer(model: Model, layer: int, fired: dict[str, Tensor], rotates: bool) -> Found:
    try:
        for part in ("q", "k", "attn_scores"):
            if part not in fired:
                raise UnsupportedModelError(f"layer {layer}: its hook_{part} does not fire (no attention there?)")
        refuse_patterns(layer, fired["attn_scores"][0])
        if backend_of(model) == "hooked":
            sites, drafts = hooked_sites(model, layer), hooked_drafts(model, layer)
            q, k = (sites.read(part, fired[part])[0] for part in ("q", "k"))
        else:
            d_head = int(getattr(model.blocks[layer].attn.original_component, "head_dim", None) or model.cfg.d_head)
            normed = "q_normed" in fired and "k_normed" in fired
            sites = bridge_sites(model, layer, d_head, normed)
            q, k = (sites.read(part, fired[f"{part}_normed" if normed else part])[0] for part in ("q", "k"))
            drafts = bridge_drafts(model, layer, q, k, fired, rotates)
        return Probed(prove(drafts, q, k, plain_scores(fired["attn_scores"][0], q.dtype)), sites)
    except UnsupportedModelError as refusal:
        return refusal.with_traceback(None)


def probe_run(model: Model) -> dict[int, dict[str, Tensor]]:
    """layer -> hook -> what it carried while the model read a few random tokens."""
    n = min(PROBE_TOKENS, longest_prompt(model)[0] or PROBE_TOKENS)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.cfg.d_vocab, (1, n), generator=generator).to(next(model.parameters()).device)
    fired: dict[int, dict[str, Tensor]] = defaultdict(dict)

    def remember(layer: int, name: str) -> Callable[[Tensor], None]:
        return lambda value: fired[layer].update({name: value.detach()})

    known = model.hook_dict
    places = {
        f"blocks.{layer}.attn.hook_{name}": remember(layer, name)
        for layer in range(model.cfg.n_layers)
        for name in HOOKS
    }
    hooks = dispatch(model, {place: take for place, take in places.items() if place in known})
    with torch.no_grad(), model.hooks(fwd_hooks=hooks):
        model(tokens, return_type=None, **unpadded(model, tokens))
    return fired


def unpadded(model: Model, tokens: Tensor) -> dict[str, Tensor]:
    """A HookedTransformer whose tokenizer pads on the left takes leading tokens for padding unless told otherwise."""
    tokenizer = model.tokenizer
    if backend_of(model) == "hooked" and tokenizer is not None and tokenizer.padding_side == "left":
        return {"attention_mask": torch.ones_like(tokens)}
    return {}


def longest_prompt(model: Model) -> tuple[int | None, str]:
    """The longest prompt that the probed geometry holds for (None: any length), and what sets it."""
    return hooked_limit(model) if backend_of(model) == "hooked" else bridge_limit(model)


def check(model: Model, *, printed: bool = True) -> pd.DataFrame:
    """Print, layer by layer, what a model does with positions, how well that was proved, and what is not supported.

    A model that cannot be analysed is reported, not refused.

    Returns:
        One row per layer: layer, supported, encoding, planes, shortest and longest wavelength (tokens per turn),
        rotary_dim, pairing, scale, soft_cap, window, heads, key_value_heads, qk_norm, proof_error, refusal.

    Example:
        >>> from tl_posgen import load_model
        >>> table = check(load_model("mini"), printed=False)
        >>> bool(table["supported"].all())
        True
    """
    table = pd.DataFrame([{"layer": layer, **row_of(found)} for layer, found in enumerate(probe(model))])
    if printed:
        print_table(table, f"{origin_of(model).name} as a {type(model).__name__}")
    return table


def row_of(found: Found) -> dict[str, Any]:
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
        "proof_error": geometry.error,
        "refusal": None,
    }


def print_table(table: pd.DataFrame, title: str) -> None:
    """What a terminal has room for, empty columns left out; then, once each, why layers are not supported."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    rows = pd.DataFrame([cells(row) for row in table.to_dict("records")])
    rows = rows.loc[:, (rows != "").any()]
    grid = Table(*rows.columns, box=SIMPLE_HEAD, padding=0, pad_edge=False)
    for row in rows.itertuples(index=False):
        grid.add_row(*row)
    console = Console()
    console.print(title, markup=False, highlight=False, soft_wrap=True)
    console.print(grid)
    refusals = table["refusal"].dropna()
    for refusal in refusals[~refusals.str.replace(r"^layer \d+", "", regex=True).duplicated()]:
        console.print(f"not supported: {refusal}", markup=False, highlight=False, soft_wrap=True)


def cells(row: Mapping[Hashable, Any]) -> dict[str, str]:
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
        "proof": number("proof_error", ".0e"),
    }

"""Hooks that perturb queries and keys in chosen RoPE planes: magnitudes, phases, or positions alone."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.core.options import require
from tl_posgen.editing.draws import generator_at
from tl_posgen.editing.printed_hooks import HookList, printing_call
from tl_posgen.editing.replace_scores import replace_scores
from tl_posgen.editing.score_functions import scores_with
from tl_posgen.errors import InputError, check_choice, check_seed, check_share, is_non_negative
from tl_posgen.models.layer_table import rotating_layers
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.model import Model
from tl_posgen.models.selection import Heads, Layers, select_heads
from tl_posgen.models.session import Session, session_of
from tl_posgen.position.planes.numbers.plane_edits import EDITS, Draw, Edit, edit_planes
from tl_posgen.rope.frequency_bands import PlaneChoice, planes_of
from tl_posgen.rope.rotation import from_planes, to_planes

_SIDES = ("q", "k")


@printing_call
def perturb_planes(
    model: Model | Session,
    edit: Edit | str,
    band: PlaneChoice | None = None,
    *,
    of: Sequence[str] = _SIDES,
    strength: int | float = 1.0,
    first_token: bool = False,
    control: bool = False,
    layers: Layers = None,
    heads: Heads = None,
    seed: int = 0,
) -> HookList:
    """score_ij <- scale <R_i q'_i, R_j k'_j> with q' and k' edited in some planes BEFORE RoPE.

    With z = |z| e^{i arg z} a plane of a query or key: "shuffle_magnitudes" gives token t the |z| of another token,
    "shuffle_phases" the arg z of another token; "shuffle_positions" keeps both and rotates z to the position of another
    token; "mean_magnitude" replaces |z| by its root mean square, "mean_phase" arg z by the phase of the mean vector;
    "phase_noise" rotates each z by a random angle. After RoPE phases are arg z + theta t, so a shuffle of phases there
    would also move positions: before RoPE these are two separate edits. Means and shuffles are over the whole prompt,
    later tokens included; prompts and padding never mix. See `tl_posgen.position.planes.numbers.plane_edits`.

    Args:
        band: planes to edit: a list of plane numbers, a boolean per plane
            (`tl_posgen.rope.frequency_bands.bands_by_thirds`), or a function from a layer's `Rope` to one of these; all
            if left out. Layers without RoPE are not changed.
        of: ("q", "k"), or one of them.
        strength: in [0, 1]: the share of tokens shuffled, or of the way to the mean; for "phase_noise" the standard
            deviation in radians. 0 changes nothing.
        first_token: whether the first token is edited too, and counts in the means.
        control: instead of the edit, a random rotation of every rotary vector over all planes that changes as much
            energy as the edit would, in every head.
        layers, heads: chosen layers and heads; all if left out. Query heads that share a key get the same edited key.
        seed: of the random draws. Edits, strengths and bands with one seed have the same draws; prompts, layers, q and
            k have different ones. torch's global random state is not changed.

    Raises:
        InputError: an unknown edit or side, a strength outside its range, a band that a chosen layer does not have.
        UnsupportedModelError: see `replace_scores`; also if no chosen layer has RoPE.

    Source: ours.

    Example:
        >>> import torch
        >>> from tl_posgen import load_model
        >>> model, tokens = load_model("mini"), torch.arange(12)[None]
        >>> plain = model(tokens)
        >>> same, other = (
        ...     model.run_with_hooks(tokens, fwd_hooks=perturb_planes(model, "shuffle_phases", [0], strength=strength))
        ...     for strength in (0, 1)
        ... )
        >>> torch.allclose(same, plain, atol=1e-4), torch.allclose(other, plain, atol=1e-4)
        (True, False)
    """
    check_choice("edit", edit, EDITS)
    if not isinstance(of, tuple | list) or not of or not all(isinstance(side, str) and side in _SIDES for side in of):
        raise InputError(f'of={of!r}: give ("q", "k"), ("q",) or ("k",)')
    if edit != "phase_noise":
        check_share(f"strength of {edit}", strength)
    elif not is_non_negative(strength):
        raise InputError(f"strength {strength!r} of phase_noise: give a standard deviation in radians, 0 or more")
    seed = check_seed(seed)
    require("first_token", first_token, bool)
    require("control", control, bool)
    session = session_of(model)
    selected = select_heads(session, layers, heads)
    geometries = rotating_layers(session, list(selected), "planes to perturb")
    planes = {}
    for geometry in geometries:
        try:
            every = torch.ones(len(geometry.rope.inv_freq), dtype=torch.bool)
            planes[geometry.layer] = every if band is None else planes_of(geometry.rope, band, "band")
        except InputError as error:
            raise InputError(f"layer {geometry.layer}: {error}") from error

    def scores_of(capture: LayerCapture) -> Float[Tensor, "head query key"]:
        rope, first = capture.geometry.rope, int(not first_token)
        x = {side: getattr(capture, side) for side in _SIDES}
        for side in dict.fromkeys(of):
            z, theta = to_planes(x[side], rope), rope.inv_freq.to(x[side].device)
            arguments = (edit, float(strength), theta, draw_of(capture, side, first, seed), planes[capture.layer])
            edited = edit_planes(z[:, first:], *arguments, control=control)
            x[side] = from_planes(torch.cat([z[:, :first], edited], 1), x[side][..., rope.rotary_dim :], rope)
        return scores_with(capture, **x)

    rotating = [(geometry.layer, head) for geometry in geometries for head in selected[geometry.layer]]
    return replace_scores(session, scores_of, heads=rotating)


def draw_of(capture: LayerCapture, side: str, first: int, seed: int) -> Draw:
    """Return the draw for the tokens from `first` on, which depends only on seed, prompt, layer and side."""
    geometry, of_keys, n = capture.geometry, side == "k", capture.length - first
    generator = generator_at(seed, prompt=capture.prompt, layer=capture.layer, side=of_keys)
    n_rows = geometry.n_key_value_heads if of_keys else geometry.n_heads
    rows = geometry.key_heads(capture.heads) if of_keys else list(capture.heads)
    order = torch.randperm(n, generator=generator)
    noise = torch.randn(n_rows, n, len(geometry.rope.inv_freq), 2, generator=generator)
    return Draw(order.to(capture.device), noise[rows].to(capture.device))

"""Keys of a running model cut to their mean direction plus a share of the rest."""

import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.core.null_models import check_seed
from tl_posgen.core.options import Share, require
from tl_posgen.hooks.draws import generator_at
from tl_posgen.hooks.replace_scores import HookList, replace_scores, scores_with
from tl_posgen.joining.numbers import mean_direction, share_of_equal_energy, shrink_rest
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.model import Model
from tl_posgen.models.selection import Heads, Layers


def cut_keys(
    model: Model,
    share: int | float,
    *,
    control: bool = False,
    first_token: bool = False,
    layers: Layers = None,
    heads: Heads = None,
    seed: int = 0,
) -> HookList:
    """score_ij <- scale <R_i q_i, R_j k'_j>, k' = <k, u> u + share (k - <k, u> u), u the direction of the mean key.

    Before RoPE and after qk-norm, each head by itself, the mean over the prompt's keys, later ones too. Share 0 leaves
    keys of rank one, 1 changes nothing. Query heads that share a key see it cut alike.

    Args:
        share: of what is not along u that is kept, in [0, 1].
        control: keep the mean key, and of the deviations from it the part along a random direction in the place of u,
            the rest shrunk so that as much energy is taken, E|k' - k|^2, of every head and prompt.
        first_token: whether the first token's key is cut as well, and counts in the mean.
        layers, heads: which; all if left out.
        seed: of the control's directions: one a layer and key head, the same for all prompts and shares.

    Raises:
        InputError: a share outside [0, 1], a layer or head that does not exist.
        UnsupportedModelError: see `replace_scores`.

    Source: ours.

    Example:
        >>> from tl_posgen import load_model
        >>> model, tokens = load_model("mini"), torch.arange(12)[None]
        >>> plain = model(tokens)
        >>> same, other = (model.run_with_hooks(tokens, fwd_hooks=cut_keys(model, share)) for share in (1, 0))
        >>> torch.allclose(same, plain, atol=1e-4), torch.allclose(other, plain, atol=1e-4)
        (True, False)
    """
    require("share", share, Share)
    require("control", control, bool)
    require("first_token", first_token, bool)
    seed = check_seed(seed)

    def scores_of(capture: LayerCapture) -> Float[Tensor, "head query key"]:
        return scores_with(capture, k=cut(capture, float(share), control, int(not first_token), seed))

    return replace_scores(model, scores_of, layers, heads)


def cut(capture: LayerCapture, share: float, control: bool, first: int, seed: int) -> Float[Tensor, "head pos d_head"]:
    """Return the keys of a layer, cut from token `first` on."""
    kept, k = capture.k[:, :first], capture.k[:, first:]
    if share == 1 or not k.shape[1]:
        return capture.k
    direction, rest, mean = mean_direction(k), share, k.mean(1, keepdim=True)
    if control:
        other = random_directions(capture, seed)
        direction, rest = other, share_of_equal_energy(k - mean, direction, other, share)
    return torch.cat([kept, mean + shrink_rest(k - mean, direction, rest)], 1)  # the mean is along its direction


def random_directions(capture: LayerCapture, seed: int) -> Float[Tensor, "head d_head"]:
    """Return a direction for each key head, drawn from seed and layer alone."""
    geometry = capture.geometry
    shape = geometry.n_key_value_heads, geometry.d_head
    drawn = torch.randn(shape, generator=generator_at(seed, layer=capture.layer))
    return torch.nn.functional.normalize(drawn, dim=-1)[geometry.key_heads(capture.heads)].to(capture.k)

"""Keys cut towards rank one in the running model: hooks, and what becomes of interaction, slash and loss."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, Any

import pandas as pd
import plotly.graph_objects as go
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.core.measure import HEAD, Measure, Variable
from tl_posgen.core.numbers import Numbers, intervals_of
from tl_posgen.core.options import Count, Each, Share, require
from tl_posgen.core.run import Run
from tl_posgen.core.sums import Sums
from tl_posgen.errors import check_seed
from tl_posgen.hooks.draws import generator_at
from tl_posgen.hooks.replace_scores import HookList, replace_scores, scores_with
from tl_posgen.joining.numbers import mean_direction, share_of_equal_energy, shrink_rest
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.model import Model
from tl_posgen.models.selection import Heads, Layers, select_heads
from tl_posgen.position.decomposition.numbers.variance_shares import TripleMoments
from tl_posgen.position.decomposition.variance import shares_of
from tl_posgen.report.figures import COLOURS, NULL_COLOUR, Panels, band, line, model_label
from tl_posgen.slash.layer_means import at_distance, statistics_of
from tl_posgen.slash.slash import Slash

CUTS = {"mean": "mean direction", "random": "mean and random direction"}
CURVE = ("cut", "share")
OF_RUN = {"score": Variable("", dims=("prompt", *HEAD, "distance")), "energy_taken": Variable("")}
MOST_LAYERS = 12  # that are also cut alone unless asked for
NO_TURN = "nothing rotates, so there is no interaction, and no slash that RoPE makes of constant keys."


# Hooks


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
        other = _random_directions(capture, seed)
        direction, rest = other, share_of_equal_energy(k - mean, direction, other, share)
    return torch.cat([kept, mean + shrink_rest(k - mean, direction, rest)], 1)  # the mean is along its direction


def _random_directions(capture: LayerCapture, seed: int) -> Float[Tensor, "head d_head"]:
    """Return a direction for each key head, drawn from seed and layer alone."""
    geometry = capture.geometry
    shape = geometry.n_key_value_heads, geometry.d_head
    drawn = torch.randn(shape, generator=generator_at(seed, layer=capture.layer))
    return torch.nn.functional.normalize(drawn, dim=-1)[geometry.key_heads(capture.heads)].to(capture.k)


# The measure


def _draw_curves(result: Any) -> go.Figure:
    """Draw loss, slash score and interaction along the share that is kept."""
    names = {"rise": "rise of the loss, nats", "slash_score": "slash score", "interaction": "interaction share"}
    panels = Panels(list(names.values()), columns=3, row_height=320)
    both = [("", result.own, dict(zip(CUTS, COLOURS, strict=False)))]
    both += [(", random init", one, dict.fromkeys(CUTS, NULL_COLOUR)) for one in result.nulls[:1]]
    for suffix, data, colours in reversed(both):
        x = data["share"].values
        for (panel, name), (which, words) in product(enumerate(names), CUTS.items()):
            one = data[name].sel(cut=which)
            found = intervals_of(one.mean([dim for dim in one.dims if dim in HEAD]))
            if "prompt" in one.dims and not suffix:
                area = band(x, found["low"].values, found["high"].values, f"{words}, 95 %", grey=which == "random")
                panels.add(panel, area.update(showlegend=False))
            dash = "solid" if which == "mean" else "dot"
            curve = line(x, found["value"].values, words + suffix, colours[which], dash=dash, mode="lines+markers")
            panels.add(panel, curve)
    panels.figure.update_xaxes(title_text="share of the rest that is kept").update_yaxes(rangemode="tozero")
    subtitle = (
        "keys of all layers cut to their mean and one direction plus a share of the rest; both take the same energy"
    )
    return panels.finish(f"Keys cut towards rank one · {model_label(result.own)}", subtitle)


@dataclass(frozen=True)
class KeyCut(Measure):
    r"""Loss, slash scores and interaction with k' = <k, u> u + share (k - <k, u> u) in all layers of a running model.

    In the running model every key keeps its part along the direction of the head's mean key and a share of the rest:
    rank one at share 0. Loss, slash scores and interaction along the share; beside each a control that takes as much
    energy: the mean key stays, and its deviations are kept along a random direction instead.

    u is the direction of the head's mean key before RoPE; share 1 changes nothing. The control is k' = kbar + <e,
    w> w + mu (e - <e, w> w), e = k - kbar, w random, mu such that as much energy E|k' - k|^2 is taken of every head
    and prompt, the mean of several draws; mu may be negative, where deviations off w have less energy. Both cuts keep
    the mean key, so their difference tells which deviations matter: those along u, or those along any other direction.
    The first token's key stays as it is. Slash scores are at each head's best distance in the untouched model; the
    interaction is that of `variance`, of the queries and cut keys of the running model. By layer: the rise of the
    loss with the keys of one layer alone cut to the first share.

    Args:
        shares: kept of the rest of keys, in [0, 1].
        controls: how many draws of random directions.
        each_layer: whether to cut each layer alone too; if left out, of models with up to 12 layers.

    Raises:
        InputError: prompts of different lengths.
        UnsupportedModelError: a model whose scores cannot be replaced.

    Source: that slash-dominant heads have keys of nearly rank one is claimed by Cheng et al. 2026 (arXiv 2601.08297);
    the cut, its control and what is measured along it are ours.

    Example:
        >>> cut = {"length": 24, "n_prompts": 1, "null_seeds": (), "progress": False}
        >>> found = KeyCut(shares=[0, 1], controls=1)("mini", "Down, down, down. Would the fall never end?" * 3, **cut)
        >>> rises = [float(found.numbers("rise", cut="mean", share=share)) for share in (1, 0)]
        >>> abs(rises[0]) < 1e-5, rises[1] > 0
        (True, True)
    """

    shares: Annotated[Sequence[Share], Each()] = (0.0, 0.25, 0.5, 0.75, 1.0)
    controls: Count = 3
    each_layer: bool | None = None

    usual_prompts = 8
    words = CUTS
    question = "Do keys of rank one make the slash, and the split?"
    after = (Slash,)
    one_length = True
    matrices = 10
    rows = CURVE
    variables = {
        "loss": Variable("loss", "nats", "per token, nothing cut", ("prompt",)),
        "rise": Variable("rise of the loss", "nats", "loss with cut keys - loss", (*CURVE, "prompt"), "rise"),
        "layer_rise": Variable(
            "rise, one layer alone",
            "nats",
            "cut to the first share, the other layers as they are",
            ("cut", "layer", "prompt"),
        ),
        "slash_score": Variable(
            "slash score", "", "at the untouched head's best distance", (*CURVE, "prompt", *HEAD), bounds=(0, 1)
        ),
        "interaction": Variable(
            "interaction share", "", "kd + qkd of the cut keys, as in `variance`", (*CURVE, *HEAD), bounds=(0, 1)
        ),
        "energy_taken": Variable("key energy taken", "", "E|k' - k|^2 / E|k|^2, first token left out", (*CURVE, *HEAD)),
    }
    figures = {"curves": _draw_curves}
    caveats = dict.fromkeys(("absolute", "alibi", "none"), NO_TURN)

    def prepare(self, model: Any, tokens: Sequence[Tensor]) -> "KeyCut":
        return replace(
            self, each_layer=model.cfg.n_layers <= MOST_LAYERS if self.each_layer is None else self.each_layer
        )

    def passes(self, run: Run) -> int:
        cuts = len(self.shares) + len(select_heads(run.model, **run.where)) * bool(self.each_layer)
        return len(run.rows) * (1 + cuts * (1 + self.controls))

    def of_model(self, run: Run) -> xr.Dataset:
        shares, selected = sorted(float(share) for share in self.shares), select_heads(run.model, **run.where)
        draws = [run.seed * self.controls + draw for draw in range(self.controls)]

        def by_cut(measured: Callable[[bool, int], Mapping[str, xr.DataArray]]) -> dict[str, xr.DataArray]:
            """Return measured(control, seed) of the mean direction, and its mean over draws of random ones."""
            random = xr.concat([xr.Dataset(measured(True, seed)) for seed in draws], "draw").mean("draw")
            both = [xr.Dataset(measured(False, run.seed)), random]
            found = xr.concat(both, pd.Index(list(CUTS), name="cut"))
            return {str(name): one for name, one in found.data_vars.items()}

        def in_all_layers(share: float) -> Mapping[str, Any]:
            return by_cut(lambda control, seed: _in_running_model(run, share, control, seed))

        def in_one_layer(layer: int) -> Mapping[str, Any]:
            heads = [(layer, head) for head in selected[layer]]

            def rise(control: bool, seed: int) -> dict[str, xr.DataArray]:
                hooks = cut_keys(run.model, shares[0], control=control, heads=heads, seed=seed)
                return {"layer_rise": _rise_of(run, run.losses_under(hooks))}

            return by_cut(rise)

        data = run.grid(in_all_layers, pure=True, share=shares).assign(loss=("prompt", run.loss.mean(-1).numpy()))
        data = data.merge(run.grid(in_one_layer, pure=True, layer=list(selected))) if self.each_layer else data
        return data.assign({name: one.transpose(*self.variables[str(name)].dims) for name, one in data.items()})

    def findings(self, own: Numbers) -> list[str]:
        shares = own.data["share"].values.tolist()
        taken = own("energy_taken", cut="mean", share=shares[0])
        rise, control = (own("rise", cut=which, share=shares[0]) for which in CUTS)
        less = own.number(less_control(own.array("rise", share=shares[0])))
        parts = []
        for words, name, form in (("interaction share", "interaction", ".1%"), ("slash score", "slash_score", ".3f")):
            along = {
                which: ", ".join(f"{own(name, cut=which, share=share).plain:{form}}" for share in shares)
                for which in CUTS
            }
            null = own(name, cut="mean", share=shares[0]).null_in_brackets
            parts.append(f"{words} {along['mean']}{null:{form}}, with the control {along['random']}")
        kept = ", ".join(f"{share:.0%}" for share in shares)
        return [
            f"With keys cut to their mean direction and {shares[0]:.0%} of the rest, which takes {taken.plain:.0%} of "
            f"their squared norm, the loss changes by {rise.with_interval:+.3f} nats{rise.null_in_brackets:+.3f}. "
            "With the mean key and what lies along a random direction kept, as much taken, it changes by "
            f"{control.with_interval:+.3f}; the difference is {less.with_interval:+.3f}.",
            f"With {kept} of the rest kept, mean over heads: {'; '.join(parts)}.",
        ]

    def table(self, own: Numbers) -> pd.DataFrame:
        """Return a row a cut and share: rise of the loss, slash score, interaction and energy taken."""
        names = {name: one.label for name, one in self.variables.items() if set(CURVE) <= set(one.dims)}
        return own.frame({label: own.array(name) for name, label in names.items()}, *CURVE)


def less_control(rise: xr.DataArray) -> xr.DataArray:
    """Return the rise by the mean direction less that by random ones, prompt by prompt."""
    return rise.sel(cut="mean") - rise.sel(cut="random")


def _rise_of(run: Run, losses: Float[Tensor, "prompt target"]) -> xr.DataArray:
    """Return the rise of the loss of every prompt."""
    return xr.DataArray((losses.mean(-1) - run.loss.mean(-1)).numpy(), dims="prompt")


def _in_running_model(run: Run, share: float, control: bool, seed: int) -> dict[str, xr.DataArray]:
    """Return the rise of the loss, and of every head its slash score, interaction, and share of key energy taken."""
    sums = Sums(OF_RUN)

    def scores_of(capture: LayerCapture) -> Float[Tensor, "head query key"]:
        keys = cut(capture, share, control, 1, seed)
        change, energy = (double(x)[:, 1:].square().sum((1, 2)) for x in (keys - capture.k, capture.k))
        moments = TripleMoments.from_qk(capture.q, keys, capture.geometry.rope, first_token=False)
        sums.add_layer(capture, {"energy_taken": change / energy, "moments": moments})
        return scores_with(capture, k=keys)

    def add_slash(layer: LayerCapture) -> None:
        sums.add_layer(layer, {"score": statistics_of(layer).score[0]})

    hooks = replace_scores(run.model, scores_of, **run.where)
    losses = run.losses_under(hooks, add_slash, needs=frozenset({"pattern"}))
    n_tokens, moments = run.tokens.shape[1], sums.by_layer("moments")
    shares = {layer: shares_of(one, *sums.layers[layer], n_tokens, "uniform") for layer, one in moments.items()}
    interaction = {layer: one.within_rows.interaction.cpu().numpy() for layer, one in shares.items()}
    return {
        "rise": _rise_of(run, losses),
        "slash_score": at_distance(sums.mean("score"), run.found(Slash)["best_distance"]),
        "interaction": sums.over_layers("interaction", interaction, HEAD),
        "energy_taken": sums.mean("energy_taken"),
    }

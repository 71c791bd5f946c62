"""Keys cut towards rank one in the running model: hooks, and what becomes of interaction, slash and loss."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import pandas as pd
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.core.measure import HEAD, Variable
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.options import Count, Each, Share, require
from tl_posgen.core.run import Run
from tl_posgen.core.sums import Sums
from tl_posgen.errors import check_seed
from tl_posgen.hooks.draws import generator_at
from tl_posgen.hooks.replace_scores import HookList, replace_scores, scores_with
from tl_posgen.interventions import UNTOUCHED, Interventions
from tl_posgen.joining.numbers import mean_direction, share_of_equal_energy, shrink_rest
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.model import Model
from tl_posgen.models.selection import Heads, Layers
from tl_posgen.position.decomposition.numbers.variance_shares import TripleMoments
from tl_posgen.position.decomposition.variance import shares_of
from tl_posgen.report.kinds import bars
from tl_posgen.slash.dominance import at_distance, statistics_of
from tl_posgen.slash.slash import Slash

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
        return scores_with(capture, k=_cut(capture, float(share), control, int(not first_token), seed))

    return replace_scores(model, scores_of, layers, heads)


def _cut(capture: LayerCapture, share: float, control: bool, first: int, seed: int) -> Float[Tensor, "head pos d_head"]:
    """Return the keys of a layer, cut from token `first` on."""
    kept, k = capture.k[:, :first], capture.k[:, first:]
    if share == 1 or not k.shape[1]:
        return capture.k
    direction, rest, mean = mean_direction(k), share, k.mean(1, keepdim=True)
    if control:  # a direction for each key head, drawn from seed and layer alone
        geometry, generator = capture.geometry, generator_at(seed, layer=capture.layer)
        drawn = torch.randn(geometry.n_key_value_heads, geometry.d_head, generator=generator)
        other = torch.nn.functional.normalize(drawn, dim=-1)[geometry.key_heads(capture.heads)].to(k)
        direction, rest = other, share_of_equal_energy(k - mean, direction, other, share)
    return torch.cat([kept, mean + shrink_rest(k - mean, direction, rest)], 1)  # the mean is along its direction


# The measure


@dataclass(frozen=True)
class KeyCut(Interventions):
    r"""Loss, slash scores and interaction with k' = <k, u> u + share (k - <k, u> u) in all layers of a running model.

    In the running model every key keeps its part along the direction of the head's mean key, and a share of the rest;
    at share 0 keys are of rank one. Loss, slash scores and interaction are measured at each share. A control takes as
    much energy: the mean key stays, and its deviations are kept along a random direction instead.

    u is the direction of the head's mean key before RoPE. The control is k' = kbar + <e, w> w + mu (e - <e, w> w),
    e = k - kbar, w random, mu such that as much energy E|k' - k|^2 is taken of every head and prompt, the mean of
    several draws; mu may be negative, where deviations off w have less energy. Both cuts keep the mean key, so their
    difference tells which deviations matter: those along u, or those along any other direction. The first token's key
    stays as it is. Slash scores are at each head's best distance in the untouched model; the interaction is that of
    `variance`, of the queries and cut keys of the running model.

    Args:
        shares: how much of the rest of keys is kept, in [0, 1].
        controls: how many draws of random directions.

    Raises:
        InputError: prompts of different lengths.
        UnsupportedModelError: a model whose scores cannot be replaced.

    Source: that slash-dominant heads have keys of nearly rank one is claimed by Cheng et al. 2026 (arXiv 2601.08297);
    the cut, its control and what is measured along it are ours.

    Example:
        >>> cut = {"length": 24, "n_prompts": 1, "null_seeds": (), "progress": False}
        >>> found = KeyCut(shares=[0, 1], controls=1)("mini", "Down, down, down. Would the fall never end?" * 3, **cut)
        >>> rises = found.measure.rises(found.numbers)
        >>> rises["mean direction, 1"].value, rises["mean direction, 0"].value > 0
        (0.0, True)
    """

    shares: Annotated[Sequence[Share], Each()] = (0.0, 0.25, 0.5, 0.75)
    controls: Count = 3

    usual_prompts = 8
    question = "Do keys of rank one make the slash, and the split?"
    after = (Slash,)
    matrices = 10
    variables = {
        **Interventions.variables,
        "slash_score": Variable(
            "slash score", "", "at the untouched head's best distance", ("condition", "prompt", *HEAD), bounds=(0, 1)
        ),
        "interaction": Variable(
            *("interaction share", "", "kd + qkd of the cut keys, see `variance`", ("condition", *HEAD)),
            bounds=(0, 1),
        ),
        "energy_taken": Variable(
            "key energy taken", "", "E|k' - k|^2 / E|k|^2, first token left out", ("condition", *HEAD)
        ),
    }
    figures = {
        "rise": bars(
            {
                "rise of the loss, nats": [("rise", lambda own: own.measure.rise_of(own))],
                "slash score": [("slash score", "slash_score")],
                "interaction share": [("interaction share", "interaction")],
            },
            "condition",
            title="Keys cut towards rank one",
            subtitle="keys of all layers cut to their mean and one direction plus this share of the rest; both take "
            "the same energy",
        )
    }
    caveats = dict.fromkeys(("absolute", "alibi", "none"), NO_TURN)

    def passes(self, run: Run) -> int:
        return len(run.rows) * (1 + len(self.shares) * (1 + self.controls))

    def conditions(self, run: Run) -> Mapping[str, Any]:
        draws = {
            "mean direction": [(False, run.seed)],
            "random direction": [(True, run.seed * self.controls + draw) for draw in range(self.controls)],
        }
        return {
            f"{cut}, {share:g}": [(float(share), *draw) for draw in some]
            for cut, some in draws.items()
            for share in sorted(self.shares)
        }

    def under(self, run: Run, hooks: Any) -> Mapping[str, Any]:
        """Return the variables of one condition, a list of draws (share, control, seed): their means."""
        unchanged: Any = [(1.0, False, run.seed)]
        draws = [self._of_draw(run, *draw) for draw in hooks or unchanged]
        return {str(name): one for name, one in xr.concat(draws, "draw").mean("draw").data_vars.items()}

    def _of_draw(self, run: Run, share: float, control: bool, seed: int) -> xr.Dataset:
        sums = Sums({"score": Variable("", dims=("prompt", *HEAD, "distance")), "energy_taken": Variable("")})

        def add_keys(layer: LayerCapture, keys: Float[Tensor, "head pos d_head"]) -> None:
            change, energy = (double(x)[:, 1:].square().sum((1, 2)) for x in (keys - layer.k, layer.k))
            moments = TripleMoments.from_qk(layer.q, keys, layer.geometry.rope, first_token=False)
            sums.add_layer(layer, {"energy_taken": change / energy, "moments": moments})

        def scores_of(layer: LayerCapture) -> Float[Tensor, "head query key"]:
            keys = _cut(layer, share, control, 1, seed)
            add_keys(layer, keys)
            return scores_with(layer, k=keys)

        def add_slash(layer: LayerCapture) -> None:  # q and k do not give the scores of a pass that was cut
            sums.add_layer(layer, {"score": statistics_of(layer).score[0]})
            if share == 1:
                add_keys(layer, layer.k)

        hooks = replace_scores(run.model, scores_of, **run.where) if share < 1 else []
        losses = run.losses_under(hooks, add_slash, needs=frozenset({"pattern"}))
        shares = {
            layer: shares_of(one, *sums.layers[layer], run.tokens.shape[1], "uniform").within_rows.interaction
            for layer, one in sums.by_layer("moments").items()
        }
        alone = torch.nan if run.tokens.shape[1] < 3 else 1.0  # one token besides the first does not vary
        interaction = {layer: alone * one.cpu().numpy() for layer, one in shares.items()}
        found = {
            "loss": ("prompt", losses.mean(-1).numpy()),
            "slash_score": at_distance(sums.mean("score"), run.found(Slash)["best_distance"]),
            "interaction": sums.over_layers("interaction", interaction, HEAD),
            "energy_taken": sums.mean("energy_taken"),
        }
        return xr.Dataset(found)

    def less_control(self, own: Numbers, share: int | float) -> Number:
        """Return the rise by the mean direction less that by random ones, prompt by prompt."""
        rise = self.rise_of(own)
        mean, random = (rise.sel(condition=f"{cut} direction, {share:g}", drop=True) for cut in ("mean", "random"))
        return own.number(mean - random)

    def findings(self, own: Numbers) -> list[str]:
        share, rises = min(self.shares), self.rises(own)
        mean, random = (f"{cut} direction, {share:g}" for cut in ("mean", "random"))
        taken, less = own("energy_taken", condition=mean), self.less_control(own, share)
        parts = []
        for words, name, form in (("interaction share", "interaction", ".1%"), ("slash score", "slash_score", ".3f")):
            before, after, control = (own(name, condition=one) for one in (UNTOUCHED, mean, random))
            parts.append(
                f"{words} {before.plain:{form}} becomes {after.plain:{form}}{after.null_in_brackets:{form}}, with the "
                f"control {control.plain:{form}}"
            )
        return [
            f"With keys cut to their mean direction and {share:.0%} of the rest, which takes {taken.plain:.0%} of "
            f"their squared norm, the loss changes by {rises[mean].with_interval:+.3f} "
            f"nats{rises[mean].null_in_brackets:+.3f}. With the mean key and what lies along a random direction kept, "
            f"as much taken, it changes by {rises[random].with_interval:+.3f}; the difference is "
            f"{less.with_interval:+.3f}.",
            f"Mean over heads: {'; '.join(parts)}.",
        ]

    def table(self, own: Numbers) -> pd.DataFrame:
        """Return a row a condition: loss and rise, slash score, interaction and energy taken."""
        names = {name: one.label for name, one in self.variables.items() if "head" in one.dims}
        frame = own.frame({label: own.array(name, condition=None) for name, label in names.items()}, "condition")
        return super().table(own).merge(frame, on="condition", how="left")

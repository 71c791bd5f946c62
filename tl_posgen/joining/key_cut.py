"""Keys cut towards rank one in the running model: what becomes of interaction, slash and loss?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.collector import HeadRows, Variable
from tl_posgen.errors import InputError
from tl_posgen.hooks.replace_scores import replace_scores
from tl_posgen.joining.hooks import cut, cut_keys, scores_with
from tl_posgen.measure import Measure, Request
from tl_posgen.models.capture.capturing import capturing
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.layers.geometry import LayerGeometry
from tl_posgen.models.loss import prompts_of_one_length, require_one_length, token_losses
from tl_posgen.models.model import Model
from tl_posgen.models.selection import select_heads
from tl_posgen.options import Options, fits
from tl_posgen.position.decomposition.option_checks import check_share
from tl_posgen.position.decomposition.variance import shares_of
from tl_posgen.position.decomposition.variance_shares import TripleMoments
from tl_posgen.procedure import Job
from tl_posgen.report.figures import COLOURS, NULL_COLOUR, Panels, band, line, model_label
from tl_posgen.report.intervals import ENDS, mean_and_ends, with_ends
from tl_posgen.report.sentences import null_of, said, with_interval
from tl_posgen.result import Result
from tl_posgen.slash.layer_means import at_distance, statistics_of
from tl_posgen.summary import NullSummary, Summary

CUTS = {"mean": "mean direction", "random": "random direction"}
BATCH = 8  # prompts per forward pass


@dataclass(frozen=True)
class KeyCut(Options):
    r"""Loss, slash scores and interaction with k' = <k, u> u + share (k - <k, u> u) in all layers of a running model.

    u is the direction of the head's mean key before RoPE; share 0 makes keys of rank one, 1 changes nothing. Beside it
    the control: random directions in the place of u, their rest shrunk so that as much energy E|k' - k|^2 is taken of
    every head and prompt, the mean of several draws. The first token's key stays as it is. Slash scores are at each
    head's best distance in the untouched model; the interaction is that of `variance`, of the queries and cut keys of
    the running model. By layer: the rise of the loss with the keys of one layer alone cut to the first share.

    Args:
        shares: of the rest that are kept, in [0, 1].
        controls: how many draws of random directions.

    Raises:
        InputError: a share outside [0, 1], one twice, no share, no draw; later, prompts of different lengths.
        UnsupportedModelError: a model whose scores cannot be replaced.

    Source: that slash-dominant heads have keys of nearly rank one is claimed by Cheng et al. 2026 (arXiv 2601.08297);
    the cut, its control and what is measured along it are ours.

    Example:
        >>> from tl_posgen.joining import key_cut
        >>> cut = {"shares": [0, 1], "controls": 1, "length": 24, "n_prompts": 1, "null_seeds": (), "progress": False}
        >>> found = key_cut("mini", "Down, down, down. Would the fall never end?" * 3, **cut).dataset
        >>> bool(abs(found["rise"].sel(share=1)).max() < 1e-5), bool(found["rise"].sel(share=0, cut="mean") > 0)
        (True, True)
    """

    shares: Sequence[int | float] = (0.0, 0.25, 0.5, 0.75, 1.0)
    controls: int = 3

    def check(self) -> None:
        if not len(self.shares) or len(set(self.shares)) < len(self.shares):
            raise InputError(f"key_cut: shares={list(self.shares)}: give one at least, each only once")
        for share in self.shares:
            check_share("share", share)
        if not fits(self.controls, int) or self.controls < 1:
            raise InputError(f"key_cut: controls={self.controls!r}: give a whole number, 1 or more")


def run(model: Model, prompts: Any, request: Request, job: Job) -> Result:
    options = request.options
    assert isinstance(options, KeyCut)
    tokens = prompts_of_one_length(model, prompts, job.length, job.n_prompts)
    n_runs = (1 + options.controls) * (len(options.shares) + len(select_heads(model, job.layers, job.heads)))
    job.plan(len(tokens) * (1 + n_runs))

    def of_model(one: Model, label: str, after: Mapping[str, xr.Dataset]) -> xr.Dataset:
        return measured(one, tokens, options, job, after["slash"]["best_distance"]).assign_attrs(
            model=label, rows=("cut", "share")
        )

    return job.result(request, model, list(tokens), of_model)


def measured(
    model: Model, tokens: Int[Tensor, "prompt pos"], options: KeyCut, job: Job, best: xr.DataArray
) -> xr.Dataset:
    """Every cut at every share in all layers at once, then layer by layer at the first share."""
    shares, selected = sorted(float(share) for share in options.shares), select_heads(model, job.layers, job.heads)
    unchanged = token_losses(model, tokens, batch=BATCH).mean(-1).numpy()
    seeds = {"mean": [job.seed], "random": [job.seed * options.controls + draw for draw in range(options.controls)]}
    losses = np.zeros((len(tokens), len(CUTS), len(shares)))
    alone = np.zeros((len(tokens), len(CUTS), len(selected)))
    heads: dict[tuple[str, float], list[xr.Dataset]] = {}
    for (row, name), (column, share) in product(enumerate(CUTS), enumerate(shares)):
        for seed in seeds[name]:
            found, of_heads = in_running_model(model, tokens, share, name == "random", seed, job, best)
            losses[:, row, column] += (found - unchanged) / len(seeds[name])
            heads.setdefault((name, share), []).append(of_heads)
    for (row, name), (column, layer) in product(enumerate(CUTS), enumerate(selected)):
        for seed in seeds[name]:
            where: dict[str, Any] = {"heads": [(layer, head) for head in selected[layer]], "seed": seed}
            hooks = cut_keys(model, shares[0], control=name == "random", **where)
            found = token_losses(model, tokens, hooks, batch=BATCH).mean(-1).numpy()
            alone[:, row, column] += (found - unchanged) / len(seeds[name])
    data = xr.Dataset(coords={"cut": list(CUTS), "share": shares, "layer": list(selected)})
    data["loss"] = float(unchanged.mean())
    data = data.assign(mean_and_ends("rise", losses, ("cut", "share")))
    data = data.assign(mean_and_ends("rise_less_control", losses[:, 0] - losses[:, 1], ("share",)))
    data = data.assign(mean_and_ends("layer_rise", alone, ("cut", "layer")))
    data = data.assign(mean_and_ends("layer_rise_less_control", alone[:, 0] - alone[:, 1], ("layer",)))
    rows = [xr.concat([mean_of(heads[name, share]) for share in shares], "share") for name in CUTS]
    every = xr.concat(rows, "cut").assign_coords(cut=list(CUTS), share=shares)
    assert isinstance(every, xr.Dataset)
    data = data.assign({name: every[name] for name in ("slash_score", "interaction", "energy_taken")})
    each = every["slash_each"].transpose("prompt", "cut", "share").values
    return data.assign(mean_and_ends("mean_slash_score", each, ("cut", "share"), (0.0, 1.0)))


def mean_of(draws: Sequence[xr.Dataset]) -> xr.Dataset:
    joined = xr.concat(draws, "draw")
    assert isinstance(joined, xr.Dataset)
    return joined.mean("draw")


def in_running_model(
    model: Model,
    tokens: Int[Tensor, "prompt pos"],
    share: float,
    control: bool,
    seed: int,
    job: Job,
    best: xr.DataArray,
) -> tuple[Float[np.ndarray, " prompt"], xr.Dataset]:
    """The loss of every prompt, and of every head its slash score, interaction, and share of key energy taken."""
    moments: dict[int, TripleMoments] = {}
    layers: dict[int, tuple[LayerGeometry, list[int]]] = {}
    rows, taken = HeadRows(), HeadRows()

    def scores_of(capture: LayerCapture) -> Float[Tensor, "head query key"]:
        layer, keys = capture.layer, cut(capture, share, control, 1, seed)
        new = TripleMoments.from_qk(capture.q, keys, capture.geometry.rope, first_token=False)
        moments[layer] = moments[layer] + new if layer in moments else new
        layers[layer] = (capture.geometry, list(capture.heads))
        change, energy = ((x.double()[:, 1:].square().sum((1, 2))) for x in (keys - capture.k, capture.k))
        taken.add(capture, energy_taken=change / energy)
        return scores_with(capture, keys)

    def take(layer: LayerCapture) -> None:
        rows.add(layer, score=statistics_of(layer).score)

    where: dict[str, Any] = {"layers": job.layers, "heads": job.heads}
    hooks = replace_scores(model, scores_of, **where)
    with capturing(model, take, needs=frozenset({"pattern"}), **where):
        losses = token_losses(model, tokens, hooks, batch=BATCH).mean(-1).numpy()
    score = at_distance(rows.array("score", "distance"), best)
    data = xr.Dataset({"slash_score": score.mean("prompt"), "slash_each": score.mean(("layer", "head"))})
    data["energy_taken"] = taken.array("energy_taken").mean("prompt")
    by_layer = []
    for layer, one in sorted(moments.items()):
        found = shares_of(one, *layers[layer], tokens.shape[1], "uniform").within_rows.interaction
        by_layer.append(xr.DataArray(found.cpu().numpy(), {"layer": layer, "head": layers[layer][1]}, ("head",)))
    data["interaction"] = xr.concat(by_layer, "layer", join="outer")
    return losses, data


# What is shown


def percent_of(share: float) -> str:
    return f"{100 * share:g}"


def summarise(data: xr.Dataset) -> Summary:
    """Keys end in the cut and 100 times the share: `rise_mean_0`, `interaction_random_50`; `rise_less_control_0`."""
    shares = [float(share) for share in data["share"].values]
    found: dict[str, Any] = {"loss": float(data["loss"]), "shares": shares, "least_share": shares[0]}
    for share in shares:
        at = percent_of(share)
        one = data.sel(share=share)
        found |= {f"rise_less_control_{at}{end}": float(one[f"rise_less_control{end}"]) for end in ENDS}
        for name in CUTS:
            here = one.sel(cut=name)
            found |= {f"rise_{name}_{at}{end}": float(here[f"rise{end}"]) for end in ENDS}
            found |= {f"slash_{name}_{at}{end}": float(here[f"mean_slash_score{end}"]) for end in ENDS}
            found |= {f"interaction_{name}_{at}": float(here["interaction"].mean())}
            found |= {f"energy_taken_{name}_{at}": float(here["energy_taken"].mean())}
    found["layers"] = data["layer"].values.tolist()
    for name in CUTS:
        found[f"by_layer_{name}"] = data["layer_rise"].sel(cut=name).values.tolist()
    return found


def findings(own: Summary, null: NullSummary | None) -> list[str]:
    shares = own["shares"]
    first, last = percent_of(shares[0]), percent_of(shares[-1])
    kept = ", ".join(f"{share:.0%}" for share in shares)
    rise, control = (with_interval(own, f"rise_{name}_{first}", "+.3f") for name in CUTS)
    lines = [
        f"Keys cut to their mean direction and {shares[0]:.0%} of the rest, {own[f'energy_taken_mean_{first}']:.0%} of "
        f"their energy: the loss rises by {rise} nats ({null_of(null, f'rise_mean_{first}', '+.3f')}); a random "
        f"direction of the same energy {control}, the difference "
        f"{with_interval(own, f'rise_less_control_{first}', '+.3f')}."
    ]
    for words, key, form in (("Interaction share", "interaction", ".1%"), ("Slash score", "slash", ".3f")):
        curves = "; ".join(
            f"{CUTS[name]} {', '.join(said(own[f'{key}_{name}_{percent_of(share)}'], form) for share in shares)}"
            for name in CUTS
        )
        ends = " to ".join(null_of(null, f"{key}_mean_{at}", form) for at in (first, last))
        lines.append(f"{words}, mean over heads, with {kept} of the rest: {curves} ({ends}).")
    parts = [
        f"{layer} {said(mean, '+.3f')} ({said(random, '+.3f')})"
        for layer, mean, random in zip(own["layers"], own["by_layer_mean"], own["by_layer_random"], strict=True)
    ]
    lines.append(f"One layer alone (random direction): {', '.join(parts)}.")
    return lines


def curves(result: Any) -> go.Figure:
    """Loss, slash score and interaction along the share that is kept."""
    names = {"rise": "rise of the loss, nats", "mean_slash_score": "slash score", "interaction": "interaction share"}
    panels = Panels(list(names.values()), columns=3, row_height=320)
    both = [("", result.dataset, dict(zip(CUTS, COLOURS, strict=False)))]
    both += [(", random init", one, dict.fromkeys(CUTS, NULL_COLOUR)) for one in result.nulls[:1]]
    for suffix, data, colours in reversed(both):
        x = data["share"].values
        for (panel, name), (cut_, words) in product(enumerate(names), CUTS.items()):
            one = data.sel(cut=cut_)
            y = one[name].values if name != "interaction" else one[name].mean(("layer", "head")).values
            if name != "interaction" and not suffix:
                low, high = (one[f"{name}{end}"].values for end in ENDS[1:])
                panels.add(panel, band(x, low, high, f"{words}, 95 %", grey=cut_ == "random").update(showlegend=False))
            dash = "solid" if cut_ == "mean" else "dot"
            panels.add(panel, line(x, y, words + suffix, colours[cut_], dash=dash, mode="lines+markers"))
    panels.figure.update_xaxes(title_text="share of the rest that is kept").update_yaxes(rangemode="tozero")
    subtitle = "keys of all layers cut to one direction plus a share of the rest; both cuts take the same energy"
    return panels.finish(f"Keys cut towards rank one · {model_label(result.dataset)}", subtitle)


CURVE, HEADS = ("cut", "share"), ("cut", "share", "layer", "head")
RISE = "loss with cut keys - loss, mean over prompts"
LESS = "of the mean direction less that of the random one, prompt by prompt"
VARIABLES = {
    "loss": Variable("loss", "nats", "per token, nothing cut", ()),
    **with_ends("rise", "rise of the loss", "nats", RISE, CURVE),
    **with_ends("rise_less_control", "rise less that of the control", "nats", LESS, ("share",)),
    **with_ends("layer_rise", "rise, one layer alone", "nats", f"{RISE}, at the first share", ("cut", "layer")),
    **with_ends("layer_rise_less_control", "rise of a layer less control", "nats", LESS, ("layer",)),
    "slash_score": Variable("slash score", "", "at the untouched head's best distance", HEADS),
    "interaction": Variable("interaction share", "", "kd + qkd of the cut keys, as in `variance`", HEADS),
    "energy_taken": Variable("key energy taken", "", "E|k' - k|^2 / E|k|^2, first token left out", HEADS),
    **with_ends("mean_slash_score", "mean slash score", "", "over heads", CURVE),
}

MEASURE = Measure(
    name="key_cut",
    question="Do keys of rank one make the slash, and the split?",
    explanation=(
        "In the running model every key keeps its part along the direction of the head's mean key and a share of the "
        "rest: rank one at share 0. Loss, slash scores and interaction along the share; beside each a random direction "
        "that takes as much energy."
    ),
    source="that slash heads have nearly rank-one keys: Cheng et al. 2026 (arXiv 2601.08297); the cut: ours",
    options=KeyCut,
    procedure=run,
    after=("slash",),
    check_prompts=lambda options, tokens: require_one_length("key_cut", tokens),
    matrices=10,
    variables=VARIABLES,
    summarise=summarise,
    findings=findings,
    figures={"curves": curves},
    caveats={
        "absolute": "nothing rotates, so there is no interaction, and no slash that RoPE makes of constant keys.",
        "alibi": "nothing rotates, so there is no interaction, and no slash that RoPE makes of constant keys.",
        "none": "nothing rotates, so there is no interaction, and no slash that RoPE makes of constant keys.",
    },
)

"""Do the planes of a head foretell how additive it is? The bound of its planes against its interaction share."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import torch
import xarray as xr
from torch import Tensor

from tl_posgen.collector import Variable
from tl_posgen.feed import one_pass
from tl_posgen.measure import Measure, Request
from tl_posgen.models.loading.shuffled_like import shuffled_label, shuffled_like
from tl_posgen.models.model import Model
from tl_posgen.models.provenance import model_label, provenance_of
from tl_posgen.models.tokens import to_prompts
from tl_posgen.options import Options
from tl_posgen.position.first_token import WITHOUT_FIRST_TOKEN
from tl_posgen.position.planes.planes import EPS, Planes, require_rope
from tl_posgen.procedure import Job, as_result
from tl_posgen.prompt_groups import INTERVAL
from tl_posgen.report.figures import COLOURS, NULL_COLOUR, Panels, finish, head_names, line
from tl_posgen.report.figures import model_label as label_of
from tl_posgen.report.intervals import ENDS, FISHER, with_ends
from tl_posgen.report.sentences import said, with_interval
from tl_posgen.result import Result
from tl_posgen.stats.agreement import fisher_interval, pearson, spearman
from tl_posgen.summary import Summary

WEIGHTS = ("trained", "random init", "shuffled")
POOLED = "pooled"
VARIANTS = {"all": "", "without_first_token": WITHOUT_FIRST_TOKEN}
CORRELATIONS = ("pearson", "spearman")
ROW, GROUP = ("weights", "layer", "head"), ("group", "variant")
OF_MEAN = [f"mean_interaction{WITHOUT_FIRST_TOKEN}{end}" for end in ENDS[1:]]
PER_HEAD = (
    *(f"{name}{suffix}" for suffix in VARIANTS.values() for name in ("score_sum", "interaction", "std", "additive")),
    "planes_met",
)


@dataclass(frozen=True)
class PlaneSufficiency(Options):
    r"""corr over heads of sum_m s_m / std(W) with the interaction share kd + qkd, s_m = scale E|q^m| E|k^m - kbar^m| x
    max_d 2|sin(theta_m d / 2)|.

    The sum bounds what the mean-key split can miss, so a small one is sufficient for an additive head; whether it also
    tells heads apart is what this measures. The same on a random initialisation, the first of `null_seeds`, and on the
    trained weights shuffled by `seed`, which keep their sizes; both are part of the result, a row per (weights, layer,
    head), and it has no other null.

    Args:
        eps, n_distances: as in `Planes`.

    Raises:
        InputError: unusable prompts or options.
        UnsupportedModelError: a model without RoPE.

    Source: the bound, the criterion and this test of it are ours.

    Example:
        >>> from tl_posgen.position.planes import plane_sufficiency
        >>> found = plane_sufficiency("mini", "Down, down, down. Would the fall never end?", progress=False)
        >>> found.dataset["pearson"].sizes["group"], len(found.frame())
        (4, 48)
    """

    eps: int | float = EPS
    n_distances: int | None = None

    def check(self) -> None:
        self.planes()

    def planes(self) -> Planes:
        """The options of the measure that this one rests on; InputError for bad ones."""
        return Planes(eps=self.eps, n_distances=self.n_distances)


def run(model: Model, prompts: Any, request: Request, job: Job) -> Result:
    assert isinstance(request.options, PlaneSufficiency)
    tokens = to_prompts(model, prompts, length=job.length, n_prompts=job.n_prompts)
    planes = Request(Planes.measure, request.options.planes())
    job.plan(0, once=len(tokens) * (2 + bool(job.random_inits)))
    null_seeds, label = list(job.random_inits[:1]), model_label(model)
    dataset = job.kept(
        request, tokens, label, lambda: of_every_weights(model, tokens, planes, job), null_seeds=null_seeds
    )
    return as_result(request, [dataset], provenance_of(model, tokens, null_seeds, job.seed))


def of_every_weights(model: Model, tokens: Sequence[Tensor], planes: Request, job: Job) -> xr.Dataset:
    where: dict[str, Any] = {"layers": job.layers, "heads": job.heads}
    measured = {}
    for kind, label, other in every_weights(model, job):
        found = one_pass(other, tokens, [planes], seed=job.seed, label=label, intervals=True, **where)["planes"]
        measured[kind] = found[[*PER_HEAD, *OF_MEAN, "additive_by_eps"]]
        del other  # before the next is built
    kinds = [kind for kind in WEIGHTS if kind in measured]
    index = pd.Index(kinds, name="weights")
    whole: Any = [measured[kind] for kind in kinds]
    heads: xr.Dataset = xr.concat(whole, index, combine_attrs="override")
    heads = heads.assign(certified=heads["additive_by_eps"].mean(("layer", "head"))).drop_vars("additive_by_eps")
    return heads.merge(correlations(heads)).assign_attrs(rows=list(ROW))


def every_weights(model: Model, job: Job) -> Iterator[tuple[str, str, Model]]:
    """(kind, label, model), each built when its turn comes, in the place of the one before."""
    trained, random_init, shuffled = WEIGHTS
    yield trained, model_label(model), model
    random_inits = job.random_inits.of(model)
    random_inits.let_go()
    yield shuffled, shuffled_label(job.seed), shuffled_like(model, job.seed)
    yield from ((random_init, label, other) for label, other in islice(random_inits.models(), 1))


def correlations(heads: xr.Dataset) -> xr.Dataset:
    """Pearson and Spearman over heads, for each kind of weights and pooled, with the first token and without."""
    groups = {str(kind): heads.sel(weights=[kind]) for kind in heads["weights"].values} | {POOLED: heads}
    by_group = [[correlation(data, suffix) for suffix in VARIANTS.values()] for data in groups.values()]
    columns = torch.tensor(by_group, dtype=torch.float64).movedim(-1, 0)
    data = {name: (GROUP, x.numpy()) for name, x in zip((*CORRELATIONS, "n_heads"), columns, strict=True)}
    # none of the pooled ones: a head under three kinds of weights is one head
    own, n = columns[0].where(torch.tensor([[group != POOLED] for group in groups]), torch.nan), columns[2]
    ends = zip(ENDS[1:], fisher_interval(own, n), strict=True)
    data |= {f"pearson{end}": (GROUP, x.numpy()) for end, x in ends}
    return xr.Dataset(data, {"group": list(groups), "variant": list(VARIANTS)})


def correlation(data: xr.Dataset, suffix: str) -> tuple[float, float, int]:
    """Of the heads that have both numbers: a head that never varies, or has no planes, has none."""
    both = data[[f"score_sum{suffix}", f"interaction{suffix}"]].to_dataframe().dropna()
    x, y = (torch.tensor(both[f"{name}{suffix}"].to_numpy()) for name in ("score_sum", "interaction"))
    return float(pearson(x, y)), float(spearman(x, y)), len(both)


# What is shown

MEANS = (f"score_sum{WITHOUT_FIRST_TOKEN}", f"interaction{WITHOUT_FIRST_TOKEN}", "additive")


def key_of(name: str, group: str) -> str:
    """A number's key in the summary: 'pearson_random_init'."""
    return f"{name}_{group.replace(' ', '_')}"


def summarise(data: xr.Dataset) -> Summary:
    """Keys are `<name>_<weights>`; None for a random init that was not measured."""
    n_heads = data["n_heads"].sel(group="trained", variant="without_first_token")
    summary: dict[str, Any] = {"n_heads": int(n_heads)}
    for group in (*WEIGHTS, POOLED):
        known = group in data["group"].values
        for name, end in [(name, "") for name in CORRELATIONS] + [("pearson", end) for end in ENDS[1:]]:
            for variant, suffix in VARIANTS.items():
                at = {"group": group, "variant": variant}
                value = float(data[f"{name}{end}"].sel(at)) if known else None
                summary[f"{key_of(f'{name}{suffix}', group)}{end}"] = value
        for name in MEANS if group != POOLED else ():
            summary[key_of(name, group)] = float(data[name].sel(weights=group).mean()) if known else None
        for end in ENDS[1:] if group != POOLED else ():
            value = float(data[f"mean_{MEANS[1]}{end}"].sel(weights=group)) if known else None
            summary[f"{key_of(MEANS[1], group)}{end}"] = value
    return summary


def findings(own: Summary, null: Any) -> list[str]:
    def number(name: str, group: str, form: str) -> str:
        return with_interval(own, key_of(name, group), form)

    def correlated(group: str) -> str:
        r, rho = (number(f"{name}{WITHOUT_FIRST_TOKEN}", group, ".2f") for name in CORRELATIONS)
        return f"{r} (Spearman {rho})"

    with_random = own[key_of("additive", "random init")] is not None

    def mean(name: str, form: str) -> str:
        random = f"random init {number(name, 'random init', form)}, " if with_random else ""
        return f"{number(name, 'trained', form)} ({random}shuffled {number(name, 'shuffled', form)})"

    random = f"random init {correlated('random init')}" if with_random else "no random init measured"
    return [
        f"Over {own['n_heads']} heads, first token left out, the sum of the plane scores correlates with the "
        f"interaction share at r = {correlated('trained')}; {random}, shuffled {correlated('shuffled')}, pooled "
        f"{correlated(POOLED)}.",
        f"First token left out, mean sum of scores {mean(MEANS[0], '.2f')}, interaction share {mean(MEANS[1], '.3f')}; "
        f"with it, certified additive {mean('additive', '.0%')} of heads. A sum above 1 bounds nothing by itself: it "
        "ranks heads, it does not prove them additive.",
    ]


def table(data: xr.Dataset) -> pd.DataFrame:
    """A row per kind of weights: correlations and means over heads, as the sentences give them."""
    means = data[[*MEANS, "planes_met", "additive"]].mean(("layer", "head")).to_dataframe()
    columns = data[list(CORRELATIONS)].sel(variant="without_first_token", drop=True).to_dataframe()
    frame = columns.join(means).rename(columns=lambda name: name.removesuffix(WITHOUT_FIRST_TOKEN))
    tokens = {"planes_met": "all tokens", "additive": "all tokens"}
    return frame.rename(columns=lambda name: f"{name}, {tokens.get(name, 'first out')}").reset_index(names="weights")


LOOKS = {"trained": (COLOURS[0], "circle"), "random init": (NULL_COLOUR, "diamond-open")}
LOOKS |= {"shuffled": (COLOURS[1], "square-open")}
PANELS = {"": "all tokens", WITHOUT_FIRST_TOKEN: "first token left out"}


def scatter(result: Any) -> go.Figure:
    """Interaction share against the sum of the plane scores: a point a head, correlations in the legend."""
    data, summary = result.dataset, result.summary

    def told(group: str, suffix: str) -> str:
        r, rho = (said(summary[key_of(f"{name}{suffix}", group)], ".2f") for name in CORRELATIONS)
        return f"r = {r}, rho = {rho}"

    titles = [f"{label}; pooled: {told(POOLED, suffix)}" for suffix, label in PANELS.items()]
    panels = Panels(titles, columns=2, row_height=320, shared_yaxes=True)
    for panel, (suffix, label) in enumerate(PANELS.items()):
        x, y = f"score_sum{suffix}", f"interaction{suffix}"
        for kind in data["weights"].values:
            (colour, symbol), heads = LOOKS[kind], data[[x, y]].sel(weights=kind).to_dataframe().dropna()
            hover = "%{text}<br>sum of scores %{x:.2f}, interaction %{y:.3f}<extra></extra>"
            points = go.Scatter(x=heads[x], y=heads[y], name=f"{kind}: {told(kind, suffix)}", mode="markers")
            points.update(text=[f"{kind}, {head}" for head in head_names(heads.index)], hovertemplate=hover)
            panels.add(panel, points.update(marker={"color": colour, "symbol": symbol, "size": 8}))
            panels.figure.data[-1].update(legendgroup=label, legendgrouptitle={"text": label}, showlegend=True)
    panels.axes("sum of plane scores / std of the scores", "interaction share, kd + qkd")
    panels.figure.update_xaxes(rangemode="tozero").update_yaxes(rangemode="tozero")
    subtitle = "a point a head; r: Pearson, rho: Spearman, over the heads of one kind of weights"
    return panels.finish(f"Do the planes foretell how additive a head is? · {label_of(data)}", subtitle)


def certified(result: Any) -> go.Figure:
    """Share of heads that the sufficient criterion certifies, by its tolerance."""
    data, figure = result.dataset, go.Figure()
    for kind in data["weights"].values:
        (colour, symbol), values = LOOKS[kind], data["certified"].sel(weights=kind)
        marker = {"symbol": symbol, "size": 9}
        figure.add_trace(line(values["eps"].values, values.values, kind, colour, mode="lines+markers", marker=marker))
    figure.update_xaxes(title_text="eps, the tolerance of each plane", type="log", tickvals=data["eps"].values)
    figure.update_yaxes(title_text="share of heads certified", range=[-0.03, 1.03], tickformat=".0%")
    subtitle = "in every plane: the key nearly constant, or too small to matter, or hardly turning; all tokens"
    return finish(figure, f"Heads that the criterion certifies · {label_of(data)}", subtitle)


OF_PLANES = Planes.measure.variables
VARIABLES = {
    **{name: replace(OF_PLANES[name], dims=ROW, headline="", short="") for name in PER_HEAD},
    "certified": Variable("share of heads certified", description="by tolerance, all tokens", dims=("weights", "eps")),
    **with_ends("pearson", "Pearson's r", "", "score_sum with interaction, over the group's heads", GROUP, FISHER),
    **{
        name: Variable("end of the mean interaction share", description=INTERVAL, dims=("weights",)) for name in OF_MEAN
    },
    "spearman": Variable("Spearman's rho", description="score_sum with interaction, by rank", dims=GROUP),
    "n_heads": Variable("number of heads", description="that have both numbers", dims=GROUP),
}

MEASURE = Measure(
    name="plane_sufficiency",
    question="Do a head's planes foretell how additive it is?",
    explanation=(
        "In each plane: mean length of the query, times how far keys stray from their mean, times how far the plane "
        "turns. Summed over planes, relative to the standard deviation of the scores, this bounds what a split into "
        "position and content can miss; here it is set against the interaction share, for trained weights, a random "
        "initialisation, and the trained weights with the entries of every matrix shuffled."
    ),
    source="ours",
    options=PlaneSufficiency,
    procedure=run,
    requires=require_rope,
    variables=VARIABLES,
    summarise=summarise,
    findings=findings,
    figures={"scatter": scatter, "certified": certified},
    table=table,
    legend="first out: the first token left out; a row a kind of weights, over whose heads correlations are taken.",
)

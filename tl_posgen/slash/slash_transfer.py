"""Do slash heads belong to the model or to the text? The same heads on text and on random tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
import xarray as xr
from jaxtyping import Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posgen.analysis import Job
from tl_posgen.measure import Measure, Options, Request, Summary, TokenView, Variable
from tl_posgen.models.capture import LayerCapture
from tl_posgen.models.capturing import run_capture
from tl_posgen.models.tokens import to_prompts, token_strings
from tl_posgen.report.circuits import CROP, attention_maps
from tl_posgen.report.figures import Panels, equality, head_names, model_label, sides
from tl_posgen.report.sentences import at_head, beside, head_reference, said
from tl_posgen.result import Result
from tl_posgen.slash.dominance import check_all_reached, check_dominance
from tl_posgen.slash.entries import entry
from tl_posgen.slash.layer_means import LayerMeans, at_distance, cropped, of_head, statistics_of
from tl_posgen.slash.slash_scores import SHORT_DISTANCES, SHORT_KAPPA
from tl_posgen.stats.agreement import agreement

SOURCES = ("natural", "random")
SUFFIXES = {"all": "", "without_first_token": "_without_first_token"}
TOKENS = {"all": "all keys", "without_first_token": "first token left out"}
N_PANELS = 5  # distances drawn in one row


@dataclass(frozen=True)
class SlashTransfer(Options):
    r"""SlashScore on text against SlashScore on i.i.d. uniform random tokens: correlations and overlap over heads.

    The random prompts have the lengths and the first tokens of the natural ones, everything else drawn uniformly from
    the vocabulary with `seed`. The scores on text are those of the measure "slash".

    Args:
        kappa, distances: what makes a head slash-dominant, for the overlap of the sets.

    Raises:
        InputError: unusable prompts, kappa outside (0, 1], a distance that no prompt reaches.

    Source: that slash-dominant heads keep their scores on random tokens is claimed by Cheng et al. 2026 (arXiv
    2601.08297), whose prompts and thresholds are not known; the comparison is ours.

    Example:
        >>> from tl_posgen.slash import slash_transfer
        >>> result = slash_transfer("mini", "Down, down, down. Would it end?", null_seeds=(), progress=False)
        >>> result.dataset.score.dims
        ('source', 'layer', 'head', 'distance')
    """

    kappa: float = SHORT_KAPPA
    distances: Sequence[int] = tuple(SHORT_DISTANCES)

    def check(self) -> None:
        check_dominance(self.kappa, self.distances)


def run(model: Any, prompts: Any, request: Request, job: Job) -> Result:
    """The random tokens through the model, beside the finished result of the text."""
    options = request.options
    assert isinstance(options, SlashTransfer)
    tokens = to_prompts(model, prompts, length=job.length, n_prompts=job.n_prompts)
    drawn = random_prompts(tokens, model.cfg.d_vocab, job.seed)

    def of_model(model: Any, label: str, after: Mapping[str, xr.Dataset]) -> xr.Dataset:
        natural = after["slash"]
        random = scores_on(model, drawn, natural, job, label)
        return compared(natural, random, options).assign_attrs(model=label, kappa=options.kappa)

    return job.result(request, model, tokens, of_model)


def random_prompts(tokens: Sequence[Int[Tensor, " _"]], n_vocabulary: int, seed: int) -> list[Int[Tensor, " _"]]:
    """Prompts of the same lengths and first tokens, the others i.i.d. uniform over the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(n_vocabulary, (len(prompt),), generator=generator) for prompt in tokens]
    return [torch.cat([prompt[:1], other[1:]]) for prompt, other in zip(tokens, drawn, strict=True)]


def scores_on(model: Any, tokens: Sequence[Int[Tensor, " _"]], natural: xr.Dataset, job: Job, label: str) -> xr.Dataset:
    """Slash scores on other tokens, and the patterns there of the heads that are shown on text."""
    means = LayerMeans()
    shown = list(zip(natural["example_layer"].values.tolist(), natural["example_head"].values.tolist(), strict=True))
    patterns: dict[tuple[int, int], np.ndarray] = {}

    def take(layer: LayerCapture) -> None:
        means.add(layer, statistics_of(layer))
        if len(patterns) < len(shown):  # on the first prompt
            patterns.update({head: crop for head, crop in cropped(layer).items() if head in shown})

    needs = frozenset({"pattern"})
    for prompt in tqdm(tokens, desc=f"random tokens, {label}", unit="prompt", disable=not job.progress):
        run_capture(model, prompt[None], take, needs=needs, layers=job.layers, heads=job.heads)
    return means.dataset().assign(
        pattern=(("example", "query", "key"), np.stack([patterns[head] for head in shown])),
        token_text=("key", np.array(token_strings(model, tokens[0][:CROP]), dtype=object)),
    )


def compared(natural: xr.Dataset, random: xr.Dataset, options: SlashTransfer) -> xr.Dataset:
    """Both sources side by side, and how far they agree over heads."""
    labels = xr.DataArray(list(SOURCES), dims="source", name="source")
    shared = [f"score{suffix}" for suffix in SUFFIXES.values()] + ["first_token", "pattern", "token_text"]
    data = {name: xr.concat([one[name] for one in (natural, random)], labels) for name in shared}
    place = natural["best_distance"]
    for source in SOURCES:
        for suffix in SUFFIXES.values():
            data[f"{source}{suffix}"] = at_distance(data[f"score{suffix}"].sel(source=source, drop=True), place)
    kept = natural[["uniform", "best_distance", "example_layer", "example_head"]]
    data["uniform_score"] = at_distance(natural["uniform"], place)
    dataset = kept.assign(data)
    return dataset.merge(agreements(dataset, options))


def agreements(dataset: xr.Dataset, options: SlashTransfer) -> xr.Dataset:
    """Do text and random tokens agree on the heads? For every D, with the first token's column and without it."""
    distances = sorted(set(options.distances))
    chosen = [dataset[f"score{suffix}"].sel(distance=distances) for suffix in SUFFIXES.values()]
    stacked = np.stack([one.transpose("source", "distance", "layer", "head").values for one in chosen])
    scores = torch.from_numpy(stacked).flatten(-2)
    scores = scores[..., ~scores.isnan().any(dim=0).any(dim=0).any(dim=0)]  # heads that a layer was not asked for
    found = agreement(scores[:, 0], scores[:, 1], options.kappa)
    names = {"pearson": "pearson", "spearman": "spearman", "jaccard": "jaccard"}
    names |= {"n_natural": "n_first", "n_random": "n_second"}
    data = {name: (("variant", "at"), getattr(found, field).numpy()) for name, field in names.items()}
    return xr.Dataset(data, {"variant": list(SUFFIXES), "at": distances})


# What is shown


def summarise(data: xr.Dataset) -> Summary:
    whole, rest = (data.sel(variant=variant) for variant in SUFFIXES)
    some = (whole["n_natural"] > 0).values
    place = int(whole["n_natural"].argmax("at"))  # where most heads are dominant on text
    strongest = head_reference(data, "natural") or ""
    head = of_head(data, strongest)

    def listed(array: xr.DataArray, kind: type = float) -> list[Any]:
        return [kind(value) for value in array.values]

    return {
        "distances": listed(data["at"], int),
        **{name: listed(whole[name]) for name in ("pearson", "spearman", "jaccard")},
        **{f"{name}_without_first_token": listed(rest[name]) for name in ("pearson", "spearman", "jaccard")},
        **{name: listed(whole[name], int) for name in ("n_natural", "n_random")},
        "at": int(whole["at"][place]),
        "least_pearson_where_dominant": float(whole["pearson"].values[some].min()) if some.any() else None,
        "strongest_head": strongest,
        "strongest_distance": int(head["best_distance"]),
        "strongest_natural": float(head["natural"]),
        "strongest_random": float(head["random"]),
    }


def findings(own: Summary, null: Any) -> list[str]:
    at = own["at"]
    keys = ("pearson", "pearson_without_first_token", "n_natural", "n_random", "jaccard")
    r, rest, natural, random, overlap = (entry(own, key, "distances", at) for key in keys)
    of_null = "no null measured"
    if null is not None:
        of_null = f"random init {said(entry(null, 'pearson', 'distances', at), '.3f')}"
    return [
        f"At D = {at} slash scores on random tokens follow those on text over heads with r = {said(r, '.3f')} "
        f"({of_null}; without the first token {said(rest, '.3f')}); {natural:g} heads are dominant on text, {random:g} "
        f"on random tokens, overlap (Jaccard) {said(overlap, '.2f')}.",
        f"The strongest, {at_head(own['strongest_head'], own['strongest_natural'])} at D = {own['strongest_distance']} "
        f"on text, scores {beside(own, null, 'strongest_random')} on random tokens.",
    ]


def table(data: xr.Dataset) -> pd.DataFrame:
    """A row per distance: agreement over heads, with the first token and without, and how many are dominant."""
    own = summarise(data)
    columns = {
        "D": "distances",
        "r": "pearson",
        "r without first token": "pearson_without_first_token",
        "Spearman": "spearman",
        "dominant on text": "n_natural",
        "on random": "n_random",
        "Jaccard": "jaccard",
        "Jaccard without first token": "jaccard_without_first_token",
    }
    return pd.DataFrame({heading: own[key] for heading, key in columns.items()})


def scatter(result: Any) -> go.Figure:
    """Random tokens against text, a point a head: a column a distance, a row with and without the first token."""
    own, data = result.summary, result.dataset
    distances = own["distances"][:N_PANELS]
    titles = [panel_title(result, variant, distance) for variant in SUFFIXES for distance in distances]
    panels = Panels(titles, columns=len(distances), horizontal_spacing=0.04)
    for row, (variant, suffix) in enumerate(SUFFIXES.items()):
        for column, distance in enumerate(distances):
            panel = row * len(distances) + column
            for side, one, colour in sides(result):
                look = {"color": colour, "size": 7, "symbol": "x-thin-open" if one is result.null else "circle"}
                panels.add(panel, points(one, f"score{suffix}", distance).update(name=side, marker=look))
            panels.add(panel, equality(float(data[f"score{suffix}"].sel(distance=distance).max())))
        panels.figure.update_yaxes(title_text=f"random tokens<br>{TOKENS[variant]}", row=row + 1, col=1)
    panels.figure.update_xaxes(title_text="on text", row=2).update_annotations(font_size=11)
    subtitle = "a point a head, a column a distance D; r: Pearson over heads, ρ: Spearman; dotted: equal"
    return panels.finish(f"Slash scores in and out of distribution · {model_label(data)}", subtitle)


def panel_title(result: Any, variant: str, distance: int) -> str:
    own, null, end = result.summary, result.null_summary, SUFFIXES[variant]
    r, rho = (entry(own, f"{name}{end}", "distances", distance) for name in ("pearson", "spearman"))
    random = "" if null is None else f" (random init {entry(null, f'pearson{end}', 'distances', distance):.2f})"
    return f"D = {distance}: r {r:.2f}{random}, ρ {rho:.2f}"


def points(data: xr.Dataset, name: str, distance: int) -> go.Scatter:
    heads = data[name].sel(distance=distance, drop=True).stack(place=("layer", "head")).dropna("place")
    return go.Scatter(
        x=heads.sel(source="natural").values,
        y=heads.sel(source="random").values,
        mode="markers",
        text=head_names(heads["place"].values),
        hovertemplate=f"%{{text}}, D = {distance}<br>text %{{x:.3f}}, random tokens %{{y:.3f}}<extra></extra>",
    )


def labels(data: xr.Dataset) -> list[str]:
    """Which head each example is, with its scores on both."""
    places = zip(data["example_layer"].values, data["example_head"].values, strict=True)
    heads = [(layer, head, data.sel(layer=layer, head=head)) for layer, head in places]
    return [
        f"layer {layer}, head {head}, D = {int(one['best_distance'])}: slash score {float(one['natural']):.3f} on "
        f"text, {float(one['random']):.3f} on random tokens (each token: of the text ¦ drawn at random)"
        for layer, head, one in heads
    ]


def show(data: xr.Dataset, example: int) -> Any:
    """Both patterns of one head, side by side."""
    patterns = data["pattern"].isel(example=example).transpose("source", "query", "key").values
    text, random = (data["token_text"].sel(source=source).values for source in SOURCES)
    both = [f"{one} ¦ {other}" for one, other in zip(text, random, strict=True)]
    return attention_maps(patterns, both, ["text", "random"])


BY_DISTANCE = ("source", "layer", "head", "distance")
AT = ("variant", "at")
VARIABLES = {
    "natural": Variable("slash score on text", description="at the head's best distance there"),
    "random": Variable("slash score on random tokens", description="at the same distance"),
    "natural_without_first_token": Variable("on text, without first token", description="at the same distance"),
    "random_without_first_token": Variable("on random tokens, without first token", description="at the same distance"),
    "uniform_score": Variable("slash score of uniform attention", description="at the same distance"),
    "best_distance": Variable("best distance on text", "tokens", "over D < N/2"),
    "score": Variable("slash score", dims=BY_DISTANCE),
    "score_without_first_token": Variable(
        "slash score without first token", description="its column removed, rows renormalised", dims=BY_DISTANCE
    ),
    "first_token": Variable("attention to the first token", dims=("source", "layer", "head")),
    "uniform": Variable("slash score of uniform attention", dims=("layer", "distance")),
    "pearson": Variable("correlation over heads", description="Pearson, text with random tokens", dims=AT),
    "spearman": Variable("rank correlation over heads", description="Spearman", dims=AT),
    "jaccard": Variable("overlap of the dominant heads", description="|A & B| / |A | B|", dims=AT),
    "n_natural": Variable("dominant heads on text", dims=AT),
    "n_random": Variable("dominant heads on random tokens", dims=AT),
    "pattern": Variable("attention of the strongest heads", dims=("source", "example", "query", "key")),
    "token_text": Variable("tokens of the first prompt", dims=("source", "key")),
    "example_layer": Variable("layer of an example", dims=("example",)),
    "example_head": Variable("head of an example", dims=("example",)),
}

MEASURE = Measure(
    name="slash_transfer",
    question="Do slash heads belong to the model or to the text?",
    explanation=(
        "The same heads on text and on i.i.d. uniform random tokens, per distance D, with and without the first token."
    ),
    source="the claim: Cheng et al. 2026 (arXiv 2601.08297); the comparison: ours",
    options=SlashTransfer,
    procedure=run,
    after=("slash",),
    check_prompts=check_all_reached,
    variables=VARIABLES,
    summarise=summarise,
    findings=findings,
    figures={"scatter": scatter},
    table=table,
    tokens=TokenView(labels, show),
)

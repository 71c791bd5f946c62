"""Do slash heads belong to the model or to the text? The same heads on text and on random tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Int
from torch import Tensor

from tl_posgen.collector import HeadRows, Variable
from tl_posgen.measure import Measure, Request, TokenView
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.tokens import to_prompts, token_strings
from tl_posgen.procedure import Job
from tl_posgen.report.circuits import CROP, attention_maps
from tl_posgen.report.intervals import ENDS, FISHER, with_ends
from tl_posgen.report.sentences import NO_NULL, at_head, beside, entry, head_reference, said, with_interval
from tl_posgen.result import Result
from tl_posgen.slash.dominance import Dominance, check_all_reached
from tl_posgen.slash.layer_means import (
    EXAMPLES,
    SUFFIXES,
    at_distance,
    by_head,
    cropped,
    examples,
    means_over_prompts,
    of_head,
    statistics_of,
    with_and_without,
)
from tl_posgen.slash.slash_transfer_figures import FIGURES, SOURCES
from tl_posgen.stats.agreement import agreement, fisher_interval
from tl_posgen.summary import NullSummary, Summary


@dataclass(frozen=True)
class SlashTransfer(Dominance):
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


def run(model: Any, prompts: Any, request: Request, job: Job) -> Result:
    """The random tokens through the model, beside the finished result of the text."""
    options = request.options
    assert isinstance(options, SlashTransfer)
    tokens = to_prompts(model, prompts, length=job.length, n_prompts=job.n_prompts)
    drawn = random_prompts(tokens, model.cfg.d_vocab, job.seed)
    job.plan(len(drawn))

    def of_model(model: Any, label: str, after: Mapping[str, xr.Dataset]) -> xr.Dataset:
        natural = after["slash"]
        random = scores_on(model, drawn, natural, job)
        return compared(natural, random, options).assign_attrs(model=label, kappa=options.kappa)

    return job.result(request, model, tokens, of_model)


def random_prompts(tokens: Sequence[Int[Tensor, " _"]], n_vocabulary: int, seed: int) -> list[Int[Tensor, " _"]]:
    """Prompts of the same lengths and first tokens, the others i.i.d. uniform over the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(n_vocabulary, (len(prompt),), generator=generator) for prompt in tokens]
    return [torch.cat([prompt[:1], other[1:]]) for prompt, other in zip(tokens, drawn, strict=True)]


def scores_on(model: Any, tokens: Sequence[Int[Tensor, " _"]], natural: xr.Dataset, job: Job) -> xr.Dataset:
    """Slash scores on other tokens, and the patterns there of the heads that are shown on text."""
    rows = HeadRows()
    shown = list(zip(natural["example_layer"].values.tolist(), natural["example_head"].values.tolist(), strict=True))
    patterns: dict[tuple[int, int], np.ndarray] = {}

    def take(number: int, layer: LayerCapture) -> None:
        layer.prompt = number
        rows.add(layer, **by_head(statistics_of(layer)))
        if number == 0:
            patterns.update({head: crop for head, crop in cropped(layer).items() if head in shown})

    needs = frozenset({"pattern"})
    for number, prompt in enumerate(tokens):
        run_capture(model, prompt[None], partial(take, number), needs=needs, layers=job.layers, heads=job.heads)
    return means_over_prompts(rows).assign(
        pattern=(("example", "query", "key"), np.stack([patterns[head] for head in shown])),
        token_text=("key", np.array(token_strings(model, tokens[0][:CROP]), dtype=object)),
    )


def compared(natural: xr.Dataset, random: xr.Dataset, options: SlashTransfer) -> xr.Dataset:
    """Both sources side by side, and how far they agree over heads."""
    shared = [f"score{suffix}" for suffix in SUFFIXES.values()] + ["first_token", "pattern", "token_text"]
    both = xr.concat([natural[shared], random[shared]], xr.DataArray(list(SOURCES), dims="source", name="source"))
    assert isinstance(both, xr.Dataset)
    place = natural["best_distance"]
    at_best = {
        f"{source}{suffix}": at_distance(both[f"score{suffix}"].sel(source=source, drop=True), place)
        for source in SOURCES
        for suffix in SUFFIXES.values()
    }
    at_best |= {"uniform_score": at_distance(natural["uniform"], place), "best_distance": place}
    kept = natural[["uniform", "example_layer", "example_head"]]
    return xr.Dataset(at_best).merge(both).merge(kept).merge(agreements(both, options))


def agreements(both: xr.Dataset, options: SlashTransfer) -> xr.Dataset:
    """Do text and random tokens agree on the heads? For every D, with the first token's column and without it."""
    distances = sorted(set(options.distances))
    chosen = both[[f"score{suffix}" for suffix in SUFFIXES.values()]].sel(distance=distances)
    scores = chosen.to_array("variant").stack(place=("layer", "head")).dropna("place")
    natural, random = (
        torch.from_numpy(scores.sel(source=source).transpose("variant", "distance", "place").values).contiguous()
        for source in SOURCES
    )
    agreed = agreement(natural, random, options.kappa)
    low, high = fisher_interval(agreed.pearson, scores.sizes["place"])
    columns = vars(agreed) | {"pearson_low": low, "pearson_high": high}
    found = {name: (("variant", "at"), one.numpy()) for name, one in columns.items()}
    names = {"n_first": "n_natural", "n_second": "n_random"}
    return xr.Dataset(found, {"variant": list(SUFFIXES), "at": distances}).rename(names)


# What is shown


AGREEMENTS = [(name, "") for name in ("pearson", "spearman", "jaccard")] + [("pearson", end) for end in ENDS[1:]]


def summarise(data: xr.Dataset) -> Summary:
    counts = data[["n_natural", "n_random"]].sel(variant="all")
    some = counts["n_natural"] > 0
    strongest = head_reference(data, "natural") or ""
    head = of_head(data, strongest)
    return {
        "distances": data["at"].values.tolist(),
        **{
            f"{name}{suffix}{end}": data[f"{name}{end}"].sel(variant=variant).values.tolist()
            for variant, suffix in SUFFIXES.items()
            for name, end in AGREEMENTS
        },
        **{str(name): count.values.tolist() for name, count in counts.items()},
        "at": int(counts["n_natural"].idxmax("at")),  # where most heads are dominant on text
        "least_pearson_where_dominant": (
            float(data["pearson"].sel(variant="all").where(some, drop=True).min()) if some.any() else None
        ),
        "strongest_head": strongest,
        "strongest_distance": int(head["best_distance"]),
        "strongest_natural": float(head["natural"]),
        "strongest_random": float(head["random"]),
    }


def findings(own: Summary, null: NullSummary | None) -> list[str]:
    place = own["distances"].index(own["at"])
    r, r_out = (with_interval(entry(own, key, place), key) for key in ("pearson", "pearson_without_first_token"))
    of_null = NO_NULL if null is None else f"random init {said(null['pearson'][place], '.3f')}"
    return [
        f"At D = {own['at']} slash scores on random tokens follow those on text over heads with r = "
        f"{r} ({of_null}; without the first token {r_out}); {own['n_natural'][place]} heads are dominant on text, "
        f"{own['n_random'][place]} on random tokens, overlap (Jaccard) {said(own['jaccard'][place], '.2f')}.",
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


def labels(data: xr.Dataset) -> list[str]:
    """Which head each example is, with its scores on both."""
    return [
        f"layer {int(one['layer'])}, head {int(one['head'])}, D = {int(one['best_distance'])}: slash score "
        f"{float(one['natural']):.3f} on text, {float(one['random']):.3f} on random tokens (each token: of the text ¦ "
        "drawn at random)"
        for one in examples(data)
    ]


def show(data: xr.Dataset, example: int) -> Any:
    """Both patterns of one head, side by side."""
    patterns = data["pattern"].isel(example=example).transpose("source", "query", "key").values
    text, random = (data["token_text"].sel(source=source).values for source in SOURCES)
    both = [f"{one} ¦ {other}" for one, other in zip(text, random, strict=True)]
    return attention_maps(patterns, both, ["text", "random"])


AT = ("variant", "at")
VARIABLES = {
    **with_and_without(
        {
            "natural": Variable("slash score on text", description="at the head's best distance there"),
            "random": Variable("slash score on random tokens", description="at the same distance"),
            "score": Variable("slash score", dims=("source", "layer", "head", "distance")),
        }
    ),
    "uniform_score": Variable("slash score of uniform attention", description="at the same distance"),
    "best_distance": Variable("best distance on text", "tokens", "over D < N/2"),
    "first_token": Variable("attention to the first token", dims=("source", "layer", "head")),
    "uniform": Variable("slash score of uniform attention", dims=("layer", "distance")),
    **with_ends("pearson", "correlation over heads", "", "Pearson, text with random tokens", AT, FISHER),
    "spearman": Variable("rank correlation over heads", description="Spearman", dims=AT),
    "jaccard": Variable("overlap of the dominant heads", description="|A & B| / |A | B|", dims=AT),
    "n_natural": Variable("dominant heads on text", dims=AT),
    "n_random": Variable("dominant heads on random tokens", dims=AT),
    "pattern": Variable("attention of the strongest heads", dims=("source", "example", "query", "key")),
    **{**EXAMPLES, "token_text": Variable("tokens of the first prompt", dims=("source", "key"))},
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
    figures=FIGURES,
    table=table,
    legend=(
        "r, Spearman: of slash scores on text and on random tokens, over heads; dominant: heads that reach kappa; "
        "Jaccard: overlap of the two sets."
    ),
    tokens=TokenView(labels, show),
)

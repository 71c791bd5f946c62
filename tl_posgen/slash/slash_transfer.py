"""Do slash heads belong to the model or to the text? The same heads on text and on random tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Int
from torch import Tensor

from tl_posgen.core.formatting import in_brackets
from tl_posgen.core.measure import ENDS, HEAD, TOKENS, TokenView, Variable
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.run import Run
from tl_posgen.core.sums import Sums
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.selection import head_name
from tl_posgen.models.tokens import token_strings
from tl_posgen.report.circuits import CROP, attention_maps
from tl_posgen.slash.layer_means import (
    EXAMPLES,
    Dominance,
    at_distance,
    cropped,
    example_heads,
    examples,
    statistics_of,
    thresholds,
)
from tl_posgen.slash.slash import Slash
from tl_posgen.slash.slash_transfer_figures import FIGURES, SOURCES
from tl_posgen.stats.agreement import agreement, fisher_interval

AT = ("tokens", "short_distance")


def example_labels(data: xr.Dataset) -> list[str]:
    """Return a line for each example: its head, with its scores on both."""
    lines = []
    for one in examples(data):
        text, random = (float(one["best_score"].sel(tokens="all", source=source)) for source in SOURCES)
        lines.append(
            f"{head_name(one['layer'], one['head'])}, D = {int(one['best_distance'])}: slash score "
            f"{text:.3f} on text, {random:.3f} on random tokens (each token: of the text ¦ drawn at random)"
        )
    return lines


def show_example(data: xr.Dataset, example: int) -> Any:
    """Return circuitsvis' page of both patterns of one head, side by side."""
    patterns = data["pattern"].isel(example=example).transpose("source", "query", "key").values
    text, random = (data["token_text"].sel(source=source).values for source in SOURCES)
    both = [f"{one} ¦ {other}" for one, other in zip(text, random, strict=True)]
    return attention_maps(patterns, both, ["text", "random"])


@dataclass(frozen=True)
class SlashTransfer(Dominance):
    r"""SlashScore on text against SlashScore on i.i.d. uniform random tokens: correlations and overlap over heads.

    The same heads on text and on i.i.d. uniform random tokens, per distance D, with and without the first token.

    The random prompts have the lengths and the first tokens of the natural ones, everything else drawn uniformly from
    the vocabulary with `seed`. The scores on text are those of the measure "slash".

    Args:
        kappa, distances: what makes a head slash-dominant, for the overlap of the sets.

    Raises:
        InputError: a distance that no prompt reaches.

    Source: that slash-dominant heads keep their scores on random tokens is claimed by Cheng et al. 2026 (arXiv
    2601.08297), whose prompts and thresholds are not known; the comparison is ours.

    Example:
        >>> result = SlashTransfer()("mini", "Down, down, down. Would it end?", null_seeds=(), progress=False)
        >>> result.sel(tokens="all")["score"].dims
        ('source', 'layer', 'head', 'distance')
    """

    question = "Do slash heads belong to the model or to the text?"
    after = (Slash,)
    variables = {
        "best_score": Variable("slash score", "", "at the head's best distance on text", ("tokens", "source", *HEAD)),
        "score": Variable("slash score", dims=("tokens", "source", *HEAD, "distance")),
        "best_uniform": Variable("slash score of uniform attention", "", "at the same distance"),
        "best_distance": Variable("best distance on text", "tokens", "over D < N/2"),
        "first_token": Variable("attention to the first token", dims=("source", *HEAD)),
        "uniform": Variable("slash score of uniform attention", dims=("layer", "distance")),
        "pearson": Variable("correlation over heads", "", "Pearson, text with random tokens", (*AT, "end")),
        "spearman": Variable("rank correlation over heads", "", "Spearman", AT, bounds=(-1, 1)),
        "jaccard": Variable("overlap of the dominant heads", "", "|A & B| / |A | B|", AT, bounds=(0, 1)),
        "n_dominant": Variable("dominant heads", dims=("tokens", "source", "short_distance")),
        "pattern": Variable("attention of the strongest heads", dims=("source", "example", "query", "key")),
        **{**EXAMPLES, "token_text": Variable("tokens of the first prompt", dims=("source", "key"))},
    }
    legend = (
        "r, Spearman: of slash scores on text and on random tokens, over heads; dominant: heads that reach kappa; "
        "Jaccard: overlap of the two sets."
    )
    token_view = TokenView(example_labels, show_example)
    figures = FIGURES

    def labels(self) -> Mapping[str, Sequence[Any]]:
        return {"source": list(SOURCES), "short_distance": sorted(self.distances)}

    def usual(self) -> Mapping[str, Any]:
        return {"source": "natural"}

    def of_model(self, run: Run) -> xr.Dataset:
        natural, drawn = run.found(Slash), random_prompts(run.rows, run.model.cfg.d_vocab, run.seed)
        sums, shown, patterns = Sums(Slash.variables), example_heads(natural), {}

        def consumer(layer: LayerCapture) -> None:
            sums.add_layer(layer, vars(statistics_of(layer)))
            if layer.prompt == 0:
                patterns.update({head: crop for head, crop in cropped(layer).items() if head in shown})

        run.capture(consumer, needs=Slash.needs, rows=drawn)
        random = sums.means().assign(
            pattern=(("example", "query", "key"), np.stack([patterns[head] for head in shown])),
            token_text=("key", np.array(token_strings(run.session, drawn[0][:CROP]), dtype=object)),
        )
        return self.compared(natural, random)

    def compared(self, natural: xr.Dataset, random: xr.Dataset) -> xr.Dataset:
        """Return both sources side by side, and how far they agree over heads."""
        shared = ["score", "first_token", "pattern", "token_text"]
        both: Any = xr.concat([natural[shared], random[shared]], pd.Index(SOURCES, name="source"))
        place = natural["best_distance"]
        data = both.assign(
            best_score=at_distance(both["score"], place),
            best_distance=place,
            best_uniform=natural["best_uniform"],
            uniform=natural["uniform"].sel(tokens="all", drop=True),
        )
        data = data.merge(natural[["example_layer", "example_head"]]).merge(
            self.agreements(both["score"], natural["uniform"])
        )
        return data[list(self.variables)].transpose("tokens", "source", ..., missing_dims="ignore")

    def agreements(self, score: xr.DataArray, uniform: xr.DataArray) -> xr.Dataset:
        """Return how far text and random tokens agree on the heads, for every D, with and without the first token."""
        chosen = score.sel(distance=sorted(self.distances)).stack(place=HEAD)
        heads = chosen.dropna("place").transpose("source", "tokens", "distance", "place")
        natural, random = torch.from_numpy(heads.values)
        least = thresholds(self.kappa, uniform).sel(distance=heads["distance"], layer=heads["layer"])
        kappa = torch.from_numpy(least.transpose("tokens", "distance", "place").values)
        agreed = vars(agreement(natural, random, kappa))
        r, counts = agreed["pearson"], [agreed.pop(name) for name in ("n_first", "n_second")]
        found: dict[str, Any] = {name: (AT, values.numpy()) for name, values in agreed.items()}
        found["pearson"] = ((*AT, "end"), torch.stack([r, *fisher_interval(r, heads.sizes["place"])], -1).numpy())
        found["n_dominant"] = (("source", *AT), torch.stack(counts).numpy())
        return xr.Dataset(found, {"tokens": list(TOKENS), "end": list(ENDS), **self.labels()})

    # Words

    def distance_of_most(self, own: Numbers) -> int:
        """Return the distance at which most heads are dominant on text."""
        return int(own.data["n_dominant"].sel(tokens="all", source="natural").idxmax("short_distance"))

    def findings(self, own: Numbers) -> list[str]:
        at = {"short_distance": self.distance_of_most(own)}
        r, rest = (own("pearson", tokens=tokens, **at) for tokens in TOKENS)
        text, random = (own("n_dominant", source=source, **at).plain for source in SOURCES)
        best = own.extreme("best_score")
        place = {"layer": best.layer, "head": best.head}
        beside = in_brackets(f"{r.null:.3f}", f"without the first token {rest.with_interval:.3f}")
        return [
            f"At D = {at['short_distance']} slash scores on random tokens follow those on text over heads with r = "
            f"{r.with_interval:.3f}{beside}. Dominant at this distance alone: {text:.0f} heads on text, "
            f"{random:.0f} on random tokens, overlap (Jaccard) {own('jaccard', **at).plain:.2f}.",
            f"The strongest, {best:.3f} at D = {int(own.data['best_distance'].sel(place))} on text, scores "
            f"{self.strongest_on_random(own):.3f} on random tokens.",
        ]

    def strongest_on_random(self, own: Numbers) -> Number:
        """Return the score on random tokens of the head that is strongest on text, in every model its own."""
        text, random = (own.array("best_score", source=source).stack(place=HEAD) for source in SOURCES)
        return own.number(random.isel(place=text.fillna(-1).argmax("place")))

    def table(self, own: Numbers) -> pd.DataFrame:
        """Return a row per distance: agreement over heads, and how many are dominant."""
        whole, rest = (own.dataset.sel(tokens=tokens) for tokens in TOKENS)
        columns = {
            "r": whole["pearson"],
            "r without first token": rest["pearson"],
            "Spearman": whole["spearman"],
            "dominant on text": whole["n_dominant"].sel(source="natural"),
            "on random": whole["n_dominant"].sel(source="random"),
            "Jaccard": whole["jaccard"],
            "Jaccard without first token": rest["jaccard"],
        }
        return own.frame(columns, "short_distance").rename(columns={"short_distance": "D"})


def random_prompts(tokens: Sequence[Int[Tensor, " _"]], n_vocabulary: int, seed: int) -> list[Int[Tensor, " _"]]:
    """Return prompts of the same lengths and first tokens, the others i.i.d. uniform over the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(n_vocabulary, (len(prompt),), generator=generator) for prompt in tokens]
    return [torch.cat([prompt[:1], other[1:]]) for prompt, other in zip(tokens, drawn, strict=True)]

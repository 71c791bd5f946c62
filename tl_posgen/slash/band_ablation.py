"""Measure which frequencies the running model needs: bands of RoPE dropped, frozen or kept alone in every layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import pandas as pd
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from tl_posgen.core.formatting import counted, in_brackets
from tl_posgen.core.measure import HEAD, Variable
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.run import Run
from tl_posgen.core.sums import Sums
from tl_posgen.editing.printed_hooks import HookList, printing_call
from tl_posgen.editing.replace_scores import replace_scores
from tl_posgen.editing.score_functions import RowByRow
from tl_posgen.errors import InputError, UnsupportedModelError
from tl_posgen.interventions import UNTOUCHED, Interventions
from tl_posgen.models.layer_table import geometry_of, rotating_layers
from tl_posgen.models.layers.capture import LayerCapture, scores_from
from tl_posgen.models.model import Model
from tl_posgen.models.selection import Heads, Layers, select_heads
from tl_posgen.models.session import Session, session_of
from tl_posgen.rope.frequency_bands import BANDS, PlaneChoice, planes_of
from tl_posgen.rope.rotation import Rope
from tl_posgen.slash.dominance import Dominance, statistics_of
from tl_posgen.slash.numbers.ablations import OF_THE_PROMPT, Ablation, ablate
from tl_posgen.slash.slash import Slash
from tl_posgen.slash.slash_ablation import WORDS, Scheme, ablations

_OF_PROMPTS = {
    "profile": Variable("", dims=(*HEAD, "distance")),
    "uniform": Variable("", dims=("layer", "distance")),
    "score": Variable("", dims=("prompt", *HEAD)),
}


def mean_of_slash_heads(data: xr.Dataset) -> xr.DataArray:
    """Return the mean slash score over the heads that are dominant unchanged; over all where none is."""
    before = data["dominant"].sel(condition="unchanged", drop=True).astype(bool).any("short_distance")
    return data["score"].where(before | ~before.any(HEAD)).mean(HEAD)


@printing_call
def ablate_bands(
    model: Model | Session,
    kind: Ablation | str,
    band: PlaneChoice | None = None,
    *,
    layers: Layers = None,
    heads: Heads = None,
) -> HookList:
    """score_ij <- scale <q'_i, k'_j> with q' and k' rotated after an ablation; see `slash.numbers.ablations.ablate`.

    Args:
        kind: "drop", "freeze" or "keep" a band; "rank_one", "no_rope", "means", "means_no_rope"; "none".
        band: boolean per plane (`tl_posgen.rope.frequency_bands.bands_by_thirds`) or plane numbers, for the first
            three; or a function from a layer's `Rope` to one, where layers have frequencies of their own (Gemma 3).
            "drop", "freeze", "keep", "no_rope" and "none" work with a KV cache too.
        layers, heads: chosen layers and heads; all if left out. Heads as in `replace_scores`.

    Raises:
        InputError: an unknown kind, no model, no band for a kind that needs one, a band that is none of the above or
            does not fit the planes of a chosen layer.
        UnsupportedModelError: see `replace_scores`; also "no_rope" if no chosen layer has RoPE.

    Example:
        >>> import torch
        >>> from tl_posgen import load_model
        >>> model, tokens = load_model("mini"), torch.arange(12)[None]
        >>> same = model.run_with_hooks(tokens, fwd_hooks=ablate_bands(model, "none"))
        >>> torch.allclose(same, model(tokens), atol=1e-4)
        True
    """
    session = session_of(model)

    def ablated(q: Tensor, k: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        return ablate(q, k, rope, kind, None if band is None else planes_of(rope, band, "band"))

    chosen_layers = list(select_heads(session, layers, heads))
    if kind == "no_rope":
        rotating_layers(session, chosen_layers, "planes to stop")
    for geometry in geometry_of(session, chosen_layers):
        vectors = torch.ones(1, 2, geometry.d_head)
        try:
            ablated(vectors, vectors, geometry.rope)
        except InputError as error:
            raise InputError(f"layer {geometry.layer}: {error}") from error

    def scores_of(capture: LayerCapture) -> Float[Tensor, "head query key"]:
        q, k = ablated(capture.q, capture.k, capture.geometry.rope)
        return scores_from(q, k, capture.geometry, capture.heads, capture.query_positions)

    return replace_scores(session, scores_of if kind in OF_THE_PROMPT else RowByRow(scores_of), layers, heads)


@dataclass(frozen=True)
class BandAblation(Dominance, Interventions):
    r"""Loss, and SlashScore(D) at each head's own D, with scores = scale <R' q', R' k'> in all layers at once.

    RoPE planes are dropped, frozen (theta = 0) or kept alone in all layers at once, Q and K are cut to rank one or to
    their means, or RoPE is removed. What is left: the loss, and the slash scores. Bands are thirds of the planes,
    fastest first, or go by wavelength: high < 32 tokens, medium up to the prompt's length, low above.

    The conditions are those of `SlashAblation`. There one layer is changed by itself; here the model runs on what is
    left. Each head's own D comes from the measure "slash" of the same run. Layers and heads that are chosen are those
    whose slash scores are taken; all are ablated.

    Args:
        schemes: how to make bands, any of "thirds" and "wavelength".
        kappa: slash score from which a head is slash-dominant.
        distances: how many tokens back that score is looked at.

    Raises:
        InputError: prompts of several lengths, a distance that no prompt reaches.
        UnsupportedModelError: a model without rotary planes, or whose scores cannot be replaced.

    Source: that medium and high frequencies carry the slash is claimed by Cheng et al. 2026 (arXiv 2601.08297); bands
    and ablations are ours.

    Example:
        >>> options = {"length": 12, "n_prompts": 1, "nulls": 0, "progress": False}
        >>> result = BandAblation(schemes=["thirds"])("mini", "Down, down, down. Would the fall never end?", **options)
        >>> result.frame()["condition"].tolist()[:3]
        ['unchanged', 'drop high, thirds', 'drop medium, thirds']
    """

    schemes: Sequence[Scheme] = ("thirds",)

    words = WORDS
    edits_all_layers = True
    question = "Which frequencies does the running model need?"
    after = (Slash,)
    matrices = 10
    variables = {
        **Interventions.variables,
        "score": Variable.share("slash score", "at the best distance", ("condition", "prompt", *HEAD), interval=False),
        "dominant": Variable(
            "slash-dominant",
            "",
            "mean score >= kappa, or twice uniform attention, at this distance",
            ("condition", *HEAD, "short_distance"),
        ),
        "n_planes": Variable("planes in the band", "", "", ("condition", "model_layer")),
    }
    legend = "slash heads: dominant under the condition; score: mean of the heads that are dominant unchanged."

    def requires(self, session: Session) -> None:
        if not any(geometry.rope.rotary_dim for geometry in geometry_of(session)):
            raise UnsupportedModelError(
                "no layer of this model has rotary planes, so there is no band to drop; "
                "slash_ablation measures its slash scores with Q and K ablated"
            )

    def conditions(self, run: Run) -> Mapping[str, Any]:
        planned = ablations(self.schemes, run.tokens.shape[1]).items()
        return {name: ablate_bands(run.session, *ablation) for name, ablation in planned if name != UNTOUCHED}

    def under(self, run: Run, hooks: Any) -> Mapping[str, Any]:
        """Return the loss, and slash scores at each head's own distance, with one condition in all layers."""
        sums, best_distance = Sums(_OF_PROMPTS), run.dataset_of(Slash)["slash_distance"]

        def consumer(layer: LayerCapture) -> None:
            statistics = statistics_of(layer, entropy=False)
            score, uniform = statistics.score[0], statistics.uniform[0]
            distances = best_distance.sel(layer=layer.layer, head=list(layer.heads)).values.astype(int)
            at_distances = score.gather(-1, torch.as_tensor(distances, device=score.device)[:, None])[:, 0]
            sums.add_layer(layer, {"profile": score, "uniform": uniform, "score": at_distances})

        options: Any = {"needs": frozenset({"pattern"}), "prove": not hooks}
        loss = run.losses_under(hooks, consumer, **options).mean(-1).numpy()
        dominant = self.dominant_at(sums.mean("profile"), sums.mean("uniform"))
        return {"loss": loss, "score": sums.mean("score"), "dominant": dominant}

    def of_model(self, run: Run) -> xr.Dataset:
        data, planned = super().of_model(run), ablations(self.schemes, run.tokens.shape[1]).values()
        ropes = [geometry.rope for geometry in geometry_of(run.session)]
        n_planes = [[int(planes(rope).sum()) for rope in ropes] for _, planes in planned]
        return data.assign(dominant=data["dominant"].astype(bool), n_planes=(("condition", "model_layer"), n_planes))

    def slash_score(self, numbers: Numbers, condition: str = UNTOUCHED) -> Number:
        """Return the mean score of the heads that are dominant in the unchanged model (of all where none is)."""
        return numbers.number(mean_of_slash_heads(numbers.dataset).sel(condition=condition), (0, 1))

    def n_heads(self, numbers: Numbers) -> Number:
        """Return how many heads are slash-dominant in the unchanged model."""
        return numbers.number(numbers.array("dominant").astype(bool).any("short_distance").sum(HEAD))

    def findings(self, numbers: Numbers) -> list[str]:
        heads, score, rises = self.n_heads(numbers), partial(self.slash_score, numbers), self.rises(numbers)
        banded = product(dict.fromkeys(self.schemes), BANDS)
        labels = {f"drop {band}, {scheme}": f"without {band} frequencies ({scheme})" for scheme, band in banded}
        labels |= {kind: WORDS[kind] for kind in ("rank_one", "no_rope", "means")}
        phrases = [
            f"{label} {score(condition).with_interval:.3f} (loss {rises[condition].with_interval:+.3f})"
            for condition, label in labels.items()
        ]
        return [
            f"Slash-dominant: {counted(heads.value, 'head')}{in_brackets(heads.null_range)}, mean score "
            f"{score():.3f}, loss {numbers('loss').plain:.3f}; in the running model this becomes: "
            f"{', '.join(phrases)}."
        ]

    def table(self, numbers: Numbers) -> pd.DataFrame:
        """Return a row per condition: loss, slash-dominant heads and mean score."""
        heads = numbers.dataset["dominant"].astype(bool).any("short_distance").sum(HEAD)
        columns = {"loss": numbers.dataset["loss"], "slash heads": heads, "score": mean_of_slash_heads(numbers.dataset)}
        return numbers.frame(columns, "condition")

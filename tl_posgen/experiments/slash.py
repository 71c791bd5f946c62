"""Which heads are slash-dominant, whether they stay so on random tokens, and what is left of them without RoPE."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Bool, Int
from torch import Tensor
from tqdm.auto import tqdm

from tl_posgen.analysis import model_label, null_label, provenance_of
from tl_posgen.analyzers.slash import best, check_dominance, statistics_dataset
from tl_posgen.errors import InputError
from tl_posgen.maths.agreement import agreement
from tl_posgen.maths.bands import BANDS, ablate, bands_by_thirds
from tl_posgen.maths.slash import (
    SHORT_DISTANCES,
    SHORT_KAPPA,
    SlashMean,
    SlashStatistics,
    dominant_heads,
    slash_statistics,
    slash_statistics_from_qk,
)
from tl_posgen.models.backend import Model
from tl_posgen.models.capture import LayerCapture
from tl_posgen.models.hooks import run_capture
from tl_posgen.models.load import load_model
from tl_posgen.models.probe import probe, supported
from tl_posgen.models.random_like import random_like
from tl_posgen.models.tokens import to_prompts, token_strings
from tl_posgen.results import Result

SOURCES = ("natural", "random")
ABLATIONS = ("none", "no_rope", "means", "means_no_rope", "rank_one", *(f"drop_{band}" for band in BANDS))
WITHOUT_ROPE = ("none", "means", "rank_one")
N_EXAMPLES, CROP = 3, 128
PER_HEAD = ("score", "score_without_first", "first_token")
SUFFIXES = {"all": "", "without_first": "_without_first"}


def find_slash_heads(
    model: Model | str,
    prompts: Any,
    *,
    kappa: float = SHORT_KAPPA,
    distances: Sequence[int] = SHORT_DISTANCES,
    length: int | None = None,
    n_prompts: int | None = None,
) -> pd.DataFrame:
    r"""All (head, D) with SlashScore(D) = E_P[1/(N-D) sum_{i>=D} S_{i,i-D}] >= kappa, strongest first.

    Args:
        model: a HookedTransformer or TransformerBridge, or a name or directory for `load_model`.
        prompts, length, n_prompts: as in `analyze`.
        kappa: the score that makes a head slash-dominant, in (0, 1].
        distances: D to look at: 0 is the token itself, 1 the previous one.

    Returns:
        A row per find: layer, head, distance, score, and ratio, the score over that of uniform causal attention.

    Raises:
        InputError: unusable prompts, kappa outside (0, 1], or a distance that no prompt reaches.

    Source: the definition is Cheng et al. 2026 (arXiv 2601.08297); the default kappa and distances are ours.

    Example:
        >>> import tl_posgen
        >>> heads = tl_posgen.find_slash_heads("mini", "Down, down, down. Would the fall never end?", kappa=0.2)
        >>> heads.columns.tolist(), bool(heads["score"].is_monotonic_decreasing)
        (['layer', 'head', 'distance', 'score', 'ratio'], True)
    """
    if isinstance(model, str):
        model = load_model(model)
    tokens = to_prompts(model, prompts, length=length, n_prompts=n_prompts)
    check_reach(tokens, kappa, distances)
    dataset = scores_under(model, tokens, progress=False).isel(ablation=0, drop=True)
    layers = zip(*(torch.from_numpy(dataset[name].values) for name in ("score", "baseline")), strict=True)
    rows = []
    for layer, (score, baseline) in enumerate(layers):
        found = dominant_heads(score, baseline, kappa, sorted(set(distances)))
        columns = {"head": found.index[:, 0], "distance": found.distance, "score": found.score, "ratio": found.ratio}
        rows.append(pd.DataFrame({name: column.numpy() for name, column in columns.items()}).assign(layer=layer))
    table = pd.concat(rows).sort_values("score", ascending=False, kind="stable")
    return pd.DataFrame(table[["layer", "head", "distance", "score", "ratio"]]).reset_index(drop=True)


def check_reach(tokens: Sequence[Tensor], kappa: float, distances: Sequence[int]) -> None:
    check_dominance(kappa, distances)
    longest = max(len(prompt) for prompt in tokens)
    if max(distances) >= longest:
        raise InputError(f"distance {max(distances)}: the longest prompt has {longest} tokens; give longer prompts")


def slash_transfer(
    model: Model,
    prompts: Any,
    *,
    length: int | None = None,
    n_prompts: int | None = None,
    kappa: float = SHORT_KAPPA,
    distances: Sequence[int] = SHORT_DISTANCES,
    ablations: Sequence[str] | None = None,
    seed: int = 0,
    null_seed: int | None = 0,
    progress: bool = True,
) -> Result:
    r"""SlashScore on text against SlashScore on i.i.d. uniform random tokens, over heads; and without RoPE.

    The random prompts have the lengths and the first tokens of the natural ones, everything else drawn uniformly from
    the vocabulary. The ablations change the captured q and k of one layer at a time, on natural text, and take the
    softmax anew: "no_rope" turns nothing, "means" replaces q and k by their means over positions, "means_no_rope" does
    both and leaves uniform attention (but for ALiBi), "rank_one" truncates Q and K, "drop_high", "drop_medium" and
    "drop_low" set a third of the planes to zero. A slash that is only RoPE survives "means" and is lost in "no_rope".
    A model without rotary planes (learned positions, ALiBi) has nothing to turn off: `WITHOUT_ROPE` is measured there.

    Args:
        prompts, length, n_prompts: as in `analyze`.
        kappa, distances: what makes a head slash-dominant, for the overlap of the sets.
        ablations: any of `ABLATIONS`; "none" is always measured; all that the model has planes for if left out.
        seed: of the random tokens. null_seed: of the randomly initialised model; None skips it.

    Returns:
        A Result named "slash_transfer": over (source, layer, head, distance) `score`, `score_without_first`; over
        (variant, at) `pearson`, `spearman`, `jaccard`, `n_natural`, `n_random` for each D of `distances`, with the
        first token ("all") and without its column; over (ablation, layer, head, distance) `score_ablated`. Per head, at
        its best distance on natural text (over D < N/2): `natural`, `random`, `*_without_first`, `baseline_score`, and
        `ablated_<kind>`. Over (source, example, query, key) `pattern`, the first 128 tokens of the first prompt of each
        source for the strongest heads; `.show(example=i)` draws it. `attrs["left_out"]`: ablations that mean nothing.

    Raises:
        InputError: unusable prompts, kappa outside (0, 1], a distance that no prompt reaches, an ablation that is
            unknown or of planes that the model lacks.

    Source: that slash-dominant heads keep their scores on random tokens is claimed by Cheng et al. 2026 (arXiv
    2601.08297), whose prompts and thresholds are not known; the comparison and the ablations are ours.

    Example:
        >>> import tl_posgen
        >>> model = tl_posgen.load_model("mini")
        >>> result = slash_transfer(model, "Down, down, down. Would it end?", null_seed=None, progress=False)
        >>> result.dataset.score.dims
        ('source', 'layer', 'head', 'distance')
    """
    tokens = to_prompts(model, prompts, length=length, n_prompts=n_prompts)
    check_reach(tokens, kappa, distances)
    kinds = usable_ablations(model, ablations)
    prompts_by_source = {"natural": tokens, "random": random_prompts(tokens, model.cfg.d_vocab, seed)}
    settings: dict[str, Any] = {"kappa": kappa, "distances": sorted(set(distances)), "kinds": kinds}
    dataset = transfer(model, prompts_by_source, **settings, label=model_label(model), progress=progress)
    dataset = dataset.merge(examples_of(model, prompts_by_source, dataset), combine_attrs="override")
    dataset.attrs["left_out"] = "" if ablations is not None else ", ".join(k for k in ABLATIONS if k not in kinds)
    null = None
    if null_seed is not None:
        null_model = random_like(model, null_seed)
        null = transfer(null_model, prompts_by_source, **settings, label=null_label(null_seed), progress=progress)
    return Result("slash_transfer", dataset, null, provenance_of(model, tokens, null_seed) | {"seed": seed})


def usable_ablations(model: Model, ablations: Sequence[str] | None) -> list[str]:
    """ "none" and the ablations asked for, or all that the model has planes for."""
    rotary = any(supported(layer).geometry.rope.rotary_dim for layer in probe(model))
    usable = ABLATIONS if rotary else WITHOUT_ROPE
    for kind in ablations or ():
        if kind not in ABLATIONS:
            raise InputError(f"ablation {kind!r}: choose from {', '.join(ABLATIONS)}")
        if kind not in usable:
            raise InputError(
                f"ablation {kind!r}: no layer of this model has rotary planes, so it would change nothing; "
                f"choose from {', '.join(usable)}"
            )
    return ["none", *(kind for kind in (usable if ablations is None else ablations) if kind != "none")]


def random_prompts(tokens: Sequence[Int[Tensor, " _"]], n_vocabulary: int, seed: int) -> list[Int[Tensor, " _"]]:
    """Prompts of the same lengths and first tokens, the others i.i.d. uniform over the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(n_vocabulary, (len(prompt),), generator=generator) for prompt in tokens]
    return [torch.cat([prompt[:1], other[1:]]) for prompt, other in zip(tokens, drawn, strict=True)]


def transfer(
    model: Model,
    prompts: Mapping[str, Sequence[Int[Tensor, " _"]]],
    *,
    kappa: float,
    distances: Sequence[int],
    kinds: Sequence[str],
    label: str,
    progress: bool,
) -> xr.Dataset:
    """Everything `slash_transfer` measures of one model."""
    natural = scores_under(model, prompts["natural"], kinds, progress=progress, label=f"slash, {label}, text")
    random = scores_under(model, prompts["random"], progress=progress, label=f"slash, {label}, random tokens")
    sources = [one.isel(ablation=0, drop=True) for one in (natural, random)]
    dataset = beside(dict(zip(SOURCES, sources, strict=True)), "source")
    place = best(sources[0])["best_distance"]
    ablated = natural["score"].rename("score_ablated")
    at_best = {
        f"{source}{suffix}": dataset[f"score{suffix}"].sel(source=source, distance=place, drop=True)
        for source in SOURCES
        for suffix in SUFFIXES.values()
    }
    at_best |= {f"ablated_{kind}": ablated.sel(ablation=kind, distance=place, drop=True) for kind in kinds}
    at_best["baseline_score"] = dataset["baseline"].sel(distance=place, drop=True)
    dataset = dataset.assign({"best_distance": place, "score_ablated": ablated, **at_best})
    return dataset.merge(agreements(dataset, kappa, distances)).assign_attrs(model=label, kappa=kappa)


def examples_of(model: Model, prompts: Mapping[str, Sequence[Int[Tensor, " _"]]], dataset: xr.Dataset) -> xr.Dataset:
    """Patterns of the strongest heads on the first prompt of each source, cropped, with the tokens they are over."""
    strongest = dataset["natural"].to_series().nlargest(N_EXAMPLES).index.to_list()
    picks = [(int(layer), int(head)) for layer, head in strongest]
    maps: dict[tuple[str, int, int], np.ndarray] = {}
    tokens = []
    for source, of_source in prompts.items():

        def take(capture: LayerCapture, source: str = source) -> None:
            assert capture.pattern is not None
            for layer, head in picks:
                if layer == capture.layer:
                    maps[source, layer, head] = capture.pattern[head, :CROP, :CROP].float().cpu().numpy()

        layers = sorted({layer for layer, _ in picks})
        run_capture(model, of_source[0][None], take, needs=frozenset({"pattern"}), layers=layers)
        tokens.append(token_strings(model, of_source[0][:CROP]))
    layers, heads = zip(*picks, strict=True)
    patterns = np.stack([[maps[source, layer, head] for layer, head in picks] for source in prompts])
    data: dict[str, Any] = {"pattern": (("source", "example", "query", "key"), patterns)}
    data |= {"token": (("source", "key"), np.array(tokens, dtype=object))}
    return xr.Dataset(data | {"example_layer": ("example", list(layers)), "example_head": ("example", list(heads))})


def agreements(dataset: xr.Dataset, kappa: float, distances: Sequence[int]) -> xr.Dataset:
    """Do text and random tokens agree on the heads? For every D, with the first token's column and without it."""
    chosen = [dataset[f"score{suffix}"].sel(distance=list(distances)) for suffix in SUFFIXES.values()]
    stacked = np.stack([one.transpose("source", "distance", "layer", "head").values for one in chosen])
    natural, random = torch.from_numpy(stacked).flatten(-2).unbind(1)
    found = agreement(natural, random, kappa)
    names = {"pearson": "pearson", "spearman": "spearman", "jaccard": "jaccard"}
    names |= {"n_natural": "n_first", "n_random": "n_second"}
    data = {name: (("variant", "at"), getattr(found, field).numpy()) for name, field in names.items()}
    return xr.Dataset(data, {"variant": list(SUFFIXES), "at": list(distances)})


def scores_under(
    model: Model,
    tokens: Sequence[Int[Tensor, " _"]],
    kinds: Sequence[str] = ("none",),
    *,
    progress: bool = True,
    label: str = "slash",
) -> xr.Dataset:
    """score, score_without_first [ablation layer head distance], baselines, first_token: means over prompts."""
    means: dict[str, dict[int, SlashMean]] = {kind: {} for kind in kinds}

    def take(capture: LayerCapture) -> None:
        for kind in kinds:
            means[kind].setdefault(capture.layer, SlashMean()).add(statistics_under(capture, kind))

    for prompt in tqdm(tokens, desc=label, unit="prompt", disable=not progress):
        run_capture(model, prompt[None], take, needs=frozenset({"pattern"}))
    heads = range(model.cfg.n_heads)
    return beside(
        {kind: statistics_dataset({at: m.result() for at, m in means[kind].items()}, heads) for kind in kinds},
        "ablation",
    )


def beside(datasets: Mapping[str, xr.Dataset], dim: str) -> xr.Dataset:
    """Scores side by side along a new dim, and the baselines, which they share."""
    labels = pd.Index(list(datasets), name=dim)
    stacked = {name: xr.concat([one[name] for one in datasets.values()], labels) for name in PER_HEAD}
    return next(iter(datasets.values()))[["baseline", "baseline_without_first"]].assign(stacked)


def statistics_under(capture: LayerCapture, kind: str) -> SlashStatistics:
    """Slash statistics of one layer: of the model's own pattern, or after an ablation of its q and k."""
    if kind == "none":
        assert capture.pattern is not None
        return slash_statistics(capture.pattern, window=capture.geometry.window, entropy=False)
    if not kind.startswith("drop_"):
        return ablated_statistics(capture, kind)
    kind, band = kind.split("_")
    return ablated_statistics(capture, kind, bands_by_thirds(len(capture.geometry.rope.inv_freq))[BANDS.index(band)])


def ablated_statistics(
    capture: LayerCapture, kind: str, planes: Bool[Tensor, " plane"] | None = None
) -> SlashStatistics:
    """Slash statistics of one layer with its own captured q and k ablated, nothing before it changed."""
    geometry, slopes = capture.geometry, capture.geometry.alibi_slopes
    q, k = ablate(capture.q, capture.k, geometry.rope, kind, planes)
    return slash_statistics_from_qk(
        q,
        k,
        geometry.scale,
        window=geometry.window,
        soft_cap=geometry.soft_cap,
        alibi_slopes=None if slopes is None else slopes[list(capture.heads)],
        entropy=False,
    )

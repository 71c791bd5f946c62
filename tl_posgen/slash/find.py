"""One call for the slash-dominant heads of a model."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from tl_posgen.analysis import Prompts, analyze
from tl_posgen.errors import InputError
from tl_posgen.models import open_model, to_prompts
from tl_posgen.slash.slash import Slash
from tl_posgen.slash.slash_scores import SHORT_DISTANCES, SHORT_KAPPA


def find_slash_heads(
    model: Any,
    prompts: Prompts,
    *,
    kappa: float = SHORT_KAPPA,
    distances: Sequence[int] = tuple(SHORT_DISTANCES),
    layers: Sequence[int] | None = None,
    heads: Any = None,
    length: int | None = None,
    n_prompts: int | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    r"""All (head, D) with SlashScore(D) = E_P[1/(N-D) sum_{i>=D} S_{i,i-D}] >= kappa, strongest first.

    Args:
        model, prompts, layers, heads, length, n_prompts, progress: as in `analyze`.
        kappa: the score that makes a head slash-dominant, in (0, 1].
        distances: D to look at: 0 is the token itself, 1 the previous one.

    Returns:
        A row per find: layer, head, distance, score, and ratio, the score over that of uniform causal attention. Other
        measures and interventions take it as `heads=`.

    Raises:
        InputError: unusable prompts, kappa outside (0, 1], or a distance that no prompt reaches.

    Source: the definition is Cheng et al. 2026 (arXiv 2601.08297); the default kappa and distances are ours.

    Example:
        >>> import tl_posgen
        >>> heads = tl_posgen.find_slash_heads("mini", "Down, down, down. Would the fall never end?", kappa=0.2)
        >>> heads.columns.tolist(), bool(heads["score"].is_monotonic_decreasing)
        (['layer', 'head', 'distance', 'score', 'ratio'], True)
    """
    options, model = Slash(kappa=kappa, distances=distances), open_model(model)
    tokens = to_prompts(model, prompts, length=length, n_prompts=n_prompts)
    if max(distances) >= (longest := max(len(prompt) for prompt in tokens)):
        raise InputError(f"distance {max(distances)}: the longest prompt has {longest} tokens; give longer prompts")
    where: dict[str, Any] = {"layers": layers, "heads": heads, "length": length, "n_prompts": n_prompts}
    data = analyze(model, prompts, measures=options, **where, null_seeds=(), progress=progress)["slash"].dataset
    found = data[["score"]].assign(ratio=data["score"] / data["uniform"]).sel(distance=sorted(set(distances)))
    table = found.to_dataframe(dim_order=["layer", "head", "distance"]).reset_index()
    table = table[table["score"] >= kappa].sort_values("score", ascending=False, kind="stable")
    return pd.DataFrame(table[["layer", "head", "distance", "score", "ratio"]]).reset_index(drop=True)

"""What is said of a result named slash_planes."""

import numpy as np
import pandas as pd
import xarray as xr

from tl_posgen.report.groups import by_group, heads_in_words, of_dominant, short
from tl_posgen.results import Result

TITLE = "Which frequencies make the slash, and is rank one enough?"
QUESTION = (
    "How far each RoPE plane lifts the logits of the head's best diagonal: above the mean logit (lift), and above the "
    "diagonals up to 8 tokens away (edge). Summed into bands by thirds of the planes and by wavelength (high < 32 "
    "tokens, low > the prompt). Beside it the slash profile that rank-one queries and keys would have, against the "
    "measured one; chance is the profile of another head."
)
BANDS = ("high", "medium", "low", "unrotated")
SCHEMES = {"thirds": "by thirds of the planes", "wavelength": "by wavelength"}
PLACES = {"best": "lift", "edge": "edge"}


def found(result: Result) -> list[str]:
    data, null = result.dataset, result.null
    if of_dominant(data, []) is None:
        return ["No head is slash-dominant, so no band makes a slash.", *_predictions(data, null)]
    above = {"best": "the mean logit", "edge": "the diagonals up to 8 tokens away"}
    lines = [
        f"The best diagonal of slash-dominant heads stands above {above[at]} by {_lift(data, at)}." for at in PLACES
    ]
    if null is not None:
        largest = float(abs(null["bands"].sel(at=list(PLACES)).mean(("layer", "head"))).max())
        lines[-1] += f" In the random init no band lifts it by more than {largest:.3f} logits, mean over heads."
    return lines + _predictions(data, null)


def table(dataset: xr.Dataset) -> pd.DataFrame:
    frames = []
    for at, measure in PLACES.items():
        for scheme in SCHEMES:
            frame = short(by_group(with_bands(dataset, scheme, at), BANDS))
            frame.insert(0, "measure", measure)
            frame.insert(1, "bands by", scheme)
            frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def with_bands(dataset: xr.Dataset, scheme: str, at: str) -> xr.Dataset:
    """The contributions at one place, a variable a band."""
    return dataset["bands"].sel(scheme=scheme, at=at, drop=True).to_dataset("band").assign(dominant=dataset["dominant"])


def _lift(data: xr.Dataset, at: str) -> str:
    """'26.25 logits: by thirds of the planes high 8.48, medium 9.49, low 8.29; by wavelength ..'."""
    parts, total = [], 0.0
    for scheme, said in SCHEMES.items():
        means = of_dominant(with_bands(data, scheme, at), BANDS) or []
        total = sum(means)
        # what a model rotates all, or nothing, of is not worth a word
        bands = [f"{band} {mean:.2f}" for band, mean in zip(BANDS, means, strict=True) if mean != 0]
        parts.append(f"{said} {', '.join(bands)}")
    return f"{total:.2f} logits: {'; '.join(parts)}"


def _predictions(data: xr.Dataset, null: xr.Dataset | None) -> list[str]:
    if not np.isfinite(data["wavelength"]).any():
        return ["No plane of this model turns, so queries and keys of rank one would make no slash."]
    rows = by_group(data, ["correlation", "chance_correlation", "same_peak", "chance_peak"])
    lines = []
    for row in pd.DataFrame(rows[rows["tokens"] == "all"]).to_dict("records"):
        heads = heads_in_words(row["n"], row["dominant"])
        lines.append(
            f"In {heads} the slash scores predicted from rank one, less those of uniform attention, correlate with the "
            f"measured ones at {row['correlation']:.3f} (with other heads: {row['chance_correlation']:.3f}); the peak "
            f"is right in {row['same_peak']:.0%} (of another head, in {row['chance_peak']:.0%})."
        )
    if null is not None:
        own, other = (float(null[name].sel(variant="all").mean()) for name in ("correlation", "chance_correlation"))
        lines[-1] += f" Random init: {own:.3f} and {other:.3f}."
    return lines

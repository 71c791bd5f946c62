"""Captures of passes that a test makes itself, their comparison, and measures that are fed with them."""

import torch
import xarray as xr

from tl_posgen.core.measure import Measure, with_token_variants
from tl_posgen.core.sums import Sums
from tl_posgen.models.capture.capturing import capturing, run_capture
from tl_posgen.models.layers.capture import LayerCapture

EVERYTHING = frozenset({"v", "attn_scores", "pattern", "resid"})


def captures_of(model, tokens, needs=EVERYTHING, *, hooks=(), layers=None, heads=None, **options) -> list[LayerCapture]:
    """Return what is captured of model(tokens, **options), to which hooks are added last."""
    found = []
    with torch.no_grad(), capturing(model, found.append, needs, layers, heads), model.hooks(fwd_hooks=list(hooks)):
        model(tokens, **options)
    return found


def run(model, tokens, needs=EVERYTHING, **options) -> list[LayerCapture]:
    """Return what `run_capture` captures."""
    found = []
    run_capture(model, tokens, found.append, needs, **options)
    return found


def collected(measure: Measure, *captures: LayerCapture) -> xr.Dataset:
    """Return the dataset of a measure that was fed these."""
    sums = Sums(measure.variables, measure.labels())
    for one, values in zip(captures, measure.of_layers([measure.of_layer(one) for one in captures]), strict=True):
        sums.add_layer(one, with_token_variants(values))
    return measure.of_sums(sums)


def assert_same_parts(found: LayerCapture, expected: LayerCapture, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Compare all that was captured."""
    for part in ("q", "k", *sorted(EVERYTHING)):
        own, other = getattr(found, part), getattr(expected, part)
        torch.testing.assert_close(own, other, rtol=rtol, atol=atol, msg=lambda words, part=part: f"{part}: {words}")

"""What every source adds to the queries or keys of one prompt, and parts of vectors, for tests of sources."""

from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.session import session_of
from tl_posgen.residual.residual_sources import frozen_layer, residual_sources


def source_vectors(model, row, layer, *sides):
    """The capture of a layer, and for each side ("q", "k") source -> its vectors [head, pos, d_head]."""
    captures, written = [], residual_sources(model, row, layer)
    run_capture(model, row[None], captures.append, {"resid", "inputs"}, layers=[layer])
    frozen = [frozen_layer(session_of(model), captures[0], side) for side in sides]
    vectors = [dict(zip((*written.names, *one.constants), one.vectors(written.values), strict=True)) for one in frozen]
    return captures[0], *vectors


def part_of(x, part, along):
    """All of x, its mean along an axis, or the rest."""
    mean = x.mean(along, keepdim=True)
    return {"all": x, "mean": mean.expand_as(x), "rest": x - mean}[part]

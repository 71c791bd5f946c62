"""What every source adds to the queries or keys of one prompt, and parts of vectors, for tests of sources."""

from captures import run

from tl_posgen.models.session import session_of
from tl_posgen.residual.residual_sources import frozen_layer, residual_sources


def source_vectors(model, row, layer, *sides):
    """The capture of a layer, and for each side ("q", "k") source -> its vectors [head, pos, d_head]."""
    written = residual_sources(model, row, layer)
    (capture,) = run(model, row[None], {"resid", "inputs"}, layers=[layer])
    frozen = [frozen_layer(session_of(model), capture, side) for side in sides]
    vectors = [dict(zip((*written.names, *one.constants), one.vectors(written.values), strict=True)) for one in frozen]
    return capture, *vectors


def part_of(x, part, along):
    """All of x, its mean along an axis, or the rest."""
    mean = x.mean(along, keepdim=True)
    return {"all": x, "mean": mean.expand_as(x), "rest": x - mean}[part]

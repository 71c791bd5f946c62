"""What an analyzer is: it is shown one layer of one prompt at a time, and says at the end what it found."""

from typing import Protocol, runtime_checkable

import xarray as xr

from tl_posgen.models.capture import LayerCapture


@runtime_checkable
class Analyzer(Protocol):
    """Anything with these four works in `analyze`, in `attach` and in the report.

    Attributes:
        name: the key of the result, and the name of its view.
        needs: what `update` reads beyond q and k: a subset of {"v", "attn_scores", "pattern", "resid"}.
        min_prompts: optional; fewer prompts than this are refused before anything runs.
    """

    name: str
    needs: frozenset[str]

    def update(self, capture: LayerCapture) -> None:
        """Take in one layer of one prompt. Called in the order of the layers, prompt after prompt."""
        ...

    def result(self) -> xr.Dataset:
        """What was found over all that was taken in; dims named as in `Result`."""
        ...

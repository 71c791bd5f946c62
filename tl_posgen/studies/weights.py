"""The models of a study: which weights, told before they are loaded."""

import hashlib
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from tl_posgen.errors import InputError, PosgenError
from tl_posgen.models.conversion.source import DOWNLOADED, local_directory, tokenizer_directory
from tl_posgen.models.loading.hub import Shape, shape_of
from tl_posgen.models.loading.load import Pretrained, as_dtype, computed_in
from tl_posgen.models.model import Model


@dataclass(frozen=True)
class Weights:
    """One model at one revision.

    Attributes:
        source: a name on huggingface.co, "mini", or a directory that save_pretrained wrote.
        revision: branch, tag or commit on huggingface.co; of a directory, one inside it.
        label: its name in jobs and tables.
        backend, dtype, device: as in `load_model`; dtype by its name, such as "bfloat16".
        tokenizer: a directory, or "mini", for checkpoints that have none.

    Example:
        >>> Weights("mini", label="mini").load().cfg.n_layers
        4
    """

    source: str
    revision: str | None = None
    label: str = ""
    backend: str = "auto"
    dtype: str = "auto"
    device: str | None = None
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        try:
            _ = self.pretrained
        except PosgenError as error:
            raise InputError(f"model {self.source}: {error}") from error

    @cached_property
    def pretrained(self) -> Pretrained:
        """What is loaded; a revision of a directory is the directory of that name in it."""
        how = (self.backend, self.dtype, self.device)
        if self.revision is not None and self.source != "mini" and (here := local_directory(self.source)):
            return Pretrained(here / self.revision, *how, tokenizer=self.tokenizer)
        return Pretrained(self.source, *how, self.revision, self.tokenizer)

    @property
    def name(self) -> str:
        return self.label + ("" if self.revision is None else f"@{self.revision}")

    @property
    def directory(self) -> Path | None:
        """Where the weights lie, of a model that is here and not on the Hub."""
        return local_directory(self.pretrained.name_or_directory)

    @cached_property
    def shape(self) -> Shape:
        """How large it is; asked before anything is loaded.

        Raises:
            ModelError: there is no such model, or the Hub cannot be reached.
        """
        if self.tokenizer is not None:
            tokenizer_directory(self.tokenizer)
        return shape_of(self.directory or str(self.pretrained.name_or_directory), self.pretrained.revision)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What jobs are named by: of a directory what lies there, of the Hub the name and revision."""
        made: dict[str, Any] = {"backend": self.backend, "dtype": self.dtype, "device": self.device}
        made["tokenizer"] = None if self.tokenizer is None else digest_of(tokenizer_directory(self.tokenizer))
        where = [self.source, self.revision] if self.directory is None else digest_of(self.directory)
        return {"model": self.name, "weights": where, **made}

    def itemsize(self, *, precise: bool) -> int:
        """Bytes of one weight, as `load` loads it."""
        asked, on_gpu = as_dtype(self.dtype), str(self.device).startswith("cuda")
        held = self.shape.dtype if asked == "auto" else asked
        return computed_in(held, asked, "cuda" if on_gpu else "cpu", precise).itemsize

    def load(self, *, precise: bool = False) -> Model:
        """The model of TransformerLens; `precise` as in `Pretrained.load`."""
        return self.pretrained.load(precise=precise)


def digest_of(directory: Path) -> str:
    """Of the files that make a model or tokenizer: other weights under the same path are other parts."""
    digest = hashlib.sha256()
    for path in sorted(file for pattern in DOWNLOADED for file in directory.glob(pattern)):
        found = path.stat()
        digest.update(f"{path.name} {file_digest(path, found.st_size, found.st_mtime_ns)}".encode())
    return digest.hexdigest()[:16]


@cache
def file_digest(path: Path, size: int, mtime_ns: int) -> str:
    """Of a whole file, which is read once as long as its size and time stay."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest()

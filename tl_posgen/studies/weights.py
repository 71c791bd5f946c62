"""The models of a study: which weights, and how large, before they are loaded."""

import hashlib
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from tl_posgen.models.conversion.source import DOWNLOADED, local_directory, tokenizer_directory
from tl_posgen.models.loading.hub import Shape, shape_of
from tl_posgen.models.loading.load import Pretrained, as_dtype, computed_in


@dataclass(frozen=True)
class Weights:
    """One model at one revision.

    Attributes:
        label: its name in jobs and tables.
        revision: branch, tag or commit on huggingface.co; of a directory, one inside it.
        pretrained: the model as it is loaded: of a revision of a directory, the directory inside it.

    Example:
        >>> Weights("bundled", None, Pretrained("mini")).shape.heads
        4
    """

    label: str
    revision: str | None
    pretrained: Pretrained

    @property
    def name(self) -> str:
        return self.label + ("" if self.revision is None else f"@{self.revision}")

    @property
    def source(self) -> str:
        """Its name on huggingface.co, or its directory."""
        return str(self.pretrained.name_or_directory)

    @cached_property
    def shape(self) -> Shape:
        """Its size; ModelError where there is no such model, or the Hub cannot be reached."""
        if self.pretrained.tokenizer is not None:
            tokenizer_directory(self.pretrained.tokenizer)
        return shape_of(local_directory(self.source) or self.source, self.pretrained.revision)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """The part of a job's name: the content of a directory; of the Hub the name and revision."""
        asked, here = self.pretrained, local_directory(self.source)
        return {
            "model": self.name,
            "weights": [self.source, self.revision] if here is None else digest_of(here),
            "backend": asked.backend,
            "dtype": asked.dtype,
            "device": asked.device,
            "tokenizer": None if asked.tokenizer is None else digest_of(tokenizer_directory(asked.tokenizer)),
        }

    def itemsize(self, *, precise: bool) -> int:
        """Bytes of one weight, as it is loaded."""
        asked, on_gpu = as_dtype(self.pretrained.dtype), str(self.pretrained.device).startswith("cuda")
        held = self.shape.dtype if asked == "auto" else asked
        return computed_in(held, asked, "cuda" if on_gpu else "cpu", precise).itemsize


def digest_of(directory: Path) -> str:
    """Return a digest of the files (or the file) that make a model or tokenizer: they may change under one path."""
    digest = hashlib.sha256()
    files = [directory] if directory.is_file() else [file for one in DOWNLOADED for file in directory.glob(one)]
    for path in sorted(files):
        found = path.stat()
        digest.update(f"{path.name} {file_digest(path, found.st_size, found.st_mtime_ns)}".encode())
    return digest.hexdigest()[:16]


@cache
def file_digest(path: Path, size: int, mtime_ns: int) -> str:
    """Return the digest of a whole file, which is read once as long as its size and time stay."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest()

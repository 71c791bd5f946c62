"""The models of a study: which weights, told before they are loaded."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import torch

from tl_posgen.errors import InputError
from tl_posgen.models.checkpoints import require_weights
from tl_posgen.models.hub import Shape, shape_of
from tl_posgen.models.load import BackendChoice, load_model, load_source
from tl_posgen.models.source import MINI, Source

WHOLE = 2**26  # bytes up to which a file's digest is of all of it
BLOCKS, BLOCK = 64, 2**20  # of a larger one


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
    dtype: str | None = None
    device: str | None = None
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        if self.backend not in get_args(BackendChoice):
            raise InputError(
                f"model {self.source}: backend {self.backend!r}; choose {', '.join(get_args(BackendChoice))}"
            )
        dtype = None if self.dtype is None else getattr(torch, self.dtype, None)
        if self.dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise InputError(f"model {self.source}: dtype {self.dtype!r}; give one such as float32 or bfloat16")

    @property
    def name(self) -> str:
        return self.label + ("" if self.revision is None else f"@{self.revision}")

    @property
    def directory(self) -> Path | None:
        """Where the weights lie, of a model that is here and not on the Hub."""
        if self.source == "mini":
            return MINI
        path = Path(self.source).expanduser()
        if not path.is_dir():
            return None
        return path / self.revision if self.revision else path

    @property
    def words(self) -> Path | None:
        """The directory of another tokenizer than the weights' own."""
        if self.tokenizer is None:
            return None
        return MINI if self.tokenizer == "mini" else Path(self.tokenizer).expanduser()

    @cached_property
    def shape(self) -> Shape:
        """How large it is; asked before anything is loaded.

        Raises:
            ModelError: there is no such model, or the Hub cannot be reached.
        """
        if self.directory is not None:
            require_weights(self.directory)
        if self.words is not None and not any(self.words.glob("tokenizer*")):
            raise InputError(f"{self.words}: no tokenizer there; give tokenizer = a directory that holds one")
        return shape_of(self.directory or self.source, None if self.directory else self.revision)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What jobs are named by: of a directory what lies there, of the Hub the name and revision."""
        made = {"backend": self.backend, "dtype": self.dtype, "device": self.device}
        made["tokenizer"] = None if self.words is None else digest_of(self.words)
        where = [self.source, self.revision] if self.directory is None else digest_of(self.directory)
        return {"model": self.name, "weights": where, **made}

    @property
    def itemsize(self) -> int:
        """Bytes of one weight."""
        return 4 if self.dtype is None else getattr(torch, self.dtype).itemsize

    def load(self) -> Any:
        """The model of TransformerLens."""
        options: dict[str, Any] = {} if self.dtype is None else {"dtype": getattr(torch, self.dtype)}
        options |= {} if self.device is None else {"device": self.device}
        if self.directory is None:
            return load_model(self.source, self.backend, revision=self.revision, **options)
        if self.words is None:
            return load_model("mini" if self.source == "mini" else self.directory, self.backend, **options)
        return load_source(Source(self.directory.name, self.directory), self.words, self.backend, **options)


def digest_of(directory: Path) -> str:
    """Of the files that make a model or tokenizer: other weights under the same path are other parts.

    Of a file larger than 64 MB its size and 64 evenly spaced megabytes.
    """
    digest = hashlib.sha256()
    for path in sorted(file for pattern in ("*.safetensors", "*.json", "*.model") for file in directory.glob(pattern)):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for number in range(BLOCKS):
                file.seek(0 if size <= WHOLE else number * (size - BLOCK) // (BLOCKS - 1))
                digest.update(file.read(WHOLE if size <= WHOLE else BLOCK))
                if size <= WHOLE:
                    break
    return digest.hexdigest()[:16]

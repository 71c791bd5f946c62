"""Reading a GGUF file with transformers, its weights dequantised."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tl_posgen.errors import ModelError
from tl_posgen.models.conversion.source import first_line, is_gguf

_NOT_QUANTISED = ("F32", "F16", "BF16", "F64")
_patched = threading.Lock()


def gguf_reader(path: Path) -> Any:
    """Parse the metadata of a GGUF file; ModelError where it is none, is damaged, or the package gguf is missing."""
    try:
        import gguf
    except ImportError as error:
        missing = "a GGUF file is read by the package gguf, which is not installed"
        raise ModelError(f"{path}: {missing}; pip install 'gguf>=0.17'") from error
    if path.is_dir():
        raise ModelError(f"{path}: a directory called as a GGUF file; give the file, or rename the directory")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{path}: not a GGUF file, by its first bytes; give one, or a directory of safetensors")
    try:
        return gguf.GGUFReader(path)
    except Exception as error:  # whatever numpy says of bytes that are not there
        raise ModelError(f"{path}: a damaged GGUF file ({first_line(error)}); download it again") from error


@contextmanager
def read_once(place: Path) -> Iterator[Any]:
    """Yield the reader of a GGUF file, None of a directory. While the block runs transformers gets the same reader for
    config, tokenizer and weights, as parsing a vocabulary takes seconds each time."""
    if not is_gguf(place):
        yield None
        return
    reader = gguf_reader(place)
    import gguf

    with _patched:
        own = gguf.GGUFReader
        gguf.GGUFReader = lambda path, *args: reader if Path(path) == place else own(path, *args)  # pyright: ignore
        try:
            yield reader
        finally:
            gguf.GGUFReader = own


def quantisation_of(reader: Any) -> str | None:
    """Return what the file says it is quantised to, such as "Q4_K_M", else the type of most weights; None for none."""
    import gguf

    known = {kind.value: kind.name.removeprefix("MOSTLY_").removeprefix("ALL_") for kind in gguf.LlamaFileType}
    field = reader.get_field("general.file_type")
    name = None if field is None else known.get(field.contents())
    if name is None or name == "GUESSED":
        sizes: Counter[str] = Counter()
        for tensor in reader.tensors:
            sizes[tensor.tensor_type.name] += int(tensor.n_elements)
        name = sizes.most_common(1)[0][0]
    return None if name in _NOT_QUANTISED else name

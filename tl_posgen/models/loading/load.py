"""Loading a model by name, directory or GGUF file, as a HookedTransformer or a TransformerBridge."""

import os
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from tqdm.auto import tqdm

from tl_posgen.arithmetic import full_precision
from tl_posgen.errors import InputError, ModelError, UnsupportedModelError
from tl_posgen.models.backends.backend import Origin
from tl_posgen.models.conversion.convert import build, hooked_parts
from tl_posgen.models.conversion.gguf_file import quantisation_of, read_once
from tl_posgen.models.conversion.hugging_face import load_hf_model, load_tokenizer, plan, read_config, require_memory
from tl_posgen.models.conversion.quiet import quiet
from tl_posgen.models.conversion.source import MINI, ModelFiles, find_files, first_line, local_directory
from tl_posgen.models.model import Model
from tl_posgen.models.same_logits import centred, logit_error
from tl_posgen.models.session import Session, session_of

BackendChoice = Literal["auto", "hooked", "bridge"]
Dtype: TypeAlias = torch.dtype | str
DTYPES = ("float32", "bfloat16", "float16", "float64")


def load_model(
    name_or_directory: str | os.PathLike,
    backend: BackendChoice | str = "auto",
    dtype: Dtype = "auto",
    device: str | None = None,
    *,
    revision: str | None = None,
    tokenizer: str | os.PathLike | None = None,
    device_map: str | Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> Model:
    """Load a model for analysis, its weights as they are: no layer norm folded in, nothing centred.

    Args:
        name_or_directory: a name on huggingface.co, a directory that save_pretrained wrote (no network is needed then),
            a GGUF file or a directory that holds one (with the package gguf; weights are dequantised), or "mini", the
            small model that comes with this package.
        backend: "hooked" for a HookedTransformer (of architectures that TransformerLens 3.9 converts), "bridge" for a
            TransformerBridge, "auto" for the first that has the same logits as the Hugging Face model.
        dtype: of the weights, such as torch.float32 or "float32". "auto" is the checkpoint's, as in transformers, with
            three exceptions: float16 on a CPU becomes float32, and so do "mini" and a GGUF file. Analyses take q and k
            to float32 at least. A CPU without instructions for bfloat16 computes 4 to 10 times slower in it than in
            float32.
        device: "cuda", "cuda:1", "mps", "cpu"; "cuda" where there is one, else "cpu", if left out or "auto".
        revision: branch, tag or commit on huggingface.co; a checkpoint, for instance.
        tokenizer: a directory, a GGUF file, or "mini", with another tokenizer than the model's own, or for one that has
            none.
        device_map: accelerate's, such as "auto" or {"": "cuda:0"}: spreads the model over devices, as a
            TransformerBridge; leave `device` out then.
        trust_remote_code: run the repository's own Python code. Only for repositories you trust.

    Returns:
        The model, in evaluation mode, with its tokenizer. `default_prepend_bos` is set to what the tokenizer does by
        itself, so that model.to_tokens(text) are the tokens the model was trained on.

    Raises:
        ModelError: nothing found under that name, missing files, no network, pickled weights only, NaN or inf weights,
            quantised weights outside GGUF, an adapter that is not merged, a config.json that no model can be made of or
            that belongs to other weights, a GGUF file that transformers cannot read, more than memory holds.
        UnsupportedModelError: the architecture cannot be had with that backend.
        InputError: an unknown backend, a device or dtype that nothing can be computed in, a revision of what is here,
            no tokenizer where one was said to be.

    Example:
        >>> model = load_model("mini")
        >>> model.cfg.n_layers > 0
        True
    """
    where = {"revision": revision, "tokenizer": tokenizer, "device_map": device_map}
    return Pretrained(name_or_directory, backend, dtype, device, **where, trust_remote_code=trust_remote_code).load()


@dataclass(frozen=True)
class Pretrained:
    """Model that is loaded where it is needed: the arguments of `load_model`, checked, as one value.

    Whatever takes a model takes this. As nobody else holds what is loaded from it, its memory is used again for the
    random inits once the model has been measured.

    Example:
        >>> import tl_posgen
        >>> mini = Pretrained("mini", backend="bridge")
        >>> report = tl_posgen.analyze(mini, "The White Rabbit put on his spectacles.", measures="three_axis")
        >>> report.provenance["backend"]
        'bridge'
    """

    name_or_directory: str | os.PathLike
    backend: BackendChoice | str = "auto"
    dtype: Dtype = "auto"
    device: str | None = None
    revision: str | None = None
    tokenizer: str | os.PathLike | None = None
    device_map: str | Mapping[str, Any] | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name_or_directory, str | os.PathLike):
            given = textwrap.shorten(repr(self.name_or_directory), 60, placeholder=" ...")
            raise InputError(
                f"{given}: give the name or directory of a model; a TransformerLens model needs no loading, and one of "
                "transformers is saved with save_pretrained first"
            )
        if not isinstance(self.backend, str) or self.backend not in ("auto", "hooked", "bridge"):
            raise InputError(f"backend {self.backend!r}: choose auto, hooked or bridge")
        _require_dtype(self.dtype)
        if not isinstance(self.tokenizer, str | os.PathLike | None):
            raise InputError(f"tokenizer={self.tokenizer!r}: give a directory that holds one")
        if self.revision is not None and local_directory(self.name_or_directory):
            raise InputError(f"revision {self.revision!r}: {self.name_or_directory} is here and has none; leave it out")
        if self.device_map is not None:
            _require_device_map(self.device_map, self.device, self.backend)

    def load(self, *, precise: bool = False) -> Model:
        """Load the model; with `precise` in float32, and said so, where the checkpoint holds less and no dtype was
        chosen."""
        if self.backend == "hooked":
            hooked_parts()  # refuse before anything is downloaded
        device = usable(self.device)
        files = find_files(self.name_or_directory, self.revision, self.tokenizer)
        return _load(files, self, device, precise=precise)


@full_precision()
def _load(files: ModelFiles, asked: Pretrained, device: str, *, precise: bool = False) -> Model:
    """Load the model of a directory, and remember its origin."""
    trust, spread, place = asked.trust_remote_code, asked.device_map, files.directory
    bundled, chosen = place == MINI, as_dtype(asked.dtype)
    with quiet(), read_once(place) as gguf:
        config = read_config(place, trust)
        words = load_tokenizer(files.tokenizer, trust)
        if gguf is None:
            held = plan(place, config, chosen, trust)
            dtype = computed_in(held, asked.dtype, device, precise or bundled)
        else:
            held = dtype = torch.float32 if chosen == "auto" else chosen
            require_memory(place, sum(int(tensor.n_elements) for tensor in gguf.tensors), dtype)
        more = {"dtype": dtype, "trust_remote_code": trust} | ({} if spread is None else {"device_map": spread})
        make = partial(load_hf_model, place, config, **more)
        model = build(make, words, files.name, device, asked.backend if spread is None else "bridge")
    if not bundled and dtype != (usual := computed_in(held, asked.dtype, device, precise=False)):
        narrow, taken = (str(one).removeprefix("torch.") for one in (usual, dtype))
        tqdm.write(f"{files.name} is loaded in {taken}, as {narrow} has too few digits here; give a dtype to choose")
    session, where = session_of(model), (files.revision, place, files.tokenizer)
    quantised = None if gguf is None else quantisation_of(gguf)
    session.remember_origin(
        Origin(
            files.name, session.backend.name, *where, trust_remote_code=trust, dequantised_from=quantised, config=config
        )
    )
    if reason := session.difference():
        raise UnsupportedModelError(f"{files.name}: {reason}")
    return model


def _require_dtype(dtype: Any) -> None:
    """Refuse what is no floating-point dtype of two bytes or more, nor the name of one."""
    if isinstance(dtype, str) and dtype in ("auto", *DTYPES):
        return
    if not isinstance(dtype, torch.dtype) or str(dtype).removeprefix("torch.") not in DTYPES:
        raise InputError(f"dtype={dtype!r}: give a floating-point one: auto, {', '.join(DTYPES)}")


def as_dtype(dtype: Dtype) -> Any:
    """Return torch's dtype of that name; "auto" as it is."""
    return dtype if dtype == "auto" or isinstance(dtype, torch.dtype) else getattr(torch, dtype)


def computed_in(held: torch.dtype, asked: Dtype, device: str, precise: bool) -> torch.dtype:
    """Return the dtype to load weights in: the one asked for, or what a checkpoint of dtype `held` is computed in."""
    narrow = held.itemsize < torch.float32.itemsize
    slow = held == torch.float16 and torch.device(device).type == "cpu"  # 10 to 100 times slower than float32 there
    return torch.float32 if asked == "auto" and (slow or (precise and narrow)) else held


def _require_device_map(device_map: Any, device: str | None, backend: str) -> None:
    """Refuse a map beside a device, for a HookedTransformer, or onto what holds no numbers."""
    if device is not None:
        raise InputError(f"device={device!r} and device_map contradict each other; give one of them")
    if backend == "hooked":
        raise InputError("device_map: only a TransformerBridge can be spread over devices; give backend='bridge'")
    if isinstance(device_map, Mapping):
        for place in {str(place): place for place in device_map.values()}.values():
            if place == "disk":
                raise InputError("device_map: weights on disk cannot be analysed; give devices that hold them")
            usable(place if isinstance(place, str) else f"cuda:{place}")
    elif device_map not in (maps := ("auto", "balanced", "balanced_low_0", "sequential")):
        raise InputError(f"device_map={device_map!r}: give {', '.join(maps)}, or a mapping of module to device")


def is_ours(model: Any) -> bool:
    """Tell whether `open_model` will load this anew, so that nobody else holds the model."""
    return isinstance(model, str | os.PathLike | Pretrained)


def open_model(model: Model | Pretrained | str | os.PathLike, *, precise: bool = False) -> Model:
    """Return a model of TransformerLens as it is, or load the one of that name or directory.

    Args:
        precise: see `Pretrained.load`; of a name, a directory or a `Pretrained`.

    Raises:
        InputError: neither a HookedTransformer, nor a TransformerBridge, nor a name, nor a path.
        ModelError: as `load_model`.

    Example:
        >>> model = open_model("mini")
        >>> open_model(model) is model
        True
    """
    if isinstance(model, str | os.PathLike):
        model = Pretrained(model)
    return model.load(precise=precise) if isinstance(model, Pretrained) else session_of(model).model


def without_context_limit(model: Model | Session) -> Model:
    """Load the model anew as an object that takes longer prompts, in its dtype and on its device; else return `model`.
    ModelError where what is there now predicts otherwise, so that `model` has other weights than it was loaded with."""
    session = session_of(model)
    model, backend, origin = session.model, session.limit.lifted_as, session.origin
    if backend is None:
        return model
    trust, name = origin.trust_remote_code, origin.directory or origin.name
    other = load_model(name, backend, session.dtype, str(session.device), trust_remote_code=trust)
    tokens = session.backend.some_tokens(24)
    with torch.no_grad():
        own, anew = centred(model(tokens)), centred(other(tokens))
    same, *_ = logit_error(anew, own, session.dtype)
    if not same:
        raise ModelError(
            f"{origin.name}: this object takes no prompts beyond {session.limit.tokens} tokens, and what it was loaded "
            f"from has other weights by now; hand over a {backend} of your own"
        )
    return other


def usable(device: str | None) -> str:
    """Return the device, chosen where left open; InputError where torch does not know it or cannot compute there."""
    if device in (None, "auto"):
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if reason := _why_unusable(device):
        here = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
        here = " or ".join(map(repr, [*here, *(["mps"] if torch.backends.mps.is_available() else [])]))
        raise InputError(f"device {device!r} cannot be used ({reason}); give {here}, or leave it out")
    return device


def _why_unusable(device: Any) -> str:
    """Say why nothing can be computed on a device; "" where something can."""
    try:
        known = torch.device(device)
    except (RuntimeError, TypeError):
        return "torch knows no device of that name"
    if known.type == "meta":
        return "it holds no numbers"
    if known.type == "cuda" and not torch.cuda.is_available():
        return "no CUDA device is here" if torch.backends.cuda.is_built() else "this torch is built without CUDA"
    if known.type == "mps" and not torch.backends.mps.is_available():
        return "no Apple GPU is here"
    if known.index is not None and known.type in ("cuda", "mps"):
        held = torch.cuda.device_count() if known.type == "cuda" else 1
        if known.index >= held:
            return f"this machine has {held} of them, numbered from 0"
    try:
        torch.zeros(1, device=known).item()
    except Exception as error:  # torch has several kinds for one mistake, and lists its backends in some
        return first_line(error).split(". ")[0]
    return ""

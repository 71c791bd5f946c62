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
from tl_posgen.models.conversion.convert import build, hooked_parts, lay_by_rows
from tl_posgen.models.conversion.files import MINI, find_files, first_line, local_directory
from tl_posgen.models.conversion.gguf_file import quantisation_of, read_once, require_layers
from tl_posgen.models.conversion.hugging_face import (
    load_hf_model,
    load_tokenizer,
    plan,
    read_config,
    require_memory,
    silenced,
)
from tl_posgen.models.model import Model
from tl_posgen.models.same_logits import centred, how_they_differ
from tl_posgen.models.session import Session, session_of

BackendChoice = Literal["auto", "hooked", "bridge"]
Dtype: TypeAlias = torch.dtype | str
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


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
    name: str | None = None,
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
        name: what titles, tables and legends call the model; the name on huggingface.co, or the last part of the
            directory or file, if left out. Provenance keeps both.

    Returns:
        The model, in evaluation mode, with its tokenizer. `default_prepend_bos` is set to what the tokenizer does by
        itself, so that model.to_tokens(text) are the tokens the model was trained on.

    Raises:
        ModelError: nothing found under that name, missing files, no network, pickled weights only, NaN or inf weights,
            quantised weights outside GGUF, an adapter that is not merged, a config.json that no model can be made of or
            that belongs to other weights, a GGUF file that transformers cannot read, or of which it leaves out what
            attention or positions depend on, more than memory holds.
        UnsupportedModelError: the architecture cannot be had with that backend.
        InputError: an unknown backend, a device or dtype that nothing can be computed in, a revision of what is here,
            no tokenizer where one was said to be.

    Example:
        >>> model = load_model("mini")
        >>> model.cfg.n_layers > 0
        True
    """
    where = {"revision": revision, "tokenizer": tokenizer, "device_map": device_map}
    options: Any = {**where, "trust_remote_code": trust_remote_code, "name": name}
    return Pretrained(name_or_directory, backend, dtype, device, **options).load()


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
    name: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name_or_directory, str | os.PathLike):
            shortened = textwrap.shorten(repr(self.name_or_directory), 60, placeholder=" ...")
            raise InputError(
                f"{shortened}: give the name or directory of a model; a TransformerLens model needs no loading, and "
                "one of transformers is copied by tl_posgen.training.snapshot(model, tokenizer)"
            )
        if not isinstance(self.backend, str) or self.backend not in ("auto", "hooked", "bridge"):
            raise InputError(f"backend {self.backend!r}: choose auto, hooked or bridge")
        dtype_name = self.dtype if isinstance(self.dtype, str) else str(self.dtype).removeprefix("torch.")
        if not isinstance(self.dtype, str | torch.dtype) or dtype_name not in DTYPES:
            raise InputError(f"dtype={self.dtype!r}: give a floating-point one: {', '.join(DTYPES)}")
        if not isinstance(self.tokenizer, str | os.PathLike | None):
            raise InputError(f"tokenizer={self.tokenizer!r}: give a directory that holds one")
        if self.name is not None and not (isinstance(self.name, str) and self.name.strip() and self.name.isprintable()):
            raise InputError(f"name={self.name!r}: give one line of text, or leave it out")
        if self.revision is not None and local_directory(self.name_or_directory):
            raise InputError(f"revision {self.revision!r}: {self.name_or_directory} is here and has none; leave it out")
        spread, maps = self.device_map, ("auto", "balanced", "balanced_low_0", "sequential")
        if spread is None:
            return
        if self.device is not None:
            raise InputError(f"device={self.device!r} and device_map contradict each other; give one of them")
        if self.backend == "hooked":
            raise InputError("device_map: only a TransformerBridge can be spread over devices; give backend='bridge'")
        if not isinstance(spread, Mapping) and spread not in maps:
            raise InputError(f"device_map={spread!r}: give {', '.join(maps)}, or a mapping of module to device")
        for place in {str(value): value for value in spread.values()}.values() if isinstance(spread, Mapping) else ():
            if place == "disk":
                raise InputError("device_map: weights on disk cannot be analysed; give devices that hold them")
            _usable(place if isinstance(place, str) else f"cuda:{place}")

    @full_precision()
    def load(self, *, precise: bool = False, by_rows: bool = True) -> Model:
        """Load the model, and remember its origin.

        Args:
            precise: in float32, and said so, where the checkpoint holds less and no dtype was chosen.
            by_rows: with weights that `save_file` takes; else some are transposed views, which a HookedTransformer's
                passes need not copy.
        """
        if self.backend == "hooked":
            hooked_parts()  # refuse before anything is downloaded
        device = _usable(self.device)
        name, trust = os.fspath(self.name_or_directory), self.trust_remote_code
        spread, backend = self.device_map, self.backend
        place, of_tokenizer, commit = find_files(name, self.revision, self.tokenizer)
        chosen: Any = getattr(torch, self.dtype, "auto") if isinstance(self.dtype, str) else self.dtype
        quantised, stored_as = None, ""
        with silenced(), read_once(place) as gguf:
            config = read_config(place, trust)
            tokenizer = load_tokenizer(of_tokenizer, trust)
            if gguf is None:
                planned_dtype = plan(place, config, chosen, trust)
            else:
                planned_dtype, quantised = torch.float32 if chosen == "auto" else chosen, quantisation_of(gguf)
                require_memory(place, sum(int(tensor.n_elements) for tensor in gguf.tensors), planned_dtype)
                require_layers(place, gguf, config)
            dtype, half = planned_dtype, planned_dtype.itemsize < torch.float32.itemsize
            if chosen == "auto" and planned_dtype == torch.float16 and torch.device(device).type == "cpu":
                dtype = torch.float32  # 10 to 100 times faster than float16 there
            elif chosen == "auto" and half and (precise or place == MINI):
                dtype = torch.float32
                stored_as = "" if place == MINI else str(planned_dtype).removeprefix("torch.")
            options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust}
            if spread is not None:
                options["device_map"], backend = spread, "bridge"
            model = build(partial(load_hf_model, place, config, **options), tokenizer, name, device, backend)
        if stored_as:
            tqdm.write(f"{name} is loaded in float32, as {stored_as} has too few digits here; give a dtype to choose")
        session = session_of(model)
        where = {"revision": commit, "directory": place, "tokenizer": of_tokenizer, "config": config}
        details = {"trust_remote_code": trust, "dequantised_from": quantised, "called": self.name}
        session.remember_origin(Origin(name, session.backend.name, **where, **details))
        if reason := session.difference():
            raise UnsupportedModelError(f"{name}: {reason}")
        return lay_by_rows(model) if by_rows else model


AnyModel: TypeAlias = Model | Session | Pretrained | str | os.PathLike


def is_ours(model: Any) -> bool:
    """Tell whether `open_session` will load this anew, so that nobody else holds the model."""
    return isinstance(model, str | os.PathLike | Pretrained)


def open_session(model: AnyModel, *, precise: bool = False) -> Session:
    """Return the session of a model of TransformerLens, or of the one of that name or directory, loaded now.

    Args:
        precise: see `Pretrained.load`; of a name, a directory or a `Pretrained`.

    Raises:
        InputError: neither a HookedTransformer, nor a TransformerBridge, nor a name, nor a path.
        ModelError: as `load_model`.

    Example:
        >>> session = open_session("mini")
        >>> open_session(session.model).model is session.model, open_session(session) is session
        (True, True)
    """
    if isinstance(model, str | os.PathLike):
        model = Pretrained(model)
    return session_of(model.load(precise=precise, by_rows=False) if isinstance(model, Pretrained) else model)


def without_context_limit(model: Model | Session) -> Model:
    """Load the model anew as an object that takes longer prompts, in its dtype and on its device; else return `model`.
    ModelError where what is there now predicts otherwise, so that `model` has other weights than it was loaded with."""
    session = session_of(model)
    backend, origin = session.limit.lifted_as, session.origin
    if backend is None:
        return session.model
    trust, name = origin.trust_remote_code, origin.directory or origin.name
    options: dict[str, Any] = {"trust_remote_code": trust, "name": origin.called}
    reloaded = load_model(name, backend, session.dtype, str(session.device), **options)
    tokens = session.backend.some_tokens()
    with torch.no_grad():
        if how_they_differ(centred(reloaded(tokens)), centred(session.model(tokens)), session.dtype):
            raise ModelError(
                f"{origin.name}: this object takes no prompts beyond {session.limit.tokens} tokens, and what it was "
                f"loaded from has other weights by now; hand over a {backend} of your own"
            )
    return reloaded


def _usable(device: str | None) -> str:
    """Return the device, chosen where left open; InputError where torch does not know it or cannot compute there."""
    if device in (None, "auto"):
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=device).item()
    except Exception as error:  # torch has several kinds for one mistake, and lists its backends in some
        devices = ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count()))]
        devices = " or ".join(map(repr, [*devices, *(["mps"] if torch.backends.mps.is_available() else [])]))
        reason = first_line(error).split(". ")[0]
        reason = "torch knows no device of that name" if "device string" in reason.lower() else reason
        raise InputError(f"device {device!r} cannot be used ({reason}); give {devices}, or leave it out") from error
    return device

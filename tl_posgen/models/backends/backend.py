"""Interface to the two kinds of model, and the origin of a model; `hooked` and `bridge` implement it."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.models.conversion.convert import PARAMETERS, build, weights_in
from tl_posgen.models.conversion.files import first_line
from tl_posgen.models.layers.fused import FAILURES, Attention
from tl_posgen.models.layers.geometry import ContextLimit, LayerGeometry
from tl_posgen.models.model import Model
from tl_posgen.models.same_logits import how_they_differ, random_tokens, without_hooks
from tl_posgen.progress import count_pass

BackendName = Literal["hooked", "bridge"]
Read: TypeAlias = Callable[[str, Tensor], Tensor]  # (part of a capture, what its hook carries) -> [batch, head, pos, d]


@dataclass(frozen=True)
class Origin:
    """Origin of a model: for provenance, and to make its random inits.

    Attributes:
        name: as the user gave it (a Hub name, a directory, "mini"), or cfg.model_name.
        backend: which object it became.
        revision: commit of the Hub repository, or None.
        directory, tokenizer: where config and weights, and where the tokenizer were read, each a directory or a GGUF
            file; None for a model that was not made by `load_model`.
        seed: of a model with random weights, else None.
        initialisation: rule that made the random weights, else None.
        trust_remote_code: whether code from the repository was allowed.
        dequantised_from: quantisation of the GGUF file that the weights were read from, such as "Q4_K_M", or None.
        called: what pictures and tables call it; None for `name`, or the last part of its directory.
        config: Hugging Face's, of a model that `load_model` made.
    """

    name: str
    backend: BackendName
    revision: str | None = None
    directory: Path | None = None
    tokenizer: Path | None = None
    seed: int | None = None
    initialisation: str | None = None
    trust_remote_code: bool = False
    dequantised_from: str | None = None
    called: str | None = None
    config: Any = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class KeyValueContext:
    """Model with the keys and values of one prompt's tokens so far.

    Attributes:
        read: one forward pass of tokens [1, pos] that uses and extends the cache.
        layers, held: the cache by layer, and the names of keys and values there; none where later layers read them.
    """

    read: Callable[[Int[Tensor, "1 pos"]], Any]
    layers: Sequence[Any]
    held: tuple[str, ...]

    def extend(self, tokens: Int[Tensor, " pos"]) -> None:
        """Run one forward pass of the next tokens, which see those before them."""
        count_pass(1)
        self.read(tokens[None])

    def forget(self, layer: int) -> None:
        """Let go of a layer's keys and values, where no later layer reads them."""
        for name in self.held:
            if isinstance(tensor := getattr(self.layers[layer], name, None), Tensor):
                setattr(self.layers[layer], name, tensor[:0].clone())


class Backend(ABC):
    """One model, seen through the ways of its kind; it keeps nothing but the model."""

    name: ClassVar[BackendName]
    attention_input: ClassVar[str]  # what the attention module calls the residual stream after its norm

    def __init__(self, model: Model):
        self.model: Any = model

    @abstractmethod
    def limit(self) -> ContextLimit:
        """Return the longest prompt that the model takes, or for which its geometry holds."""

    def some_tokens(self, n: int = 48) -> Int[Tensor, "1 pos"]:
        """Return n random tokens, or as many as the model takes, on its device: enough to leave a small window, few
        enough to cost nothing."""
        return random_tokens(self.model.cfg.d_vocab, self.limit().cut(n), next(self.model.parameters()).device)

    def n_parameters(self) -> int:
        """Return the number of weights in transformers: tied ones once, and none that TransformerLens added."""
        recorded: int | None = vars(self.model).get(PARAMETERS)
        return self.count_parameters() if recorded is None else recorded

    @abstractmethod
    def count_parameters(self) -> int:
        """Return the number of weights of a model that was not made here."""

    def options(self, tokens: Int[Tensor, "batch pos"]) -> dict[str, Any]:
        """Return keyword arguments of a forward pass on prompts without padding."""
        return {}

    def start_of_pass(self) -> int | None:
        """Return the layer at which the running pass was told to start, where earlier ones run all the same; None for
        a whole pass."""
        return None

    def ending_behind(self, layer: int | None) -> AbstractContextManager[None]:
        """While the block runs, `stop_at_layer=layer` ends passes there behind the last block too, without the head."""
        return nullcontext()

    @abstractmethod
    def sinks(self, layer: int) -> Float[Tensor, " head"] | None:
        """Return the logits that join the softmax of each head of a layer, where its module holds some."""

    @abstractmethod
    def reader(self, layer: int, *, normed: bool = False, norms: bool = False) -> Read:
        """Return what makes queries and keys before RoPE, after qk-norm, and values of what the layer's hooks carry, in
        the model's dtype.

        Args:
            normed: whether the hooks of queries and keys fire after their norm.
            norms: whether they fire before the norm that a bridge's attention has.
        """

    @abstractmethod
    def drafts(
        self, plain: LayerGeometry, fired: Mapping[str, Tensor], rotates: bool, left_to_hf: bool
    ) -> list[LayerGeometry]:
        """Return the geometries that the layer may have, not yet proved; UnsupportedModelError where none is known.

        Args:
            plain: its shapes, without positions.
            fired: what its hooks carried in the probe's pass, by hook: "cos" and "sin" where a bridge rotates it.
            rotates: whether any layer of the model is rotated by cos and sin that hooks see.
            left_to_hf: whether its attention is left to Hugging Face.
        """

    def difference(self, origin: Origin) -> str:
        """Say how the logits differ from those of the Hugging Face model that it wraps; "" without one."""
        return ""

    def cached_difference(self) -> str:
        """Say how the last block's output at the last of a few random tokens differs where the tokens before it come
        from the KV cache, the user's hooks left out; "" if it does not. See `how_they_differ`."""
        model, tokens, outputs = self.model, self.some_tokens(), list[Tensor]()

        def keep(_module: Any, _args: Any, output: Any) -> None:
            outputs.append((output[0] if isinstance(output, tuple) else output)[:, -1:].detach().float())

        with torch.no_grad(), without_hooks(model):
            handle = model.blocks[-1].register_forward_hook(keep)
            try:
                model(tokens, return_type=None, **self.options(tokens))
                context = self.context()
                for part in (tokens[:, :-1], tokens[:, -1:]):
                    context.read(part)
            except (*FAILURES, KeyError) as error:
                return f"it cannot run with one ({first_line(error)})"
            finally:
                handle.remove()
        differ = how_they_differ(outputs[-1], outputs[0], next(model.parameters()).dtype)
        return f"outputs {differ}" if differ else ""

    @abstractmethod
    def fused(
        self, geometries: Mapping[int, LayerGeometry], attention_of: Callable[[int], Attention]
    ) -> AbstractContextManager[None]:
        """While the block runs, the attention of every layer is computed by `attention_of(layer)`."""

    @abstractmethod
    def context(self) -> KeyValueContext:
        """Return an empty cache of keys and values, with the pass that reads and extends it."""

    def attention_kernel(self) -> str | None:
        """Return the name of the implementation of attention that transformers uses; None for TransformerLens' own."""
        return None

    def device_map(self) -> dict[str, Any] | None:
        """Return the device of each module, where accelerate has spread the model over devices."""
        return None

    def random_init(self, origin: Origin, *, moved: bool = False, drawn: bool = True) -> tuple[Model, str]:
        """Make a model of the same config with new weights from the CPU's random state, by transformers' own rule, and
        name that rule; in the dtype and on the devices of this one.

        Args:
            moved: every weight is moved off its initial value, so that a forgotten norm or bias shows.
            drawn: False for zeros, in whose place other weights are put afterwards.
        """
        from transformers import AutoModelForCausalLM
        from transformers.initialization import no_init_weights

        weight, rules = next(self.model.parameters()), []

        def make() -> Any:
            options = {"attn_implementation": "eager", "trust_remote_code": origin.trust_remote_code}
            with nullcontext() if drawn else no_init_weights():
                hf_model = AutoModelForCausalLM.from_config(copy.deepcopy(origin.config), **options).eval()
            if not drawn:
                hf_model.tie_weights()  # which transformers does as it draws them
            rules.append(rule_of_draws(type(hf_model), hf_model.config))
            with torch.no_grad():
                for parameter in () if drawn else hf_model.parameters():
                    parameter.zero_()
                for parameter in hf_model.parameters() if moved else ():
                    noise = torch.randn_like(parameter)
                    parameter.add_(0.3 * noise if parameter.ndim == 1 else noise * parameter.shape[-1] ** -0.5)
            hf_model = weights_in(weight.dtype, hf_model)
            if spread := self.device_map():
                from accelerate import dispatch_model

                hf_model = dispatch_model(hf_model, spread)
            return hf_model

        return build(make, self.model.tokenizer, origin.name, str(weight.device), self.name), rules[0]

    def drawing_rule(self, origin: Origin) -> str:
        """Return the name of the rule by which `random_init` draws, without drawing."""
        from transformers import AutoModelForCausalLM

        return rule_of_draws(AutoModelForCausalLM._model_mapping.get(type(origin.config), None), origin.config)

    @abstractmethod
    def copy(self, origin: Origin) -> Model:
        """Make a model with the same weights that shares nothing with this one, and without its hooks."""


def rule_of_draws(model_class: Any, config: Any) -> str:
    """Return by which rule transformers draws the weights of a class of models; None for one that it does not have."""
    from transformers import PreTrainedModel

    if model_class is None:
        return f"transformers, {config.model_type} of its own code"
    rule = f"transformers, {model_class.__name__}"
    if (std := getattr(config.get_text_config(), "initializer_range", None)) is not None:
        rule += f", initializer_range {std:g}"
    overridden = model_class._init_weights is not PreTrainedModel._init_weights
    return f"{rule}, its own _init_weights" if overridden else rule


def split_heads(x: Tensor, d_head: int) -> Tensor:
    """[batch, pos, ...] of any layout whose flattened rest is heads x d_head -> [batch, head, pos, d_head]."""
    return x.flatten(2).unflatten(-1, (-1, d_head)).transpose(1, 2)

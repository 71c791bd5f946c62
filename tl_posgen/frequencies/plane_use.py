"""Which planes of RoPE heads use, how far these turn within the context, in which phase, and what for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import pandas as pd
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double, double_device
from tl_posgen.core.formatting import counted
from tl_posgen.core.measure import HEAD, Measure, Variable
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.options import Count, Each
from tl_posgen.core.run import Run
from tl_posgen.core.sums import Sums
from tl_posgen.errors import InputError
from tl_posgen.frequencies.numbers.coordinates import massive_coordinates
from tl_posgen.frequencies.numbers.rows import row_moments
from tl_posgen.frequencies.numbers.use import (
    first_negative_distance,
    half_turn_plane,
    longest_plane,
    plane_use,
    step_of,
)
from tl_posgen.frequencies.plane_use_figure import draw_plane_use, kinds_of_layers
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.model import Model
from tl_posgen.models.session import Session, session_of
from tl_posgen.rope.rotation import complex_frequencies, complex_planes, real_coordinates

BY_PLANE, BY_CONTEXT = (*HEAD, "plane"), ("context", *HEAD)
_VECTORS = ("q", "k", "v")
SETTLED = 8  # the queries before it see so few keys that the first one has a share of any softmax
SINK = 0.3  # attention to the first token from which a head is a sink, as Gu et al. have it


def training_contexts(model: Model | Session) -> tuple[int, ...]:
    """Return the tokens of a model's training context: the one before RoPE was scaled, where its config names it, then
    the one that the config is for.

    Example:
        >>> from tl_posgen import load_model
        >>> training_contexts(load_model("mini"))
        (512,)
    """
    session = session_of(model)
    config = getattr(session.origin.config, "get_text_config", lambda: None)()
    rules = getattr(config, "rope_parameters", None) or {}
    kinds = [rules, *(rule for rule in rules.values() if isinstance(rule, Mapping))]  # layers of a kind have their own
    named = {getattr(config, "original_max_position_embeddings", None)}
    named |= {rule.get("original_max_position_embeddings") for rule in kinds}
    n_ctx = int(session.model.cfg.n_ctx)
    return (*sorted(int(length) for length in named if length and int(length) < n_ctx), n_ctx)


@dataclass(frozen=True)
class PlaneUse(Measure):
    r"""C_m = E|z^q_m| E|z^k_m| / sum_m E|z^q_m| E|z^k_m|, and theta_m L / 2 pi, the turns of a plane within L tokens.

    RoPE writes a query and a key as one complex number a plane, which turns by theta_m per token of distance. This says
    which planes a head uses, by the lengths of its queries and keys in each, how far these turn within the training
    context L, and in which phase queries and keys stand in the longest: a quarter turn makes the plane a penalty on
    distance, -A sin(theta D), which grows up to a quarter turn and changes its sign beyond half a turn.

    The longest plane of a head is that with the largest C among those that turn; it is partial where it makes less than
    a turn in L, and at the half-turn plane, the fastest that makes at most half a turn, where it is within a step of it
    (1 plane, or P / 32 of P). Such shares of heads jump, and their intervals are too narrow. In a layer with a window L
    is the window. Frequencies are those in force: of scaled RoPE
    the scaled ones, and then there may be two contexts, before and after. The unrotated rest of partial rotary is
    planes that do not turn: they count in C and are never the longest.

    Beside it: massive coordinates, above 5 times the mean of a head's coordinates (2-norm over tokens), of rotated q
    and k and of v; how fixed the centres of q and k are, |E x| / E|x|; each plane's share of the variance of scores
    over the keys of a query; and the first token: the attention it gets, and by how much each plane lifts its score
    above the mean of the other keys. Queries of the second half of the prompt are taken for the variance and the lift.
    The first token is left out of all but what is of it. A soft cap is not in these scores.

    Args:
        contexts: tokens of training contexts; those of the model's config if left out, the one before scaling first.

    Raises:
        InputError: no prompt of three tokens.
        UnsupportedModelError: a model, or a choice of layers, without RoPE (learned absolute positions, ALiBi).

    Source: claims of others, as we read them: long planes Barbero et al. 2024 (arXiv 2410.06205) and Oka et al. 2026,
    partial planes and their phase Jonasson 2025 (arXiv 2503.01832), massive values Jin et al. 2025 (arXiv 2502.01563),
    centres TriAttention (arXiv 2604.04921), sinks Gu et al. 2024 (arXiv 2410.10781). How each is measured here, and the
    half-turn plane: ours

    Example:
        >>> data = PlaneUse()("mini", "Down, down, down. Would the fall never end?", nulls=0).trained
        >>> data["use"].dims, float(data["half_turn"].max())
        (('layer', 'head', 'plane'), 9.0)
    """

    contexts: Annotated[Sequence[Count], Each()] | None = None

    question = "Which planes do heads use, and how far do they turn within the context?"
    needs = frozenset({"v", "pattern"})
    variables = {
        "use": Variable.share("use of the plane", "E|z^q| E|z^k|, share over planes", BY_PLANE),
        "longest_plane": Variable(
            "longest plane", "", "its number, of those that turn; 0 is the fastest", HEAD, "longest_plane", "plane"
        ),
        "partial": Variable.share(
            "longest plane is partial", "1: it makes less than a turn in the context", BY_CONTEXT
        ),
        "at_half_turn": Variable.share(
            "longest plane is the half-turn plane",
            "1: within a step of it",
            BY_CONTEXT,
            "at_half_turn",
            "half turn",
            judged=True,
        ),
        "phase": Variable("phase at the longest plane", "radians", "arg E z^q - arg E z^k", HEAD),
        "sine": Variable.correlation(
            "sine of the phase",
            "1: q leads k by a quarter turn, the plane adds -A sin(theta D)",
            HEAD,
            "sine_of_phase",
            "sin phase",
            judged=True,
        ),
        "alignment": Variable.share("alignment at the longest plane", "|E z^q| |E z^k| / (E|z^q| E|z^k|)", HEAD),
        "amplitude": Variable(
            "amplitude of the longest plane", "logits", "A = scale |E z^q| |E z^k|", HEAD, interval=True
        ),
        "massive": Variable(
            "massive coordinates", "", "coordinates above 5 times the mean of the head's", ("vector", *HEAD)
        ),
        "massive_slow": Variable("massive coordinates in the slower half", "", "of the planes", ("side", *HEAD)),
        "centre": Variable.share("fixed centre", "|E x| / E|x|, before RoPE", ("side", *HEAD)),
        "variance_share": Variable.share(
            "share of the variance", "of s_m over the keys of a query, over planes", BY_PLANE
        ),
        "sink": Variable.share("attention to the first token, from query 8 on", "mean over queries from 8 on", HEAD),
        "sink_lift": Variable(
            "lift of the first token", "logits", "s_m(i, 0) - E_j s_m(i, j), by plane", BY_PLANE, interval=True
        ),
        "first_length": Variable("length of the first key", "", "|k_0| / E|k_j|", HEAD, interval=True),
        "first_cosine": Variable(
            "cosine of the first key",
            "",
            "cos(q_i, k_0) - E_j cos(q_i, k_j), rotated",
            HEAD,
            interval=True,
            bounds=(-2, 2),
        ),
        "turns": Variable("turns in the context", "", "theta L / 2 pi", ("context", "layer", "plane")),
        "half_turn": Variable("half-turn plane", "", "its number", ("context", "layer"), compared=False),
        "chance": Variable(
            "planes at the half-turn plane",
            "",
            "of those that turn, within a step",
            ("context", "layer"),
            compared=False,
        ),
        "partial_planes": Variable(
            "partial planes", "", "of those that turn, less than a turn", ("context", "layer"), compared=False
        ),
        "cost": Variable(
            "cost of the plane",
            "nats",
            "rise of the loss with it edited, where it was measured too",
            dims=("edit", "plane", "prompt"),
        ),
        "across_gap": Variable(
            "loss across a gap",
            "nats per token",
            "of the second half, over contexts; where it was measured too",
            dims=("rule", "task", "contexts"),
        ),
        "reach": Variable("context or window", "tokens", "L", ("context", "layer"), compared=False),
        "first_negative": Variable(
            "first negative sum of cosines",
            "tokens",
            "least d with sum_m cos(theta_m d) < 0, at most L",
            ("context", "layer"),
            compared=False,
        ),
    }
    figures = {"use": draw_plane_use}
    curves = ("use", "sink_lift")
    legend = (
        "half turn: share of heads whose longest plane is within a step of the half-turn plane; chance: such planes "
        "among all; sine: of the phase between q and k there; amplitude: of what the plane adds, in logits."
    )

    def labels(self) -> Mapping[str, Sequence[Any]]:
        return {"vector": _VECTORS} | ({} if self.contexts is None else {"context": [*self.contexts]})

    def usual(self) -> Mapping[str, Any]:
        return {} if self.contexts is None else {"context": self.contexts[0]}

    def requires(self, session: Session) -> None:
        session.require_rope(self.name)

    def refuse(self, run: Run) -> None:
        run.session.require_rope(self.name, run.heads)

    def prepare(self, session: Session, tokens: Sequence[Tensor]) -> "PlaneUse":
        if (n := max(map(len, tokens))) < 3:
            raise InputError(f"{self.name}: the longest prompt has {n} tokens; give 3 tokens at least")
        return self.attached(session)

    def attached(self, session: Session) -> "PlaneUse":
        return replace(self, contexts=self.contexts or training_contexts(session))

    def of_layer(self, layer: LayerCapture) -> Mapping[str, Any]:
        geometry, n = layer.geometry, layer.length
        if not geometry.rope.rotary_dim:
            return {}
        assert layer.v is not None
        stacked = [torch.stack([q, k]) for q, k in ((layer.q, layer.k), (layer.rotated_q, layer.rotated_k))]
        x, rotated = (double(qk) for qk in stacked)
        z, turned = (complex_planes(vectors, geometry.rope) for vectors in (x, rotated))
        rows = torch.arange(n // 2, n, device=z.device)
        moments = row_moments(turned[0], turned[1], rows, geometry.window)
        directions = turned / rotated.norm(dim=-1, keepdim=True)
        unit = row_moments(directions[0], directions[1], rows, geometry.window)
        length = x[1].norm(dim=-1)
        return {
            "magnitude": z[:, :, 1:].abs().mean(2),
            "mean": torch.view_as_real(z[:, :, 1:].mean(2)),
            "length": x[:, :, 1:].norm(dim=-1).mean(2),
            "square": real_coordinates(turned[:, :, 1:]).square().mean(2),
            "square_of_v": double(layer.v[:, 1:]).square().mean(1),
            "variance": moments.variance.nanmean(1),
            "sink_lift": geometry.scale * (moments.first - moments.mean).nanmean(1),
            "first_length": length[:, 0] / length[:, 1:].mean(1),
            "first_cosine": (unit.first - unit.mean).sum(-1).nanmean(1),
            "sink": _attention_to_first(layer),
        }

    def of_sums(self, sums: Sums) -> xr.Dataset:
        assert self.contexts is not None
        names = ("magnitude", "mean", "length", "square", "square_of_v", "variance")
        by_name = {name: sums.by_layer(name) for name in (*names, "sink_lift", "first_length", "first_cosine", "sink")}
        variables = {}
        for layer in by_name["magnitude"]:
            rope, d_head = (geometry := sums.layers[layer][0]).rope, geometry.d_head
            mean = {name: torch.from_numpy(by_layer[layer].mean) for name, by_layer in by_name.items()}
            theta = complex_frequencies(rope, d_head).cpu()
            z = torch.view_as_complex(mean["mean"].contiguous())
            longest = longest_plane(mean["magnitude"], z, theta > 0)
            reach = torch.tensor([geometry.reach(n) for n in self.contexts], dtype=DOUBLE)
            half = torch.tensor(
                [torch.nan if (plane := half_turn_plane(theta, n)) is None else plane for n in reach.tolist()],
                dtype=DOUBLE,
            )
            turning = theta[theta > 0]
            step = step_of(len(turning))
            massive = [massive_coordinates(square) for square in (*mean["square"], mean["square_of_v"])]
            slow = torch.arange(len(theta)).repeat_interleave(2) >= len(theta) / 2
            away = (longest.plane - half[:, None]).abs()
            at_half = double(away <= step).masked_fill(away.isnan(), torch.nan)
            near = (torch.arange(len(theta)) - half[:, None]).abs() <= step
            variables[layer] = {name: mean[name] for name in ("sink_lift", "first_length", "first_cosine", "sink")} | {
                "use": plane_use(mean["magnitude"]),
                "longest_plane": double(longest.plane),
                "partial": double(theta[longest.plane] * reach[:, None] < 2 * torch.pi),
                "at_half_turn": at_half,
                "phase": longest.phase,
                "sine": longest.phase.sin(),
                "alignment": longest.alignment,
                "amplitude": geometry.scale * rope.scaling**2 * longest.amplitude,
                "massive": torch.stack([double(is_massive).sum(-1) for is_massive in massive]),
                "massive_slow": torch.stack([double(is_massive[:, slow]).sum(-1) for is_massive in massive[:2]]),
                "centre": torch.linalg.vector_norm(mean["mean"].flatten(-2), dim=-1) / mean["length"],
                "variance_share": mean["variance"] / mean["variance"].sum(-1, keepdim=True),
                "turns": theta * reach[:, None] / (2 * torch.pi),
                "half_turn": half,
                "chance": (double(near[:, theta > 0]).mean(-1)).masked_fill(half.isnan(), torch.nan),
                "partial_planes": double(turning * reach[:, None] < 2 * torch.pi).mean(-1),
                "reach": reach,
                "first_negative": torch.tensor(
                    [first_negative_distance(tuple(turning.tolist()), int(length)) for length in reach], dtype=DOUBLE
                ),
            }
        return sums.variables_of(variables).reindex(layer=sorted(sums.layers))  # NaN of layers without RoPE

    def findings(self, numbers: Numbers) -> list[str]:
        n_heads, sentences = int(numbers.data["longest_plane"].notnull().sum()), []
        for context in numbers.data["context"].values.tolist():
            half, partial = (numbers(name, context=context) for name in ("at_half_turn", "partial"))
            chance, planes = (numbers(name, context=context).plain for name in ("chance", "partial_planes"))
            less = f"{partial:.0%} have one that makes less than a turn, as {planes:.0%} of the planes do"
            if half:
                turns = sorted(_turns_of_half_turn_planes(numbers.data.sel(context=context)))
                turns_in_words = " to ".join(dict.fromkeys(f"{turn:.2f}" for turn in (turns[0], turns[-1])))
                sentences.append(
                    f"Of {counted(n_heads, 'head')} {half:.0%} have their longest plane within a step of the half-turn "
                    f"plane, the fastest with at most half a turn in the context of {context:,} tokens (it makes "
                    f"{turns_in_words}), where {chance:.0%} of the planes lie; {less}."
                )
            else:
                sentences.append(f"Of {counted(n_heads, 'head')}, in the context of {context:,} tokens, {less}.")
        q, k, v = (numbers("massive", vector=vector) for vector in _VECTORS)
        return [
            *sentences,
            "In its longest plane a head's mean query leads its mean key by a phase whose sine is "
            f"{numbers('sine'):.2f}: "
            "of 1 the plane adds -A sin(theta D), so that keys count less the further back they lie, up to a quarter "
            f"turn. A is {numbers('amplitude'):.2f} logits.",
            f"Massive coordinates a head: {q:.2f} of queries, {k:.2f} of keys, {v:.2f} of values. Attention to the "
            f"first token: {numbers('sink'):.2f}.",
        ]

    def table(self, numbers: Numbers) -> pd.DataFrame:
        """Return a row a context and kind of layers, those of one reach and the same frequencies."""
        rows = []
        for context in numbers.data["context"].values.tolist():
            for name, layers in kinds_of_layers(numbers.data, context).items():
                part = numbers.data.sel(layer=layers)
                of_context = part.sel(context=context)
                rows.append(
                    {
                        "context": f"{context:,}",
                        "layers": name,
                        "half-turn plane": float(of_context["half_turn"][0]),
                        "half turn": float(of_context["at_half_turn"].mean()),
                        "chance": float(of_context["chance"][0]),
                        "partial": float(of_context["partial"].mean()),
                        "sine": float(part["sine"].mean()),
                        "amplitude": float(part["amplitude"].mean()),
                    }
                )
        return pd.DataFrame(rows)


def _turns_of_half_turn_planes(of_context: xr.Dataset) -> list[float]:
    """Return the turns within a context that the half-turn plane of each layer with RoPE makes."""
    planes = of_context["half_turn"].dropna("layer")
    return [float(of_context["turns"].sel(layer=at, plane=int(planes.sel(layer=at)))) for at in planes["layer"].values]


def _attention_to_first(layer: LayerCapture) -> Float[Tensor, " head"]:
    """Return E_i S_i0 over the queries from SETTLED on that see the first token; NaN where none does."""
    n, device = layer.length, double_device(layer.device)
    column = torch.cat([layer.pattern_rows(*rows)[..., 0].clone() for rows in layer.query_blocks()], 1)
    seen = slice(min(SETTLED, n // 2), layer.geometry.window)
    return double(column[:, seen]).mean(1).to(device)

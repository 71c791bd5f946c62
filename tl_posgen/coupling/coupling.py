"""Coupling of residual Jacobians across layers, linearity and growth of the residual stream."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE, double
from tl_posgen.core.measure import Measure, Variable
from tl_posgen.core.numbers import Numbers
from tl_posgen.core.options import Count, Each, Whole
from tl_posgen.core.run import Run
from tl_posgen.coupling.coupling_figure import draw_trajectories
from tl_posgen.coupling.jacobians import (
    DENSE_UP_TO,
    ResidualJacobian,
    residual_jacobians,
    residual_streams,
)
from tl_posgen.coupling.numbers.overlap import Norm, Pairs, Side, every_pair
from tl_posgen.coupling.numbers.trajectories import expodistance, growth_fit, line_shape_score, principal_trajectories
from tl_posgen.errors import InputError
from tl_posgen.models.selection import check_indices
from tl_posgen.models.session import Session
from tl_posgen.report.kinds import heat_maps, lines

_VERSIONS: dict[str, tuple[Norm, bool]] = {  # label -> norm, and whether A keeps its signs
    "absolute": ("frobenius", False),
    "signed": ("frobenius", True),
    "trace": ("trace", False),
}
_CURVES = ("mean over tokens", "exponential growth, fitted", "first token")  # of log-norms
_SQUARE = ("prompt", "k", "layer", "layer_2")
_MEDIAN = "of the path x^0 .. x^L, median over the prompt's tokens"
_SCORE, _EXPO = "L / || sum_l unit(x^l - x^{l-1}) ||", "Var_l(alpha) / mean_l(alpha)^2, alpha = ln |x^l| / |x^{l-1}|"


def _of_chance(result: Any) -> str:
    chance = ", ".join(f"{result.numbers('chance', k=k).plain:.3f}" for k in result.trained["k"].values)
    return f"1 - || |A| - S ||_F / ||S||_F, top K; mean over pairs of layers; random bases reach {chance}"


@dataclass(frozen=True)
class JacobianMeasure(Measure):
    """Base: J of chosen blocks at chosen tokens, and A = U2' J1 V2 of every pair."""

    k: Count | Annotated[Sequence[Count], Each()] = (10,)
    tokens: Any = "last"
    chance_samples: Count = 10
    dense_up_to: Whole = DENSE_UP_TO

    one_length = True
    precise = True
    matrices = 5

    @property
    def ks(self) -> list[int]:
        """Numbers of singular vectors, smallest first."""
        return sorted(np.atleast_1d(self.k).tolist())

    @property
    def positions(self) -> list[int]:
        """Positions whose Jacobians are taken, as they were given."""
        return [-1] if isinstance(self.tokens, str) else [int(token) for token in self.tokens]

    def usual(self) -> Mapping[str, Any]:
        return {"k": self.ks[0]}

    def prepare(self, session: Session, tokens: Sequence[Tensor]) -> "JacobianMeasure":
        length = len(tokens[0])
        limits = (("token", self.positions, -length, length - 1), ("k", self.ks, 1, session.model.cfg.d_model))
        for what, values, low, high in limits:
            if wrong := [value for value in values if not low <= value <= high]:
                raise InputError(f"{what} {wrong}: choose from {low} to {high}")
        return self

    def refuse(self, run: Run) -> None:
        self.places(run)

    def places(self, run: Run) -> tuple[list[int], list[int]]:
        """Return the chosen layers and tokens; refuse a choice of heads."""
        if run.where["heads"] is not None:
            raise InputError("coupling is of whole blocks: leave heads out, and choose layers")
        tokens = sorted({token % run.tokens.shape[1] for token in self.positions})
        return check_indices(run.where["layers"], run.model.cfg.n_layers, "layer"), tokens

    def jacobians(self, run: Run, prompt: Tensor, source: int, target: int, streams: Tensor) -> list[ResidualJacobian]:
        """Return the Jacobian of every chosen layer from one token to another."""
        options = {"layers": run.where["layers"], "streams": streams, "dense_up_to": self.dense_up_to}
        return residual_jacobians(run.session, prompt, source, target, **options)

    def pairs(self, run: Run, jacobians: Sequence[ResidualJacobian]) -> Pairs:
        """Return all Jacobians in each other's bases."""
        triplets = [jacobian.triplets(self.ks[-1], self.dense_up_to) for jacobian in jacobians]
        generator, products = torch.Generator().manual_seed(run.seed), [jacobian.matvec for jacobian in jacobians]
        return every_pair(products, triplets, self.chance_samples, generator)

    def by_k(self, pairs: Pairs, version: str, bases: Side) -> Float[np.ndarray, "k first other"]:
        """Return the coupling at every k, NaN on the diagonal: a Jacobian couples with itself by definition."""
        norm, signed = _VERSIONS[version]
        coupling = np.stack([_as_numpy(pairs.coupling(k, norm, bases, signed=signed)) for k in self.ks])
        return coupling if bases == "chance" else np.where(np.eye(coupling.shape[-1], dtype=bool), np.nan, coupling)


def _as_numpy(x: Tensor) -> np.ndarray:
    return double(x.detach().cpu()).numpy()


@dataclass(frozen=True)
class Coupling(JacobianMeasure):
    r"""coupling = 1 - || |U2' J1 V2| - S1 ||_F / ||S1||_F over the top K singular vectors of two layers' Jacobians.

    The coupling of two layers' residual Jacobians at the last token says how far their top K singular vectors agree: 1
    if they are shared, about 0 if they are unrelated. Random bases with the same spectra and a random-init model stand
    beside it. Then: how straight tokens move, and how evenly their norms grow. 95% intervals are over prompts.

    J = d f^l(X)_t / d x_t is the residual Jacobian of one token of the block X + f^l(X), J2 = U2 S2 V2'. Frobenius with
    fixed K is the headline. Beside it: the chance line (random orthonormal bases, J1's own spectrum); coupling by
    A = U2' J1 V2 with its signs, and the share of its diagonal that is negative; the trace normalisation (for
    comparison with the published figure only); the swapped version V2' J1 U2. Line-shape score, expodistance and growth
    are of every token's path from x^0, the input of the first block, to x^L, the output of the last before the final
    norm: without x^L the numbers differ. Intervals are Student's.

    The model must be float32 at least, its writing weights not centred.

    Args:
        k: numbers of top singular vectors, or one.
        tokens: positions whose own Jacobian is taken; "last", or several, counted from 0 or negative from the end.
        chance_samples: random bases per Jacobian for the chance line.
        dense_up_to: d_model up to which Jacobians are built as matrices.

    Raises:
        InputError: prompts of different lengths; a token or k that does not exist, heads chosen, weights processed by
            centring, half precision, fused kernels.

    Source: Aubry, Meng, Sugolov and Papyan, arXiv 2407.07810, for coupling (its printed formula is signed, the authors'
    code, github.com/sugolov/coupling, takes |A|), line shape and growth; chance line, intervals, growth fit and
    linearisation check are ours.

    Example:
        >>> from tl_posgen.models.tokens import bundled_text
        >>> found = Coupling(k=4)("mini", bundled_text(), length=16, n_prompts=1, nulls=0, progress=False)
        >>> found.trained.sizes["layer_2"], 0 < float(found.numbers("coupling")) < 0.2
        (4, True)
    """

    tokens: Literal["last"] | Annotated[Sequence[int], Each()] = "last"

    question = "Do the layers act along the same directions?"
    rows = ("k", "layer", "layer_2")
    variables = {
        "coupling": Variable(
            "coupling",
            "",
            "1 - || |U2' J1 V2| - S1 ||_F / ||S1||_F, J1 of layer, bases of layer_2, mean over tokens; "
            "signed: A in place of |A|; trace: || ||_F / sum s; swapped: V2' J1 U2",
            ("version", "bases", *_SQUARE),
            bounds=(-np.inf, 1),
        ),
        "negative_share": Variable.share(
            "negative diagonal entries", "share of the diagonal of A, mean over tokens", _SQUARE, interval=False
        ),
        "chance": Variable(
            "coupling in random bases",
            "",
            "each draw at each token, J1's own spectrum",
            ("version", "prompt", "k", "layer", "draw"),
            bounds=(-np.inf, 1),
        ),
        "line_shape_score": Variable("line-shape score", "", f"{_SCORE}, {_MEDIAN}", ("prompt",), bounds=(1, np.inf)),
        "expodistance": Variable("expodistance", "", f"{_EXPO}, {_MEDIAN}", ("prompt",), bounds=(0, np.inf)),
        "growth_r2": Variable.share("R² of growth", f"of ln |x^l| against l, {_MEDIAN}", ("prompt",), interval=False),
        "log_norm": Variable("ln |x|", "nats", "the first token is not in the mean", ("curve", "prompt", "state")),
        "trajectory": Variable(
            "path in its plane",
            "",
            "principal components of x^l, first token left out",
            ("prompt", "position", "state", "component"),
        ),
        "trajectory_explained": Variable("explained by a component", "", "share of variance", ("prompt", "component")),
        "linearisation": Variable.correlation(
            "linearisation", "cos(x^L, prod_l (I + J^l) x^0)", ("prompt", "token"), interval=False
        ),
    }
    legend = (
        "K: number of top singular vectors; coupling: of residual Jacobians across layers; chance: in random bases; "
        "signed: with the signs of A; swapped: left in right singular vectors; "
        "expodistance: variance over squared mean of the growth of ln |x|, 0 if exponential; "
        "in brackets 95% intervals over prompts, from four prompts on."
    )
    figures = {
        "map": heat_maps(
            "coupling",
            "layer",
            "layer_2",
            per=["k"],
            title="Coupling of residual Jacobians",
            subtitle=_of_chance,
            x_title="bases of layer",
            y_title="Jacobian of layer",
            diagonal=False,
        ),
        "trajectories": draw_trajectories,
        "growth": lines(
            {"": [(name, "log_norm", {"curve": name}) for name in _CURVES]},
            "state",
            title="Growth of the residual stream",
            subtitle="means over tokens; the first token is not in the mean",
            x_title="after block (0: embedding)",
            y_title="ln |x|",
        ),
    }

    def usual(self) -> Mapping[str, Any]:
        return {**super().usual(), "version": "absolute", "bases": "aligned"}

    def of_model(self, run: Run) -> xr.Dataset:
        tokens = self.places(run)[1]

        def one_prompt(prompt: int) -> xr.Dataset:
            ids = run.tokens[prompt]
            streams, datasets = residual_streams(run.session, ids), []
            for token in tokens:  # the Jacobians of one token are held at a time
                jacobians = self.jacobians(run, ids, token, token, streams)
                pairs, sides = self.pairs(run, jacobians), get_args(Side)[:2]  # aligned, swapped
                couplings = [[self.by_k(pairs, version, side) for side in sides] for version in _VERSIONS]
                negative = np.stack([_as_numpy(pairs.negative_share(k)) for k in self.ks])
                chance = np.stack([self.by_k(pairs, version, "chance") for version in _VERSIONS])
                negative = np.where(np.eye(len(jacobians), dtype=bool), np.nan, negative)
                arrays = {
                    "coupling": (("version", "bases", "k", "layer", "layer_2"), np.stack(couplings)),
                    "negative_share": (("k", "layer", "layer_2"), negative),
                    "chance": (("version", "k", "layer", "draw"), chance),
                }
                layers = [jacobian.layer for jacobian in jacobians]
                if len(layers) == run.model.cfg.n_layers:
                    x, last = streams[0, token], double(streams[-1, token])
                    for jacobian in jacobians:
                        x = x + jacobian.matvec(x[:, None])[:, 0]
                    arrays["linearisation"] = ((), torch.cosine_similarity(double(x), last, dim=0).item())
                labels = {"version": list(_VERSIONS), "bases": list(sides), "k": self.ks}
                datasets.append(xr.Dataset(arrays, {**labels, "layer": layers, "layer_2": layers}))
            # every token's path; the plane and the mean leave the first out, whose norm would dominate both as a sink's
            paths = streams.transpose(0, 1)
            fit, logs, plane = growth_fit(paths), double(paths).norm(dim=-1).log(), principal_trajectories(paths[1:])
            states = torch.arange(len(streams), dtype=DOUBLE, device=fit.slope.device)
            lines = fit.intercept[:, None] + fit.slope[:, None] * states
            curves = torch.stack([logs[1:].mean(0), lines[1:].mean(0), logs[0]])
            trajectories = torch.nn.functional.pad(plane.coordinates, (0, 0, 0, 0, 1, 0), value=torch.nan)
            numbers = {"line_shape_score": line_shape_score(paths), "expodistance": expodistance(paths)}
            # the median: expodistance has no mean where a norm hardly grows
            medians = {name: np.nanmedian(_as_numpy(score)) for name, score in {**numbers, "growth_r2": fit.r2}.items()}
            of_paths = {
                "log_norm": (("curve", "state"), _as_numpy(curves)),
                "trajectory": (("position", "state", "component"), _as_numpy(trajectories)),
                "trajectory_explained": ("component", _as_numpy(plane.explained)),
            }
            labels = {"curve": list(_CURVES), "position": np.arange(len(paths)), "state": np.arange(len(streams))}
            jacobians = xr.concat(datasets, dim="token").assign_coords(token=tokens)
            return jacobians.merge(xr.Dataset({**medians, **of_paths}, labels))

        data = run.grid(one_prompt, pure=True, prompt=range(len(run.rows)))
        draws = data["chance"].stack(each=("token", "draw")).drop_vars(("each", "token", "draw"), errors="ignore")
        means = {name: data[name].mean("token") for name in ("coupling", "negative_share")}
        data = data.drop_vars("chance").assign({**means, "chance": draws.rename(each="draw")})
        cfg, n_parameters = run.model.cfg, run.session.backend.n_parameters()
        data = data.assign_attrs(d_model=cfg.d_model, n_layers=cfg.n_layers, parameters=n_parameters)
        return data.assign({name: data[name].transpose(*self.variables[name].dims) for name in data.data_vars})

    def findings(self, numbers: Numbers) -> list[str]:
        sentences = []
        for k in numbers.data["k"].values:
            coupling, chance = numbers("coupling", k=k), numbers("chance", k=k).plain
            sentence = (
                f"Top-{k} coupling over pairs of layers is {coupling:.3f}; random bases with the same spectra reach "
                f"{chance:.3f}."
            )
            if coupling:
                signed, swapped = numbers("coupling", k=k, version="signed"), numbers("coupling", k=k, bases="swapped")
                sentence += (
                    f" With the signs of A it is {signed:.3f}: {numbers('negative_share', k=k):.0%} of the diagonal "
                    "of A "
                    f"is negative, half would be by chance. With left and right vectors swapped it is {swapped:.3f}."
                )
            sentences.append(sentence)
        sentences.append(
            f"Line-shape score of a token's path through the layers: {numbers('line_shape_score'):.2f}, so many times "
            "as long as the straight line between its ends, were all its steps of one length. An exponential in the "
            "layer explains "
            f"{numbers('growth_r2'):.3f} of the growth of ln |x|, with an expodistance of "
            f"{numbers('expodistance'):.3f}."
        )
        if "linearisation" in numbers:
            sentences.append(
                f"The linearised blocks end at a cosine of {numbers('linearisation'):.3f} with the model's."
            )
        return sentences

    def table(self, numbers: Numbers) -> pd.DataFrame:
        """Return a row a K, each headline with its 95% interval."""
        paths = {"line-shape score": "line_shape_score", "expodistance": "expodistance", "growth R²": "growth_r2"}
        paths |= {"linearisation": "linearisation"} if "linearisation" in numbers else {}
        rows = []
        for k in numbers.data["k"].values:
            row = {"coupling": numbers("coupling", k=k), "chance": numbers("chance", k=k)}
            row |= {
                "signed": numbers("coupling", k=k, version="signed"),
                "swapped": numbers("coupling", k=k, bases="swapped"),
            }
            row |= {label: numbers(name) for label, name in paths.items()}
            rows.append({"K": k, **{label: f"{number.with_interval:.3f}" for label, number in row.items()}})
        return pd.DataFrame(rows)

    def kinds(self, data: xr.Dataset) -> Sequence[str]:
        return [kind for kind in self.figures if kind != "map" or data.sizes["layer"] > 1]

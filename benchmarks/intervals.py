"""How often 95 % intervals over prompts hold the value of the whole text: candidates for the rule, side by side.

    python benchmarks/intervals.py [--prompts 256] [--samples 200] [--models mini ../shared/models/stories260K]

The whole text is 256 prompts of 64 tokens. What each prompt gives is computed once: its r and slash scores, its loss
untouched and under two interventions, and its sums for the variance shares. Then samples of 4, 8 and 16 prompts are
drawn, consecutive ones, ones spread evenly over the text from a drawn place on (as measures take them), and ones from
anywhere in the text (with replacement, so that a longer text would give the same answer), and of each sample and
number, a head's and the mean over heads, one asks whether its interval holds what all 256 prompts give. With 200
samples a share of .95 is known to about .015.

    kept        what `tl_posgen.stats.intervals` does: neighbours in 4 to 6 groups, Tukey's ends, cut at the bounds
    each        the same with each prompt left out in turn
    every 5th   the same with 5 groups, of every fifth prompt
    uncorrected every 5th, about the estimate itself and not the mean of pseudo-values; not cut (the rule of 0.2.0)
    transformed each, on a scale on which the bounds lie at infinity: Fisher's z, the logit, -log(1 - x)

The second table is of the rule kept, by number, and of `mean_interval` for those that are means over prompts. Then, by
sample size, the median width of a head's interval, and how often an uncorrected one left its bounds.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pandas as pd
import torch

from tl_posgen.core.null_models import NullModels
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.loading.load import load_model
from tl_posgen.models.loss import token_losses
from tl_posgen.models.tokens import bundled_text, read_text, to_prompts
from tl_posgen.position.decomposition.numbers.mean_key_split import mean_key_products
from tl_posgen.position.decomposition.numbers.variance_shares import Spread, TripleMoments, variance_shares
from tl_posgen.position.decomposition.three_axis import fit_capture
from tl_posgen.position.decomposition.variance import triple_moments_of
from tl_posgen.position.substitution.hooks import by_constant, by_split, substitute
from tl_posgen.rope.planes import SecondMoments
from tl_posgen.rope.splits import triangle
from tl_posgen.slash.dominance import statistics_of
from tl_posgen.stats.intervals import Bounds, jackknife_interval, mean_interval, prompts_per_group, t_975

LENGTH, D0 = 64, 16
SIZES = (4, 8, 16)
SHARED = Path(__file__).parents[1].parent / "shared"
CORRELATION, SHARE, AT_MOST_1, POSITIVE = (-1.0, 1.0), (0.0, 1.0), (-np.inf, 1.0), (0.0, np.inf)
SUMS = ("mean_q", "mean_k", "conjugate_q", "conjugate_k", "plain_q", "plain_k")
WORTH = 0.1  # nats: where attention is worth less, there is no share of it to recover


@dataclass(frozen=True)
class Kind:
    """A number as a function of the share that each prompt has in a sample.

    Attributes:
        of: [sample, prompt] -> [sample, head], or [sample, 1].
        bounds: of the number.
        each: where it is a mean over prompts, its values [prompt, head].
    """

    of: Callable[[np.ndarray], np.ndarray]
    bounds: Bounds | None = None
    each: np.ndarray | None = None


def kinds_of(model, tokens) -> dict[str, Kind]:
    rows: dict[str, list[np.ndarray]] = {}
    geometry = []

    def see(layer) -> None:
        where, moments = layer.geometry, layer.shared(triple_moments_of)[0]
        geometry[:] = [where]
        of_layer = {
            "r": layer.shared(fit_capture)[0].r,
            "slash": layer.shared(statistics_of).score[0, :, : LENGTH // 2],
        }
        rotated = {"rotated": (layer.rotated_q, layer.rotated_k), "scores": None}
        of_layer["split"] = mean_key_products(layer.q, layer.k, where.rope, where.scale, [D0], **rotated).correlation()[
            0
        ][0, 0]
        for side, spread in (("q", moments.q), ("k", moments.k)):
            about_zero = spread.second_moments
            of_layer |= {f"mean_{side}": spread.mean, f"conjugate_{side}": about_zero.conjugate}
            of_layer[f"plain_{side}"] = about_zero.plain
        for name, value in of_layer.items():
            by_layer.setdefault(name, []).append(value.numpy())

    for prompt in tokens:
        by_layer: dict[str, list[np.ndarray]] = {}
        run_capture(model, prompt[None], see, needs=frozenset({"pattern"}))
        for name, layers in by_layer.items():
            rows.setdefault(name, []).append(np.concatenate(layers))
    by_prompt = {name: np.stack(values) for name, values in rows.items()}
    stand_ins = [[], substitute(model, by_constant), substitute(model, by_split(triangle(8)))]
    losses = np.stack([token_losses(model, tokens, hooks).mean(1).numpy() for hooks in stand_ins], 1)
    return kinds(by_prompt, losses, geometry[0])


def kinds(by_prompt: dict[str, np.ndarray], losses: np.ndarray, geometry) -> dict[str, Kind]:
    sums = {name: by_prompt[name] for name in SUMS}
    slash = by_prompt["slash"]

    def best_slash(weights: np.ndarray) -> np.ndarray:
        return np.einsum("sp,phd->shd", weights, slash, optimize=True).max(-1)

    def previous_token_heads(weights: np.ndarray) -> np.ndarray:
        by_distance = np.einsum("sp,phd->shd", weights, slash, optimize=True)
        return (by_distance.argmax(-1) == 1).mean(1, keepdims=True)

    def slow_heads(weights: np.ndarray) -> np.ndarray:
        q, k = (np.diagonal(np.tensordot(weights, sums[f"plain_{side}"].real, 1), axis1=2, axis2=3) for side in "qk")
        product = q * k
        return (product.argmax(-1) >= product.shape[-1] // 2).mean(1, keepdims=True)

    def recovered(weights: np.ndarray) -> np.ndarray:
        unchanged, uniform, stand_in = np.split(weights @ losses, 3, axis=1)
        return (uniform - stand_in) / (uniform - unchanged)

    def mean(values: np.ndarray, bounds: Bounds | None) -> Kind:
        return Kind(lambda weights: weights @ values, bounds, values)

    last: dict[str, np.ndarray] = {}

    def share(part: int, weights: np.ndarray) -> np.ndarray:
        if last.get("weights") is not weights:
            last.update(weights=weights, shares=shares(weights, sums, geometry))
        return last["shares"][..., part]

    by_name = {
        "r of three axes": mean(by_prompt["r"], CORRELATION),
        "r of the mean-key split": mean(by_prompt["split"], CORRELATION),
        "position share": Kind(partial(share, 0), SHARE),
        "interaction share": Kind(partial(share, 1), SHARE),
        "highest slash score": Kind(best_slash, SHARE),
        "share of heads, highest slash score": Kind(previous_token_heads, SHARE),
        "share of heads, longest plane": Kind(slow_heads, SHARE),
        "loss": mean(losses[:, :1], POSITIVE),
        "rise of the loss": mean(losses[:, 2:] - losses[:, :1], None),
    }
    if (losses[:, 1] - losses[:, 0]).mean() > WORTH:
        by_name["share recovered"] = Kind(recovered, AT_MOST_1)
    return by_name


def shares(weights: np.ndarray, sums: dict[str, np.ndarray], geometry) -> np.ndarray:
    """Position and interaction, as `variance` gives them of samples: their sums are those of their prompts."""
    heads, planes = sums["mean_q"].shape[1:]
    out = []
    for block in np.array_split(weights, max(1, len(weights) * heads * planes**2 // 400_000)):
        summed = {
            name: torch.from_numpy(np.tensordot(block, values, 1).reshape(-1, *values.shape[2:]))
            for name, values in sums.items()
        }
        spreads = []
        for side in "qk":
            of_mean = SecondMoments.from_samples(summed[f"mean_{side}"][:, None])
            plain, conjugate = summed[f"plain_{side}"] - of_mean.plain, summed[f"conjugate_{side}"] - of_mean.conjugate
            spreads.append(Spread(LENGTH - 1, summed[f"mean_{side}"], SecondMoments(plain, conjugate)))
        variance = variance_shares(TripleMoments(*spreads), geometry.rope, geometry.scale, LENGTH)
        block_shares = [variance.within_rows.share(*components) for components in (("d", "qd"), ("kd", "qkd"))]
        out.append(torch.stack(block_shares, -1).reshape(len(block), heads, 2).numpy())
    return np.concatenate(out)


def uncorrected(value: np.ndarray, without: np.ndarray, share: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """theta -+ t s, s as in `jackknife_interval`."""
    h = (1 / share).reshape(-1, *(1 for _ in value.shape))
    from_value = (h - 1) * (value - without)
    mean = ((1 - 1 / h) * (value - without)).sum(0)
    half = t_975(len(share) - 1) * np.sqrt(((from_value - mean) ** 2 / (h - 1)).mean(0))
    return value - half, value + half


def transformed(
    value: np.ndarray, without: np.ndarray, share: np.ndarray, bounds: Bounds | None
) -> tuple[np.ndarray, np.ndarray]:
    """The jackknife on the scale of -log(highest - x) + log(x - lowest), of the bounds that there are."""
    lowest, highest = bounds or (-np.inf, np.inf)

    def there(x: np.ndarray) -> np.ndarray:
        above = np.log(x - lowest) if np.isfinite(lowest) else 0.0
        return np.asarray((above - np.log(highest - x) if np.isfinite(highest) else above) if bounds else x)

    def back(y: np.ndarray) -> np.ndarray:
        if bounds is None:
            return y
        if not np.isfinite(lowest):
            return highest - np.exp(-y)
        return lowest + (np.exp(y) if not np.isfinite(highest) else (highest - lowest) / (1 + np.exp(-y)))

    low, high = jackknife_interval(there(value), there(without), share)
    return back(low), back(high)


def groupings(n: int) -> dict[str, np.ndarray]:
    """Which group each of n prompts is in."""
    prompt = np.arange(n)
    return {"kept": prompt // prompts_per_group(n), "each": prompt, "every 5th": prompt % 5}


def candidates(value, without, share, bounds) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    for name in without:
        yield name, *jackknife_interval(value, without[name], share[name], bounds)
    yield "uncorrected", *uncorrected(value, without["every 5th"], share["every 5th"])
    yield "transformed", *transformed(value, without["each"], share["each"], bounds)


def measure(kinds: dict[str, Kind], n_prompts: int, n_samples: int) -> Iterator[dict]:
    """A row for each number, sample size, way of drawing and rule: how often the interval holds, and its width."""
    rng, all_equal = np.random.default_rng(0), np.full((1, n_prompts), 1 / n_prompts)
    truth = {name: kind.of(all_equal) for name, kind in kinds.items()}
    for n in SIZES:
        first = rng.integers(0, n_prompts - n + 1, (n_samples, 1))
        for drawn, prompts in (
            ("consecutive", first + np.arange(n)),
            (
                "spread",
                np.sort((rng.integers(0, n_prompts, (n_samples, 1)) + np.arange(n) * n_prompts // n) % n_prompts),
            ),
            ("drawn", rng.integers(0, n_prompts, (n_samples, n))),
        ):
            groups = groupings(n)
            left_out = [(name, index) for name, group in groups.items() for index in range(group.max() + 1)]
            masks = [np.full(n, True), *(groups[name] != index for name, index in left_out)]
            weights = np.zeros((len(masks), n_samples, n_prompts))
            for row, mask in zip(weights, masks, strict=True):
                for place in np.flatnonzero(mask):
                    np.add.at(row, (np.arange(n_samples), prompts[:, place]), 1 / mask.sum())
            share = {name: np.bincount(group) / n for name, group in groups.items()}
            flat = weights.reshape(-1, n_prompts)
            for name, kind in kinds.items():
                values = kind.of(flat).reshape(*weights.shape[:2], -1)
                for of, over in (("a head", lambda x: x), ("mean", lambda x: x.mean(-1, keepdims=True))):
                    estimates, all_prompts = over(values), over(truth[name])
                    without = {rule: estimates[1:][[name == rule for name, _ in left_out]] for rule in groups}
                    intervals = list(candidates(estimates[0], without, share, kind.bounds))
                    if kind.each is not None:
                        sampled = np.moveaxis(over(kind.each)[prompts], 1, 0)
                        intervals.append(("mean_interval", *mean_interval(sampled, kind.bounds)))
                    for rule, low, high in intervals:
                        lowest, highest = kind.bounds or (-np.inf, np.inf)
                        yield {
                            "number": name, "of": of, "drawn": drawn, "n": n, "rule": rule,
                            "holds": np.mean((low <= all_prompts) & (all_prompts <= high)),
                            "left": np.mean((low < lowest) | (high > highest)),
                            "width": np.median(high - low),
                        }  # fmt: skip


def table(rows: pd.DataFrame, by: list[str], value: str = "holds") -> str:
    """Means over everything else, a column a way of drawing and sample size."""
    pivot = rows.pivot_table(index=by, columns=["drawn", "n"], values=value, sort=False)
    head = [*by, *(f"{drawn} {n}" for drawn, n in pivot.columns)]
    names = [name if isinstance(name, tuple) else (name,) for name in pivot.index]
    cells = [[*name, *(f"{cell:.3f}" for cell in row)] for name, row in zip(names, pivot.to_numpy(), strict=True)]
    lines = [head, ["---"] * len(head), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--models", nargs="+", default=["mini", str(SHARED / "models" / "stories260K")])
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in options.models:
        model = load_model(name)
        text = bundled_text() if name == "mini" else read_text(SHARED / "text" / "tinystories.txt")
        tokens = torch.stack(list(to_prompts(model, text, length=LENGTH, n_prompts=options.prompts)))
        for weights, subject in (
            ("trained", model),
            ("random init", next(NullModels(model, {"random init": (0,)}).models())[1]),
        ):
            for row in measure(kinds_of(subject, tokens), options.prompts, options.samples):
                rows.append({"model": Path(name).name, "weights": weights, **row})
    data = pd.DataFrame(rows)
    rules = data.query("rule != 'mean_interval'")
    print(f"{options.prompts} prompts of {LENGTH} tokens, {options.samples} samples; all models and numbers\n")
    print(table(rules, ["of", "rule"]))
    print("\nthe rule kept, by number; a mean over heads, where it has heads\n")
    print(table(rules.query("rule == 'kept' and of == 'mean'"), ["weights", "number"]))
    print("\nmeans over prompts, by mean_interval\n")
    print(table(data.query("rule == 'mean_interval'"), ["of", "number"]))
    print("\nmedian width of a head's interval, correlations and shares\n")
    of_a_head = rules.query("of == 'a head' and number not in ('loss', 'rise of the loss')")
    print(table(of_a_head, ["rule"], "width"))
    print("\nhow often an interval leaves its bounds\n")
    print(table(of_a_head.query("rule in ('kept', 'uncorrected')"), ["rule"], "left"))


if __name__ == "__main__":
    main()

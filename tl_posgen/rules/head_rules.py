"""Tables of rules: one rule for each key/value head, with the calibration that it needs, as a frame and as JSON."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from tl_posgen.arithmetic import DOUBLE
from tl_posgen.core.files import write_whole
from tl_posgen.core.options import Count, Distances, Each, fits, require
from tl_posgen.errors import InputError
from tl_posgen.rules.numbers.rule_scores import N_SINKS, PREDICTING, Means, Rule, Weights

Reference = Literal["drawn", "oracle"]
REFERENCES: tuple[Reference, ...] = get_args(Reference)
ALL = "all"  # no rule: every key is seen
WORDS: dict[str, str] = {  # rule -> its name in sentences, tables and figures
    "window": "window",
    "sinks": "sinks and window",
    "slashes": "slashes a(d)",
    "vertical": "vertical keys c(j)",
    "slashes_and_vertical": "a(d) + c(j)",
    "mean_query": "mean query",
    "position_and_content": "position + content",
    "drawn": "drawn keys",
    "oracle": "best keys",
    ALL: "all keys",
}
FORMAT = "tl_posgen rules 1"


@dataclass(frozen=True)
class HeadRule:
    """The rule of one key/value head: each of its query heads chooses `budget` keys, and all of them see their union.

    Attributes:
        heads: its query heads.
        rule: one of RULES; "all" for every key; "drawn" for drawn keys, "oracle" for those of most attention.
        budget: keys of a query head; None of "all".
        means: calibration of the query heads; None where the rule needs none.
    """

    layer: int
    key_value_head: int
    heads: tuple[int, ...]
    rule: Rule | Reference | Literal["all"]
    budget: int | None
    means: Means | None = None

    def __post_init__(self) -> None:
        """Refuse what no hook could impose."""
        check_rule(self.rule)
        if self.rule != ALL and not fits(self.budget, Count):
            raise InputError(f"budget {self.budget!r} of {self.rule}: give a whole number, 1 or more")
        if self.rule in PREDICTING and self.means is None:
            raise InputError(f"{self.rule}: needs mean queries and a mean key, and has none")

    def as_json(self) -> dict[str, Any]:
        """Return its entry in the file of a table; see `RuleTable`."""
        parameters: dict[str, Any] = {"first": N_SINKS} if self.rule == "sinks" else {}
        if self.rule in PREDICTING and self.means is not None:
            means = {"mean_queries": self.means.q.tolist(), "mean_key": self.means.k[0].tolist()}
            parameters = means | {"n_distances": self.means.n_distances, "weights": self.means.weights}
        place = {"layer": self.layer, "key_value_head": self.key_value_head, "query_heads": list(self.heads)}
        return place | {"rule": self.rule, "budget": self.budget, "parameters": parameters}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> "HeadRule":
        """Return the rule of an entry."""
        rule, heads, found = entry["rule"], entry["query_heads"], entry["parameters"]
        check_rule(rule)
        for name, kind in {"layer": int, "key_value_head": int, "budget": int | None}.items():
            require(name, entry[name], kind)
        require("query_heads", heads, Annotated[Sequence[int], Each()])
        if rule == "sinks" and found["first"] != N_SINKS:
            raise InputError(f"sinks: first = {found['first']!r}: the first {N_SINKS} keys are known")
        means = None
        if rule in PREDICTING:
            q, k = (torch.tensor(found[name], dtype=DOUBLE) for name in ("mean_queries", "mean_key"))
            if k.ndim != 1 or q.shape != (len(heads), len(k)) or not (q + k).isfinite().all():
                raise InputError(
                    f"{rule}: mean queries {list(q.shape)} and mean key {list(k.shape)} of {len(heads)} heads; give a "
                    "row of finite numbers for each head, and one row"
                )
            require("n_distances", found["n_distances"], Distances)
            require("weights", found["weights"], Weights)
            means = Means(q, k.expand(len(heads), -1), found["n_distances"], found["weights"])
        return cls(entry["layer"], entry["key_value_head"], tuple(heads), rule, entry["budget"], means)


def check_rule(rule: Any) -> None:
    """Refuse the name of a rule that is not known."""
    if rule not in WORDS:
        raise InputError(f"rule {rule!r}: choose from {', '.join(WORDS)}")


@dataclass(frozen=True)
class RuleTable:
    """A rule for each key/value head, for `tl_posgen.apply_rules`.

    As JSON: {"format": "tl_posgen rules 1", "calibration": {...}, "heads": [...]}. The calibration has the model's
    name, its backend and the fingerprint of its weights, the number, length and hash of the prompts, the seed of drawn
    keys, the mean rise of the loss that was measured on the odd prompts, and the plan's epsilon. Each of the heads has
    its layer, key_value_head, query_heads, rule, budget and parameters. A query keeps as many keys as its budget says,
    those with the largest r_ij (d = i - j; of equals the later key; all keys where it has no more). The query heads of
    one key/value head all see the union of what each of them keeps:

    - all: no budget; every key.
    - window: r = -d. sinks: the first `first` keys, the earliest of them first, then -d.
    - slashes: a(d) = s Re sum_m qbar_m conj(kbar_m) u_m(d). vertical: c(j) = s Re sum_m qbar_m conj(k_jm - kbar_m)
      ubar_m, rounded to 1/1024. slashes_and_vertical: a(d) + c(j), not rounded. mean_query: s Re sum_m qbar_m
      conj(k_jm) u_m(d). position_and_content: s Re sum_m q_im conj(kbar_m) u_m(d) + s Re sum_m q_im conj(k_jm - kbar_m)
      ubar_m. With ALiBi all but vertical less slope d. qbar is mean_queries (a row a query head), kbar is mean_key,
      both before RoPE and after qk-norm, in the coordinates of the model's own heads, as planes m; the frequencies of
      u_m(d) = exp(i theta_m d), the scale s and the slopes are the model's own; ubar is the mean of u(d) over d = 0 ..
      n_distances - 1, weighted as `weights` says: near 1 / (d + 1), causal n_distances - d, uniform 1.
    - drawn: keys drawn anew for each query from the seed, by this package's own draw. oracle: by the score itself.

    Attributes:
        heads: rules; heads without one see every key.
        calibration: "model", "backend" (hooked or bridge), "weights" (its fingerprint), "prompts", "length",
            "tokens_sha256", "seed" (of drawn keys), "rise" (of the loss, nats per token), "epsilon" (null of no plan).
    """

    heads: Sequence[HeadRule]
    calibration: Mapping[str, Any]

    def frame(self) -> pd.DataFrame:
        """Return a row a key/value head: layer, key_value_head, query_heads, rule, budget."""
        entries = [one.as_json() for one in self.heads]
        return pd.DataFrame(entries, columns=["layer", "key_value_head", "query_heads", "rule", "budget"])

    def to_json(self, path: str | os.PathLike) -> Path:
        """Write the table to a file, whole or not at all."""
        found = {"format": FORMAT, "calibration": dict(self.calibration)}
        text = json.dumps(found | {"heads": [one.as_json() for one in self.heads]}, indent=1, allow_nan=False)
        return write_whole(path, text.encode())

    @classmethod
    def from_json(cls, path: str | os.PathLike) -> "RuleTable":
        """Read a table from a file.

        Raises:
            InputError: a file that cannot be read, or is no such table.
        """
        try:
            found = json.loads(Path(path).read_text())
            if found["format"] != FORMAT:
                raise InputError(f"{path}: its format is {found['format']!r}; {FORMAT!r} is known")
            require("calibration", found["calibration"], Mapping)
            require("heads", found["heads"], Sequence[Mapping])
            return cls([HeadRule.from_json(one) for one in found["heads"]], found["calibration"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{path}: no table of rules ({type(error).__name__}: {error})") from error

    @classmethod
    def from_result(cls, result: Any, budget: int | None = None, rule: str | None = None) -> "RuleTable":
        """Return the plan of a result of `rules` at a budget, or one rule in every head.

        Args:
            result: what `tl_posgen.rules.Rules` returned, also after `tl_posgen.load`.
            budget: one of those measured; the smallest if left out.
            rule: one of those measured; the plan of the result if left out.

        Raises:
            InputError: a budget or a rule that the result lacks.
        """
        if getattr(result, "name", "") != "rules":
            raise InputError(f"{result!r}: give a result of the measure rules, or a table of rules")
        require("rule", rule, str | None)
        budget = int(min(result.own["budget"].values) if budget is None else budget)
        data = result.sel(budget=budget)
        if rule is not None and rule not in data["rule"].values:
            raise InputError(f"rules: no rule {rule!r}; it has {', '.join(map(str, data['rule'].values))}")
        heads = []
        for (layer, group), planned in data["plan"].transpose("layer", "key_value_head").to_series().items():
            if planned:
                name = planned if rule is None else rule
                heads.append(head_rule(data.sel(layer=layer), int(group), name, budget, result.measure.weights))
        names = ("model", "backend", "weights", "prompts", "length", "tokens_sha256", "seed")
        rise = data["plan_rise"] if rule is None else data["rise"].sel(rule=rule)
        measured = {"rise": float(rise.mean()), "epsilon": result.measure.epsilon if rule is None else None}
        return cls(heads, {name: result.provenance.get(name) for name in names} | measured)


def head_rule(data: Any, group: int, rule: Any, budget: int, weights: Weights) -> HeadRule:
    """Return the rule of one key/value head from the dataset of its layer."""
    layer, heads = int(data["layer"]), [int(one) for one in data["head"].values[data["reads"].values == group]]
    if rule == ALL:
        return HeadRule(layer, group, tuple(heads), ALL, None)
    q, k = (mean_of(data[name].sel(head=heads)) for name in ("mean_query", "mean_key"))
    return HeadRule(layer, group, tuple(heads), rule, budget, Means(q, k, int(data["n_distances"]), weights))


def mean_of(array: Any) -> Float[Tensor, "head d_head"]:
    """Return means of heads without the places that only larger heads of other layers have."""
    return torch.as_tensor(array.transpose("head", "component").dropna("component").values)

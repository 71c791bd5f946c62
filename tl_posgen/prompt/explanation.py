"""Explanation of one row of scores: labelled terms that add up to them, as frames, and a check by deletion."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.core.files import jsonable
from tl_posgen.core.formatting import format_number
from tl_posgen.core.measure import Measure, TokenView, Variable
from tl_posgen.core.numbers import TRAINED, Numbers
from tl_posgen.core.options import Count, Whole, require
from tl_posgen.core.report import Report
from tl_posgen.core.result import Result
from tl_posgen.editing.given import under
from tl_posgen.editing.replace_scores import replace_scores
from tl_posgen.editing.score_functions import finished
from tl_posgen.errors import InputError
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.geometry.proof import tolerance
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.selection import head_name
from tl_posgen.models.session import Session
from tl_posgen.prompt.explanation_figures import ALIBI, colour_tokens, draw_explanation, heading_of, shown_terms
from tl_posgen.report.circuits import stacked
from tl_posgen.report.tables import title

BY = ("term", "plane", "source")
DRAWS = 5  # of other terms, in `check`
_NAMED = 8  # largest terms, in a sentence
_ROUNDING = 1e-3  # by how much the attention of the same model may differ
_OF_MODEL = ("weights", "added_hooks")  # in provenance: what an explanation depends on beside the model's name


@dataclass(frozen=True)
class Row:
    """One row of a head's scores in a running model: what is explained, and from what terms are deleted."""

    session: Session
    tokens: Int[Tensor, " pos"]
    layer: int
    head: int
    query: int

    @property
    def keys(self) -> range:
        """The keys that the query sees."""
        window = self.session.layer(self.layer).geometry.window
        return range(0 if window is None else max(0, self.query - window + 1), self.query + 1)

    def predicted(self, deleted: Float[Tensor, " pos"]) -> tuple[Float[Tensor, " d_vocab"], Float[Tensor, " key"]]:
        """Return log-probabilities of the token after the query, and the head's attention in its row, with this much
        taken from the row's scores."""
        rows, place = list[Tensor](), [(self.layer, self.head)]

        def scores_of(capture: LayerCapture) -> Float[Tensor, "head query key"]:
            products = capture.geometry.scale * capture.rotated_q @ capture.rotated_k.mT
            products[:, self.query] -= deleted.to(products)
            visible = capture.geometry.visible(capture.length, products.device)
            scores = finished(products, capture).masked_fill(~visible, -torch.inf)
            rows.append(capture.attention(double(scores[:, self.query, None]))[0, 0])
            return scores

        with under(self.session, replace_scores(self.session, scores_of, heads=place)):
            logits = run_capture(self.session, self.tokens[None], lambda _: None, {"logits"}, heads=place)
        assert logits is not None
        return double(logits[0, self.query]).log_softmax(-1), rows[-1]


@dataclass(frozen=True, repr=False)
class Explanation(Result):
    """Terms of one query's scores, each less a baseline: `explain` makes it, and `tl_posgen.load` of its file.

    Attributes:
        dataset: `contribution` [term, key, plane, source], which adds up to `score` [key], the model's own scores less
            the baseline; where there is ALiBi, `alibi` [key] is one summand more. `attention` [key] is the softmax of
            the row. `plane` -1 is the whole unrotated remainder of a partly rotated head. Attributes: model, layer,
            head, query, against, reference, side, note (a part of the scores that the terms of this layer lack, such as
            position where nothing rotates), and largest_difference between the sum and the pass's own scores.
    """

    _row: Row | None = None

    @property
    def key(self) -> int:
        """The key whose sources and planes are drawn and told: the chosen one; or that of most attention, besides the
        baseline's; between two prompts, whose attention differs most."""
        return _key_of(self.trained)

    def frame(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, by: Sequence[str] = ("term",), key: int | None = None
    ) -> pd.DataFrame:
        """Return one row for each key and label, summed over all other labels.

        Args:
            by: any of "term", "plane", "source"; none for the sum, which is the score less the baseline.
            key: rows of this key alone.

        Raises:
            InputError: another label, a key that the query does not see.

        Example:
            >>> import tl_posgen
            >>> found = tl_posgen.explain("mini", "Down, down, down. Would the fall never end?", head="3.1")
            >>> rows = found.frame(by=())
            >>> bool((abs(rows["contribution"] - rows["score"]) < 1e-4).all())
            True
        """
        require("by", by, str | Sequence[str] | None)
        require("key", key, int | None)
        by, keys = (by,) if isinstance(by, str) else tuple(by or ()), self.trained["key"].values
        if wrong := [label for label in by if label not in BY or by.count(label) > 1]:
            raise InputError(f"by={wrong[0]!r}: choose any of {', '.join(BY)}, each once")
        if key is not None and key not in keys:
            raise InputError(f"key {key!r}: the query sees keys {keys[0]} to {keys[-1]}")
        frame = _frame_of(self.trained, by)
        return frame if key is None else frame.query("key == @key").reset_index(drop=True)

    def largest(self, n: int = 10, key: int | None = None, by: Sequence[str] = ("term", "source")) -> pd.DataFrame:
        """Return the n rows of `frame(by, key)` with the largest contributions, of one key or of all.

        Raises:
            InputError: a number of rows below 1, a key that the query does not see.
        """
        require("n", n, Count)
        return _largest(self.frame(by, key), n)

    def show(self, example: int | None = None) -> Any:
        """Return a circuitsvis page: the prompt coloured once for the score and once for each term, or for one of these
        alone."""
        if example is not None:
            return super().show(example)
        heading, subtitle = heading_of(self.trained)
        pages = [super(Explanation, self).show(n) for n in range(len(self.token_labels()))]
        return stacked(pages, f"<p><b>{heading}</b><br>{subtitle}</p>")

    def as_summary(self) -> list[dict[str, Any]]:
        """Return its part of summary.json: the rows of `table`."""
        return jsonable(self.table().to_dict("records"))

    def write(self, directory: str | os.PathLike, *, force: bool = False) -> Path:
        """Write index.html, summary.json and results.nc, as `Report.write` does."""
        return Report({self.name: self}, self.provenance).write(directory, force=force)

    def check(self, n: int = 10, seed: int = 0) -> pd.DataFrame:
        """Delete the n largest terms from the row of the running model, and beside them as much in drawn ones.

        A term is a key, one of position, key_part, query_key and interaction, and a source. Its contribution c is
        deleted from the head's row of scores, before a soft cap. The largest are those of the largest p (1 - p) |c|, p
        being the key's attention: to first order what deleting one alone moves. Terms of keys that get no attention
        may be large and do nothing. Drawn are other terms, until their sum of |c| is the same, the last one in part;
        numbers of them are means over five draws.

        Returns:
            Rows "largest" and "drawn": `terms`, how many; `size`, the sum of |c|; `attention`, by how much the head's
            pattern in this row moves (total variation); `prediction`, the Kullback-Leibler divergence of the model's
            next token at the query, in nats.

        Raises:
            InputError: the difference of two prompts, or a file, whose model is not there; a model that has changed, or
                is under other hooks, since; a key that is its own baseline; n terms that are larger than all others
                together.
        """
        row = self._row
        require("n", n, Count)
        require("seed", seed, Whole)
        if row is None:
            raise InputError("check deletes terms of one prompt in its model; explain that prompt, without other=")
        cells = self.trained["contribution"].sum("plane").transpose("key", "term", "source")
        values, keys = cells.values.ravel(), np.repeat(cells["key"].values, cells[0].size)
        attention = np.repeat(self.trained["attention"].values, cells[0].size)
        order = np.argsort(-abs(values) * attention * (1 - attention), kind="stable")
        size, remaining = float(abs(values[order[:n]]).sum()), float(abs(values[order[n:]]).sum())
        if not size:
            raise InputError("check: all terms are zero, as the query sees no key but that of the baseline")
        if size > remaining:
            raise InputError(f"n = {n}: give a number of {len(values)} terms that are less than all others together")
        log_p, pattern = row.predicted(torch.zeros(len(row.tokens)))
        moved_since = float(
            (pattern[list(row.keys)].cpu() - torch.tensor(self.trained["attention"].values)).abs().max()
        )
        if moved_since > max(_ROUNDING, tolerance(row.session.dtype)):
            raise InputError(
                f"check: the head's attention is off by {moved_since:.2g} from what was explained, so the model has "
                "other weights or other hooks now; explain the prompt again"
            )

        def deleted(chosen: np.ndarray, shares: np.ndarray) -> dict[str, int | float]:
            taken = np.bincount(keys[chosen], shares * values[chosen], minlength=len(row.tokens))
            without = row.predicted(torch.from_numpy(taken))
            moved, kl = (without[1] - pattern).abs().sum() / 2, (log_p.exp() * (log_p - without[0])).sum()
            return {"terms": len(chosen), "size": size, "attention": float(moved), "prediction": float(kl)}

        generator, draws = np.random.default_rng(seed), []
        for _ in range(DRAWS):
            drawn = generator.permutation(order[n:])
            sizes = abs(values[drawn])
            before = sizes.cumsum() - sizes
            is_deleted = before < size  # whole ones, and a part of the last
            shares = np.minimum(1.0, (size - before[is_deleted]) / np.maximum(sizes[is_deleted], 1e-300))
            draws.append(deleted(drawn[is_deleted], shares))
        rows = [deleted(order[:n], np.ones(n)), pd.DataFrame(draws).mean().to_dict()]
        return pd.DataFrame(rows, index=pd.Index(["largest", "drawn"], name="deleted"))

    def minus(self, other: "Explanation") -> "Explanation":
        """Return which terms make the difference to another prompt of as many tokens: its contributions taken away.

        Raises:
            InputError: the other explains another model, head, query, key or side, under other hooks, by other parts,
                or with the means of another reference.
        """
        if not isinstance(other, Explanation):
            raise InputError(f"minus: {type(other).__name__} is no explanation; give what explain returned")
        mine, theirs = self.dataset, other.dataset
        for name in ("model", "layer", "head", "query", "against_key", "side", "parts", "reference", *_OF_MODEL):
            explained, taken = (of.provenance.get(name, "none") for of in (self, other))
            if explained != taken:
                raise InputError(f"minus: {name} {taken} is taken from {name} {explained}; explain both alike")
        if len(mine["key"]) != len(theirs["key"]):
            raise InputError(f"minus: {len(theirs['key'])} keys are taken from {len(mine['key'])}; explain both alike")
        token_pairs = zip(mine["token"].values, theirs["token"].values, strict=True)
        tokens = [token if token == other_token else f"{token} | {other_token}" for token, other_token in token_pairs]
        names = list(dict.fromkeys([*mine["source"].values, *theirs["source"].values]))
        numeric = [name for name in ("contribution", "score", "attention", ALIBI) if name in mine]
        first, second = (
            dataset[numeric].drop_vars("token").reindex(source=names, fill_value=0.0) for dataset in (mine, theirs)
        )
        data = (first - second).assign_coords(token=("key", np.array(tokens, dtype=object)))
        off = mine.attrs["largest_difference"] + theirs.attrs["largest_difference"]
        attrs = {**mine.attrs, "largest_difference": off, "other": theirs.attrs["prompt"]}
        return explanation_of(data.assign_attrs(attrs), {**self.provenance, "other": theirs.attrs["prompt"]})


@dataclass(frozen=True)
class ScoreTerms(Measure):
    """W_ij - W_ij' of one query i and every key j it sees, a sum over terms x RoPE planes x sources.

    Nothing is fitted or left over: the terms of a key add up to its score less the baseline.

    Source: ours; frozen norms and an exact sum over sources are usual in direct attribution.
    """

    name = "explanation"
    question = "Why does this head attend there?"
    has_null = False
    result_class = Explanation
    rows = ("key",)
    variables = {
        "contribution": Variable(
            "contribution",
            "logits",
            "of a term, a RoPE plane (-1: all that does not rotate) and a source",
            ("term", "key", "plane", "source"),
        ),
        "score": Variable("score", "logits", "the model's own, less the baseline", ("key",)),
        "attention": Variable("attention", "", "the softmax of the query's scores", ("key",)),
        ALIBI: Variable("ALiBi", "logits", "slope (j - i), less the baseline", ("key",)),
    }
    figures = {"terms": draw_explanation}
    legend = "score: less the baseline, in logits; behind it the terms that add up to it"
    token_view = TokenView(lambda data: [f"coloured by {title(name)}" for name in shown_terms(data)], colour_tokens)

    def findings(self, numbers: Numbers) -> list[str]:
        data, attrs, key = numbers.data, numbers.attrs, _key_of(numbers.data)
        row, by_source = self.table(numbers).set_index("key").loc[key], _frame_of(data, ("term", "source"))
        against = f"key {attrs['against_key']}" if "against_key" in attrs else attrs["against"]
        terms = [f"{title(name)} {format_number(row[name], '+.2f')}" for name in row.index[3:]]
        largest = _largest(by_source.query("key == @key"), _NAMED)[["term", "source", "contribution"]]
        named = [
            f"{title(term)}{'' if term == source else f' of {source}'} {format_number(value, '+.2f')}"
            for term, source, value in largest.itertuples(index=False)
        ]
        note = f" {attrs['note'][0].upper()}{attrs['note'][1:]}." if attrs["note"] else ""
        return [
            f"{head_name(attrs['layer'], attrs['head'])}, query {attrs['query']} {attrs['query_token']!r} of "
            f"{attrs['model']}: key {key} {row['token']!r} has attention {row['attention']:.2f} and stands "
            f"{format_number(row['score'], '+.2f')} logits against {against}"
            f"{', less the same of the other prompt' if 'other' in attrs else ''}: {', '.join(terms)}.",
            f"Its largest terms by source of the {attrs['side']}: {', '.join(named)}."
            if largest["contribution"].any()
            else "All its terms are zero: a score less itself.",
            f"Means of {attrs['reference']}.{note}",
        ]

    def table(self, numbers: Numbers) -> pd.DataFrame:
        """Return one row a key, the shown one and the baseline's first, then most attention: attention, score less the
        baseline, and its terms."""
        terms = _frame_of(numbers.data, ("term",)).pivot(index="key", columns="term", values="contribution")
        head = numbers.data[["attention", "score"]].to_dataframe()[["token", "attention", "score"]]
        table = head.join(pd.DataFrame(terms[shown_terms(numbers.data)[1:]])).reset_index()
        shown = [_key_of(numbers.data), numbers.attrs.get("against_key")]
        rank = -abs(table["attention"]) - table["key"].isin(shown) - (table["key"] == shown[0])
        return table.iloc[np.argsort(rank.to_numpy(), kind="stable")].reset_index(drop=True)


def explanation_of(data: xr.Dataset, provenance: Mapping[str, Any], row: Row | None = None) -> Explanation:
    """Return the explanation that these terms are."""
    labels: Any = {"init": [TRAINED], "init_label": ("init", [data.attrs["model"]])}
    return Explanation(ScoreTerms(), ScoreTerms().describe(data.assign_coords(labels)), provenance, row)


def _key_of(data: xr.Dataset) -> int:
    if "key" in data.attrs:
        return int(data.attrs["key"])
    keys, attention = data["key"].values, abs(data["attention"].values)
    return int(keys[np.where(keys == data.attrs.get("against_key"), -1.0, attention).argmax()])


def _frame_of(data: xr.Dataset, by: Sequence[str]) -> pd.DataFrame:
    """Return one row for each key and label of these dims."""
    summed = data["contribution"].sum([dim for dim in BY if dim not in by])
    frame = summed.transpose("key", *by).rename("contribution").to_dataframe().reset_index()
    if ALIBI in data:
        labels = {"key": data["key"].values, "token": data["token"].values}
        labels |= {"term": ALIBI, "plane": -1, "source": ALIBI, "contribution": data[ALIBI].values}
        frame = pd.concat([frame, pd.DataFrame(labels)], ignore_index=True)
    if not by:
        sums = pd.DataFrame(frame.groupby(["key", "token"], sort=False).agg({"contribution": "sum"}))
        return sums.reset_index().assign(score=data["score"].values)
    return pd.DataFrame(frame[["key", "token", *by, "contribution"]])


def _largest(frame: pd.DataFrame, n: int) -> pd.DataFrame:
    order = np.argsort(-abs(frame["contribution"].to_numpy()), kind="stable")
    return frame.iloc[order[:n]].reset_index(drop=True)

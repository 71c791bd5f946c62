"""Explanation of one row of scores: labelled terms that add up to them, as frames, and a check by deletion."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from tl_posgen.arithmetic import double
from tl_posgen.core.options import Count, Whole, require
from tl_posgen.editing.given import under
from tl_posgen.editing.replace_scores import replace_scores
from tl_posgen.editing.score_functions import finished
from tl_posgen.errors import InputError
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.layers.capture import LayerCapture
from tl_posgen.models.selection import head_name
from tl_posgen.models.session import Session

if TYPE_CHECKING:
    import plotly.graph_objects as go

BY = ("term", "plane", "source")
ALIBI = "alibi"
DRAWS = 5  # of other terms, in `check`


@dataclass(frozen=True)
class Row:
    """One row of a head's scores in a running model: what is explained, and from what terms are deleted."""

    session: Session
    tokens: Int[Tensor, " pos"]
    layer: int
    head: int
    query: int
    sinks: Float[Tensor, " head"] | None = None  # what joins the head's softmax

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
            capture.sinks = self.sinks
            rows.append(capture.attention(double(scores[:, self.query, None]))[0, 0])
            return scores

        with under(self.session, replace_scores(self.session, scores_of, heads=place)):
            logits = run_capture(self.session, self.tokens[None], lambda _: None, {"logits"}, heads=place)
        assert logits is not None
        return double(logits[0, self.query]).log_softmax(-1), rows[-1]


@dataclass(frozen=True)
class Explanation:
    """Terms of one query's scores, each less a baseline: `explain` makes it.

    Attributes:
        data: `contribution` [term, key, plane, source], which adds up to `score` [key], the model's own scores less the
            baseline; where there is ALiBi, `alibi` [key] is one summand more. `attention` [key] is the softmax of the
            row. `plane` -1 is the whole unrotated remainder of a partly rotated head. Attributes: model, layer, head,
            query, against, reference, side, note, and largest_difference between the sum and the pass's own scores.
        key: the key whose sources and planes are shown; None for that of most attention.
    """

    data: xr.Dataset
    _row: Row | None = field(default=None, repr=False)
    key: int | None = None

    @property
    def head(self) -> str:
        """The head's name: "L3H1"."""
        return head_name(self.data.attrs["layer"], self.data.attrs["head"])

    @property
    def note(self) -> str:
        """A part of the scores that the terms of this layer lack, such as position where nothing rotates; else ""."""
        return self.data.attrs["note"]

    @cached_property
    def stands_out(self) -> int:
        """The chosen key; or that of most attention, besides the baseline's; between two prompts, whose attention
        differs most."""
        if self.key is not None:
            return self.key
        keys, attention = self.data["key"].values, abs(self.data["attention"].values)
        candidates = np.where(keys == self.data.attrs["against_key"], -1.0, attention)
        return int(keys[candidates.argmax()])

    def frame(self, by: Sequence[str] = ("term",)) -> pd.DataFrame:
        """Return one row for each key and label, summed over all other labels.

        Args:
            by: any of "term", "plane", "source"; none for the sum, which is the score less the baseline.

        Raises:
            InputError: another label.

        Example:
            >>> import tl_posgen
            >>> found = tl_posgen.explain("mini", "Down, down, down. Would the fall never end?", head="3.1")
            >>> rows = found.frame(by=())
            >>> bool((abs(rows["contribution"] - rows["score"]) < 1e-4).all())
            True
        """
        by = (by,) if isinstance(by, str) else tuple(by or ())
        if wrong := [label for label in by if label not in BY or by.count(label) > 1]:
            raise InputError(f"by={wrong[0]!r}: choose any of {', '.join(BY)}, each once")
        summed = self.data["contribution"].sum([dim for dim in BY if dim not in by])
        frame = summed.transpose("key", *by).rename("contribution").to_dataframe().reset_index()
        if ALIBI in self.data:
            labels = {"key": self.data["key"].values, "token": self.data["token"].values}
            labels |= {"term": ALIBI, "plane": -1, "source": ALIBI, "contribution": self.data[ALIBI].values}
            frame = pd.concat([frame, pd.DataFrame(labels)], ignore_index=True)
        if not by:
            sums = pd.DataFrame(frame.groupby(["key", "token"], sort=False).agg({"contribution": "sum"}))
            return sums.reset_index().assign(score=self.data["score"].values)
        return pd.DataFrame(frame[["key", "token", *by, "contribution"]])

    def largest(self, n: int = 10, key: int | None = None, by: Sequence[str] = ("term", "source")) -> pd.DataFrame:
        """Return the n rows of `frame(by)` with the largest contributions, of one key or of all.

        Raises:
            InputError: a number of rows below 1, a key that the query does not see.
        """
        require("n", n, Count)
        if key is not None and key not in self.data["key"].values:
            keys = self.data["key"].values
            raise InputError(f"key {key!r}: the query sees keys {keys[0]} to {keys[-1]}")
        frame = self.frame(by) if key is None else self.frame(by).query("key == @key")
        order = np.argsort(-abs(frame["contribution"].to_numpy()), kind="stable")
        return frame.iloc[order[:n]].reset_index(drop=True)

    def table(self) -> pd.DataFrame:
        """Return one row a key, most attention first: attention, score less the baseline, and its terms."""
        terms = self.frame().pivot(index="key", columns="term", values="contribution")
        head = self.data[["attention", "score"]].to_dataframe()[["token", "attention", "score"]]
        named = [name for name in (*self.data["term"].values, ALIBI) if name in terms]
        table = head.join(pd.DataFrame(terms[named])).reset_index()
        return table.iloc[np.argsort(-abs(table["attention"].to_numpy()), kind="stable")].reset_index(drop=True)

    def plot(self) -> "go.Figure":
        """Draw terms of every key, and of the key that stands out its sources and planes."""
        from tl_posgen.prompt.explanation_figures import draw_explanation

        return draw_explanation(self)

    def show(self) -> Any:
        """Return a circuitsvis page: the prompt coloured once for the score and once for each term."""
        from tl_posgen.prompt.explanation_figures import colour_terms

        return colour_terms(self)

    def write(self, directory: str | os.PathLike, *, force: bool = False) -> Path:
        """Write index.html, which loads nothing from the network, and terms.csv, a row a key, term and source.

        Raises:
            OutputError: the directory holds another run's page and `force` is not given, or cannot be written.
        """
        from tl_posgen.core.files import require_free, write_files
        from tl_posgen.prompt.explanation_figures import page_of

        require_free(directory, force)
        terms = self.frame(("term", "source")).to_csv(index=False)
        write_files(directory, {"index.html": page_of(self).encode(), "terms.csv": terms.encode()})
        return Path(directory) / "index.html"

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
            InputError: the difference of two prompts; n terms that are larger than all others together.
        """
        row = self._row
        require("n", n, Count)
        require("seed", seed, Whole)
        if row is None:
            raise InputError("check deletes terms of one prompt; explain each of the two without other=")
        cells = self.data["contribution"].sum("plane").transpose("key", "term", "source")
        values, keys = cells.values.ravel(), np.repeat(cells["key"].values, cells[0].size)
        attention = np.repeat(self.data["attention"].values, cells[0].size)
        order = np.argsort(-abs(values) * attention * (1 - attention), kind="stable")
        size, remaining = float(abs(values[order[:n]]).sum()), float(abs(values[order[n:]]).sum())
        if size > remaining:
            raise InputError(f"n = {n}: give a number of {len(values)} terms that are less than all others together")
        log_p, pattern = row.predicted(torch.zeros(len(row.tokens)))

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

    def sentence(self) -> str:
        """Return which key stands out, and the terms of its score."""
        attrs, key = self.data.attrs, self.stands_out
        row = self.table().set_index("key").loc[key]
        against = attrs["against"] if attrs["against_key"] is None else f"key {attrs['against_key']}"
        terms = [f"{name.replace('_', ' ')} {row[name]:+.2f}" for name in row.index[3:]]
        return (
            f"{self.head}, query {attrs['query']} {attrs['query_token']!r} of {attrs['model']}: key {key} "
            f"{row['token']!r} has attention {row['attention']:.2f} and stands {row['score']:+.2f} logits against "
            f"{against}{', less the same of the other prompt' if 'other' in attrs else ''}: {', '.join(terms)}."
        )

    def __repr__(self) -> str:
        return f"Explanation({self.sentence()})"

    def _repr_html_(self) -> str:
        """In a notebook: what stands out, the keys of most attention, the figure."""
        from tl_posgen.prompt.explanation_figures import cell_of_explanation

        return cell_of_explanation(self).html()

    def _ipython_display_(self) -> None:
        from tl_posgen.prompt.explanation_figures import cell_of_explanation

        cell_of_explanation(self).display(repr(self))

    def minus(self, other: "Explanation") -> "Explanation":
        """Return which terms make the difference to another prompt of as many tokens: its contributions taken away.

        Raises:
            InputError: the other explains another model, head, query, key or side.
        """
        mine, theirs = self.data, other.data
        for name in ("model", "layer", "head", "query", "against_key", "side"):
            if mine.attrs[name] != theirs.attrs[name]:
                raise InputError(
                    f"minus: {name} {theirs.attrs[name]} is taken from {name} {mine.attrs[name]}; explain both alike"
                )
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
        return Explanation(data.assign_attrs(attrs))

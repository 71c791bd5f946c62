"""Interventions on prompts of `N` tokens: those that edit row by row, and those that need the whole prompt."""

from contextlib import nullcontext

import torch

from tl_posgen.editing.replace_scores import replace_scores
from tl_posgen.editing.score_functions import RowByRow
from tl_posgen.extension.frequency_rules import FrequencyRule, with_frequencies
from tl_posgen.extension.held_planes import hold_planes
from tl_posgen.hooks import (
    ablate_bands,
    apply_rules,
    at_dummy_distance,
    by_split,
    interpolate_positions,
    lm_infinite,
    perturb_planes,
    remove_source,
    retrieve_blocks,
    self_extend,
    substitute,
    triangle,
    true_at,
)
from tl_posgen.models.capture.capturing import capturing
from tl_posgen.models.session import session_of
from tl_posgen.models.streaming.stream import streaming_by_policy
from tl_posgen.position.order.hooks import permute_positions
from tl_posgen.residual.reference import Reference, reference_of
from tl_posgen.rules import Rules
from tl_posgen.rules.rules import REFERENCES

N = 24
TOKENS = torch.randint(2, 60, (2, N), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model, hooks=(), tokens=TOKENS):
    """Return logits; hooks run in streaming mode, which edits need if a bridge uses Hugging Face's attention."""
    with streaming_by_policy(session_of(model), N) if hooks else nullcontext():
        return model.run_with_hooks(tokens, fwd_hooks=list(hooks))


def scores_under(model, hooks, layers=None):
    """Return the captures of one prompt under hooks, with the scores that the pass used."""
    seen = []
    with capturing(model, seen.append, {"attn_scores"}, layers=layers):
        logits(model, hooks, TOKENS[:1])
    return seen


def largest(difference):
    return difference.abs().max().item()


def reference(model) -> Reference:
    """Means of sources over one prompt."""
    return reference_of(model, torch.arange(2, 2 + N)[None], length=N)


def rules(model, name: str):
    """A rule in every head, calibrated on one prompt."""
    tokens, measured = torch.stack([torch.arange(3, 3 + N)] * 2), "window" if name in REFERENCES else name
    result = Rules(rules=[measured], budget=6)(model, tokens, nulls=0, progress=False)
    return apply_rules(model, result, name)


def halves(model) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The first two heads of every layer, and the next two."""
    first, next_ = (
        [(layer, head) for layer in range(model.cfg.n_layers) for head in some] for some in ((0, 1), (2, 3))
    )
    return first, next_


ROW_BY_ROW = {
    "lm_infinite": lambda m: lm_infinite(m, 8, 2),
    "retrieve_blocks": lambda m: retrieve_blocks(m, 8, 2, block=4, n_blocks=2),
    "self_extend": lambda m: self_extend(m, 6, 3),
    "planes held": lambda m: hold_planes(m, [0, 1], at=5),
    "planes held at their quarter turns": lambda m: hold_planes(m, "all", at="quarter turn"),
    "interpolate_positions": lambda m: interpolate_positions(m, 0.5),
    "one dummy distance": lambda m: at_dummy_distance(m, 3),
    "frozen beyond": lambda m: at_dummy_distance(m, beyond=8),
    "a distance beyond": lambda m: at_dummy_distance(m, 30, beyond=8),
    "a function of distances": lambda m: at_dummy_distance(m, lambda d: 1.5 * d),
    "few offsets": lambda m: at_dummy_distance(m, lambda d: d + 3 * (d > 2)),
    "frequencies frozen": lambda m: ablate_bands(m, "freeze", [0, 2]),
    "other frequencies": lambda m: with_frequencies(m, FrequencyRule("linear", 2)),
    "no RoPE": lambda m: ablate_bands(m, "no_rope"),
    "split": lambda m: substitute(m, by_split(triangle(8), mean_key="seen")),
    "some of the residual": lambda m: substitute(m, by_split(triangle(8), mean_key="seen"), residual=0.3),
    "true at the first key": lambda m: substitute(m, true_at(by_split(triangle(8), mean_key="seen"), [0])),
    "two kinds of heads": lambda m: (
        lm_infinite(m, 8, 2, heads=halves(m)[0]) + at_dummy_distance(m, 3, heads=halves(m)[1])
    ),
    "a source's constant": lambda m: remove_source(m, "embed", on="queries", reference=reference(m)),
    "vertical keys": lambda m: rules(m, "vertical"),
    "position + content": lambda m: rules(m, "position_and_content"),
    "drawn keys": lambda m: rules(m, "drawn"),
    "the best keys": lambda m: rules(m, "oracle"),
    "a function of one's own": lambda m: replace_scores(m, RowByRow(lambda capture: 0.5 * capture.scores())),
}
OF_THE_PROMPT = {
    "a matrix of distances": lambda m: at_dummy_distance(m, torch.zeros(N, N)),
    "means": lambda m: ablate_bands(m, "means"),
    "mean key of the prompt": lambda m: substitute(m, by_split(triangle(8))),
    "quantile": lambda m: substitute(m, by_split(triangle(8), mean_key="seen"), gamma=0.9),
    "positions": lambda m: permute_positions(m, torch.arange(N)),
    "a source's varying part": lambda m: remove_source(m, "embed", "varying", reference=reference(m)),
    "planes shuffled": lambda m: perturb_planes(m, "shuffle_phases"),
    "a function of one's own": lambda m: replace_scores(m, lambda capture: capture.scores()),
}

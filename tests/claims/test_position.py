"""The claims on position generalization: verdicts at thresholds and beside nulls, on results of given numbers."""

import numpy as np
import pytest
import xarray as xr
from judged import CLAIMS, FAR, NAN, MadeUp, at_each, needs_of
from made_up import around, dataset_of, result_of

from tl_posgen.claims import judge
from tl_posgen.position import (
    DummyDistance,
    LengthExtrapolation,
    MeanKey,
    Perturbation,
    Planes,
    Substitution,
    ThreeAxis,
    Variance,
)

NONE = [NAN] * 3
ADDITIVE = ("additive_r", "additive_r_of_scores")

# Numbers of each claim, in datasets: without arguments, such that the claim is held


def additive(r=0.97):
    """Position + content: r, and the sizes of scores, position, content and interaction."""
    sizes = (("of",), [2.0, 1.0, 0.8, 0.1])
    labels = ["scores", "position", "content", "interaction"]
    return dataset_of({name: (("end",), around(r, 0.01)) for name in ADDITIVE} | {"size": sizes}, of=labels)


def fitted(r=0.97):
    return dataset_of({"r": (("tokens", "end"), [NONE, around(r, 0.01)]), "r_within_rows": ((), r)})


def replaced(loss=0.97, kl=0.96):
    """Losses, and KL of predictions, of which each query's profile recovers these shares, alike in all prompts."""
    of_prompts = {name: [[0.0] * 4, [1.0] * 4, [1 - share] * 4] for name, share in (("loss", loss), ("kl", kl))}
    variables = {name: (("condition", "prompt"), one) for name, one in of_prompts.items()}
    return dataset_of(variables, condition=["unchanged", "uniform_attention", "query_profile"], prompt=range(4))


def at_sinks(loss=0.97, kl=0.96, random=0.5, keys=1.0):
    """Losses, and KL of predictions, of which these shares are recovered with the true scores of `keys` sinks."""
    data = replaced(loss, kl).assign_coords(
        condition=["unchanged", "uniform_attention", "query_profile, true at sinks"]
    )
    control = (
        replaced(random, random).isel(condition=[2]).assign_coords(condition=["query_profile, true at random keys"])
    )
    data = xr.concat([data, control], "condition")
    return data.assign(first_is_sink=("layer", [keys]), n_later_sinks=("layer", [0.0])).assign_coords(layer=[0])


def at_distances(r=0.97, refits=(0.4,)):
    numbers = {name: (("tokens", "end"), [NONE, around(r, 0.01)]) for name in ("additive_r", "key_part_r")}
    again = (("tokens", "d0"), [[NAN] * len(refits), refits])
    numbers |= {"share": (("tokens", "part"), [[0.5], [0.4]]), "refit_r": again}
    return dataset_of(numbers, part=["distance"], d0=[0, 8, 64, 256][: len(refits)])


def of_planes(r=0.8, interaction=0.2):
    """Heads whose plane scores and interaction shares correlate at r, the first token left out."""
    x, z = np.linalg.qr(np.random.default_rng(0).normal(size=(64, 3)) * [0, 1, 1] + [1, 0, 0])[0][:, 1:].T
    both = [3 + x, interaction + 0.01 * (r * x + (1 - r**2) ** 0.5 * z)]
    score_sum, share = (np.stack([np.full((8, 8), NAN), one.reshape(8, 8)]) for one in both)
    heads, at = ("layer", "head"), ("tokens", "layer", "head")
    variables = {
        "score_sum": (at, score_sum),
        "share": (("group", "part", *at), np.stack([share[None]] * 5)),  # alike without each group of prompts
        "additive": (at, np.stack([np.full((8, 8), 0.1), np.full((8, 8), NAN)])),
    }
    groups = {"group": ["all", *"0123"], "part": ["interaction"], **dict.fromkeys(heads, range(8))}
    return dataset_of(variables, **groups).assign_coords(prompt_share=("group", [NAN, *[0.25] * 4]))


def disturbed(few=0.1, many=0.2, index=0.5, features=0.5, above=None):
    """Rises of the loss by words at 5 %, 20 %, and 10 % if given, of the index and of the features at 20 %, alike in
    four prompts."""
    at = {0.05: (few, 0.1, 0.1), **({} if above is None else {0.1: (above, 0.1, 0.1)}), 0.2: (many, index, features)}
    rises = np.transpose([*at.values()])[:, :, None, None, None].repeat(4, -1)
    dims = ("condition", "ratio", "reach", "target", "prompt")
    labels = {"condition": ["words", "positions", "position_part"], "ratio": [*at], "reach": ["uniform"]}
    return dataset_of({"change": (dims, rises)}, **labels, target=["all"])


def cloze_of(few=0.795, many=0.7, whole=0.8, half=0.01):
    """Accuracy with 5 % and 20 % of the words swapped, and in order."""
    ends = [around(whole, 0), around(few, half), around(many, half)]
    texts = {"cloze_accuracy": (("condition", "ratio", "end"), [ends]), "of_items": (("item",), np.ones(40))}
    return dataset_of(texts, condition=["words"], ratio=[0, 0.05, 0.2])


def beyond(unchanged=0.5, lm_infinite=1.0):
    """Of ten heads, the share whose outputs are within the noise level beyond the training length, by condition."""
    within = {"unchanged": unchanged} | ({} if lm_infinite is None else {"lm_infinite": lm_infinite})
    shares = np.array([*within.values()])[:, None]
    above = np.where(np.isnan(shares), NAN, np.arange(10) >= 10 * shares)
    frechet = np.stack([np.zeros_like(above), above], -1)[:, None]
    of_heads, n = ("condition", "layer", "head", "segment"), len(within)
    variables = {
        "frechet": (of_heads, frechet),
        "noise_level": (("layer", "head"), np.full((1, 10), 0.5)),
        "segment_loss": (("condition", "prompt", "segment"), np.full((n, 2, 2), 2.0)),
    }
    return dataset_of(variables, condition=list(within), segment=range(2))


ORDER = Perturbation(ratios=(0, 0.05, 0.2))
MADE = {  # by claim: each measure and what makes its numbers; a null that is far from those that hold, None for its own
    "position 1": ([(Variance(), additive)], {"r": 0.2}),
    "position 1b": ([(ThreeAxis(), fitted), (MeanKey(), fitted)], {"r": 0.2}),
    "position 2": ([(Substitution(), replaced)], {"loss": 0.2, "kl": NAN}),
    "position 2b": ([(Substitution(), at_sinks)], {"loss": 0.2, "kl": NAN}),
    "position 3": ([(DummyDistance(), at_distances)], {"r": 0.2}),
    "position 4": ([(Planes(), of_planes)], {"r": 0.2, "interaction": 0.5}),
    "position 5": ([(ORDER, disturbed)], dict.fromkeys(("few", "many", "index", "features"), 0)),
    "position 5b": ([(ORDER, cloze_of)], {"few": 0.3, "many": 0.3, "whole": 0.3}),
    "position 6": ([(LengthExtrapolation(times=2), beyond)], {"unchanged": 1.0}),
}
PAPER = MadeUp(MADE)
CLOSE = {0.95: "held", 0.9499: "partly", 0.75: "partly", 0.7499: "not held", NAN: "open"}
ORDERED = {"few": 0.1001, "index": 0.5, "features": 0.5}
EDGES = [  # claim, a number of the model, and the verdict at each of these values of it beside the far null
    *((name, "r", CLOSE) for name in ("position 1", "position 1b", "position 3")),
    ("position 2", "kl", CLOSE),
    ("position 2b", "kl", CLOSE),
    ("position 2b", "keys", {0.5: "held", 0.0: "open"}),  # no sinks
    ("position 2b", "random", {0.99: "held"}),  # told beside it
    ("position 4", "interaction", {0.24: "held", 0.26: "not held"}),  # half of the null's
    ("position 5", "few", {0.1001: "partly"}),  # index and features alike
    ("position 5", "many", {0.1: "partly"}),  # more than 10 % hardly matters either
    ("position 5", "features", {0.375: "held", 0.3749: "partly"}),
    ("position 5b", "many", {0.79: "partly"}),
    ("position 5b", "few", {0.75: "not held", 0.785: "open"}),
    ("position 6", "lm_infinite", {0.9: "held", 0.8: "partly", NAN: "open"}),
    ("position 6", "unchanged", {0.9: "partly", 1.0: "not held"}),
]
VERDICTS = [  # claim, numbers of the model beside those that hold, those of null models, verdict
    *at_each(EDGES),
    ("position 2", {"loss": NAN, "kl": NAN}, FAR, "open"),  # attention is worth nothing
    ("position 4", {}, [{"r": 0.75, "interaction": 0.5}], "not held"),  # not beyond the interval
    ("position 4", {"r": 0.3}, [{"r": 0.7, "interaction": 0.5}], "not held"),
    ("position 4", {}, [{"r": 0.2, "interaction": 0.5}, {"r": 0.2, "interaction": 0.3}], "not held"),  # every null
    ("position 5", {"few": 0.1001, "features": 0.3}, FAR, "not held"),
    ("position 5", {"index": 0.0, "features": 0.0}, FAR, "partly"),  # alike, as in the null: neither costs anything
    ("position 5", {"few": 0.1001, "index": 0.0, "features": 0.0}, FAR, "not held"),
    ("position 5", ORDERED, [{"index": 0.5, "features": 0, "many": 0}], "not held"),
    ("position 5", {"few": NAN, "features": 0.3}, FAR, "open"),
    ("position 5b", {"few": 0.75, "half": 0.1}, FAR, "open"),
    ("position 5b", {"whole": 0.25}, [{"whole": 0.1}], "not held"),  # no better than chance
    ("position 6", {"lm_infinite": None}, [{"lm_infinite": None}], "open"),  # not run
]


@pytest.mark.parametrize(("name", "own", "nulls", "verdict"), VERDICTS, ids=lambda one: str(one).replace(" ", ""))
def test_a_verdict_is_given_at_its_thresholds_and_no_longer_just_beyond(name, own, nulls, verdict):
    assert PAPER.judged(name, own, nulls).verdict == verdict


@pytest.mark.parametrize(("need", "name"), needs_of(PAPER))
def test_a_verdict_needs(need, name):
    need(PAPER, name)


@pytest.mark.parametrize("name", ["position 1", "position 3"])
def test_a_sum_is_not_judged_where_nothing_rotates(name):
    assert PAPER.judged(name, encoding="alibi").verdict == "open"
    assert PAPER.judged(name, encoding="alibi, rotary").verdict == "held"


def test_shares_that_hold_by_construction_are_not_judged():
    found = PAPER.judged("position 2", encoding="alibi")
    assert (found.verdict, found.margin.split("; ")[0]) == ("open", "least share not defined")


def test_a_margin_and_words_name_thresholds_nulls_and_sizes():
    found = PAPER.judged("position 1", {"r": 0.9}, [{"r": 0.8}])
    assert found.margin.startswith("additive r 0.900, -0.050 from 0.950 (low end 0.890, +0.090 from random init 0.800)")
    assert found.measured == "additive r 0.900 [0.890, 0.910]; over all scores 0.900 [0.890, 0.910]"
    assert found.null == "random init: additive r 0.800, over all scores 0.800"
    assert PAPER.judged("position 1", {"r": 0.9}, [{"r": 0.895}]).verdict == "not held"


def test_order_is_open_where_a_condition_was_not_run_and_says_its_rises():
    assert PAPER.judged("position 5", change=lambda data: data.sel(condition=["words"])).verdict == "open"
    told = {"words at 5%": 0.1, "words at 20%": 0.2, "index at 20%": 0.5, "features at 20%": 0.5}
    assert PAPER.judged("position 5").measured == ", ".join(
        f"{name} {x:.2f} [{x:.2f}, {x:.2f}]" for name, x in told.items()
    )


@pytest.mark.parametrize(("above", "verdict"), [(0.1, "partly"), (0.1001, "held")])
def test_words_at_ten_percent_have_to_matter_and_are_told(above, verdict):
    measure = Perturbation(ratios=(0, 0.05, 0.1, 0.2))
    result = result_of(measure, disturbed(above=above), disturbed(0, 0, 0, 0, 0))
    found = judge(CLAIMS["position 5"], {measure.name: result})
    assert found.verdict == verdict
    assert "words at 5% 0.10 [0.10, 0.10], words at 10% 0.10 [0.10, 0.10], words at 20%" in found.measured
    assert "words at 10% 0.10; " in found.margin


def test_both_estimators_of_a_narrower_sum_are_told_and_the_fit_alone_is_judged():
    results = PAPER.results("position 1b")
    results["mean_key"] = result_of(MeanKey(), fitted(0.1), fitted(0.2))
    found = judge(CLAIMS["position 1b"], results)
    assert found.verdict == "held"
    assert found.measured == "r 0.970 [0.960, 0.980]; mean-key split's r 0.100 [0.090, 0.110]"


def test_without_a_cloze_downstream_scores_are_not_measured():
    found = PAPER.judged("position 5b", change=lambda data: data.drop_vars("cloze_accuracy"))
    assert found == ("open", "not measured: no cloze was made of this text", "not measured", "")
    assert "accuracy in order 0.800" in PAPER.judged("position 5b").measured

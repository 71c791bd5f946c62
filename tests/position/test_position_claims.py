"""Claims and sentences of one measure go by one rule: the first token, and which part of the text."""

import numpy as np
import pytest
import torch
import xarray as xr
from made_up import NOT_HELD, around, beside_itself, dataset_of, result_of, verdicts_beside_nulls

from tl_posgen import analyze
from tl_posgen.core.claim import Criterion
from tl_posgen.position import (
    AnyDistance,
    DummyDistance,
    LengthExtrapolation,
    MeanKey,
    Perturbation,
    PlaneSufficiency,
    Substitution,
    ThreeAxis,
    Variance,
)
from tl_posgen.position.claims import (
    CLAIMS,
    controlled_distance,
    downstream,
    left_over,
    length_claim,
    planes,
    position_and_content,
    two_axes,
    word_order,
)

OUT = {"tokens": "without first"}


@pytest.mark.longer
def test_what_is_left_over_is_judged_and_found_without_the_first_token(mini, alice):
    measures = ["residual", "across_prompts"]
    report = analyze(mini, alice, measures=measures, length=32, n_prompts=4, null_seeds=(), progress=False)
    measured = left_over(report["residual"], report["across_prompts"]).measured
    assert measured.startswith("first token left out")
    share, top = (report["residual"].numbers(name, **OUT) for name in ("share", "top_share"))
    assert f"leaves {share.plain:.0%} [{share.low:.0%}, {share.high:.0%}] of the variance within rows" in measured
    assert f"{top.plain:.0%} of that in one direction" in measured
    sentences = " ".join(report["residual"].findings())
    assert f"without the first token {share.plain:.0%}" in sentences
    assert f"One singular direction holds {top.plain:.0%}" in sentences


def beyond(**within):
    """Of ten heads, the share whose outputs are within the noise level beyond the training length, by condition."""
    shares = list(within.values())
    frechet = [
        [[[0.0, np.nan if share != share else float(head >= 10 * share)] for head in range(10)]] for share in shares
    ]
    of_heads, n = ("condition", "layer", "head", "segment"), len(shares)
    variables = {
        "frechet": (of_heads, frechet),
        "norm_ratio": (of_heads, np.ones((n, 1, 10, 2))),
        "noise_level": (("layer", "head"), np.full((1, 10), 0.5)),
        "segment_loss": (("condition", "prompt", "segment"), np.full((n, 2, 2), 2.0)),
        "plane_offset": (("condition", "shown_layer", "segment"), np.ones((n, 1, 2))),
    }
    return dataset_of(variables, condition=list(within), segment=range(2))


def test_the_loss_beyond_is_the_mean_over_all_segments():
    own = beyond(vanilla=0.5, lm_infinite=1.0)
    further = own.isel(segment=[1]).assign_coords(segment=[2])
    further["segment_loss"] += 1
    three = xr.concat([own, further], "segment", data_vars="minimal")
    measured = length_claim(result_of(LengthExtrapolation(times=3), three)).measured
    assert "mean from the training length to 3 times it" in measured
    assert "LM-Infinite 100%, loss 2.50 (+0.50); in brackets against 2.00 inside" in measured


@pytest.mark.parametrize(
    ("own", "verdict"),
    [
        ({"vanilla": 0.5, "lm_infinite": 1.0}, "held"),
        ({"vanilla": 0.5, "lm_infinite": 0.8}, "partly"),
        ({"vanilla": 1.0, "lm_infinite": 1.0}, "not held"),
        ({"vanilla": 0.5, "lm_infinite": np.nan}, "open"),
        ({"vanilla": np.nan, "lm_infinite": np.nan}, "open"),  # nothing beyond
        ({"vanilla": 0.5}, "open"),
    ],
)
def test_outputs_beyond_are_judged_where_they_were_measured(own, verdict):
    measure, stays = LengthExtrapolation(times=2), dict.fromkeys(own, 1.0)
    assert length_claim(result_of(measure, beyond(**own), beyond(**stays))).verdict == verdict
    assert length_claim(result_of(measure, beyond(**own))).null == ""


def of_planes(*kinds):
    """r and interaction of each kind of weights, the first token left out; other numbers with it."""
    dims = ("weights", "tokens")
    variables = {
        "pearson": ((*dims, "end"), [[NONE, around(r, 0.1)] for r, _ in kinds]),
        "interaction": ((*dims, "end"), [[NONE, around(share, 0.01)] for _, share in kinds]),
        "additive": ((*dims, "eps"), [[[0.1], [np.nan]] for _ in kinds]),
    }
    return dataset_of(variables, weights=["own", "shuffled"][: len(kinds)], eps=[PlaneSufficiency().eps])


def replaced(recovered, kl_recovered, shuffled=None):
    """Shares recovered by each query's profile, and by a search over shuffled q and k: a value and its ends each."""
    conditions = ["unchanged", "uniform_attention", "query_profile"]
    variables = {
        "loss": (("condition", "prompt"), [[2.0, 2.0], [3.0, 3.0], [2.1, 2.1]]),
        "recovered": (("condition", "end"), [around(1, 0), around(0, 0), recovered]),
        "kl_recovered": (("condition", "end"), [around(1, 0), around(0, 0), kl_recovered]),
    }
    if not shuffled:
        return dataset_of(variables, condition=conditions, prompt=[0, 1])
    families = {"free": around(0.99, 0.01), "position": around(0.6, 0.1), "shuffled": shuffled}
    variables["search_recovered"] = (("family", "end"), list(families.values()))
    return dataset_of(variables, condition=conditions, prompt=[0, 1], family=list(families))


@pytest.mark.parametrize(
    ("recovered", "kl_recovered", "shuffled", "verdict"),
    [
        (around(0.97, 0.01), around(0.96, 0.05), around(0.5, 0.1), "held"),
        (around(0.97, 0.01), around(0.8, 0.05), around(0.5, 0.1), "partly"),  # the loss alone may flatter
        (around(0.97, 0.01), around(0.96, 0.05), around(0.92, 0.05), "not held"),  # the intervals touch
        (around(0.97, 0.01), around(0.7, 0.05), around(0.5, 0.1), "not held"),
        ([0.97, np.nan, np.nan], around(0.96, 0.05), around(0.5, 0.1), "open"),  # fewer than four prompts
        (around(0.97, 0.01), around(0.96, 0.05), None, "held"),
        ([np.nan] * 3, [np.nan] * 3, None, "open"),  # attention is worth nothing
    ],
)
def test_two_axes_are_judged_by_what_is_not_fitted_above_a_null_that_relearns(
    recovered, kl_recovered, shuffled, verdict
):
    nothing = replaced([np.nan] * 3, [np.nan] * 3, shuffled and [np.nan] * 3)  # to recover, as at random init
    found = two_axes(result_of(Substitution(), replaced(recovered, kl_recovered, shuffled), nothing))
    assert found.verdict == verdict
    assert ("rotation and key per head, shuffled q and k 50% [40%, 60%]" in found.measured) == (
        shuffled == around(0.5, 0.1)
    )
    assert ("no null model has any" in found.margin) == (kl_recovered[0] == kl_recovered[0])


NONE = [np.nan] * 3
EXACT = result_of(
    AnyDistance(), dataset_of({"error": (("function", "planes"), [[1e-6]])}, function=["f"], planes=["inverse DFT"])
)


@pytest.mark.parametrize(
    ("trained", "random", "verdict"),
    [
        ((0.8, 0.2), [(0.2, 0.5)], "held"),
        ((0.8, 0.2), [(0.75, 0.5)], "not held"),  # not beyond the interval
        ((0.3, 0.2), [(0.7, 0.5)], "not held"),
        ((0.8, 0.4), [(0.2, 0.5)], "not held"),
        ((0.8, 0.2), [(0.2, 0.5), (0.2, 0.3)], "not held"),  # beside every random init
        ((np.nan, 0.2), [(0.2, 0.5)], "open"),
        ((0.8, 0.2), [], "open"),
    ],
)
def test_planes_are_judged_by_r_and_by_the_interaction_beside_random_init(trained, random, verdict):
    inits = [of_planes(one) for one in random]
    found = planes(result_of(PlaneSufficiency(), of_planes(trained, (0.1, 0.5)), *inits), EXACT)
    assert found.verdict == verdict
    assert ("; weights shuffled here: sum of plane scores" in found.null) == bool(random)


def test_the_refit_is_given_from_its_lowest_to_its_highest_distance_that_has_one():
    def measured(refits):
        numbers = {name: (("tokens",), [0.9, 0.8]) for name in ("additive_r", "key_part_r")}
        own = numbers | {
            "share": (("tokens", "part"), [[0.5], [0.4]]),
            "refit_r": (("tokens", "d0"), [[*NONE, 0.0], refits]),
        }
        data = dataset_of(own, part=["distance"], d0=[0, 8, 64, 256])
        return controlled_distance(result_of(DummyDistance(), data)).measured

    assert "against c, r 0.30 at 64 to 0.90 at 0" in measured([0.9, np.nan, 0.3, 0.7])
    assert "against c, r not defined" in measured([np.nan] * 4)


@pytest.mark.slow
def test_the_key_part_is_judged_without_the_first_token_and_above_random_init(mini, alice):
    result = DummyDistance(distances=(0,), limits=(8,))(mini, alice, length=64, n_prompts=4, progress=False)
    r = result.numbers("key_part_r", **OUT).value
    found = controlled_distance(result)
    assert found.verdict == Criterion("r", r, held=0.95, partly=0.75).verdict == "partly"
    assert f"key part's r is {r:.2f}" in found.measured
    assert controlled_distance(beside_itself(result, "0")).verdict == "not held"


def test_nothing_is_judged_of_scores_in_which_nothing_rotates(family_model):
    model, tokens = family_model("bloom", "bridge"), torch.arange(2, 26)[None]
    assert (
        controlled_distance(DummyDistance(distances=(0,), limits=(4,))(model, tokens, progress=False)).verdict == "open"
    )


def test_no_two_measures_call_a_number_interaction():
    assert "interaction" in [one.label for one in Variance.variables.values()]
    assert not [one for one in DummyDistance.variables.values() if "interaction" in one.label]
    assert "distance × key" in DummyDistance().labels()["part"]


def disturbed(few, many, index=0.5, features=0.5):
    """Rises of the loss by words at 5 % and 20 %, of the index and of the features at 20 %, alike in four prompts."""
    rises = np.array([[few, many], [0.1, index], [0.1, features]])
    dims = ("condition", "ratio", "reach", "target", "prompt")
    labels = {"condition": ["words", "positions", "position_part"], "ratio": [0.05, 0.2], "reach": ["uniform"]}
    return dataset_of({"change": (dims, rises[:, :, None, None, None].repeat(4, -1))}, **labels, target=["all"])


@pytest.mark.parametrize(
    ("rises", "verdict"),
    [
        ((0.1, 0.2), "held"),
        ((0.1, 0.1), "partly"),  # more than 10 % hardly matters either
        ((0.1, 0.2, 0.5, 0.3), "partly"),
        ((0.2, 0.3), "partly"),  # index and features alike
        ((0.2, 0.3, 0.5, 0.3), "not held"),
        ((np.nan, 0.3, 0.5, 0.3), "open"),
        ((0.1, 0.2, 0.0, 0.0), "held"),  # neither index nor features cost anything: alike
    ],
)
def test_order_is_judged_by_words_and_by_index_against_features(rises, verdict):
    found = word_order(result_of(Perturbation(ratios=(0, 0.05, 0.2)), disturbed(*rises), disturbed(0, 0, 0, 0)))
    assert found.verdict == verdict
    few, many = ("not defined" if one != one else f"{one:+.2f} [{one:+.2f}, {one:+.2f}]" for one in rises[:2])
    assert f"words {few} at 5%, {many} at 20%; index" in found.measured


def test_order_that_matters_no_more_than_at_random_init_is_not_held():
    result = result_of(Perturbation(ratios=(0, 0.05, 0.2)), disturbed(0.0, 0.2), disturbed(0.0, 0.3))
    assert word_order(result).verdict == "not held"


def test_order_is_open_where_a_condition_was_not_run():
    own = disturbed(0.1, 0.2).sel(condition=["words"])
    assert word_order(result_of(Perturbation(ratios=(0.05, 0.2)), own, own)).verdict == "open"


def cloze_of(few, many, whole=0.8, width=0.01):
    ends = [around(whole, 0), around(few, width), around(many, width)]
    labels = {"condition": ["words"], "ratio": [0, 0.05, 0.2]}
    texts = {"cloze_accuracy": (("condition", "ratio", "end"), [ends]), "of_items": (("item",), np.ones(40))}
    return dataset_of(texts, **labels)


@pytest.mark.parametrize(
    ("own", "of_init", "verdict"),
    [
        (cloze_of(0.795, 0.7), 0.3, "held"),
        (cloze_of(0.795, 0.79), 0.3, "partly"),
        (cloze_of(0.75, 0.7), 0.3, "not held"),
        (cloze_of(0.785, 0.7), 0.3, "open"),
        (cloze_of(0.75, 0.7, width=0.1), 0.3, "open"),
        (cloze_of(0.795, 0.7), 0.8, "not held"),
        (cloze_of(0.795, 0.7, whole=0.25), 0.1, "not held"),  # no better than chance
        (cloze_of(0.795, 0.7).drop_vars("cloze_accuracy"), 0.3, "open"),
    ],
)
def test_downstream_scores_are_judged_by_what_two_points_make(own, of_init, verdict):
    init = cloze_of(of_init, of_init, whole=of_init)
    assert downstream(result_of(Perturbation(ratios=(0, 0.05, 0.2)), own, init)).verdict == verdict


def additive(r, size=2.0):
    """Position + content: r, and the sizes of scores, position, content and interaction."""
    return dataset_of(
        {"additive_r": (("end",), around(r, 0.01)), "size": (("of",), [size, 0.5 * size, 0.4 * size, 0.1])},
        of=["scores", "position", "content", "interaction"],
    )


def fitted(r):
    return dataset_of({"r": (("tokens", "end"), [NONE, around(r, 0.01)]), "r_within_rows": ((), r)})


def at_distances(r):
    numbers = {name: (("tokens", "end"), [NONE, around(r, 0.01)]) for name in ("additive_r", "key_part_r")}
    more = {"share": (("tokens", "part"), [[0.5], [0.4]]), "refit_r": (("tokens", "d0"), [[0.5], [0.4]])}
    return dataset_of(numbers | more, part=["distance"], d0=[8])


HELD = {  # by claim: numbers beyond all thresholds, and a random init that is far from them
    "1": [result_of(Variance(), additive(0.97), additive(0.8, 0.2))],
    "1b": [result_of(ThreeAxis(), fitted(0.97), fitted(0.8)), result_of(MeanKey(), fitted(0.9), fitted(0.8))],
    "2": [
        result_of(Substitution(), replaced(around(0.97, 0.01), around(0.96, 0.01)), replaced(around(0.2, 0.1), NONE))
    ],
    "3": [result_of(DummyDistance(), at_distances(0.97), at_distances(0.5))],
    "4": [
        result_of(PlaneSufficiency(), of_planes((0.8, 0.2), (0.1, 0.5)), of_planes((0.2, 0.5), (np.nan, 0.5))),
        EXACT,
    ],
    "5": [result_of(Perturbation(ratios=(0, 0.05, 0.2)), disturbed(0.1, 0.2), disturbed(0, 0, 0, 0))],
    "5b": [result_of(Perturbation(ratios=(0, 0.05, 0.2)), cloze_of(0.795, 0.7), cloze_of(0.3, 0.3, whole=0.3))],
    "6": [
        result_of(LengthExtrapolation(times=2), beyond(vanilla=0.5, lm_infinite=1), beyond(vanilla=1, lm_infinite=1))
    ],
}


@pytest.mark.parametrize("claim", [one for one in CLAIMS if one.number not in ("7a", "7b")], ids=lambda one: one.name)
def test_no_claim_holds_where_a_null_does_as_well(claim):
    assert verdicts_beside_nulls(claim, *HELD[str(claim.number)]) == NOT_HELD


def test_the_sum_is_judged_by_its_best_fit_and_has_its_sizes_beside_it():
    found = position_and_content(result_of(Variance(), additive(0.9), additive(0.8, 0.2)))
    assert found.verdict == "partly"
    assert found.margin == "additive r 0.900, -0.050 from 0.950 (low end 0.890, +0.090 from random init 0.800)"
    assert found.measured.endswith("in logits: scores 2.00; position 1.00, content 0.80, interaction 0.10")
    assert found.null.startswith("random init: additive r 0.800")
    assert position_and_content(result_of(Variance(), additive(0.9), additive(0.895))).verdict == "not held"


def test_a_sum_is_not_judged_where_nothing_rotates():
    made = result_of(Variance(), additive(1.0), additive(0.8), encoding="alibi")
    assert position_and_content(made).verdict == "open"

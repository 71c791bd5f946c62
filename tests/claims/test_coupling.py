"""The claims on coupling: verdicts at thresholds and beside nulls, on results of given numbers."""

from functools import partial

import numpy as np
import pytest
from judged import CLAIMS, FAR, MadeUp, at_each, needs_of, without_intervals
from made_up import around, dataset_of

from tl_posgen.claims import judge
from tl_posgen.claims.coupling import OF_TOKENS
from tl_posgen.coupling import Coupling, TokenCoupling
from tl_posgen.studies.emergence import Emergence

# Numbers of each claim, in datasets: without arguments, such that the claim is held


def over_training(values=(0.1, 0.2, 0.3), half=0.02, name="coupling_coupling"):
    steps = [0, 10, 20][: len(values)]
    data = {"step": (("checkpoint",), steps), name: (("checkpoint", "end"), [around(one, half) for one in values])}
    made = dataset_of(data, checkpoint=[f"step{one}" for one in steps])
    made[name].attrs["measure"] = name.split("_")[0]
    if name == "coupling_coupling":
        made[name] = made[name].expand_dims(version=["absolute"], bases=["aligned"])
    return made.assign_attrs(measures=["coupling"])


def coupled(low=0.28, high=0.32, swapped=None, chance=0.02, score=1.2, r2=0.95, states=5):
    of_bases, of_versions = ("version", "bases", "end"), ("version",)
    own = [0.3, low, high]
    aligned = [[own, own if swapped is None else around(swapped, 0)], [around(0.1, 0), around(0.1, 0)]]
    variables = {
        "coupling": (of_bases, aligned),
        "chance": (of_versions, [chance, 0.0]),
        "negative_share": ((), 0.4),
        "line_shape_score": (("end",), around(score, 0.02)),
        "growth_r2": (("end",), around(r2, 0.02)),
        "expodistance": ((), 0.3),
        "log_norm": (("state",), np.zeros(states)),
    }
    return dataset_of(variables, version=["absolute", "signed"], bases=["aligned", "swapped"])


def between(low=0.3, chance=0.02, **of_kind):
    ends = [around(of_kind.get(kind, low), 0) for kind in OF_TOKENS]
    variables = {"coupling": (("kind", "end"), ends), "chance": (("kind", "token"), np.full((3, 3), chance))}
    return dataset_of(variables, kind=list(OF_TOKENS))


COUPLING, TRAINING = (Coupling(k=30), coupled), Emergence(per_head=False)
STRAIGHTENED = partial(over_training, values=(1.9, 1.6, 1.4), name="coupling_line_shape_score")
GROWN = partial(over_training, values=(0.5, 0.7, 0.95), name="coupling_growth_r2")
MADE = {  # by claim: each measure and what makes its numbers; a null that is far from those that hold, None for its own
    "coupling 1": ([COUPLING], {"low": 0.0, "high": 0.03}),
    "coupling 2": ([COUPLING], {"score": 2.0}),
    "coupling 3": ([COUPLING], {"r2": 0.2}),
    "coupling 4": ([(TRAINING, over_training)], None),
    "coupling 4b": ([(TRAINING, STRAIGHTENED)], None),
    "coupling 4c": ([(TRAINING, GROWN)], None),
    "coupling 5": ([(TokenCoupling(k=30), between)], {"low": 0.0}),
}
PAPER = MadeUp(MADE)
EDGES = [  # claim, a number of the model, and the verdict at each of these values of it beside the far null
    ("coupling 1", "low", {0.1999: "partly", 0.1: "partly", 0.0999: "detectable"}),
    ("coupling 1", "swapped", {0.1: "partly", 0.01: "detectable"}),  # left with right, too; one of both
    ("coupling 2", "score", {1.25: "held", 1.2501: "partly", 2.1: "not held"}),
    ("coupling 3", "r2", {0.9: "held", 0.8999: "detectable"}),
    ("coupling 4", "values", {(0.1, 0.4, 0.3): "partly", (0.1, 0.3, 0.12): "not held"}),
    ("coupling 4", "values", {(0.3,): "open"}),  # one checkpoint is no training
    ("coupling 4b", "values", {(1.9, 1.3, 1.4): "partly", (1.9, 1.5, 1.89): "not held"}),
    ("coupling 4c", "values", {(0.5, 0.7, 0.9): "held", (0.5, 0.97, 0.95): "partly"}),
    ("coupling 4c", "values", {(0.5, 0.6, 0.8999): "detectable", (0.5, 0.6, 0.51): "not held"}),
    ("coupling 5", "low", {0.2: "held", 0.1999: "partly", 0.0999: "detectable", 0.01: "not held"}),
    ("coupling 5", "same_output", {0.1: "partly", 0.01: "detectable"}),  # not all three
]
VERDICTS = [  # claim, numbers of the model beside those that hold, those of null models, verdict
    *at_each(EDGES),
    ("coupling 1", {"low": 0.2}, [{"high": 0.19}], "held"),
    ("coupling 1", {"low": 0.2}, [{"high": 0.2}], "not held"),
    ("coupling 1", {"low": 0.1, "chance": 0.1}, FAR, "not held"),
    ("coupling 1", {}, [{"high": 0.03}, {"high": 0.9}], "not held"),  # every random init has to be cleared
    ("coupling 2", {}, [{"score": 1.22}], "not held"),  # straight, but no straighter than random init
    ("coupling 2", {}, [{"score": 2.0}, {"score": 1.21}], "not held"),
    ("coupling 3", {"r2": 0.96}, [{"r2": 0.91}], "partly"),  # random init grows exponentially too
    ("coupling 3", {"r2": 0.91}, [{"r2": 0.89}], "not held"),  # the intervals overlap
    ("coupling 3", {}, [{"r2": 0.92}, {"r2": 0.2}], "not held"),
    ("coupling 3", {"states": 2}, [{"states": 2}], "open"),  # a line through two states is exact
    ("coupling 5", {}, [{"low": 0.0}, {"low": 0.4}], "not held"),
]


@pytest.mark.parametrize(("name", "own", "nulls", "verdict"), VERDICTS, ids=lambda one: str(one).replace(" ", ""))
def test_a_verdict_is_given_at_its_thresholds_and_no_longer_just_beyond(name, own, nulls, verdict):
    assert PAPER.judged(name, own, nulls).verdict == verdict


@pytest.mark.parametrize(("need", "name"), needs_of(PAPER))
def test_a_verdict_needs(need, name):
    need(PAPER, name)


@pytest.mark.parametrize("name", ["coupling 1", "coupling 2", "coupling 3", "coupling 5"])
def test_where_ends_of_null_models_decide_each_of_them_needs_an_interval(name):
    [(key, result)] = PAPER.results(name, nulls=[MADE[name][1]] * 2).items()
    assert judge(CLAIMS[name], {key: result}).verdict == "held"
    for init in ("trained", "0", "1"):
        assert judge(CLAIMS[name], {key: without_intervals(result, init)}).verdict == "open"


def test_training_says_what_stands_for_the_null():
    found = PAPER.judged("coupling 4c")
    assert found.measured == "R² of ln |x| against depth at step 20 0.950 [0.930, 0.970]"
    assert found.null == "step 0 0.520"
    assert found.margin.endswith(" at step 20 0.950, +0.050 from 0.900 (low end 0.930, +0.410 from step 0 0.520)")
    found = PAPER.judged("coupling 4", change=lambda data: data.drop_vars("coupling_coupling"))
    assert found.measured == "coupling was not measured at two checkpoints or more"

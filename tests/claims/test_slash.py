"""The claims on the slash pattern: verdicts at thresholds and beside nulls, on results of given numbers."""

import numpy as np
import pytest
from judged import FAR, MadeUp, at_each, needs_of
from made_up import around, dataset_of

from tl_posgen.rope.frequency_bands import BANDS
from tl_posgen.slash import BandAblation, Cone, Slash, SlashTransfer
from tl_posgen.slash.slash_toy import SlashToy

# Numbers of each claim, in datasets: without arguments, such that the claim is held


def transfer(near=0.95, far=0.92, n=(12, 10)):
    """r of text with random tokens at D = 1 and 2, and how many heads are dominant on text there, others at D = 2."""
    x, z = np.linalg.qr(np.random.default_rng(0).normal(size=(900, 3)) * [0, 1, 1] + [1, 0, 0])[0][:, 1:].T
    scores = np.zeros((2, 30, 30, 3))
    for distance, r, dominant in zip((1, 2), (near, far), n, strict=True):
        x, z = -x, -z
        r, cut = r + 1e-9, np.mean(np.sort([*x, x.max() + 1])[-dominant - 2 : -dominant or None][:2])
        both = x - cut, r * x + (1 - r**2) ** 0.5 * z - cut
        scores[..., distance] = 0.1 + 0.01 * np.reshape(both, (2, 30, 30))
    variables = {
        "score": (("tokens", "source", "layer", "head", "distance"), np.stack([scores] * 2)),
        "uniform": (("layer", "distance"), np.full((30, 3), 0.01)),
    }
    labels = {"source": ["natural", "random"], **dict.fromkeys(("layer", "head"), range(30)), "distance": range(3)}
    return dataset_of(variables, **labels)


def cone(cosine=0.8, gains=(2.2, 2.2), alone=0.8, rest=0.1, r1=0.95, dominant=True, n_prompts=4, biases=None):
    """Of one head, dominant or not, with a slash score of .5, .1 of it that of uniform attention, or more that of
    biases alone."""
    heads, none = ("tokens", "layer", "head"), 0.1 if biases is None else biases
    labels = ["measured", "axis only", "off axis"]
    scores = [0.5, *(none + (0.5 - none) * part for part in (alone, rest))]
    if biases is not None:  # without them neither part makes a slash, and r1 is .5
        scores = [0.5, 0.1, 0.1, biases, *scores[1:]]
        labels += ["bias only", "axis and bias", "off axis and bias"]
    variables = {
        "cosine": (("layer", "tokens", "end"), [[around(cosine, 0.05)] * 2]),
        "gain": (("side", "end"), [around(gain, 0.1) for gain in gains]),
        "r1": (("tokens", "side", "layer", "head", "end"), [[[[around(r1, 0.01)]]] * 2] * 2),
        "slash_score": (
            ("tokens", "input", "layer", "head", "prompt"),
            [[[[[one] * n_prompts]] for one in scores]] * 2,
        ),
        "best_uniform": (heads, [[[0.1]]] * 2),
        "slash_distance": (heads, [[[1]]] * 2),
        "dominant": (heads, [[[dominant]]] * 2),
    }
    if biases is not None:
        variables["r1_without_bias"] = variables["r1"][0], np.full((2, 2, 1, 1, 3), 0.5)
    return dataset_of(variables, input=labels, side=["q", "k"])


def ablated(thirds=(0.21, 0.55, 1.03, 0.08), wavelength=None, planes=(5, 5, 6), dominant=True):
    """Of one head, that scores .2 unchanged: the shares left without each band, and on the low one alone."""
    left, n_planes = {"unchanged": 1.0, "no_rope": 0.1}, {"unchanged": 16, "no_rope": 16}
    for scheme, shares in {"thirds": thirds, "wavelength": wavelength}.items():
        names = [f"drop {band}, {scheme}" for band in BANDS] + [f"keep low, {scheme}"]
        left |= dict(zip(names, shares or (), strict=False))
        n_planes |= dict(zip(names, (*(planes if scheme == "thirds" else (5, 5, 6)), 6), strict=True)) if shares else {}
    of_head, n = ("condition", "layer", "head"), len(left)
    variables = {
        "score": ((*of_head, "prompt"), 0.2 * np.repeat([*left.values()], 4).reshape(n, 1, 1, 4)),
        "dominant": ((*of_head, "short_distance"), np.full((n, 1, 1, 1), dominant)),
        "loss": (("condition", "prompt"), np.ones((n, 4))),
        "n_planes": (("condition", "model_layer"), np.array([n_planes[one] for one in left])[:, None]),
    }
    return dataset_of(variables, condition=list(left))


def of_toy(trained=0.9, unseen=0.9, before=0.02):
    scores = [[[before, trained], [before, 0.95]], [[before, unseen], [before, 0.96]]]
    variables = {
        "score": (("features", "seed", "step"), scores),
        "r1": (("side", "seed", "step"), np.full((2, 2, 2), 0.9)),
        "uniform": (("distance",), np.full(48, 0.03)),
    }
    return dataset_of(variables, features=["trained", "unseen"], step=[0, 500], distance=range(48))


def long_slashes(counts=(1, 3), n=128, window=128):
    """Of two heads, at how many long distances each is dominant without the first token."""
    variables = {
        "n_long": (("tokens", "layer", "head"), [[[9, 9]], [list(counts)]]),  # with the first token all would be
        "score": (("layer", "head", "distance"), np.ones((1, 2, n))),
        "uniform": (("layer", "distance"), [np.where(np.arange(n) < window, 0.01, 0.0)]),
    }
    return dataset_of(variables, tokens=["all", "without first"], distance=range(n))


CONE = (Cone(), cone)
MADE = {  # by claim: each measure and what makes its numbers; a null that is far from those that hold, None for its own
    "slash 1": ([(SlashTransfer(), transfer)], {"near": 0.2, "far": 0.3}),
    "slash 2": ([CONE], {"r1": 0.5}),
    "slash 3a": ([CONE], {"cosine": 0.4}),
    "slash 3b": ([CONE], {"gains": (1, 1)}),
    "slash 3c": ([CONE], {"dominant": False}),
    "slash 4": ([(BandAblation(), ablated)], {"thirds": (1, 1, 1, 1), "wavelength": (1, 1, 1, 1), "dominant": False}),
    "slash 5": ([(SlashToy(seeds=(0, 1), steps=500), of_toy)], None),
    "slash 6": ([(Slash(), long_slashes)], {"counts": (0, 0)}),
}
PAPER = MadeUp(MADE)
EDGES = [  # claim, a number of the model, and the verdict at each of these values of it beside the far null
    ("slash 1", "far", {0.9: "held", 0.8999: "partly", 0.6: "partly", 0.5999: "not held"}),  # the least decides
    ("slash 1", "n", {(0, 0): "open", (9, 0): "open", (5, 4): "open", (5, 5): "held"}),  # ten heads, if together
    ("slash 2", "r1", {0.9: "held", 0.8999: "partly", 0.7: "partly", 0.6999: "not held"}),
    ("slash 2", "dominant", {False: "open"}),
    ("slash 3a", "cosine", {0.76: "held", 0.7499: "partly"}),  # its lower end decides
    ("slash 3b", "gains", {(2.2, 2.11): "held", (2.2, 2.09): "partly", (2.2, 1.61): "partly"}),
    ("slash 3b", "gains", {(2.2, 1.59): "detectable", (2.2, 1): "detectable", (1.1, 1): "not held"}),  # one of both
    ("slash 3c", "alone", {0.7499: "partly", 0.3999: "not held"}),
    ("slash 3c", "rest", {0.2501: "partly"}),
    ("slash 4", "thirds", {(0.21, 0.55, 0.7501, 0.2499): "held"}),
    ("slash 4", "thirds", {(0.21, 0.55, 0.71, 0.11): "partly"}),  # low costs .29, the others .62 in the mean
    ("slash 4", "thirds", {(0.21, 0.98, 1.00, 0.08): "partly"}),  # the medium band makes nothing of it
    ("slash 4", "thirds", {(0.21, 0.55, 1.00, 0.60): "partly"}),  # the low band makes much of it alone
    ("slash 4", "thirds", {(0.45, 0.59, 0.62, 0.16): "not held", (1.0,) * 4: "not held"}),  # all, or none, cost alike
    ("slash 4", "dominant", {False: "open"}),
    ("slash 4", "planes", {(8, 8, 0): "open"}),
    ("slash 5", "unseen", {0.4999: "partly"}),
    ("slash 5", "trained", {0.4999: "not held"}),
    ("slash 5", "before", {0.9: "not held"}),  # no better than before training, its null
    ("slash 6", "counts", {(0, 0): "not held"}),
]
VERDICTS = [  # claim, numbers of the model beside those that hold, those of null models, verdict
    *at_each(EDGES),
    ("slash 1", {"far": 0.5, "n": (12, 9)}, FAR, "held"),  # not by nine heads
    ("slash 1", {"near": 0.95, "far": 0.7, "n": (9, 2)}, FAR, "held"),  # .905 by heads
    ("slash 1", {"near": 0.95, "far": 0.7, "n": (8, 3)}, FAR, "partly"),
    ("slash 1", {"near": 0.95, "far": 0.7, "n": (8, 3)}, [{"near": 0.95, "far": 0.69}], "not held"),
    ("slash 2", {"r1": 0.83}, [{"r1": 0.8, "dominant": False}], "partly"),
    ("slash 2", {"r1": 0.83}, [{"r1": 0.825, "dominant": False}], "not held"),  # the interval reaches it
    ("slash 3a", {"cosine": 0.38}, [{"cosine": 0.42}], "not held"),
    ("slash 3c", {"alone": 1.45, "rest": 0.2}, FAR, "held"),  # a ratio, not a share
    ("slash 3c", {"alone": 0.5, "rest": 0.6}, FAR, "not held"),
    ("slash 3c", {}, [{"alone": 0.9}], "not held"),
    ("slash 2", {"biases": 0.4}, FAR, "held"),  # of Q and K as they are; r1 without biases is told beside
    ("slash 3c", {"biases": 0.4}, FAR, "held"),  # with the rest the head scores .41 of .5, nearly all of it by biases
    ("slash 3c", {"biases": 0.4, "alone": 0.3}, FAR, "not held"),
    ("slash 4", {}, [{"thirds": (0.2, 0.2, 0.9, 1.0), "dominant": False}], "not held"),
    ("slash 5", {"trained": 0.5, "unseen": 0.5}, FAR, "held"),
    ("slash 6", {"counts": (1, 0)}, [{"counts": (0, 2)}], "not held"),
    ("slash 6", {"counts": (0, 0), "n": 99}, [{"counts": (0, 0), "n": 99}], "open"),
    ("slash 6", {"window": 20}, [{"counts": (0, 0), "window": 20}], "open"),
]


@pytest.mark.parametrize(("name", "own", "nulls", "verdict"), VERDICTS, ids=lambda one: str(one).replace(" ", ""))
def test_a_verdict_is_given_at_its_thresholds_and_no_longer_just_beyond(name, own, nulls, verdict):
    assert PAPER.judged(name, own, nulls).verdict == verdict


@pytest.mark.parametrize(("need", "name"), needs_of(PAPER))
def test_a_verdict_needs(need, name):
    need(PAPER, name)


HELD, PARTLY = (0.21, 0.55, 1.03, 0.08), (0.21, 0.55, 1.00, 0.60)


@pytest.mark.parametrize(
    ("thirds", "wavelength", "planes", "verdict", "words"),
    [
        (HELD, HELD, (5, 5, 6), "held", ["thirds, held", "wavelength, held"]),
        (HELD, PARTLY, (5, 5, 6), "partly", ["thirds, held", "wavelength, partly"]),
        (PARTLY, (1, 1, 1.1, 1), (5, 5, 6), "not held", ["thirds, partly", "wavelength, not held"]),
        (HELD, PARTLY, (8, 8, 0), "partly", ["wavelength, partly"]),  # by the other a band has no plane
    ],
)
def test_schemes_are_judged_each_and_a_disagreement_is_shown(thirds, wavelength, planes, verdict, words):
    found = PAPER.judged("slash 4", {"thirds": thirds, "wavelength": wavelength, "planes": planes})
    assert found.verdict == verdict
    assert [one.partition(": ")[0] for one in found.measured.split("; ")] == words
    assert found.margin.startswith("wavelength: without high" if planes[2] == 0 else "thirds: without high")

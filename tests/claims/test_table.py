"""The table of claims: verdicts at thresholds and beside nulls, on results whose numbers are given."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import xarray as xr
from made_up import around, beside_itself, dataset_of, result_of

from tl_posgen.claims import PAPERS, judge
from tl_posgen.claims.coupling import OF_TOKENS
from tl_posgen.coupling import Coupling, TokenCoupling
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
from tl_posgen.position.substitution.substitution import AT_RANDOM, AT_SINKS
from tl_posgen.rope.frequency_bands import BANDS
from tl_posgen.slash import BandAblation, Cone, Slash, SlashTransfer
from tl_posgen.slash.slash_toy import SlashToy
from tl_posgen.studies.emergence import Emergence

CLAIMS = {claim.name: claim for claims in PAPERS.values() for claim in claims}
NAN = float("nan")
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
    data = replaced(loss, kl).assign_coords(condition=["unchanged", "uniform_attention", AT_SINKS["query_profile"]])
    control = replaced(random, random).isel(condition=[2]).assign_coords(condition=[AT_RANDOM])
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


def beyond(vanilla=0.5, lm_infinite=1.0):
    """Of ten heads, the share whose outputs are within the noise level beyond the training length, by condition."""
    within = {"vanilla": vanilla} | ({} if lm_infinite is None else {"lm_infinite": lm_infinite})
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


def over_training(values=(0.1, 0.2, 0.3), half=0.02, name="coupling_coupling"):
    steps = [0, 10, 20][: len(values)]
    data = {"step": (("checkpoint",), steps), name: (("checkpoint", "end"), [around(one, half) for one in values])}
    made = dataset_of(data, checkpoint=[f"step{one}" for one in steps])
    made[name].attrs["measure"] = name.split("_")[0]
    if name == "coupling_coupling":
        made[name] = made[name].expand_dims(version=["absolute"], bases=["aligned"])
    return made.assign_attrs(measures=["coupling"])


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


COUPLING, CONE, ORDER = (Coupling(k=30), coupled), (Cone(), cone), Perturbation(ratios=(0, 0.05, 0.2))
TRAINING = Emergence(per_head=False)
STRAIGHTENED = partial(over_training, values=(1.9, 1.6, 1.4), name="coupling_line_shape_score")
GROWN = partial(over_training, values=(0.5, 0.7, 0.95), name="coupling_growth_r2")
MADE = {  # by claim: each measure and what makes its numbers; a null that is far from those that hold, None for its own
    "position 1": ([(Variance(), additive)], {"r": 0.2}),
    "position 1b": ([(ThreeAxis(), fitted), (MeanKey(), fitted)], {"r": 0.2}),
    "position 2": ([(Substitution(), replaced)], {"loss": 0.2, "kl": NAN}),
    "position 2b": ([(Substitution(), at_sinks)], {"loss": 0.2, "kl": NAN}),
    "position 3": ([(DummyDistance(), at_distances)], {"r": 0.2}),
    "position 4": ([(Planes(), of_planes)], {"r": 0.2, "interaction": 0.5}),
    "position 5": ([(ORDER, disturbed)], dict.fromkeys(("few", "many", "index", "features"), 0)),
    "position 5b": ([(ORDER, cloze_of)], {"few": 0.3, "many": 0.3, "whole": 0.3}),
    "position 6": ([(LengthExtrapolation(times=2), beyond)], {"vanilla": 1.0}),
    "slash 1": ([(SlashTransfer(), transfer)], {"near": 0.2, "far": 0.3}),
    "slash 2": ([CONE], {"r1": 0.5}),
    "slash 3a": ([CONE], {"cosine": 0.4}),
    "slash 3b": ([CONE], {"gains": (1, 1)}),
    "slash 3c": ([CONE], {"dominant": False}),
    "slash 4": ([(BandAblation(), ablated)], {"thirds": (1, 1, 1, 1), "wavelength": (1, 1, 1, 1), "dominant": False}),
    "slash 5": ([(SlashToy(seeds=(0, 1), steps=500), of_toy)], None),
    "slash 6": ([(Slash(), long_slashes)], {"counts": (0, 0)}),
    "coupling 1": ([COUPLING], {"low": 0.0, "high": 0.03}),
    "coupling 2": ([COUPLING], {"score": 2.0}),
    "coupling 3": ([COUPLING], {"r2": 0.2}),
    "coupling 4": ([(TRAINING, over_training)], None),
    "coupling 4b": ([(TRAINING, STRAIGHTENED)], None),
    "coupling 4c": ([(TRAINING, GROWN)], None),
    "coupling 5": ([(TokenCoupling(k=30), between)], {"low": 0.0}),
}
COUNTS = {"position 6", "slash 1", "slash 5", "slash 6"}  # without an interval over prompts
FAR = "far"


def results_of(name, own=None, nulls=FAR, change=lambda data: data, **provenance):
    """Results of what the claim needs, with these numbers, and the far null or nulls of these."""
    made, far = MADE[name]
    nulls = ([] if far is None else [far]) if nulls == FAR else nulls
    found = {}
    for measure, builder in made:
        inits = [builder(**one) for one in nulls]
        found[measure.name] = result_of(measure, change(builder(**(own or {}))), *inits, **provenance)
    return found


def judged(name, own=None, nulls=FAR, **how):
    return judge(CLAIMS[name], results_of(name, own, nulls, **how))


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
    ("position 6", "vanilla", {0.9: "partly", 1.0: "not held"}),
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
    *((name, {key: value}, FAR, verdict) for name, key, edges in EDGES for value, verdict in edges.items()),
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
    assert judged(name, own, nulls).verdict == verdict


@pytest.mark.parametrize("name", MADE)
def test_a_claim_holds_and_does_not_where_a_null_does_as_well(name):
    assert judged(name).verdict == "held"
    results = results_of(name)
    for label, kind in {"0": "random init", "shuffled 0": "shuffled"}.items() if MADE[name][1] else ():
        found = judge(CLAIMS[name], {key: beside_itself(one, label) for key, one in results.items()})
        assert found.verdict == "not held"
        assert kind in found.margin
        assert found.null.startswith(f"{kind}: ")


def without_values(data):
    return data.map(lambda one: one * NAN if one.dtype.kind == "f" else one)


def without_intervals(result, *inits):
    """The result as if these models, or all, had fewer prompts than an interval takes."""

    def values_alone(one):
        return one.where((one["end"] == "value") | ~one["init"].isin(inits or one["init"].values))

    data = result.dataset if inits or "prompt" not in result.dataset.dims else result.dataset.isel(prompt=slice(3))
    data = data.map(lambda one: values_alone(one) if "end" in one.dims else one, keep_attrs=True)
    data = data.isel(group=slice(1)) if "group" in data.dims and not inits else data
    return replace(result, dataset=data)


@pytest.mark.parametrize("name", [one for one in MADE if one != "slash 6"])
def test_a_claim_is_open_where_its_number_is_not_defined(name):
    assert judged(name, change=without_values).verdict == "open"


@pytest.mark.parametrize("name", [one for one in MADE if one not in COUNTS])
def test_what_rests_on_an_interval_is_open_where_there_is_none(name):
    results = {key: without_intervals(one) for key, one in results_of(name).items()}
    assert judge(CLAIMS[name], results).verdict == "open"


@pytest.mark.parametrize("name", [one for one, (_, far) in MADE.items() if far])
def test_a_claim_is_open_without_a_null(name):
    found = judged(name, nulls=[])
    assert (found.verdict, found.null) == ("open", "")


@pytest.mark.parametrize("name", ["coupling 1", "coupling 2", "coupling 3", "coupling 5"])
def test_where_ends_of_null_models_decide_each_of_them_needs_an_interval(name):
    [(key, result)] = results_of(name, nulls=[MADE[name][1]] * 2).items()
    assert judge(CLAIMS[name], {key: result}).verdict == "held"
    for init in ("trained", "0", "1"):
        assert judge(CLAIMS[name], {key: without_intervals(result, init)}).verdict == "open"


@pytest.mark.parametrize("name", ["position 1", "position 3"])
def test_a_sum_is_not_judged_where_nothing_rotates(name):
    assert judged(name, encoding="alibi").verdict == "open"
    assert judged(name, encoding="alibi, rotary").verdict == "held"


def test_shares_that_hold_by_construction_are_not_judged():
    found = judged("position 2", encoding="alibi")
    assert (found.verdict, found.margin.split("; ")[0]) == ("open", "least share not defined")


# Words


def test_a_margin_and_words_name_thresholds_nulls_and_sizes():
    found = judged("position 1", {"r": 0.9}, [{"r": 0.8}])
    assert found.margin.startswith("additive r 0.900, -0.050 from 0.950 (low end 0.890, +0.090 from random init 0.800)")
    assert found.measured == "additive r 0.900 [0.890, 0.910]; over all scores 0.900 [0.890, 0.910]"
    assert found.null == "random init: additive r 0.800, over all scores 0.800"
    assert judged("position 1", {"r": 0.9}, [{"r": 0.895}]).verdict == "not held"


def test_order_is_open_where_a_condition_was_not_run_and_says_its_rises():
    assert judged("position 5", change=lambda data: data.sel(condition=["words"])).verdict == "open"
    told = {"words at 5%": 0.1, "words at 20%": 0.2, "index at 20%": 0.5, "features at 20%": 0.5}
    assert judged("position 5").measured == ", ".join(f"{name} {x:.2f} [{x:.2f}, {x:.2f}]" for name, x in told.items())


@pytest.mark.parametrize(("above", "verdict"), [(0.1, "partly"), (0.1001, "held")])
def test_words_at_ten_percent_have_to_matter_and_are_told(above, verdict):
    measure = Perturbation(ratios=(0, 0.05, 0.1, 0.2))
    result = result_of(measure, disturbed(above=above), disturbed(0, 0, 0, 0, 0))
    found = judge(CLAIMS["position 5"], {measure.name: result})
    assert found.verdict == verdict
    assert "words at 5% 0.10 [0.10, 0.10], words at 10% 0.10 [0.10, 0.10], words at 20%" in found.measured
    assert "words at 10% 0.10; " in found.margin


def test_both_estimators_of_a_narrower_sum_are_told_and_the_fit_alone_is_judged():
    results = results_of("position 1b")
    results["mean_key"] = result_of(MeanKey(), fitted(0.1), fitted(0.2))
    found = judge(CLAIMS["position 1b"], results)
    assert found.verdict == "held"
    assert found.measured == "r 0.970 [0.960, 0.980]; mean-key split's r 0.100 [0.090, 0.110]"


def test_without_a_cloze_downstream_scores_are_not_measured():
    found = judged("position 5b", change=lambda data: data.drop_vars("cloze_accuracy"))
    assert found == ("open", "not measured: no cloze was made of this text", "not measured", "")
    assert "accuracy in order 0.800" in judged("position 5b").measured


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
    found = judged("slash 4", {"thirds": thirds, "wavelength": wavelength, "planes": planes})
    assert found.verdict == verdict
    assert [one.partition(": ")[0] for one in found.measured.split("; ")] == words
    assert found.margin.startswith("wavelength: without high" if planes[2] == 0 else "thirds: without high")


def test_training_says_what_stands_for_the_null():
    found = judged("coupling 4c")
    assert found.measured == "R² of ln |x| against depth at step 20 0.950 [0.930, 0.970]"
    assert found.null == "step 0 0.520"
    assert found.margin.endswith(" at step 20 0.950, +0.050 from 0.900 (low end 0.930, +0.410 from step 0 0.520)")
    found = judged("coupling 4", change=lambda data: data.drop_vars("coupling_coupling"))
    assert found.measured == "coupling was not measured at two checkpoints or more"

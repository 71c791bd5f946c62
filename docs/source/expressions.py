"""Numbers that pages show and no variable holds: differences, extreme heads, counts; by measure."""

from collections.abc import Callable, Iterator
from typing import Any

from tl_posgen.core.measure import HEAD
from tl_posgen.core.number import Number
from tl_posgen.core.numbers import TRAINED, Numbers, at_init, mean_of

Entry = tuple[str, dict[str, Any], Number]  # name, labels, number


def expressions_of(result: Any) -> Iterator[dict[str, Any]]:
    """Yield the further numbers of a result as entries of docs/numbers.json."""
    for name, labels, number in EXPRESSIONS.get(result.name, lambda result: ())(result):
        yield {"name": name, **labels, **number.as_dict()}


def n_heads(numbers: Numbers, name: str) -> Entry:
    """Return how many heads have a value of a per-head variable."""
    return "n_heads", {}, Number(float(mean_of(at_init(numbers.array(name), TRAINED)).notnull().sum()))


def dummy_distance(result: Any) -> Iterator[Entry]:
    """Yield the agreement of the key part over pairs of different distances, and losses: at the best distance, and
    beyond limits."""
    numbers = result.numbers
    matrix = numbers.array("key_agreement", tokens="without first")
    yield (
        "mean_key_agreement",
        {"tokens": "without first"},
        numbers.number(matrix.where(matrix["d0"] != matrix["other_d0"])),
    )
    labels = result.measure.labels()
    yield "least_loss_at", {}, min((numbers("loss", condition=f"at {d0:.9g}") for d0 in labels["d0"]), key=float)
    for limit in labels["limit"]:
        yield "loss_beyond", {"limit": limit}, numbers("loss", condition=f"beyond {limit:.9g}")


def length_extrapolation(result: Any) -> Iterator[Entry]:
    """Yield what stands for all segments beyond the training length."""
    numbers = result.numbers
    for condition in numbers.data["condition"].values.tolist():
        beyond = result.measure.beyond(numbers, condition)
        yield "loss_beyond", {"condition": condition}, beyond["loss"]
        yield "within_noise", {"condition": condition}, beyond["within_noise"]
        ratio = (
            numbers.array("norm_ratio", condition=condition).isel(segment=slice(1, None)).mean("segment").median(HEAD)
        )
        yield "median_norm_ratio", {"condition": condition}, numbers.number(ratio)


def coupling(result: Any) -> Iterator[Entry]:
    """Yield means over pairs of layers and over tokens; the width and the number of blocks."""
    numbers = result.numbers
    for at in ({}, {"version": "signed"}, {"bases": "swapped"}):
        labels = {**result.measure.usual(), **at}
        yield "coupling", labels, numbers("coupling", **labels)
    if "linearisation" in numbers:
        yield "linearisation", {}, numbers("linearisation")
    yield "d_model", {}, Number(float(result.trained.attrs["d_model"]))
    yield "blocks", {}, Number(float(result.trained.sizes["state"] - 1))


def planes(result: Any) -> Iterator[Entry]:
    """Yield the correlation over heads of the sum of plane scores with the interaction share."""
    yield "score_interaction_r", {"tokens": "without first"}, result.measure.correlation(result.numbers)


def plane_perturbation(result: Any) -> Iterator[Entry]:
    """Yield the rise of the loss under each edit and its control, and the rank correlations over the map."""
    numbers, measure = result.numbers, result.measure
    for cost in numbers.data["cost"].values.tolist():
        rise = measure.rise_of(numbers, cost)
        for condition in numbers.data["condition"].values.tolist():
            at = {"condition": condition, "cost": cost}
            yield "rise", at, numbers.number(rise.sel(condition=condition))
        for edit in numbers.data["map_edit"].values.tolist() if "map_rise" in numbers else ():
            at = {"map_edit": edit, "part": "position", "cost": cost}
            yield "rho", at, measure.rho(numbers, edit, "position", cost)


def rules(result: Any) -> Iterator[Entry]:
    """Yield the rise of the loss under each rule."""
    for rule, rise in result.measure.rises(result.numbers).items():
        yield "rise", {"rule": rule}, rise


def slash(result: Any) -> Iterator[Entry]:
    """Yield how many heads there are."""
    yield n_heads(result.numbers, "slash_score")


def slash_transfer(result: Any) -> Iterator[Entry]:
    """Yield the correlation over heads of text with random tokens, and how many heads are dominant, by distance."""
    numbers, measure = result.numbers, result.measure
    for distance in measure.reached(numbers.data):
        at = {"tokens": "all", "short_distance": distance}
        yield "pearson", at, measure.correlation(numbers, distance)
        yield "jaccard", at, measure.jaccard(numbers, distance)
        for source in numbers.data["source"].values.tolist():
            yield "n_dominant", {**at, "source": source}, measure.n_dominant(numbers, distance, source)


def slash_ablation(result: Any) -> Iterator[Entry]:
    """Yield the score of the head that is strongest untouched, under each ablation."""
    numbers = result.numbers
    best = numbers.extreme("slash_score")
    head = {"layer": best.layer, "head": best.head}
    scores = numbers.data["slash_score"].sel(head)
    for condition in numbers.data["condition"].values.tolist():
        yield "strongest", {"condition": condition, **head}, Number(float(scores.sel(condition=condition)))
    yield "strongest_uniform", head, Number(float(numbers.data["best_uniform"].sel(head)))


def slash_planes(result: Any) -> Iterator[Entry]:
    """Yield means over slash-dominant heads of correlations."""
    from tl_posgen.slash.dominance import group_mean

    for name in ("correlation", "chance_correlation"):
        yield name, {"tokens": "all", "heads": "dominant"}, group_mean(result.numbers, name, "dominant")


def cone(result: Any) -> Iterator[Entry]:
    """Yield how many heads are slash-dominant, by the distance that they attend to most with the multiple of
    uniform attention that they pay there, and means over these and over the others."""
    from tl_posgen.slash import dominance

    numbers, group_mean = result.numbers, dominance.group_mean
    yield "n_dominant", {"tokens": "all"}, dominance.n_heads(numbers, "dominant")
    score, uniform = (numbers.array(name, tokens="all") for name in ("slash_score", "best_uniform"))
    place, dominant = (numbers.array(name, tokens="all") for name in ("slash_distance", "dominant"))
    for distances, (first, last) in {"0": (0, 0), "1": (1, 1), "2 to 4": (2, 4)}.items():
        heads = dominant.astype(bool) & (place >= first) & (place <= last)
        at = {"tokens": "all", "distances": distances}
        yield "n_dominant_at", at, numbers.number(heads.sum(HEAD))
        yield "times_uniform", at, numbers.number((score / uniform).where(heads).mean(HEAD))
    for group in dominance.GROUPS:
        at = {"tokens": "all", "heads": group}
        yield "best_uniform", at, group_mean(numbers, "best_uniform", group)
        for name in ("r1", "gain"):
            for side in "qk":
                yield name, {**at, "side": side}, group_mean(numbers, name, group, side=side)
        for part in numbers.data["input"].values.tolist():
            yield "slash_score", {**at, "input": part}, group_mean(numbers, "slash_score", group, input=part)


def band_ablation(result: Any) -> Iterator[Entry]:
    """Yield under each ablation the rise of the loss and the score of slash heads; the largest rise."""
    numbers = result.numbers
    for condition, rise in result.measure.rises(numbers).items():
        yield "loss_change", {"condition": condition}, rise
    for condition in numbers.data["condition"].values.tolist():
        yield "slash_score", {"condition": condition}, result.measure.slash_score(numbers, condition)
    loss = numbers.array("loss", condition=None).mean("prompt")
    largest = abs(loss - loss.sel(condition="unchanged")).max("condition")
    yield "largest_loss_change", {}, numbers.number(largest)


def bias_ablation(result: Any) -> Iterator[Entry]:
    """Yield the rise of the loss without biases."""
    for condition, rise in result.measure.rises(result.numbers).items():
        yield "rise", {"condition": condition}, rise


def slash_biases(result: Any) -> Iterator[Entry]:
    """Yield the correlation over heads of slash scores of biases alone with measured ones, by distance, and how many
    heads are dominant."""
    numbers, measure = result.numbers, result.measure
    for distance in numbers.data["short_distance"].values.tolist():
        yield "r", {"tokens": "all", "short_distance": distance}, measure.correlation(numbers, distance)
    for names in (("dominant",), ("dominant_alone",), ("dominant", "dominant_alone")):
        yield "n_dominant", {"tokens": "all", "by": " and ".join(names)}, measure.n_dominant(numbers, *names)


def gap(result: Any) -> Iterator[Entry]:
    """Yield the gaps between which a copy is no longer read and harm begins; what text, copy and needle cost
    at the largest gap."""
    numbers, last = result.numbers, result.trained["gap"].values[-1].item()
    for row in result.measure.table(numbers).to_dict("records"):
        condition = row["condition"]
        for name in ("reads", "lost", "harmless", "harm"):
            yield name, {"condition": condition}, Number(row[name])
        for task in ("text", "copy"):
            yield task, {"condition": condition}, numbers("loss", condition=condition, task=task, gap=last)
        yield (
            "recall",
            {"condition": condition, "at": "the largest gap"},
            numbers("recall", condition=condition, gap=last),
        )
    yield "largest_gap", {}, Number(float(last))


def slash_toy(result: Any) -> Iterator[Entry]:
    """Yield means over seeds at the first and at the last step."""
    numbers, measure = result.numbers, result.measure
    yield "loss", {"at": "start"}, measure.over_seeds(numbers.array("loss").isel(step=0))
    yield "loss", {"at": "end"}, measure.at_end(numbers, "loss")
    for features in ("trained", "unseen"):
        yield "score", {"at": "end", "features": features}, measure.at_end(numbers, "score", features=features)
    for side in "qk":
        yield "r1", {"at": "end", "side": side}, measure.at_end(numbers, "r1", side=side)


def substitution(result: Any) -> Iterator[Entry]:
    """Yield what attention is worth, shares of it that are recovered, their rank correlation with the fit of the
    scores, and how many conditions stand in for the scores."""
    from tl_posgen.position.substitution.conditions import NOT_OF_ALL

    numbers = result.numbers
    yield "worth", {}, result.measure.worth(numbers)
    for name, variable in {"recovered": "loss", "kl_recovered": "kl"}.items():
        for condition, share in result.measure.recovered(numbers, variable).items():
            yield name, {"condition": condition}, share
    for predictor in ("r", "attention_kl"):
        yield "rank", {"predictor": predictor}, result.measure.rank(numbers, predictor)
    yield "n_stand_ins", {}, Number(float(numbers.data.sizes["condition"] - len(NOT_OF_ALL)))


def sources(result: Any) -> Iterator[Entry]:
    """Yield the source with the largest share of position through keys, by layer, of the model and of random inits."""
    from tl_posgen.sources.sources import top_of

    of_model = result.numbers
    layers = of_model.data["layer"].values.tolist()
    yield "n_layers", {}, Number(float(len(layers)))
    for name, numbers in {"top": of_model, **({"top_of_inits": of_model.of_inits} if of_model.inits else {})}.items():
        for layer in layers[1:]:
            for source, share in top_of(numbers, "k", "position", layer, 1):
                yield name, {"layer": layer, "source": source}, share


def token_coupling(result: Any) -> Iterator[Entry]:
    """Yield the coupling of different tokens with one input, or one output, token: lowest and highest layer."""
    numbers = result.numbers
    between_tokens = numbers.array("coupling", kind=["same_input", "same_output"]).mean(("prompt", "token", "token_2"))
    yield "lowest", {}, numbers.number(between_tokens.min(("kind", "layer")))
    yield "highest", {}, numbers.number(between_tokens.max(("kind", "layer")))


EXPRESSIONS: dict[str, Callable[[Any], Iterator[Entry]]] = {
    function.__name__: function
    for function in (
        dummy_distance,
        length_extrapolation,
        coupling,
        token_coupling,
        slash,
        slash_transfer,
        slash_ablation,
        slash_planes,
        slash_toy,
        cone,
        band_ablation,
        bias_ablation,
        gap,
        slash_biases,
        planes,
        plane_perturbation,
        rules,
        sources,
        substitution,
    )
}

"""A metric in the place of the loss: in every measure that judges the running model, named wherever it is shown."""

import re

import pytest
import torch

import tl_posgen
from tl_posgen.errors import InputError
from tl_posgen.frequencies import Gap, PlaneCost
from tl_posgen.loss import Loss
from tl_posgen.models.loss import token_losses
from tl_posgen.models.metric import Metric
from tl_posgen.models.session import Choices, session_of
from tl_posgen.position import DummyDistance, LengthExtrapolation, Perturbation, Substitution
from tl_posgen.slash import BandAblation

pytestmark = pytest.mark.longer

TEXT = "The White Rabbit put on his spectacles and looked at the King, and the King at the Queen. " * 3
CUT = {"length": 32, "n_prompts": 2, "nulls": 0, "progress": False}
THIRDS = BandAblation(schemes=("thirds",))


def doubled(logits, tokens):
    """Twice the loss of each predicted token."""
    return -2 * logits[:, :-1].double().log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


@pytest.mark.parametrize(
    ("measure", "names"),
    [
        (THIRDS, ["loss"]),
        pytest.param(
            Perturbation(ratios=(0, 0.5), conditions=("tokens", "positions"), reaches=("uniform",), n_cloze=4),
            ["change"],
            marks=pytest.mark.slow,
        ),
        pytest.param(Substitution(), ["loss"], marks=pytest.mark.slow),
    ],
)
def test_every_value_of_the_loss_is_that_of_the_metric(small_model, measure, names):
    plain, metric = (measure(small_model, TEXT, metric=one, **CUT).trained for one in (None, doubled))
    for name in names:
        assert float(abs(plain[name]).max()) > 0.1
        torch.testing.assert_close(torch.tensor(metric[name].values), 2 * torch.tensor(plain[name].values))
    if "cloze_log_likelihood" in plain:
        assert metric["cloze_log_likelihood"].equals(plain["cloze_log_likelihood"])


def test_a_value_of_a_prompt_stands_at_each_of_its_targets(mini):
    own = tl_posgen.analyze(mini, TEXT, measures="loss", metric=lambda logits, _: logits[:, -1, 5], **CUT)[
        "loss"
    ].trained
    rows = tl_posgen.models.tokens.to_prompts(mini, TEXT, 32, 2)
    expected = mini(torch.stack(rows))[:, -1, 5].double()
    torch.testing.assert_close(torch.tensor(own["loss"].values), expected)


def test_titles_sentences_and_provenance_name_the_metric(small_model):
    result = THIRDS(small_model, TEXT, metric=doubled, heads=["1.2"], **CUT)
    assert result.provenance["metric"] == "doubled"
    assert any("the metric doubled, in its own unit" in sentence for sentence in result.findings())
    assert result.table().columns[:2].tolist() == ["condition", "metric"]
    for kind in result.kinds:
        assert "loss = doubled" in result.plot(kind).layout.title.text
    assert "metric" not in THIRDS(small_model, TEXT, heads=["1.2"], **CUT).provenance


def likelihood(logits, tokens):
    """The log-likelihood of each predicted token, of which higher is better."""
    return -doubled(logits, tokens) / 2


def words_of(result):
    """Return everything that a result says of its loss: sentences, legend, and the words of its figures."""
    figures = [result.plot(kind) for kind in result.kinds]
    axes = [
        axis.title.text
        for figure in figures
        for get in ("xaxes", "yaxes")
        for axis in getattr(figure, f"select_{get}")()
    ]
    notes = [note.text for figure in figures for note in figure.layout.annotations]
    titles = [figure.layout.title.text for figure in figures]
    return [*map(str, [*result.findings(), result.legend, *axes, *notes, *titles, *result.token_labels()])]


MEASURES = [
    Loss(),
    THIRDS,
    Gap(gaps=(0, 40), at=8, skip=2, needle=4),
    PlaneCost(edits=("drop",)),
    pytest.param(Perturbation(ratios=(0, 0.5), reaches=("uniform",), n_draws=1, n_cloze=0), marks=pytest.mark.slow),
    pytest.param(Substitution(), marks=pytest.mark.slow),
    pytest.param(DummyDistance(), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("metric", [doubled, likelihood])
@pytest.mark.parametrize("measure", MEASURES, ids=lambda measure: measure.name)
def test_words_are_true_of_a_metric_of_either_direction(mini, alice, measure, metric):
    settings = {"length": 64, "n_prompts": 4, "nulls": 0, "progress": False}
    plain, of_metric = (measure(mini, alice, metric=judge, **settings) for judge in (None, metric))
    assert any("nats" in text for text in words_of(plain))
    for text in words_of(of_metric):
        assert not re.search(r"\bnats\b(?! .*KL)|perplexity|\bworth\b|dearest|does harm|rises by", text), text
        assert not re.search(r"\bloss\b(?! = )", re.sub("in the place of the loss|^loss: ", "", text)), text


@pytest.mark.slow
def test_what_a_control_costs_is_said_as_a_difference_of_the_metric(mini, alice):
    settings = {"length": 64, "n_prompts": 4, "nulls": 0, "progress": False}
    higher, lower = (Substitution()(mini, alice, metric=metric, **settings) for metric in (doubled, likelihood))
    worth = [result.measure.worth(result.numbers).value for result in (higher, lower)]
    assert worth[0] == pytest.approx(-2 * worth[1])
    of_whole = f"of the metric under uniform attention less that of the unchanged model, {worth[0]:.3f} ["
    assert of_whole in higher.sentences[0]
    said = f"The metric under uniform attention less that of the unchanged model: {worth[1]:.3f} ["
    assert lower.sentences[0].startswith(said)
    assert lower.sentences[0].endswith("not surely above 0.01: shares of it are not defined.")


def test_a_comparison_speaks_of_the_metric(mini):
    report = tl_posgen.analyze(mini, TEXT, measures=["variance", "loss"], metric=doubled, **CUT)
    result = tl_posgen.compare(report, report)["comparison"]
    assert "Metric: +0.000, from " in result.findings()[0]
    assert not any("nats" in sentence for sentence in result.findings())


@pytest.mark.usefixtures("unchecked")
def test_a_logit_difference_is_called_on_logits(mini):
    metric = tl_posgen.logit_difference(mini, " and", " the", at=-2)
    logits = mini(torch.arange(12).view(2, 6))
    right, wrong = (mini.tokenizer(one, add_special_tokens=False).input_ids[0] for one in (" and", " the"))
    expected = logits[:, -2, right].double() - logits[:, -2, wrong].double()
    torch.testing.assert_close(metric(logits), expected)
    assert Metric("doubled", doubled)(logits, torch.arange(12).view(2, 6)).shape == (2, 5)
    with pytest.raises(InputError, match=r"logits of shape \[6, \d+\]; give \[prompt, pos, vocabulary\]"):
        metric(logits[0])


def test_the_loss_comes_back_after_an_error(mini):
    def broken(logits, tokens):
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        tl_posgen.analyze(mini, TEXT, measures="loss", metric=broken, **CUT)
    assert session_of(mini).choices == Choices()
    assert token_losses(mini, torch.arange(9)[None]).shape == (1, 8)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (3, "give a function of logits and tokens"),
        (lambda logits: logits, "give a function of logits and tokens; this one takes others"),
        (lambda logits, tokens: logits, r"metric '<lambda>': gives \(1, 32, \d+\) for 1 prompts of 32 tokens"),
        (lambda logits, tokens: 0.5, "gives float"),
        (Metric("nothing", lambda logits, tokens: torch.full((len(logits),), torch.nan)), "not finite"),
        (lambda logits, tokens: tokens[:, 1:] * 1j, "complex"),
    ],
)
def test_bad_metrics_are_refused(mini, metric, message):
    with pytest.raises(InputError, match=message):
        tl_posgen.analyze(mini, TEXT, measures="loss", metric=metric, **CUT)


def test_kept_parts_and_results_of_another_metric_are_refused(mini, tmp_path):
    with pytest.raises(InputError, match="what a metric does"):
        tl_posgen.analyze(mini, TEXT, measures="loss", metric=doubled, keep=tmp_path, **CUT)
    known = tl_posgen.analyze(mini, TEXT, measures="loss", **CUT)
    with pytest.raises(InputError, match="cannot know what a metric does"):
        tl_posgen.analyze(mini, TEXT, measures="loss", after=known, metric=doubled, **CUT)
    other = tl_posgen.analyze(mini, TEXT, measures="loss", metric=doubled, **CUT)
    with pytest.raises(InputError, match="judge by the loss and by doubled"):
        tl_posgen.compare(known, other)


def test_where_parts_of_a_prompt_are_compared_a_value_a_prompt_is_refused(mini):
    """One value for all tokens would say that nothing changes beyond the context, or across a gap."""
    metric = tl_posgen.logit_difference(mini, " and", " the", at=10)
    for measure, cut in ((LengthExtrapolation(inside=32, times=2), {}), (Gap(), {"length": 64})):
        with pytest.raises(InputError, match="one value for a whole prompt"):
            measure(mini, TEXT * 20, metric=metric, n_prompts=2, nulls=0, progress=False, **cut)


def test_a_metric_of_text_behind_a_gap_sees_the_whole_prompt(mini):
    """Its values are those at the same tokens of a whole pass, and not of logits that were cut before."""
    cut = {"length": 64, "n_prompts": 2, "nulls": 0, "progress": False}

    def place(logits, tokens):
        return torch.arange(tokens.shape[1] - 1.0).expand(len(tokens), -1)

    found = Gap(gaps=(0,), rules=(), skip=8)(mini, TEXT * 20, metric=place, **cut)
    text = found.trained["loss"].sel(task="text", gap=0, condition="unchanged")
    assert text.values.tolist() == [sum(range(40, 63)) / 23] * 2  # targets behind the half and 8 tokens more


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("token", "message"),
    [
        (" spectacles and", "tokens of this model"),
        (10**6, "has the ids 0 to"),
        (-1, "has the ids"),
        (None, "token None"),
        (" the", "one token"),
    ],
)
def test_logit_difference_refuses_what_is_not_a_token(mini, token, message):
    with pytest.raises(InputError, match=message):
        tl_posgen.logit_difference(mini, token, " the")

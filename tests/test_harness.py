"""lm-evaluation-harness' own HFLM answers under the hooks of a TransformerBridge: see docs/how_to/harness.md."""

import pytest
import torch

import tl_posgen
from tl_posgen.editing.replace_scores import replace_scores
from tl_posgen.editing.score_functions import RowByRow
from tl_posgen.errors import InputError

PAIRS = [("I do not", " know"), ("Down, down", " and"), ("The White Rabbit put on his", " spectacles"), ("", "He")]
INTERVENTIONS = {
    "none": lambda model: [],
    "half of the scores": lambda model: replace_scores(model, RowByRow(lambda capture: capture.scores() / 2)),
    "no attention": lambda model: [("blocks.1.attn.hook_z", lambda z, hook: torch.zeros_like(z))],
}


@pytest.fixture(scope="module")
def bridge():
    return tl_posgen.load_model("mini", backend="bridge")


@pytest.fixture
def ask(bridge):
    """(kind, arguments of the first, of the second, ...) -> the answers of HFLM."""
    instance = pytest.importorskip("lm_eval.api.instance", reason="lm-evaluation-harness is missing: extra eval")
    huggingface = pytest.importorskip("lm_eval.models.huggingface")

    def answers(kind, *arguments, batch_size=1):
        options = {"device": "cpu", "batch_size": batch_size}
        lm = huggingface.HFLM(pretrained=bridge.original_model, tokenizer=bridge.tokenizer, **options)
        requests = [instance.Instance(kind, {}, one, number) for number, one in enumerate(arguments)]
        return getattr(lm, kind)(requests, disable_tqdm=True)

    return answers


def log_probability(bridge, hooks, context, continuation):
    """sum_t ln p(x_t | x_<t) of the continuation, in one pass of the hooked bridge."""
    begin = bridge.tokenizer(context).input_ids or [bridge.tokenizer.bos_token_id]
    ids = begin + bridge.tokenizer(continuation, add_special_tokens=False).input_ids
    with torch.no_grad():
        log_p = bridge.run_with_hooks(torch.tensor([ids]), fwd_hooks=hooks)[0].double().log_softmax(-1)
    return sum(log_p[at - 1, ids[at]].item() for at in range(len(begin), len(ids)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the harness' own
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("name", INTERVENTIONS)
def test_log_likelihoods_are_those_of_the_hooked_model(bridge, ask, name, batch_size):
    hooks = INTERVENTIONS[name](bridge)
    with bridge.hooks(fwd_hooks=hooks):
        answers = ask("loglikelihood", *PAIRS, batch_size=batch_size)
    expected = [log_probability(bridge, hooks, *pair) for pair in PAIRS]
    assert [one for one, _ in answers] == pytest.approx(expected, abs=2e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_greedy_texts_are_those_of_the_hooked_model(bridge, ask):
    options, written = {"until": ["."], "max_gen_toks": 8, "do_sample": False}, {}
    for name, make in INTERVENTIONS.items():
        with bridge.hooks(fwd_hooks=make(bridge)):
            [written[name]] = ask("generate_until", ("Down, down", options))
            ids = bridge.tokenizer("Down, down", return_tensors="pt").input_ids
            for _ in range(8):
                ids = torch.cat([ids, bridge(ids)[:, -1:].argmax(-1)], 1)
        start = len(bridge.tokenizer("Down, down").input_ids)
        assert written[name] == bridge.tokenizer.decode(ids[0, start:], skip_special_tokens=True).split(".")[0]
    assert len(set(written.values())) > 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_scores_made_of_whole_prompts_are_asked_for_one_prompt_at_a_time(bridge, ask):
    with bridge.hooks(fwd_hooks=replace_scores(bridge, lambda capture: capture.k.mean() * capture.scores())):
        with pytest.raises(InputError, match=r"end with what may be padding.*batch_size=1"):
            ask("loglikelihood", *PAIRS, batch_size=4)
        assert len(ask("loglikelihood", *PAIRS, batch_size=1)) == len(PAIRS)

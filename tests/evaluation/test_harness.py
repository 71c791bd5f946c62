"""The LM in the harness: tasks, chats, its cache and log, and what it refuses."""

import json
import socket
import subprocess
import sys

import pytest
from plain_answers import PAIRS, STOP, TEXT, assert_alike, silence

from tl_posgen.errors import InputError, PosgenError
from tl_posgen.evaluation import LensLM, MissingExtraError, with_harness_base

DOCS = {
    "choice": [
        {"context": context, "choices": ["the river and the sea.", "a house", "him"], "gold": number % 3}
        for number, context in enumerate(["The girl lived by", "He went to", "They all looked for", f"{TEXT}Then came"])
    ],
    "cloze": [{"context": context, "target": target} for context, target in PAIRS if context.strip()],
    "perplexity": [{"text": TEXT}, {"text": "He was not there."}, {"text": 4 * TEXT}],
    "generation": [{"context": "Once upon a time"}, {"context": "He was one of"}, {"context": TEXT}],
}
TASKS = {
    "choice": {"output_type": "multiple_choice", "doc_to_choice": "choices", "doc_to_target": "gold"},
    "cloze": {"output_type": "loglikelihood", "doc_to_target": "{{target}}", "target_delimiter": ""},
    "perplexity": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"},
    "generation": {"output_type": "generate_until", "doc_to_target": "", "generation_kwargs": STOP},
}
METRICS = {
    "choice": ("acc", "acc_norm"),
    "cloze": ("perplexity", "acc"),
    "perplexity": ("word_perplexity", "byte_perplexity"),
    "generation": ("bypass",),
}


@pytest.fixture
def evaluate(ask, tmp_path, monkeypatch):
    """`simple_evaluate` of local tasks, with no network: samples and results by task."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    def refuse(*_):
        raise AssertionError("a test reached for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_OFFLINE", True)
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # it asks pip for what is installed
    for name, docs in DOCS.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
        files = {"data_files": {"test": str(tmp_path / f"{name}.jsonl")}, "cache_dir": str(tmp_path / "cache")}
        task = {"task": f"local_{name}", "dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
        task |= {"doc_to_text": "{{context}}", "metric_list": [{"metric": one} for one in METRICS[name]]}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(task | TASKS[name]))  # JSON is YAML
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)

    def run(lm, *names, **options):
        tasks = [f"local_{name}" for name in names or TASKS]
        keywords = {"model": lm, "tasks": tasks, "task_manager": manager, "bootstrap_iters": 0, **options}
        return simple_evaluate(**keywords)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), [("mini", "bridge"), ("stories260K", "hooked")])
def test_tasks_of_the_harness_come_out_as_with_its_own_model(evaluate, hflm, load, name, backend):
    ours = evaluate(LensLM(load(name, backend), max_length=128, batch_size=2, progress=False))
    theirs = evaluate(hflm(name, max_length=128, batch_size=1))
    for task, samples in theirs["samples"].items():
        for mine, sample in zip(ours["samples"][task], samples, strict=True):
            assert mine["arguments"] == sample["arguments"]
            for answer, reference in zip(mine["filtered_resps"], sample["filtered_resps"], strict=True):
                if isinstance(reference, tuple):
                    assert_alike([answer], [reference])
                else:
                    assert answer == (reference if isinstance(reference, str) else pytest.approx(reference, abs=1e-3))
        numbers = {metric: value for metric, value in theirs["results"][task].items() if isinstance(value, float)}
        assert {metric: ours["results"][task][metric] for metric in numbers} == pytest.approx(numbers, rel=1e-4)
    assert ours["config"]["fwd_hooks"] == []


def test_chats_are_written_by_the_tokenizers_template_and_have_one_bos(evaluate, lens, monkeypatch):
    lm = lens()
    template = "{{ bos_token }}{% for turn in messages %}[{{ turn.role }}]{{ turn.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}[assistant]{% endif %}"
    monkeypatch.setattr(lm.tokenizer, "chat_template", template)
    [sample, *_] = evaluate(lm, "choice", apply_chat_template=True)["samples"]["local_choice"]
    context = sample["arguments"][0][0]
    assert context == "<s>[user]The girl lived by[assistant]"
    assert lm.tok_encode(context).count(lm.tokenizer.bos_token_id) == 1


def test_cut_contexts_are_named_in_the_log(ask, lens, caplog):
    lm = lens(max_length=32)
    lm.loglikelihood(ask("loglikelihood", PAIRS[0], (TEXT, " Then"), (TEXT, " He")))
    assert [text for text in caplog.messages if "cut" in text] == [
        "2 of 3 requests do not fit into 32 tokens: their contexts are cut on the left, as HFLM does"
    ]
    caplog.clear()
    lm.generate_until(ask("generate_until", ("He was", STOP), (TEXT, STOP)))
    assert "1 of 2 requests do not fit into 32 tokens" in caplog.text


@pytest.mark.parametrize("progress", [True, False])
def test_progress_is_shown_unless_it_is_not_wanted(ask, load, capsys, progress):
    lm = LensLM(load("mini"), progress=progress)
    requests = {"loglikelihood": PAIRS[0], "loglikelihood_rolling": ("He",), "generate_until": ("He", STOP)}
    for kind, arguments in requests.items():
        getattr(lm, kind)(ask(kind, arguments))
        assert ("1/1" in capsys.readouterr().err) == progress


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("loglikelihood", PAIRS[:4]),
        ("loglikelihood_rolling", [(doc["text"],) for doc in DOCS["perplexity"]]),
        ("generate_until", [(doc["context"], STOP) for doc in DOCS["generation"]]),
    ],
)
def test_answers_are_read_from_the_harness_cache(ask, lens, tmp_path, kind, arguments):
    from lm_eval.api.model import CachingLM

    seen = []
    lm = lens(lambda tokens: seen.append(tokens) or [])
    CachingLM(lm, str(tmp_path / "cache.db"))
    direct = getattr(lm, kind)(ask(kind, *arguments))  # past the cache's own bookkeeping, as in an interrupted run
    assert seen
    seen.clear()
    assert getattr(CachingLM(lm, str(tmp_path / "cache.db")), kind)(ask(kind, *arguments)) == direct
    assert not seen


def test_the_harness_takes_it_for_one_of_its_own(load, ask):
    from lm_eval.api.model import LM

    for cls in (LensLM, type("Mine", (LensLM,), {})):
        lm = cls(load("mini"))
        assert isinstance(lm, LM)
        assert isinstance(lm, cls)
        assert type(lm).__name__ == cls.__name__


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("backend", ["hooked", "bridge"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 0}, "batch_size 0"),
        ({"max_length": 0}, "max_length 0"),
        ({"fwd_hooks": [("blocks.9.attn.hook_z", silence)]}, "no hook point 'blocks.9.attn.hook_z'"),
        ({"fwd_hooks": [("blocks.0.attn.hook_result", silence)]}, "blocks.0.attn.hook_result does not fire"),
        ({"fwd_hooks": [("blocks.1.attn.hook_z", None)]}, "is no hook; give pairs"),
    ],
)
def test_unusable_options_are_refused(ask, load, backend, options, words):
    with pytest.raises(InputError, match=words):
        LensLM(load("mini", backend), **options)


def test_a_context_that_the_model_cannot_run_is_refused(ask, load):
    with pytest.raises(InputError, match=r"513 tokens.*512"):
        LensLM(load("mini", "hooked"), max_length=513)


def test_a_hook_that_the_model_does_not_have_is_refused_from_a_function_too(ask, lens):
    for point in ("hook_zz", "hook_result"):
        lm = lens(lambda tokens, point=point: [(f"blocks.0.attn.{point}", silence)])
        with pytest.raises(InputError, match=point):
            lm.loglikelihood(ask("loglikelihood", PAIRS[0]))


def test_a_model_without_a_tokenizer_is_refused(ask, load, monkeypatch):
    monkeypatch.setattr(load("mini"), "tokenizer", None)
    with pytest.raises(InputError, match="no tokenizer"):
        LensLM(load("mini"))


@pytest.mark.slow
def test_the_import_brings_neither_the_harness_nor_transformer_lens():
    code = "import sys, tl_posgen.evaluation; print({'lm_eval', 'transformer_lens', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_a_missing_harness_is_named_with_its_extra_before_a_model_is_loaded(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with_harness_base.cache_clear()
    with pytest.raises(MissingExtraError, match=r'pip install "\.\[eval\]"') as raised:
        LensLM("no/such-model")
    assert isinstance(raised.value, ImportError)
    assert isinstance(raised.value, PosgenError)

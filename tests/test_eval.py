"""The harness' LM over a hooked model: numbers of plain Hugging Face and of the harness' own HFLM; hooks at work."""

import json
import random
import socket
import subprocess
import sys
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tl_posgen import load_model
from tl_posgen.errors import InputError, ModelError, PosgenError
from tl_posgen.evaluation import LensLM, MissingExtraError, with_harness_base
from tl_posgen.hooks.replace_scores import replace_scores
from tl_posgen.models.conversion.source import MINI

BOTH = [(name, backend) for name in ("mini", "stories260K") for backend in ("hooked", "bridge")]
PAIRS = [
    ("Once upon a time there was a little girl who lived in", " a house near the wood."),
    ("Once upon a time there was a little girl who lived in", " the"),
    ("Once upon a time there was a little girl who lived in", " a"),
    ("She looked at him, and he looked at  ", "her"),  # spaces that belong to the continuation
    ("The sun", " was"),
    ("", "The sun was very hot."),
    ("", "He"),
    ("   ", "and so on"),
    ("I do not", " know"),
    ("<s>I do not", " know"),
    ("One\ntwo\nthree", "\nfour"),
    ("The rabbit ran and ran until it came to the", " river, and then it stopped."),
]
STOP = {"until": ["."], "max_gen_toks": 24, "do_sample": False}


@pytest.fixture(scope="session")
def ask():
    """Requests as the harness makes them: ask(kind, arguments of the first, arguments of the second, ...)."""
    instance = pytest.importorskip("lm_eval.api.instance", reason="lm-evaluation-harness is missing: extra eval")
    return lambda kind, *pairs: [instance.Instance(kind, {}, pair, number) for number, pair in enumerate(pairs)]


@pytest.fixture(scope="session")
def directory(request):
    return lambda name: MINI if name == "mini" else request.getfixturevalue("shared") / "models" / name


@pytest.fixture(scope="session")
def load(directory):
    """(name, backend) -> a model of TransformerLens."""
    made = cache(lambda name, backend: load_model(directory(name), backend=backend))

    def model(name, backend="bridge"):
        try:
            return made(name, backend)
        except ModelError as error:
            if backend == "hooked" and "HookedTransformer" in str(error):
                pytest.skip(str(error))
            raise

    return model


@pytest.fixture(scope="session")
def lens(load):
    """`LensLM` of the bundled model as a bridge, or of another model, without progress bars."""
    return lambda *hooks, model=None, **options: LensLM(model or load("mini"), *hooks, progress=False, **options)


@pytest.fixture(scope="session")
def plain(directory):
    """name -> model and tokenizer of transformers, of which TransformerLens knows nothing."""
    return cache(lambda name: (plain_model(directory(name)), AutoTokenizer.from_pretrained(directory(name))))


def plain_model(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def hflm(plain):
    def made(name, **options):
        huggingface = pytest.importorskip("lm_eval.models.huggingface", reason="lm-evaluation-harness is missing")
        model, tokenizer = plain(name)
        return huggingface.HFLM(model, tokenizer=tokenizer, **{"device": "cpu", "batch_size": 3, **options})

    return made


def encoded(tokenizer, context, continuation):
    """Token ids of a request, and where its continuation starts."""
    text, context = context + continuation, context.rstrip(" ")
    if not context:
        return [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False).input_ids], 1
    special = not context.startswith("<s>")
    whole, start = (tokenizer(part, add_special_tokens=special).input_ids for part in (text, context))
    return whole, len(start)


def scored(model, ids, start):
    """ln p of ids[start:] and whether they are greedy, one token at a time."""
    with torch.no_grad():
        log_p = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    total = sum(log_p[at - 1, ids[at]].item() for at in range(start, len(ids)))
    return total, all(log_p[at - 1].argmax().item() == ids[at] for at in range(start, len(ids)))


def expected(reference, pairs):
    model, tokenizer = reference
    return [scored(model, *encoded(tokenizer, *pair)) for pair in pairs]


def greedy_text(reference, context, options):
    """The text that transformers writes, up to the first stop."""
    model, tokenizer = reference
    ids = tokenizer(context, return_tensors="pt").input_ids
    limit = options.get("max_gen_toks", options.get("max_new_tokens"))
    known = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        whole = model.generate(ids, max_new_tokens=limit, **known)
    text = tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True)
    until = options.get("until", [])
    for stop in [until] if isinstance(until, str) else until:
        text = text.split(stop)[0]
    return text


def assert_alike(answers, references):
    assert [greedy for _, greedy in answers] == [greedy for _, greedy in references]
    assert [log_p for log_p, _ in answers] == pytest.approx([log_p for log_p, _ in references], abs=1e-4)


@pytest.mark.parametrize(("name", "backend"), BOTH)
def test_log_likelihoods_are_those_of_plain_hugging_face_in_the_order_of_the_requests(ask, load, plain, name, backend):
    pairs = 2 * PAIRS
    random.Random(0).shuffle(pairs)
    answers = LensLM(load(name, backend), batch_size=3, progress=False).loglikelihood(ask("loglikelihood", *pairs))
    assert_alike(answers, expected(plain(name), pairs))
    assert len({round(log_p, 3) for log_p, _ in answers}) > 8  # a constant would be in order too


def test_a_pass_holds_whole_sequences_of_one_length_the_longest_first(ask, lens):
    seen = []
    lm = lens(lambda tokens: seen.append(tokens.tolist()) or [], batch_size=2)
    lm.loglikelihood(ask("loglikelihood", *PAIRS))
    assert all(len({len(row) for row in batch}) == 1 for batch in seen)
    lengths = [len(batch[0]) for batch in seen]
    assert lengths == sorted(lengths, reverse=True)
    assert max(len(batch) for batch in seen) == 2
    inputs = {tuple(encoded(lm.tokenizer, *pair)[0][:-1]) for pair in PAIRS}
    assert sorted(tuple(row) for batch in seen for row in batch) == sorted(inputs)
    assert len(inputs) < len(PAIRS)  # " the" and " a" after one context share a pass


TEXT = "The rabbit sat down. " * 12
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


def silence(z, hook):
    return torch.zeros_like(z)


def silenced(model):
    """Hooks that take away what attention adds in layer 1; and the same done to a model of transformers."""
    return [("blocks.1.attn.hook_z", silence)], lambda hf: hf.model.layers[1].self_attn.o_proj.weight


def uniform(model):
    """Hooks that set the scores of layer 0 to 0, in an intervention that refuses padding; and the same."""
    hooks = replace_scores(model, lambda capture: torch.zeros_like(capture.scores()), layers=[0])
    return hooks, lambda hf: hf.model.layers[0].self_attn.q_proj.weight


@pytest.mark.parametrize(
    ("name", "backend", "intervention"),
    [
        ("mini", "hooked", uniform),
        ("mini", "bridge", silenced),
        ("stories260K", "hooked", silenced),
        ("stories260K", "bridge", uniform),
    ],
)
def test_hooks_are_at_work_in_every_pass_and_gone_after_it(ask, load, lens, directory, name, backend, intervention):
    model, tokens = load(name, backend), torch.arange(8)[None]
    hooks, weights_of = intervention(model)
    before, lm, pairs = model(tokens), lens(hooks, model=model, batch_size=4), PAIRS[:8]
    changed = plain_model(directory(name)), lm.tokenizer
    weights_of(changed[0]).data.zero_()
    answers = lm.loglikelihood(ask("loglikelihood", *pairs))
    assert_alike(answers, expected(changed, pairs))
    ids = [lm.tokenizer.bos_token_id, *lm.tokenizer(TEXT).input_ids]  # the harness puts a BOS before that of the text
    rolling = lm.loglikelihood_rolling(ask("loglikelihood_rolling", (TEXT,)))
    assert rolling == pytest.approx([scored(changed[0], ids, 1)[0]])
    requests = [(context, STOP) for context, _ in PAIRS[:3]]
    assert lm.generate_until(ask("generate_until", *requests)) == [greedy_text(changed, *one) for one in requests]
    without = lens(model=model).loglikelihood(ask("loglikelihood", *pairs))
    assert max(abs(one - other) for (one, _), (other, _) in zip(answers, without, strict=True)) > 0.1
    assert torch.equal(model(tokens), before)
    assert not any(point.fwd_hooks for point in model.hook_dict.values())


def test_hooks_are_gone_after_an_error_in_them(ask, load, lens):
    def fail(value, hook):
        raise ValueError("from the hook")

    with pytest.raises(ValueError, match="from the hook"):
        lens([("blocks.0.attn.hook_z", fail)]).loglikelihood(ask("loglikelihood", PAIRS[0]))
    assert not any(point.fwd_hooks for point in load("mini").hook_dict.values())


def test_hooks_may_depend_on_the_tokens(ask, load, lens):
    """A hook made for one length, where prompts have several: the last token sees all keys alike."""

    def hooks_of(tokens):
        def uniform_for_the_last(pattern, hook):
            pattern[:, :, -1] = 1 / tokens.shape[1]
            return pattern

        return [("blocks.0.attn.hook_pattern", uniform_for_the_last)]

    lm = lens(hooks_of, batch_size=1)
    answers = lm.loglikelihood(ask("loglikelihood", *PAIRS))
    for pair, answer in zip(PAIRS, answers, strict=True):
        ids, start = encoded(lm.tokenizer, *pair)
        tokens = torch.tensor([ids[:-1]])
        with torch.no_grad():
            log_p = load("mini").run_with_hooks(tokens, fwd_hooks=hooks_of(tokens))[0].double().log_softmax(-1)
        assert answer[0] == pytest.approx(sum(log_p[at - 1, ids[at]].item() for at in range(start, len(ids))), abs=1e-4)
    assert lm.get_model_info()["fwd_hooks"] == [hooks_of.__qualname__]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mini", "stories260K"])
def test_greedy_texts_are_those_of_hugging_face_up_to_their_stops(ask, load, lens, plain, name):
    requests = [
        ("Once upon a time", {"max_gen_toks": 16}),
        ("He was one of", STOP),
        ("She looked at him, and", {"until": " the", "max_gen_toks": 16}),
        ("The sun", {"until": [], "max_new_tokens": 5}),
        ("", STOP),
    ]
    texts = lens(model=load(name), batch_size=3).generate_until(ask("generate_until", *requests))
    assert texts == [greedy_text(plain(name), *request) for request in requests]
    assert len({len(text) for text in texts}) > 2


@pytest.mark.parametrize("end", ["</s>", "<unk>"])
def test_a_text_ends_at_eos_and_at_a_stop_that_is_a_special_token(ask, load, lens, monkeypatch, end):
    lm = lens(model=load("stories260K"))
    start, end = len(lm.tok_encode("Once")), lm.tokenizer.convert_tokens_to_ids(end)
    written = lm.tok_encode("Once there was a cat")[start:]
    passes = []

    def scripted(rows):
        """The context is followed by " there was a cat", then by the end, and by that for ever."""
        passes.append(len(rows))
        following = (written + 9 * [end])[len(rows[0]) - start]
        return torch.nn.functional.one_hot(torch.tensor(len(rows) * [[following]]), lm.model.cfg.d_vocab).float()

    monkeypatch.setattr(lm, "logits", scripted)
    whole, short = {"until": ["<unk>"], "max_gen_toks": len(written) + 5}, {"max_gen_toks": 2}
    texts = lm.generate_until(ask("generate_until", ("Once", whole), ("Once", short), ("Once", whole)))
    assert texts == [lm.tokenizer.decode(ids) for ids in (written, written[:2], written)]
    assert passes == [3, 3] + [2] * (len(written) - 1)  # who has finished leaves the batch


def test_leading_bos_is_no_padding_where_the_tokenizer_pads_on_the_left(ask, load, lens, plain, monkeypatch):
    model = load("mini", "hooked")
    monkeypatch.setattr(model.tokenizer, "padding_side", "left")
    assert model.tokenizer.pad_token_id == model.tokenizer.bos_token_id
    hf, tokenizer = plain("mini")
    [answer] = lens(model=model).loglikelihood_rolling(ask("loglikelihood_rolling", (TEXT,)))
    assert answer == pytest.approx(scored(hf, [tokenizer.bos_token_id, *tokenizer(TEXT).input_ids], 1)[0], abs=1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"do_sample": True, "temperature": 1.0}, "do_sample"),
        ({"temperature": 0.7}, "temperature"),
        ({"num_beams": 4}, "num_beams"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"max_gen_toks": 512}, "max_gen_toks 512"),
    ],
)
def test_other_than_greedy_decoding_is_refused_before_anything_runs(ask, lens, options, words):
    seen = []
    lm = lens(lambda tokens: seen.append(tokens) or [])
    with pytest.raises(InputError, match=words):
        lm.generate_until(ask("generate_until", ("He", STOP), ("She", {"until": ["."], **options})))
    assert not seen


def test_what_greedy_decoding_does_not_read_is_no_obstacle(ask, lens):
    options = {"temperature": 0.0, "top_p": 0.95, "num_beams": 1, **STOP}
    ours, same = lens().generate_until(ask("generate_until", ("He was", options), ("He was", STOP)))
    assert ours == same != ""


@pytest.mark.parametrize(
    ("continuation", "match"),
    [
        ("", "has 0 tokens of its own"),
        (" not there, and not here", r"' not there, and not here' of 'He was' has \d+ tokens.* 1 to 4"),
    ],
)
def test_a_continuation_that_cannot_be_scored_is_named(ask, lens, continuation, match):
    with pytest.raises(InputError, match=match):
        lens(max_length=4).loglikelihood(ask("loglikelihood", ("He was", continuation)))


def test_texts_begin_with_bos_by_the_models_own_convention(ask, load, lens, plain, hflm, monkeypatch):
    model, reference = load("stories260K"), hflm("stories260K")
    lm = lens(model=model)
    for text in ("He was", "<s>He was", "", " He "):
        assert lm.tok_encode(text) == reference.tok_encode(text)
        assert lm.tok_encode(text)[0] == lm.tokenizer.bos_token_id
    monkeypatch.setattr(model.cfg, "default_prepend_bos", False)
    bare = lens(model=model)
    assert bare.tok_encode("He was") == lm.tok_encode("He was")[1:]
    pairs = [("", "He was"), (" ", "He was")]  # nothing to condition on but the token that the harness puts there
    assert_alike(bare.loglikelihood(ask("loglikelihood", *pairs)), expected(plain("stories260K"), pairs))
    assert bare.generate_until(ask("generate_until", ("", STOP))) == [greedy_text(plain("stories260K"), "", STOP)]


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


@pytest.mark.parametrize("backend", ["hooked", "bridge"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 0}, "batch_size 0"),
        ({"max_length": 0}, "max_length 0"),
        ({"fwd_hooks": [("blocks.9.attn.hook_z", silence)]}, "no hook 'blocks.9.attn.hook_z'"),
        ({"fwd_hooks": [("blocks.1.attn.hook_z", None)]}, "not a pair"),
    ],
)
def test_unusable_options_are_refused(ask, load, backend, options, words):
    with pytest.raises(InputError, match=words):
        LensLM(load("mini", backend), **options)


def test_a_context_that_the_model_cannot_run_is_refused(ask, load):
    with pytest.raises(InputError, match=r"513 tokens.*512"):
        LensLM(load("mini", "hooked"), max_length=513)


def test_a_hook_that_the_model_does_not_have_is_refused_from_a_function_too(ask, lens):
    lm = lens(lambda tokens: [("blocks.0.attn.hook_zz", silence)])
    with pytest.raises(InputError, match="hook_zz"):
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
    with pytest.raises(MissingExtraError, match=r'pip install "tl-posgen\[eval\]"') as raised:
        LensLM("no/such-model")
    assert isinstance(raised.value, ImportError)
    assert isinstance(raised.value, PosgenError)

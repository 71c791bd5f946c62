"""Texts become prompts with the tokenizer's own special tokens, and what cannot be a prompt is refused."""

import json
import pickle
import shutil

import pytest
import torch
from families import VOCAB, tokenizer
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoTokenizer

from tl_posgen.core.engine import analyze
from tl_posgen.errors import InputError
from tl_posgen.models import memory
from tl_posgen.models.capture.capturing import run_capture
from tl_posgen.models.loading.load import load_model
from tl_posgen.models.session import Choices, session_of
from tl_posgen.models.tokens import (
    bundled_text,
    first_token_in_words,
    name_of_text,
    read_text,
    repeated_share,
    start_of_texts,
    to_prompts,
    token_strings,
)

TEXT = "the cat sat on the mat. " * 400


def own(text: str) -> list[int]:
    return tokenizer()(text).input_ids


def test_a_text_becomes_the_tokens_its_tokenizer_gives_by_default_and_several_a_prompt_each(llama):
    (prompt,) = to_prompts(llama, "the cat")
    assert prompt.tolist() == own("the cat") == llama.to_tokens("the cat")[0].tolist()
    assert prompt[0] == 0
    assert prompt.dtype == torch.int64
    assert [len(prompt) for prompt in to_prompts(llama, ["abc", "abcdef"])] == [4, 7]
    assert len(to_prompts(llama, ["abc", "abcdef", "ab"], n_prompts=2)) == 2


def test_a_text_that_begins_with_bos_gets_no_second_one(llama):
    (prompt,) = to_prompts(llama, "<s>the cat")
    assert prompt.tolist() == own("the cat")
    both = to_prompts(llama, ["<s>the cat", "the cat", "the <s>"])
    assert [ids.tolist() for ids in both] == [own("the cat"), own("the cat"), own("the <s>")]
    for options in ({}, {"consecutive": True}):
        plain, begun = (to_prompts(llama, text, 10, 4, **options) for text in (TEXT, f"<s>{TEXT}"))
        assert torch.equal(torch.stack(plain), torch.stack(begun))
    with pytest.raises(InputError, match="only 1 token"):
        to_prompts(llama, "<s>")


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_text_has_the_tokens_of_its_tokenizer_whatever_the_object(family_directory, tmp_path, adds_bos, has_hooked):
    """TransformerLens gives its own objects a tokenizer with a BOS token, and default_prepend_bos=True."""
    directory = shutil.copytree(family_directory("llama"), tmp_path / "model")
    if not adds_bos:
        written = json.loads((directory / "tokenizer.json").read_text())
        (directory / "tokenizer.json").write_text(json.dumps({**written, "post_processor": None}))
    made = TransformerBridge.boot_transformers(str(directory), device="cpu")
    assert made.cfg.default_prepend_bos
    assert made.tokenizer("the cat").input_ids == own("the cat")
    expected = AutoTokenizer.from_pretrained(directory)("the cat").input_ids
    assert (expected == own("the cat")) == adds_bos
    models = [made, *(load_model(directory, one) for one in ["bridge", *(["hooked"] if has_hooked else [])])]
    for model in models:
        assert to_prompts(model, "the cat")[0].tolist() == expected
        assert to_prompts(model, TEXT, length=5)[0].tolist() == own(TEXT)[1 - adds_bos : 6 - adds_bos]
    for model in models[1:]:
        assert model.to_tokens("the cat")[0].tolist() == expected
        assert model.tokenizer("the cat").input_ids == expected
        assert model.tokenizer.init_kwargs.get("add_bos_token") is None


def test_a_long_text_is_cut_into_consecutive_prompts_that_each_begin_with_bos(llama):
    prompts = to_prompts(llama, TEXT, length=10, n_prompts=4, consecutive=True)
    assert all(len(prompt) == 10 and prompt[0] == 0 for prompt in prompts)
    assert torch.cat([prompt[1:] for prompt in prompts]).tolist() == own(TEXT)[1:37]


def test_prompts_are_spread_over_all_of_the_texts(llama):
    every = [prompt.tolist() for prompt in to_prompts(llama, [TEXT, TEXT[::-1]], length=10)]
    prompts = [prompt.tolist() for prompt in to_prompts(llama, [TEXT, TEXT[::-1]], length=10, n_prompts=5)]
    assert prompts == [every[i * len(every) // 5] for i in range(5)]
    assert to_prompts(llama, torch.arange(12), length=3, n_prompts=2)[1].tolist() == [6, 7, 8]
    assert len(to_prompts(llama, TEXT, length=10, n_prompts=len(every) // 2)) == len(every) // 2


def test_ids_are_taken_as_they_are(llama):
    ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
    assert [prompt.tolist() for prompt in to_prompts(llama, ids)] == ids.tolist()
    assert to_prompts(llama, [3, 4, 5])[0].tolist() == [3, 4, 5]
    assert [prompt.tolist() for prompt in to_prompts(llama, torch.arange(6), length=3)] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ("", {}, "empty"),
        ("  \n", {}, "empty"),
        ([], {}, "not empty"),
        (["abc", ""], {}, "empty"),
        (torch.tensor([[5]]), {}, "only 1 token"),
        ("abc", {"length": 10, "n_prompts": 1}, r"there are 3 tokens in 1 text, .* 1 prompts of 10 tokens"),
        ("abc", {"n_prompts": 2}, "2 prompts"),
        (TEXT, {"length": 1}, "length=1: give a whole number, 2 or more"),
        (TEXT, {"length": 8, "n_prompts": 0}, "n_prompts=0: give a whole number, 1 or more"),
        (torch.tensor([[1, VOCAB]]), {}, "token id 64 is outside the vocabulary of 64"),
        ([-1, 2], {}, "token id -1"),
        (torch.tensor([[0.5, 1.0]]), {}, "must be integers, not torch.float32"),
        (torch.zeros(1, 1, 2, dtype=torch.long), {}, r"\[pos\] or \[batch, pos\]"),
        ([[1, 2, 3], "ab"], {}, "must be a text"),
        ({"a": 1}, {}, "needs input_ids"),
    ],
)
def test_what_cannot_be_a_prompt_is_refused(llama, prompts, options, message):
    with pytest.raises(InputError, match=message):
        to_prompts(llama, prompts, **options)


def test_a_text_longer_than_the_context_is_refused_with_the_remedy(family_model, backend):
    model = family_model("gpt2", backend)
    with pytest.raises(InputError, match=r"this model takes 128, .*length="):
        to_prompts(model, TEXT)
    with pytest.raises(InputError, match="prompts of 129 tokens are too long: this model takes 128"):
        to_prompts(model, TEXT, length=129)


def test_a_text_for_a_model_without_tokenizer_is_refused(model):
    model.tokenizer = None
    with pytest.raises(InputError, match="no tokenizer"):
        to_prompts(model, "abc")
    assert to_prompts(model, [1, 2])[0].tolist() == [1, 2]
    assert token_strings(model, torch.tensor([1, 2])) == ["1", "2"]


def test_sentencepiece_token_strings_keep_their_spaces(shared):
    model = load_model(shared / "models/stories260K")
    (prompt,) = to_prompts(model, "Once upon a time")
    assert "".join(token_strings(model, prompt)[1:]) == " Once upon a time"


def test_first_512_tokens_of_a_real_text_are_the_tokenizers(shared):
    text = read_text(shared / "text/tinystories.txt")
    for name in ("stories260K", "atome_vanilla_1m"):
        model, length = load_model(shared / "models" / name), 256
        ids = AutoTokenizer.from_pretrained(shared / "models" / name)(text[:20_000]).input_ids
        (prompt,) = to_prompts(model, text, length=length, n_prompts=1)
        assert prompt.tolist() == ids[:length]


def test_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Down, down, down.", encoding="utf-8-sig")
    assert path.read_bytes()[:3] == b"\xef\xbb\xbf"
    assert read_text(path) == "Down, down, down."


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"\xff\xfe\x00a", "not UTF-8 text"),
        (b"abc\0def", "zero bytes"),
        (None, "no such file"),
        ("a directory", "a directory, not"),
    ],
)
def test_unreadable_texts_are_refused(tmp_path, content, message):
    path = tmp_path / "text.txt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.mkdir()
    with pytest.raises(InputError, match=message):
        read_text(path)


@pytest.mark.parametrize(
    ("groups", "files", "limits"),
    [
        ("0::/user/job", {"memory.max": "max", "user/memory.max": "4096", "user/job/memory.max": "9000"}, [9000, 4096]),
        ("3:cpu:/\n4:memory:/docker", {"memory/docker/memory.limit_in_bytes": "2048", "cpu/memory.max": "1"}, [2048]),
        ("0::/", {}, []),
        (None, {}, []),
    ],
)
def test_a_container_has_the_memory_that_its_control_groups_allow(tmp_path, groups, files, limits):
    for name, limit in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{limit}\n")
    if groups is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(groups + "\n")
    assert memory.control_group_limits(tmp_path) == limits


def test_prompts_that_no_memory_holds_are_refused_with_the_estimate(mini_bridge, monkeypatch):
    """3 matrices of 4 heads by a million squared in float32; streamed, 2,048 logits a token and a stream of 128."""
    monkeypatch.setattr(memory, "memory_of", lambda device: 2**30)
    tokens = torch.ones(1, 10**6, dtype=torch.long)
    formed = r"prompts of 1000000 tokens: attention of one layer \(4 heads\) needs 48000 GB, .* give at most \d+ tokens"
    streamed = r"prompts of 1000000 tokens: the logits need 9 GB, .* give at most 123361 tokens"
    for choice, message in ((False, formed), (None, streamed), (True, streamed)):
        with session_of(mini_bridge).choosing(Choices(choice)):
            with pytest.raises(InputError, match=message):
                to_prompts(mini_bridge, tokens)
            with pytest.raises(InputError, match=message):
                run_capture(mini_bridge, tokens, lambda capture: None)
            with pytest.raises(InputError, match=message):
                to_prompts(mini_bridge, "a text", length=10**6)


def test_what_a_measure_holds_counts_where_prompts_are_refused(mini_bridge, monkeypatch):
    """10 matrices of 4 heads by a million squared in float32, however the pass is run."""
    monkeypatch.setattr(memory, "memory_of", lambda device: 2**30)
    tokens, message = torch.ones(1, 10**6, dtype=torch.long), r"needs 160000 GB, .* give at most 2590 tokens"
    for choice in (None, True, False):
        with session_of(mini_bridge).choosing(Choices(choice, matrices=10)), pytest.raises(InputError, match=message):
            to_prompts(mini_bridge, tokens)
    with pytest.raises(InputError, match=message):
        analyze(mini_bridge, tokens, measures="band_ablation", nulls=0, progress=False)


def test_a_string_that_names_a_file_is_not_taken_for_its_text(mini, tmp_path, monkeypatch):
    (tmp_path / "short.txt").write_text("Down, down, down.")
    monkeypatch.chdir(tmp_path)
    for name in ("short.txt", str(tmp_path / "short.txt")):
        with pytest.raises(InputError, match="names a file; give its text"):
            to_prompts(mini, name)
    for name in ("absent.txt", "texts/absent.jsonl", "./texts", "/data/corpus/", "~/book.md"):
        with pytest.raises(InputError, match="names a file that is not there; give its text"):
            to_prompts(mini, name)
    with pytest.raises(InputError, match="names a directory; give its text"):
        to_prompts(mini, str(tmp_path))
    for text in ("Down, down, down.", "and/or", "/think", "See absent.txt", ["absent.txt"]):
        assert len(to_prompts(mini, text)) == 1


def test_a_chat_is_the_ids_of_its_template(llama):
    template = "{{ bos_token }}{% for one in messages %}{{ one.content }}{% endfor %}"
    chat = [{"role": "user", "content": "the cat"}]
    text = llama.tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False)
    expected = llama.tokenizer.apply_chat_template(chat, chat_template=template, return_dict=False)
    assert to_prompts(llama, text)[0].tolist() == expected


def test_a_token_of_the_users_choice_begins_every_prompt_in_the_place_of_bos(mini, alice):
    plain = to_prompts(mini, alice, 16, 3)
    (comma,) = mini.tokenizer(",", add_special_tokens=False).input_ids
    for first in (",", comma):
        chosen = to_prompts(mini, alice, 16, 3, first=first)
        assert [row.tolist() for row in chosen] == [[comma, *row[1:].tolist()] for row in plain]
    bos = mini.tokenizer.bos_token
    assert [row.tolist() for row in to_prompts(mini, alice, 16, 3, first=bos)] == [row.tolist() for row in plain]
    assert to_prompts(mini, [[5, 6, 7], [8, 9, 10]], first=8)[0].tolist() == [8, 5, 6, 7]
    assert to_prompts(mini, [[5, 6, 7], [8, 9, 10]], first=8)[1].tolist() == [8, 9, 10]  # as with a BOS
    assert to_prompts(mini, [[mini.tokenizer.bos_token_id, 5, 6]], first=8)[0].tolist() == [8, 5, 6]
    session = session_of(mini)
    assert start_of_texts(session) == [mini.tokenizer.bos_token_id]
    with session.choosing(Choices(first=8)):
        assert start_of_texts(session) == [8]


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (
            "Down, down",
            r"first='Down, down': \d tokens here, not one; give the text of one token, such as '<s>'",
        ),
        ("", "first='': 0 tokens here, not one"),
        (2048, "first=2048: give the text of one token, or an id, 0 to 2047"),
        (-1, "first=-1: give"),
        (True, "first=True: give"),
        (1.5, "first=1.5: give"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_is_not_one_token_is_refused(mini, alice, first, message):
    with pytest.raises(InputError, match=message):
        to_prompts(mini, alice, 16, 1, first=first)
    with pytest.raises(InputError, match=message):
        analyze(mini, alice, length=16, n_prompts=1, first=first, nulls=0, progress=False)


def test_what_prompts_begin_with_is_said(mini, alice):
    session, rows = session_of(mini), to_prompts(mini, alice, 16, 3)
    (comma,) = mini.tokenizer(",", add_special_tokens=False).input_ids
    words = {
        "BOS '<s>'": rows,
        "no BOS but word ','": [torch.tensor([comma, 5])] * 2,
        "no BOS but words ',', '#'": [torch.tensor([comma, 5]), torch.tensor([3, 4])],
        None: [],
    }
    assert {said: first_token_in_words(session, some) for said, some in words.items()} == {one: one for one in words}


def test_a_report_says_which_text_it_is_of(mini, tmp_path):
    """By the name of its file or book; else by its beginning, on one line."""
    (tmp_path / "walrus.txt").write_text("The time has come,\n the Walrus said, to talk of many things. " * 9)
    walrus = read_text(tmp_path / "walrus.txt")
    named = {"Alice's Adventures in Wonderland": bundled_text(), "walrus": walrus}
    begun = {"'The time has come, the Walrus said, to t ..'": walrus + " ", "2 texts: 'Down.', ..": ["Down.", "Up."]}
    others = {"token ids": [[1, 2, 3]], "'Down, down.'": "Down, down.", "'Down.'": ["Down."]}
    assert {name_of_text(text): text for text in (named | begun | others).values()} == named | begun | others
    assert pickle.loads(pickle.dumps(walrus)).name == "walrus"
    report = analyze(mini, walrus, measures="loss", length=16, n_prompts=2, nulls=0)
    assert report.provenance["text"] == report["loss"].provenance["text"] == "walrus"
    assert "2 prompts of 16 tokens of walrus" in report.html()


def test_prompts_of_a_text_that_repeats_are_no_samples_and_that_is_said(mini, alice):
    """Whatever the places at which they are cut from it; a text that goes on says nothing."""
    again = "The time has come, the Walrus said, to talk of many things: of shoes and ships and sealing-wax. " * 40
    reports = [analyze(mini, text, measures="variance", length=48, n_prompts=4, nulls=0) for text in (again, alice)]
    warned = [[one for one in report.findings() if "too narrow" in one] for report in reports]
    assert [len(one) for one in warned] == [1, 0]
    assert "repeated" not in reports[1].provenance
    assert warned[0] == [f"variance: {reports[0]['variance'].warnings[0]}"]
    assert repeated_share(to_prompts(mini, again, 48, 4)) > 0.95
    assert repeated_share([torch.tensor([1, 2]), torch.tensor([2, 1]), torch.tensor([1, 2])]) == 2 / 3
    assert repeated_share([torch.tensor([1, 2])]) == repeated_share([]) == 0


def test_prompts_beyond_the_context_are_said_to_be(mini_bridge, alice):
    inside, beyond = (analyze(mini_bridge, alice, measures="loss", length=n, n_prompts=1, nulls=0) for n in (512, 513))
    assert "beyond" not in " ".join(inside.findings())
    assert "loss: measured on prompts of up to 513 tokens, beyond the model's context of 512." in beyond.findings()

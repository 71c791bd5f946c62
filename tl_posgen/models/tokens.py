"""Making prompts of texts: token ids, checked against the model before anything runs."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tl_posgen.errors import InputError, ModelError, check_whole
from tl_posgen.models.capture.padding import as_ids, ids_and_mask, pad_token, spans_of_mask, texts_of
from tl_posgen.models.conversion.files import MINI
from tl_posgen.models.conversion.hugging_face import load_tokenizer, silenced
from tl_posgen.models.model import Model
from tl_posgen.models.session import Session, session_of
from tl_posgen.models.streaming.stream import require_fits

BUNDLED_NAME = "Alice's Adventures in Wonderland"
_LONGEST_PATH = 4096  # characters
_BEGINNING = 40  # characters that stand for a text without a name
_MOST_WORDS = 4  # that prompts begin with, in a sentence
_RUN = 16  # tokens in a row that two texts hardly share by chance
_LIKE_A_PATH = re.compile(r"(~|\.{1,2})/\S+|/\S+/\S*|\S+\.(txt|md|json|jsonl|csv|tsv|parquet)")


class NamedText(str):
    """A text with the name of its file, book or dataset. What is cut from it has none."""

    name: str

    def __new__(cls, text: str, name: str) -> "NamedText":
        named = super().__new__(cls, text)
        named.name = name
        return named

    def __reduce__(self) -> tuple[Any, ...]:
        return NamedText, (str(self), self.name)


def name_of_text(prompts: Any) -> str:
    """Return the name of a text, as a report's provenance says it: else how it begins, or "token ids".

    Example:
        >>> name_of_text(bundled_text()), name_of_text("Down, down, down.")
        ("Alice's Adventures in Wonderland", "'Down, down, down.'")
        >>> name_of_text(["Down.", "Up."])
        "2 texts: 'Down.', .."
    """
    texts = [prompts] if isinstance(prompts, str) else prompts
    if not isinstance(texts, list | tuple) or not texts or not all(isinstance(text, str) for text in texts):
        return "token ids"
    begins = re.sub(r"\s+", " ", texts[0].strip()[: 2 * _BEGINNING])
    cut = f"{begins[:_BEGINNING].rstrip()} .." if len(begins) > _BEGINNING else begins
    name = (texts[0].name if isinstance(texts[0], NamedText) else "") or repr(cut)
    return name if len(texts) == 1 else f"{len(texts)} texts: {name}, .."


def text_provenance(prompts: Any, length: int | None, n_prompts: int | None, consecutive: bool) -> dict[str, str]:
    """Return what the provenance says of the text: its name, and where in it the prompts lie that were cut from it."""
    text = {"text": name_of_text(prompts)}
    if length is None or n_prompts is None:
        return text
    return text | {"drawn": "consecutive" if consecutive else "spread over the text"}


def to_prompts(
    model: Model | Session,
    prompts: Any,
    length: int | None = None,
    n_prompts: int | None = None,
    *,
    consecutive: bool = False,
    first: str | int | None = None,
) -> list[Int[Tensor, " _"]]:
    """Return the token ids of every prompt, ready for the model.

    Args:
        prompts: a text, a list of texts, token ids of one prompt (list or tensor), a tensor of ids [batch, pos], a list
            of lists of ids, or what a Hugging Face tokenizer returns (input_ids and attention_mask). Padding is left
            out: where the mask says so, or the padding token where that is no other.
        length: cut texts (or ids) into pieces of exactly this many tokens. Where the tokenizer puts a BOS token in
            front of a text, every prompt starts with one, and it counts; a text that begins with one gets no other.
        n_prompts: how many prompts; as many as there are, if left out. Of the pieces that `length` makes, they are
            spread evenly over all texts, as neighbours depend on each other: piece i * pieces // n_prompts.
        consecutive: take the first pieces, one after the other.
        first: a token that every prompt begins with, as a string or an id; it counts. It stands in the place of the
            tokenizer's BOS, also where ids begin with that; a text (or ids) that begins with it gets no other. If left
            out, what an analysis chose.

    Raises:
        InputError: no text or an empty one, prompts of fewer than two tokens or longer than the model takes, a text too
            short for `length` and `n_prompts`, ids outside the vocabulary, ids that are not integers, a text for a
            model without a tokenizer, padding that cannot be told from text, `first` that is not one token.

    Example:
        >>> from tl_posgen import load_model
        >>> prompts = to_prompts(load_model("mini"), bundled_text(), length=32, n_prompts=3)
        >>> len(prompts), prompts[0].shape
        (3, torch.Size([32]))
    """
    session = session_of(model)
    tokenizer = session.model.tokenizer
    check_numbers(session, length, n_prompts)
    refuse_file_names(prompts)
    texts = [prompts] if isinstance(prompts, str) else prompts
    first = session.choices.first if first is None else first
    is_text = isinstance(texts, Sequence) and texts and all(isinstance(text, str) for text in texts)
    bos = _bos_of(tokenizer) if is_text or (first is not None and tokenizer is not None) else []
    sources = [text_ids(tokenizer, text) for text in texts] if is_text else given_prompts(tokenizer, prompts)
    sources = [ids[len(bos) :] if ids[: len(bos)] == bos else ids for ids in sources]
    if first is not None:
        bos = [first_id(session, first)]
        sources = [ids[1:] if ids[:1] == bos else ids for ids in sources]
    pieces = sources
    if length is not None:
        step = length - len(bos)
        if step < 1:
            raise InputError(f"length {length}: the tokenizer puts {len(bos)} tokens in front of a text; give more")
        pieces = [ids[i : i + step] for ids in sources for i in range(0, len(ids) - step + 1, step)]
        if not consecutive and n_prompts is not None:
            pieces = spread(pieces, n_prompts)
    rows = [bos + piece for piece in pieces[:n_prompts]]
    if len(rows) < (n_prompts or 1):
        wanted = f"{n_prompts or 1} prompts" + (f" of {length} tokens" if length else "")
        texts = f"{len(sources)} text{'s' * (len(sources) > 1)}"
        raise InputError(
            f"there are {sum(map(len, sources))} tokens in {texts}, which is too little for {wanted}; "
            "give a longer text, or ask for fewer or shorter prompts"
        )
    if (shortest := min(map(len, rows))) < 2:
        raise InputError(f"a prompt has only {shortest} token; two are needed at least")
    check_ids(session, *rows)
    return [torch.tensor(row, device="cpu") for row in rows]


def prompts_of_one_length(
    model: Model | Session, prompts: Any, length: int | None, n_prompts: int | None, *, consecutive: bool = False
) -> Int[Tensor, "prompt pos"]:
    """Return `to_prompts` within the training context, stacked; texts of different lengths need `length`."""
    session = session_of(model)
    if length is not None:
        require_context(session, length)
    rows = to_prompts(session, prompts, length, n_prompts, consecutive=consecutive)
    require_one_length(rows)
    require_context(session, len(rows[0]))
    return torch.stack(rows)


def require_one_length(rows: Sequence[Int[Tensor, " _"]]) -> None:
    """Refuse prompts of different lengths."""
    lengths = sorted({len(row) for row in rows})
    if len(lengths) > 1:
        raise InputError(f"prompts of {lengths[0]} to {lengths[-1]} tokens: give length= to cut them to one length")


def require_context(session: Session, length: int) -> None:
    """Refuse what is longer than the training context, even where the model could run it: the loss there answers
    another question, that of length_extrapolation."""
    n_ctx = session.model.cfg.n_ctx
    if length > n_ctx:
        raise InputError(
            f"prompts of {length} tokens: this model's training context has {n_ctx}; give length={n_ctx} or "
            "less, or ask length_extrapolation what happens beyond"
        )


def first_id(session: Session, first: str | int) -> int:
    """Return the id of a token that the user puts in front of every prompt: its text, or the id itself."""
    tokenizer, d_vocab = session.model.tokenizer, session.model.cfg.d_vocab
    if isinstance(first, str):
        if tokenizer is None:
            raise InputError(f"first={first!r}: this model has no tokenizer; give the token's id")
        in_vocabulary = tokenizer.get_vocab().get(first)  # special tokens too
        ids = tokenizer(first, add_special_tokens=False).input_ids if in_vocabulary is None else [in_vocabulary]
        if len(ids) != 1:
            special = ", ".join(map(repr, tokenizer.all_special_tokens[:4]))
            remedy = f"give the text of one token{f', such as {special}' if special else ''}, or an id"
            raise InputError(f"first={first!r}: {len(ids)} tokens here, not one; {remedy}")
        return int(ids[0])
    if isinstance(first, bool) or not isinstance(first, int | np.integer) or not 0 <= first < d_vocab:
        raise InputError(f"first={first!r}: give the text of one token, or an id, 0 to {d_vocab - 1}")
    return int(first)


def first_token_in_words(session: Session, rows: Sequence[Int[Tensor, " _"]]) -> str | None:
    """Return what prompts begin with: "BOS '<s>'", or words of texts; None of no prompts."""
    first = torch.tensor([int(row[0]) for row in rows if len(row)])
    if not len(first):
        return None
    ids, tokenizer = first.unique_consecutive().tolist(), session.model.tokenizer
    texts = [*dict.fromkeys(map(repr, token_strings(session, first)))]
    if tokenizer is None:
        kind = "token" if len(ids) == 1 else "tokens"
    elif len(ids) == 1 and ids[0] in tokenizer.all_special_ids:
        kind = "BOS" if ids[0] == tokenizer.bos_token_id else "special token"
    else:
        kind = "no BOS but " + ("word" if len(texts) == 1 else "words")
    return f"{kind} {', '.join(texts[:_MOST_WORDS])}{', ..' * (len(texts) > _MOST_WORDS)}"


def repeated_share(rows: Sequence[Int[Tensor, " _"]]) -> float:
    """Return the share of the runs of 16 tokens that stand in another prompt too; of a shorter prompt its whole is one.

    Where much is repeated, prompts are no independent samples.

    Example:
        >>> once, other = torch.arange(20), torch.arange(20, 40)
        >>> repeated_share([once, other]), repeated_share([once, other, once])
        (0.0, 0.6666666666666666)
    """
    factors, runs = np.random.default_rng(0).integers(2**62, size=_RUN) * 2 + 1, []
    for row in rows:
        ids = row.cpu().numpy().astype(np.int64)
        if len(ids) < _RUN:
            runs.append([tuple(ids.tolist())])
        else:
            runs.append((np.lib.stride_tricks.sliding_window_view(ids, _RUN) @ factors).tolist())
    n_prompts = Counter(chain.from_iterable(set(of_prompt) for of_prompt in runs))  # that each run stands in
    return float(np.mean([n_prompts[run] > 1 for run in chain.from_iterable(runs)])) if runs else 0.0


def spread(pieces: Sequence[Any], n: int) -> list[Any]:
    """Return piece i * pieces // n for i < n, spread evenly over all; all of them where there are no more."""
    n = min(n, len(pieces))
    return [pieces[i * len(pieces) // n] for i in range(n)]


def check_numbers(session: Session, length: int | None, n_prompts: int | None) -> None:
    """Refuse a length or a number of prompts that is none, or that the model cannot take."""
    check_counts(length, n_prompts)
    if length is not None:
        require_fits(session, length)


def check_counts(length: int | None, n_prompts: int | None) -> None:
    """Refuse a length or a number of prompts that is none, whatever the model."""
    for name, least, value in (("length", 2, length), ("n_prompts", 1, n_prompts)):
        if value is not None:
            check_whole("prompts", least, **{name: value})


def refuse_file_names(prompts: Any) -> None:
    """Refuse a string that names a file or directory, or looks as if it should: what stands there is meant."""
    if not isinstance(prompts, str) or len(prompts) >= _LONGEST_PATH:
        return
    is_file = is_directory = False
    with suppress(OSError, ValueError):  # a name that the system refuses
        is_file = bool(Path(prompts).suffix) and Path(prompts).is_file()
        is_directory = "/" in prompts and Path(prompts).is_dir()
    if is_file or is_directory or _LIKE_A_PATH.fullmatch(prompts):
        kind = "a file" if is_file else "a directory" if is_directory else "a file that is not there"
        remedy = f"give its text, pathlib.Path(...).read_text(); or [{prompts!r}], if this is the prompt itself"
        raise InputError(f"{prompts!r} names {kind}; {remedy}")


def start_of_texts(session: Session) -> list[int]:
    """Return what every text begins with: the token that was chosen for it (`first=`), else what `_bos_of` gives."""
    if (chosen := session.choices.first) is not None:
        return [chosen]
    return [] if session.model.tokenizer is None else _bos_of(session.model.tokenizer)


def _bos_of(tokenizer: Any) -> list[int]:
    """Return the tokens that the tokenizer puts in front of a text by itself: a BOS token, or none in most cases.

    They are those of its files, whatever the model says: for objects that it makes TransformerLens loads a tokenizer
    with add_bos_token=True, and cfg.default_prepend_bos is True there, whatever the model was trained with. What a
    tokenizer appends (EOS) is left out, as a prompt is a text that goes on.
    """
    if tokenizer is None:
        raise InputError("this model has no tokenizer, so it cannot be given a text; give token ids [batch, pos]")
    if tokenizer.init_kwargs.get("add_bos_token"):
        tokenizer = _tokenizer_of_files(tokenizer.name_or_path) or tokenizer
    ids, plain_ids = (tokenizer("a", add_special_tokens=special).input_ids for special in (True, False))
    return next((ids[:n] for n in range(len(ids)) if ids[n : n + len(plain_ids)] == plain_ids), [])


@lru_cache(maxsize=8)
def _tokenizer_of_files(name: str) -> Any:
    """Return the tokenizer of a directory, or of a model in the Hub's cache; None where there is none."""
    with suppress(ModelError), silenced():
        return load_tokenizer(Path(name), trust_remote_code=False)


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the text's own tokens, without special ones."""
    if not text.strip():
        raise InputError("a text is empty; leave it out, or give its words")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        place = f"character {error.start}, {text[error.start]!r}"
        raise InputError(f"a text is no Unicode: {place}, is half of a pair; read it with errors='replace'") from error
    return tokenizer(text, add_special_tokens=False, verbose=False).input_ids


def given_prompts(tokenizer: Any, prompts: Any) -> list[list[int]]:
    """Return the token ids of every prompt that the user gave, without padding."""
    prompts, mask = ids_and_mask(prompts)
    pad, token_ids = pad_token(tokenizer), []
    for rows in given_ids(prompts):
        spans = texts_of(rows, pad) if mask is None else spans_of_mask(mask)
        token_ids += [ids[span] for ids, span in zip(rows, spans, strict=True)]
    return token_ids


def given_ids(prompts: Any) -> list[list[list[int]]]:
    """Return the ids that the user gave: batches of prompts of one length, those of another length one by one."""
    type_name = f"a {type(prompts).__name__}"
    if isinstance(prompts, list | tuple):
        type_name += f" of {', '.join(sorted({type(item).__name__ for item in prompts})) or 'nothing'}"
    wrong = f"prompts must be a text, a list of texts, or token ids [batch, pos]; this is {type_name}"
    if not isinstance(prompts, Sequence | Tensor | np.ndarray) or isinstance(prompts, str | bytes):
        raise InputError(wrong)
    several = isinstance(prompts, Sequence) and len(prompts) and not isinstance(prompts[0], int | np.integer)
    batches = [as_ids(batch, wrong).tolist() for batch in (prompts if several else [prompts])]
    rows = [row for batch in batches for row in batch]
    return [rows] if len({len(row) for row in rows}) == 1 else batches


def check_ids(session: Session, *prompts: Sequence[int]) -> None:
    """Refuse ids outside the vocabulary, and prompts longer than the model takes."""
    d_vocab = session.model.cfg.d_vocab
    for ids in prompts:
        for extreme in (min(ids), max(ids)):
            if not 0 <= extreme < d_vocab:
                wrong = f"token id {extreme} is outside the vocabulary of {d_vocab}"
                raise InputError(f"{wrong}; was the text tokenised for another model?")
        require_fits(session, len(ids))


def token_strings(model: Model | Session, tokens: Int[Tensor, " pos"]) -> list[str]:
    """Return every token as readable text, its leading space kept; ids where the model has no tokenizer."""
    ids, tokenizer = tokens.tolist(), session_of(model).model.tokenizer
    if tokenizer is None:
        return [str(index) for index in ids]
    pieces = tokenizer.convert_ids_to_tokens(ids)
    texts = [tokenizer.decode([index], clean_up_tokenization_spaces=False) for index in ids]
    # a sentencepiece decoder drops the space of the first token it is given
    return [
        f" {text}" if str(piece).startswith("▁") and not text.startswith(" ") else text
        for piece, text in zip(pieces, texts, strict=True)
    ]


def read_text(path: str | os.PathLike) -> NamedText:
    """Read a text file, UTF-8, without the byte order mark that it may begin with.

    Raises:
        InputError: it is not there, not a file, not UTF-8 text, or empty.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: " + ("a directory, not a text file" if path.is_dir() else "no such file"))
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); convert it first") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    if "\0" in text:
        raise InputError(f"{path}: holds zero bytes, so it is not text")
    if not text.strip():
        raise InputError(f"{path}: empty; give a file with text in it")
    return NamedText(text, path.stem)


def bundled_text() -> NamedText:
    """Read the text that comes with the package: Lewis Carroll, Alice's Adventures in Wonderland, public domain."""
    return NamedText(read_text(MINI / "alice_in_wonderland.txt"), BUNDLED_NAME)

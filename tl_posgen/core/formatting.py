"""Numbers as text: rounded by a format specification, counted, as a bound, in brackets; how positions are known."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

ENCODINGS = {  # of positions, other than RoPE -> how they are known
    "absolute": "Positions are added to the embeddings here",
    "alibi": "Positions enter as a fixed slope per head here (ALiBi)",
    "none": "Nothing in the attention knows positions here (NoPE)",
}

_NATS = re.compile(
    r"(?:(?:[,;]? in|[,;])?(?:\s|<br>)*)\b(?:nats)\b(?:(?:\s|<br>)+(?:per|a)(?:\s|<br>)+token)?| \[nats[^]]*\]"
)
_OF_METRIC = {
    r"\brise( of the loss)": r"change\1",
    r"\bRise( of the loss)": r"Change\1",
    r"\b([Ll]oss) rises\b": r"\1 changes",
    r"\bdearest\b": "highest",
    r"\bloss\b": "metric",
    r"\bLoss\b": "Metric",
    r"\blosses\b": "metrics",
}
_EXACT = 2**53  # above it not every whole number is a float


@dataclass(frozen=True)
class Formatted:
    """A number with the way in which a format specification is applied to it."""

    text: Callable[[str], str]

    def __format__(self, form: str) -> str:
        return self.text(form)

    def __str__(self) -> str:
        return self.text("")

    __repr__ = __str__


def format_number(value: float | None, form: str) -> str:
    """Return a number in this format, never "-0.000"; with three digits in none; "not defined" for NaN.

    Example:
        >>> [format_number(-0.0001, form) for form in (".3f", ".1%", "+.2f", ".4f")]
        ['0.000', '0.0%', '+0.00', '-0.0001']
        >>> [format_number(value, "") for value in (0.9, 12.3456, 0.00012345, 134515008.0, 0.0)]
        ['0.900', '12.346', '0.000123', '134515008', '0.000']
        >>> [format_number(1e300, form) for form in ("", ".3f", ".0%", "+.2f")]
        ['1.00e+300', '1.00e+300', '1.00e+300', '+1.00e+300']
    """
    if value is None or value != value:
        return "not defined"
    size = abs(value)
    if not form:
        form = ".0f" if size >= 1000 else ".3f" if size >= 0.001 or not size else ".3g"
    if _EXACT <= size < math.inf and form[-1] in "f%":  # whose further digits say nothing
        form = f"{'+' * form.startswith('+')}.2e"
    text = format(value, form)
    return text if text.strip(" +-0.%") else format(0.0, form)


def in_brackets(*parts: str) -> str:
    """Return what stands behind a number in brackets; "" for nothing.

    Example:
        >>> in_brackets("random init 0.35", "", "seed 0"), in_brackets("")
        (' (random init 0.35; seed 0)', '')
    """
    joined = "; ".join(part for part in parts if part)
    return f" ({joined})" if joined else ""


def counted(n: int | float, what: str) -> str:
    """Return a number of things.

    Example:
        >>> counted(1, "seed"), counted(3, "seed")
        ('1 seed', '3 seeds')
    """
    return f"{n:g} {what}{'' if n == 1 else 's'}"


def prompts_in_words(n: int | None, length: int | Sequence[int] | None, text: str | None = None) -> str:
    """Return how many prompts of how many tokens of which text there are; "" where that is not known.

    Example:
        >>> prompts_in_words(4, 256, "alice"), prompts_in_words(2, [5, 9])
        ('4 prompts of 256 tokens of alice', '2 prompts of 5 to 9 tokens')
    """
    if not n or not length:
        return ""
    tokens = f"{min(length)} to {max(length)}" if isinstance(length, Sequence) else length
    return f"{counted(n, 'prompt')} of {tokens} tokens{f' of {text}' if text else ''}"


def in_ranges(numbers: Sequence[int]) -> str:
    """Return ascending whole numbers with neighbours joined.

    Example:
        >>> in_ranges([0, 1, 2, 5, 7, 8])
        '0 to 2, 5, 7, 8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def format_bound(values: Sequence[float], digits: int = 3) -> str:
    """Return the largest of some values, rounded up so that it holds as a bound.

    Example:
        >>> format_bound([0.25]), format_bound([0.0, 2e-5])
        ('0.250', '0.001')
    """
    largest = float(np.max(values))  # NaN of an undefined one
    if not math.isfinite(largest):
        return format_number(largest, f".{digits}f")
    # a float's own error is not rounded up
    return f"{math.ceil(round(largest * 10**digits, 6)) / 10**digits:.{digits}f}"


def known_by(encoding: str, encodings: Sequence[str]) -> str:
    """Return how positions are known where this is one of the encodings.

    Example:
        >>> known_by("none", ["none"]), known_by("none", ["rotary", "none"])[-14:]
        ('Nothing in the attention knows positions here (NoPE)', 'in some layers')
    """
    return f"{ENCODINGS.get(encoding, encoding)}{' in some layers' if len(encodings) > 1 else ''}"


def about_metric(text: str, metric: str) -> str:
    """Return words on the loss as words on a metric in its place: without nats, and with the rise of either direction.

    Titles keep "loss = " and the metric's name; what is said of an entropy or a KL divergence stays in nats.

    Example:
        >>> about_metric("Rise of the loss of 0.512 nats, the 2 dearest of 9: means +0.100.", "doubled")
        'Change of the metric of 0.512, the 2 highest of 9: means +0.100.'
        >>> about_metric("Entropy of attention, nats", "doubled"), about_metric("nats per token; share", "doubled")
        ('Entropy of attention, nats', 'share')
    """
    name = f"loss = {metric}"
    if name in text:
        return name.join(about_metric(part, metric) for part in text.split(name))
    if not re.search(r"[Ee]ntropy|\bKL\b|\bln\b", text):
        text = re.sub(r"(^|>)nats(?: per token)?(?:[,;] | (?=over))", r"\1", text)
        text = _NATS.sub("", text)
    for pattern, word in _OF_METRIC.items():
        text = re.sub(pattern, word, text)
    return text

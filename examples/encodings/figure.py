"""The figure of the encodings, as SVG: loss, loss by position, and three-axis r within rows beside random init."""

from collections.abc import Mapping, Sequence
from typing import Any

COLOURS = {"rope": "#3b6fb6", "plain": "#7fb3e6", "split": "#d1603d", "several": "#b8892b", "added": "#8a5aa8"}
COLOURS |= {"alibi": "#3f9b6b", "none": "#6b7280"}
R = "r_within_rows_without_first_token"  # what softmax sees: <q_i, m> shifts whole rows of alibi and none
WIDTH, HEIGHT = 1110, 330
TOP, BOTTOM = 56, 282  # of the plots
STYLE = 'font-family="Helvetica,Arial,sans-serif" font-size="11" fill="#374151"'


class Panel:
    """Axes between two pixels, with y from `low` to `high`; what is drawn collects in `parts`."""

    def __init__(self, left: float, right: float, title: str, low: float, high: float, ticks: Sequence[float]):
        self.left, self.right, self.low, self.high = left, right, low, high
        self.parts = [f'<text x="{left}" y="{TOP - 16}" font-size="12" font-weight="bold">{title}</text>']
        for tick in ticks:
            y = self.y(tick)
            self.parts.append(f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e7eb"/>')
            self.text(left - 6, y + 4, f"{tick:g}", "end")

    def y(self, value: float) -> float:
        return BOTTOM - (value - self.low) / (self.high - self.low) * (BOTTOM - TOP)

    def text(self, x: float, y: float, words: str, anchor: str = "middle") -> None:
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>')

    def dots(self, x: float, values: Sequence[float], colour: str, filled: bool = True) -> None:
        """A dot a seed, and a line at their mean."""
        y, fill = self.y(sum(values) / len(values)), colour if filled else "#fff"
        self.parts.append(f'<line x1="{x - 9:.1f}" x2="{x + 9:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="{colour}"/>')
        for value in values:
            dot = f'cx="{x:.1f}" cy="{self.y(value):.1f}" r="3.5" fill="{fill}" stroke="{colour}"'
            self.parts.append(f"<circle {dot}/>")

    def line(self, x: Sequence[float], values: Sequence[float], colour: str) -> None:
        points = " ".join(f"{one:.1f},{self.y(value):.1f}" for one, value in zip(x, values, strict=True))
        self.parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>')

    def places(self, n: int) -> list[float]:
        return [self.left + (number + 0.5) * (self.right - self.left) / n for number in range(n)]


def limits(values: Sequence[float], step: float) -> tuple[float, float, list[float]]:
    """Multiples of the step around the values, and those to write: seven at most."""
    low, high = int(min(values) // step), int(-(-max(values) // step))
    high += high == low
    every = -(-(high - low) // 6)
    return low * step, high * step, [round(number * step, 6) for number in range(low, high + 1, every)]


def draw(found: Mapping[str, Any], block: int, context: int) -> str:
    """SVG of `measure.summarise`; `block` positions stand behind a point of the curves."""
    names = list(found)
    losses = [value for name in names for value in found[name]["trained"]["loss"]["of_seeds"]]
    left = Panel(50, 330, "Held-out loss, 512 tokens (nats)", *limits(losses, 0.02))
    after_first = [value for name in names for value in found[name]["curve"][1:]]
    middle = Panel(390, 690, f"Loss by position (blocks of {block}, from {block} on)", *limits(after_first, 0.2))
    right = Panel(750, 1090, "Three-axis r within rows, first token left out", 0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1])
    for name, x, pair in zip(names, left.places(len(names)), right.places(len(names)), strict=True):
        one, colour = found[name], COLOURS[name]
        left.dots(x, one["trained"]["loss"]["of_seeds"], colour)
        left.text(x, BOTTOM + 18, name)
        at = middle.places(len(one["curve"]))[1:]
        middle.line(at, one["curve"][1:], colour)
        right.dots(pair - 10, one["random_init"][R]["of_seeds"], colour, filled=False)
        right.dots(pair + 10, one["trained"][R]["of_seeds"], colour)
        right.text(pair, BOTTOM + 18, name)
    end = len(found[names[0]]["curve"]) * block
    for position in range(0, end + 1, context):
        x = middle.left + position / end * (middle.right - middle.left)
        middle.text(x, BOTTOM + 18, str(position))
        if position == context:
            dashed = f'x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{BOTTOM}" stroke="#9ca3af" stroke-dasharray="3 3"'
            middle.parts.append(f"<line {dashed}/>")
    left.text(left.left, HEIGHT - 14, "a dot a seed, a line at their mean", "start")
    middle.text(middle.left, HEIGHT - 14, "mean over seeds; dashed: the length of training", "start")
    right.text(right.left, HEIGHT - 14, "open: random init; filled: trained", "start")
    parts = "\n".join(part for panel in (left, middle, right) for part in panel.parts)
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {STYLE}>'
    return f'{frame}<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>\n{parts}\n</svg>\n'

"""Charts as inline SVG, drawn without a library: one at the end of a run must cost milliseconds, not a second.

The drawing stretches with its box; labels are HTML beside it, so that text has one size at every width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape as escape_markup

from shoal.monitor.report.series import Point
from shoal.monitor.wording import clean, duration, figure, short

WIDTH, HEIGHT = 600, 200
"""Of the drawing, in its own units."""
MOST_DRAWN = 180
"""Points of a line: about one for every three pixels."""
MOST_DOTS = 60
"""Beyond so many points, a line has no dots."""
LOG_RATIO = 100.0
"""Values that are this many times as large as the least are drawn on a logarithmic scale."""
LARGEST = 1e300
_SECONDS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400)


def escape(text: str) -> str:
    """Foreign text for a page."""
    return escape_markup(clean(text))


@dataclass(frozen=True)
class Line:
    """Values to draw. `colour` is a class of the page's style, as is `dashed`."""

    label: str
    points: Sequence[Point]
    colour: str = "c0"
    dots: bool = False
    band: bool = True
    ends: Sequence[Point] = ()
    """Single values among means, drawn as dots: as part of the line they would look like a jump."""

    def drawable(self) -> list[Point]:
        return [point for point in (*self.points, *self.ends) if abs(point.value) < LARGEST]


@dataclass(frozen=True)
class Axis:
    """A range of values, and where its ticks are. `at` says where a value is, from 0 to 1."""

    low: float
    high: float
    ticks: list[float]
    labels: list[str]
    log: bool = False

    def at(self, value: float) -> float:
        if self.log:
            value = max(value, self.low)
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def line_chart(
    title: str, lines: Sequence[Line], *, over: str = "step", from_zero: bool = False, empty: str = ""
) -> str:
    """A figure. `over`: step, or time, in seconds. `from_zero`: the least value on the axis is 0 or below."""
    drawn = [line for line in lines if line.drawable()]
    if not drawn:
        return _figure(title, f'<p class="empty">{escape(empty)}</p>')
    where: Callable[[Point], float] = (lambda p: p.elapsed) if over == "time" else (lambda p: p.step)
    points = [point for line in drawn for point in line.drawable()]
    places = [where(point) for point in points]
    x = time_axis(min(places), max(places)) if over == "time" else step_axis(min(places), max(places))
    low, high = _extent(drawn)
    y = value_axis(min(low, 0.0) if from_zero else low, high)
    body = [_grid(y)]
    for line in drawn:
        body.append(_draw(line, where, x, y))
    values = [point.value for point in points]
    words = f"{title} against {over}, from {figure(min(values))} to {figure(max(values))}"
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{escape(words)}">'
        f"{''.join(body)}</svg>"
    )
    ys = "".join(
        f'<span style="top:{100 - 100 * y.at(t):.1f}%">{label}</span>'
        for t, label in zip(y.ticks, y.labels, strict=True)
    )
    xs = "".join(
        f'<span style="left:{100 * x.at(t):.1f}%">{label}</span>' for t, label in zip(x.ticks, x.labels, strict=True)
    )
    plot = f'<div class="plot"><div class="ys">{ys}</div>{svg}<div class="xs">{xs}</div></div>'
    return _figure(title, plot, _key(drawn, over, y.log))


def _figure(title: str, body: str, key: str = "") -> str:
    return f'<figure class="chart"><figcaption><b>{escape(title)}</b>{key}</figcaption>{body}</figure>'


def _key(lines: Sequence[Line], over: str, log: bool) -> str:
    named = [f'<i class="line {line.colour}"></i>{escape(line.label)}' for line in lines if line.label]
    scale = ["log scale"] if log else []
    return (
        f'<span class="key">{" ".join(f"<span>{word}</span>" for word in [*named, *scale, f"against {over}"])}</span>'
    )


def _extent(lines: Sequence[Line]) -> tuple[float, float]:
    """Of the lines; the band is cut off where it is far outside, so that one wild step does not flatten the curve."""
    values = [point.value for line in lines for point in line.drawable()]
    low, high = min(values), max(values)
    bands = [point for line in lines if line.band for point in line.drawable()]
    room = high - low
    low_band = min((point.low for point in bands), default=low)
    high_band = max((point.high for point in bands), default=high)
    if low > 0 and low_band <= 0:
        low_band = max(low_band, low / 2)
    return max(low - room / 2, min(low, low_band)), min(high + room / 2, max(high, high_band))


def _grid(y: Axis) -> str:
    rows = "".join(f"M0 {HEIGHT * (1 - y.at(tick)):.1f}H{WIDTH}" for tick in y.ticks)
    return f'<path class="grid" d="{rows}"/>'


def _draw(line: Line, where: Callable[[Point], float], x: Axis, y: Axis) -> str:
    parts = []
    runs = _runs(line.points)

    def place(point: Point, value: float) -> str:
        across = WIDTH * x.at(where(point))
        down = HEIGHT * (1 - min(1.0, max(0.0, y.at(value))))
        return f"{across:.1f} {down:.1f}"

    if line.band:
        parts += [_band(run, place) for run in runs if any(point.high > point.low for point in run)]
    curve = "".join("M" + "L".join(place(point, point.value) for point in run) for run in runs if len(run) > 1)
    if curve:
        parts.append(f'<path class="curve" d="{curve}"/>')
    dotted = line.dots and sum(map(len, runs)) <= MOST_DOTS
    alone = [point for run in runs for point in run if dotted or len(run) == 1]
    for point in (*alone, *(end for end in line.ends if abs(end.value) < LARGEST)):
        title = f"{escape(line.label)} {figure(point.value)} at step {point.step:,}"
        parts.append(f'<path class="dot" d="M{place(point, point.value)}h0"><title>{title}</title></path>')
    return f'<g class="{line.colour}">{"".join(parts)}</g>'


def _runs(points: Sequence[Point]) -> list[list[Point]]:
    """Stretches without a gap: a value that is not finite is not drawn, and no line leads over it."""
    runs: list[list[Point]] = [[]]
    for point in points:
        if abs(point.value) < LARGEST:
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _band(run: Sequence[Point], place: Callable[[Point, float], str]) -> str:
    above = "L".join(place(point, point.high) for point in run)
    below = "L".join(place(point, point.low) for point in reversed(run))
    return f'<path class="band" d="M{above}L{below}Z"/>'


def value_axis(low: float, high: float) -> Axis:
    if low > 0 and high / low >= LOG_RATIO:
        return _log_axis(low, high)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        room = abs(low) * 0.1 or 1.0
        low, high = low - room, high + room
    ticks = even_ticks(low, high, 5)
    step = ticks[1] - ticks[0]
    return Axis(min(low, ticks[0]), max(high, ticks[-1]), ticks, tick_labels(ticks, step))


def _log_axis(low: float, high: float) -> Axis:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = math.ceil((last - first) / 5)
    ticks = [10.0**power for power in range(first, last + 1, every) if low <= 10.0**power <= high]
    return Axis(low, high, ticks, [short(tick) for tick in ticks], log=True)


def step_axis(low: float, high: float) -> Axis:
    """Steps are whole: so are the ticks."""
    if low == high:
        return Axis(low - 1, high + 1, [low], [short(low)])
    ticks = [tick for tick in even_ticks(low, high, 5, least=1.0) if low <= tick <= high]
    return Axis(low, high, ticks, tick_labels(ticks, ticks[1] - ticks[0] if len(ticks) > 1 else 1.0))


def time_axis(low: float, high: float) -> Axis:
    if high - low < 1e-9:
        return Axis(low - 1, high + 1, [low], [duration(low)])
    if high - low < 4:
        ticks = [tick for tick in even_ticks(low, high, 4) if low <= tick <= high]
        return Axis(low, high, ticks, [f"{tick:.3g} s" for tick in ticks])
    step = next((step for step in _SECONDS if (high - low) / step <= 5), 0) or 86_400 * math.ceil(
        (high - low) / 432_000
    )
    ticks = [float(step * number) for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return Axis(low, high, ticks, [_clock(tick, step) for tick in ticks])


def _clock(seconds: float, step: float) -> str:
    for unit, name in ((86_400, "d"), (3600, "h"), (60, "min")):
        if step >= unit or (seconds >= unit and seconds % unit == 0):
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:g} s"


def even_ticks(low: float, high: float, about: int, least: float = 0.0) -> list[float]:
    """Round numbers, 1, 2 or 5 times a power of ten apart, that reach over the range. Two at least."""
    rough = max((high - low) / about, least)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def tick_labels(ticks: Sequence[float], step: float) -> list[str]:
    """As short as can be while labels tell the ticks apart."""
    largest = max(map(abs, ticks), default=0.0)
    if largest >= 1e12 or 0 < largest < 1e-3:
        return ["0" if tick == 0 else f"{tick:.3g}" for tick in ticks]
    if largest >= 1000 and step >= largest / 2000:
        return [short(tick) for tick in ticks]
    for digits in range(7):
        if all(abs(round(tick, digits) - tick) < step / 100 for tick in ticks):
            return ["0" if tick == 0 else f"{tick:,.{digits}f}" for tick in ticks]
    return [f"{tick:.8g}" for tick in ticks]


def stacked_bar(parts: Sequence[tuple[str, str, float]], whole: float) -> str:
    """A bar of (class, what it says when pointed at, amount), each as long as its share of `whole`."""
    rects, at = [], 0.0
    for colour, title, amount in parts:
        width = 1000 * amount / whole if whole > 0 else 0.0
        if width >= 0.5:
            box = f'x="{at:.0f}" width="{width:.0f}" height="1"'
            rects.append(f'<rect class="{colour}" {box}><title>{escape(title)}</title></rect>')
        at += width
    words = escape("; ".join(title for _, title, _ in parts))
    return (
        f'<svg class="bar" viewBox="0 0 1000 1" preserveAspectRatio="none" role="img" aria-label="{words}">'
        f"{''.join(rects)}</svg>"
    )

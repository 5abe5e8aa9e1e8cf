"""Samples to medians, medians to a table with bars. Pure: no I/O."""

import dataclasses
import statistics


@dataclasses.dataclass(frozen=True)
class Bar:
    """A limit: on ours/stock (``ratio``) or on our own figure."""

    limit: float
    at_least: bool = True
    ratio: bool = True

    def __str__(self):
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}{' x' if self.ratio else ''}"

    def met(self, value):
        """Say whether *value* keeps the limit."""
        return value >= self.limit if self.at_least else value <= self.limit


@dataclasses.dataclass
class Row:
    """One figure of every variant: label -> samples, one a round."""

    name: str
    unit: str
    bar: Bar | None = None
    samples: dict = dataclasses.field(default_factory=dict)

    def add(self, label, value):
        """Add a round's sample; None is none."""
        if value is not None:
            self.samples.setdefault(label, []).append(value)

    def median(self, label):
        """Return the median, or None without samples."""
        values = self.samples.get(label)
        return statistics.median(values) if values else None

    def ratio(self, base, label):
        """Return median(label) / median(base), or None."""
        one, other = self.median(base), self.median(label)
        return other / one if one and other is not None else None

    def ratio_spread(self, base, label):
        """Return (lowest, highest) ratio of samples taken in the same round."""
        pairs = zip(self.samples.get(base, ()), self.samples.get(label, ()), strict=False)
        ratios = [other / one for one, other in pairs if one]
        return (min(ratios), max(ratios)) if ratios else None

    def verdict(self, base, label):
        """Return met, missed, or how near: the bar lies inside the spread."""
        if self.bar is None:
            return ""
        value = self.ratio(base, label) if self.bar.ratio else self.median(label)
        if value is None:
            return "not measured"
        if self.bar.ratio:
            spread = self.ratio_spread(base, label)
        else:
            values = self.samples[label]
            spread = min(values), max(values)
        word = "met" if self.bar.met(value) else "MISSED"
        if spread and spread[0] < self.bar.limit < spread[1]:
            word += " (bar within spread)"
        return word


class Table:
    """Rows in the order in which they were first named."""

    def __init__(self, title, note="", labels=None):
        self.title, self.note, self.rows, self.problems = title, note, {}, []
        self.labels = labels  # columns of its own, whatever variants the run compares

    def row(self, name, unit, bar=None):
        """Return the row of that name and unit, made on first use."""
        return self.rows.setdefault((name, unit), Row(name, unit, bar))

    def render(self, labels):
        """Return the table as text; the first label is what the others are held against."""
        labels = self.labels or labels
        base, others = labels[0], labels[1:]
        head = ["", "unit", base]
        if not others:
            head += ["bar", ""]
        for label in others:
            head += [label, f"{label}/{base}", "bar", ""]
        lines = [head]
        for row in self.rows.values():
            line = [row.name, row.unit, _spread(row.samples.get(base))]
            if not others:
                line += [str(row.bar or ""), row.verdict(base, base)]
            for label in others:
                ratio = row.ratio(base, label)
                line += [
                    _spread(row.samples.get(label)),
                    f"{ratio:.2f}" if ratio is not None else "-",
                    str(row.bar or ""),
                    row.verdict(base, label),
                ]
            lines.append(line)
        text = [f"## {self.title}", *([self.note] if self.note else []), "", *_align(lines)]
        text += [f"! {problem}" for problem in self.problems]
        return "\n".join(text) + "\n"

    def as_json(self, labels):
        """Return everything measured, ready for json."""
        labels = self.labels or labels
        return {
            "title": self.title,
            "problems": self.problems,
            "rows": [
                {
                    "name": row.name,
                    "unit": row.unit,
                    "bar": str(row.bar) if row.bar else None,
                    "samples": row.samples,
                    "median": {label: row.median(label) for label in labels},
                    "ratio": {label: row.ratio(labels[0], label) for label in labels[1:]},
                    "verdict": {
                        label: row.verdict(labels[0], label) for label in labels[1:] or labels
                    },
                }
                for row in self.rows.values()
            ],
        }


def percentile(values, share):
    """Return the nearest-rank percentile of *values*."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * share // 100) - 1)]


def _spread(values):
    if not values:
        return "-"
    middle = _number(statistics.median(values))
    if len(values) == 1:
        return middle
    return f"{middle} ({_number(min(values))}-{_number(max(values))})"


def _number(value):
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _align(lines):
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    lines.insert(1, ["-" * width for width in widths])
    return [
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]

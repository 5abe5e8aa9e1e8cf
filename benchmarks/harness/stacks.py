"""Group call stacks by who owns the code. Pure.

A stack is a list of (function, file, line), outermost first. Time in the standard library
belongs to its nearest caller that has a group of its own; so `socket.recv` under redis-py
counts as redis-py.
"""

import collections

# First match wins; slashes are forward.
GROUPS = (
    ("celery_strategies", ("/celery_strategies/",)),
    (
        "asyncio/hub",
        ("/kombu/asynchronous/", "/kombu/utils/eventio.py", "/asyncio/", "/selectors.py"),
    ),
    ("pickling/json", ("/pickle.py", "/json/", "/kombu/serialization.py", "/kombu/utils/json.py")),
    ("kombu", ("/kombu/",)),
    ("celery pool", ("/celery/concurrency/", "/billiard/", "/concurrent/futures/")),
    ("celery", ("/celery/", "/vine/")),
    ("redis-py", ("/redis/", "/hiredis/")),
    ("logging", ("/logging/", "/celery/utils/log.py")),
    ("the task", ("/workload/",)),
)


def group_of(path):
    """Return the group of the file at *path*, or None for other code."""
    if path.endswith("/celery/utils/log.py"):
        return "logging"
    for name, parts in GROUPS:
        if any(part in path for part in parts):
            return name
    return None


class Profile:
    """Sum of weighted stacks (samples or seconds)."""

    def __init__(self):
        self.total, self.flat = 0.0, False
        self.own, self.under = collections.Counter(), collections.Counter()
        self.self_time, self.cumulative = collections.Counter(), collections.Counter()

    def add(self, stack, weight):
        """Count *stack*, outermost frame first."""
        self.total += weight
        groups = [group_of(path) for _, path, _ in stack]
        self.own[next((g for g in reversed(groups) if g), "other")] += weight
        for group in {g for g in groups if g}:
            self.under[group] += weight
        self.self_time[_title(stack[-1])] += weight
        for title in {_title(frame) for frame in stack}:
            self.cumulative[title] += weight

    def set_below(self, frame, weight):
        """Give a function's time with what it calls, where whole stacks are not known."""
        self.flat = True
        self.cumulative[_title(frame)] = weight

    def render(self, unit, top=20):
        """Return the report: groups, then the *top* functions."""
        if not self.total:
            return "nothing was sampled\n"
        text = [
            f"{self.total:,.2f} {unit} in all",
            "",
            "| group | own | own and below |",
            "|---|---|---|",
        ]
        for group, weight in self.own.most_common():
            below = "-" if self.flat else self._share(self.under[group])
            text.append(f"| {group} | {self._share(weight)} | {below} |")
        for title, counter in (("itself", self.self_time), ("with what it calls", self.cumulative)):
            text += ["", f"Functions, {title}:", ""]
            text += [f"{self._share(w):>7}  {name}" for name, w in counter.most_common(top)]
        return "\n".join(text) + "\n"

    def _share(self, weight):
        return f"{weight / self.total:.1%}"


def parse_raw(text):
    """Yield (stack, samples) from py-spy's raw format with full file names."""
    for line in text.splitlines():
        frames, _, count = line.rpartition(" ")
        stack = [_frame(frame) for frame in frames.split(";") if " (" in frame]
        if stack and not _waits(stack[-1]):
            yield stack, int(count)


def _waits(frame):
    """Say whether a pool thread waits for work; py-spy takes its C-level queue for running."""
    name, path, _ = frame
    return name == "_worker" and path.endswith("/concurrent/futures/thread.py")


def _frame(text):
    name, _, place = text.rpartition(" (")
    path, _, line = place.rstrip(")").rpartition(":")
    return (name, path, line) if path else (name, line, "")


def _title(frame):
    name, path, _ = frame
    group = group_of(path)
    return f"{'/'.join(path.split('/')[-3:])} {name}" + (f"  [{group}]" if group else "")

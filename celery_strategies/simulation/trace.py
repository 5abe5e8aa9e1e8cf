"""Own the format of traces and of a backlog in words: what may stand in them, and what each error says.

A trace is a JSON object; docs/simulate.md describes it. Every error names the entry, the value and the rule.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from celery_strategies.core.levels import LISTS, check_levels
from celery_strategies.core.tags import check_key, check_weight
from celery_strategies.simulation.engine import Arrival
from celery_strategies.simulation.errors import SimulationError, suggestion

__all__ = ("MAX_JOBS", "Entry", "Trace", "dump", "parse", "parse_backlog")

#: Most jobs of one simulation.
MAX_JOBS = 1_000_000

#: Longest value that an error shows.
_SHOWN = 80

_PART = re.compile(r"(?:(?P<key>.+):)?(?P<count>[0-9]{1,7})(?:@(?P<level>[0-9]))?")


@dataclass(frozen=True)
class Entry:
    """Describe jobs that differ in nothing but their time: ``count`` of them, ``every`` seconds one.

    What is None was not said: the default run time, the default level of the queue, the weight of the tenant.
    """

    queue: str
    at: float = 0.0
    run: float | None = None
    level: int | None = None
    key: str = ""
    weight: float | None = None
    count: int = 1
    every: float = 0.0
    name: str = ""


@dataclass
class Trace:
    """What a trace says. ``queues`` are all queues, in bind order; what is None or missing was not said."""

    entries: list[Entry] = field(default_factory=list)
    queues: list[str] = field(default_factory=list)
    ranks: dict[str, int] = field(default_factory=dict)
    levels: dict[str, int] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    caps: dict[str, int] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    slots: int | None = None

    @property
    def keys(self) -> list[str]:
        """Return the keys of the jobs, in the order in which they come up."""
        return list(dict.fromkeys(entry.key for entry in self.entries if entry.key))

    def jobs(self, run: float, level_of: Callable[[str], int]) -> list[Arrival]:
        """Return every job, in the order in which they are published.

        ``run`` is the run time of a job without one, in seconds, and ``level_of`` gives the level of a queue's jobs
        without one.
        """
        found: list[Arrival] = []
        for entry in self.entries:
            weight = self.weights.get(entry.key, 1.0) if entry.weight is None else entry.weight
            level = level_of(entry.queue) if entry.level is None else entry.level
            for nth in range(entry.count):
                found.append(
                    Arrival(
                        number=len(found) + 1,
                        queue=entry.queue,
                        at=entry.at + nth * entry.every,
                        run=run if entry.run is None else entry.run,
                        list=level,
                        key=entry.key,
                        weight=weight,
                        name=entry.name,
                    )
                )
        return found


# -- a backlog in words ------------------------------------------------------------------------


def parse_backlog(words: Iterable[str]) -> Trace:
    """Return what ``alerts=2 emails=acme:30,minnow:2@1`` says: all of it waits at second 0. Raises SimulationError."""
    trace = Trace()
    for word in words:
        queue, found, parts = word.rpartition("=")
        if not found or not queue:
            raise SimulationError(
                f"{_show(word)}: a backlog is QUEUE=NUMBER, or QUEUE=KEY:NUMBER,KEY:NUMBER, as in "
                "alerts=2 or emails=acme:30,minnow:2"
            )
        if queue not in trace.queues:
            trace.queues.append(queue)
        for part in parts.split(","):
            match = _PART.fullmatch(part.strip())
            if match is None:
                raise SimulationError(
                    f"{_show(word)}: {_show(part)} must be NUMBER or KEY:NUMBER, with @LEVEL (0 to 9) behind it "
                    "for a level"
                )
            key, level = match["key"], match["level"]
            entry = Entry(
                queue,
                key="" if key is None else _key(f"{_show(word)}: key", key),
                level=None if level is None else int(level),
                count=int(match["count"]),
            )
            trace.entries.append(entry)
    _check_size(trace)
    return trace


# -- JSON --------------------------------------------------------------------------------------


def parse(text: str, where: str = "the trace") -> Trace:
    """Return what the JSON ``text`` says. Raises SimulationError, whose message begins with ``where``."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise SimulationError(f"{where} is not JSON: {error}") from None
    except RecursionError:
        raise SimulationError(f"{where} is nested too deeply") from None
    try:
        return _Reader().read(data)
    except SimulationError as error:
        raise SimulationError(f"{where}: {error}") from None


class _Reader:
    def __init__(self) -> None:
        self.trace = Trace()

    def read(self, data: Any) -> Trace:
        top = _fields("", data, ("queues", "tenants", "settings", "slots", "jobs", "recorded"))
        trace = self.trace
        for number, queue in enumerate(_list("queues", top.get("queues", []))):
            self._queue(f"queues[{number}]", queue)
        if not isinstance(tenants := top.get("tenants", {}), dict):
            raise SimulationError("tenants must be an object of keys")
        for key, tenant in tenants.items():
            self._tenant(f"tenants[{key!r}]", key, tenant)
        if not isinstance(settings := top.get("settings", {}), dict):
            raise SimulationError("settings must be an object of strategies_... settings")
        trace.settings = dict(settings)
        if "slots" in top:
            trace.slots = _integer("slots", top["slots"], 1)
        if "jobs" not in top:
            raise SimulationError("there is no 'jobs', the list of the jobs that arrive")
        declared = list(trace.queues)
        for number, job in enumerate(_list("jobs", top["jobs"])):
            trace.entries.append(self._job(f"jobs[{number}]", job, declared))
        _check_size(trace)
        return trace

    def _queue(self, where: str, value: Any) -> None:
        data = {"name": value} if isinstance(value, str) else value
        given = _fields(where, data, ("name", "rank", "levels"))
        name = _name(f"{where}.name", given.get("name"))
        if name in self.trace.queues:
            raise SimulationError(f"{where}: queue {name!r} is there twice")
        self.trace.queues.append(name)
        if given.get("rank") is not None:
            self.trace.ranks[name] = _integer(f"{where}.rank", given["rank"])
        if given.get("levels") is not None:
            try:
                check_levels(given["levels"])
            except ValueError:
                rule = f"must be an integer from 1 to {LISTS}"
                raise _wrong(f"{where}.levels", given["levels"], rule) from None
            self.trace.levels[name] = given["levels"]

    def _tenant(self, where: str, key: str, value: Any) -> None:
        given = _fields(where, value, ("weight", "cap"))
        if key != "*" or "weight" in given:
            _key(where, key)
        if "weight" in given:
            self.trace.weights[key] = _weight(f"{where}.weight", given["weight"])
        if given.get("cap") is not None:
            self.trace.caps[key] = _integer(f"{where}.cap", given["cap"], 1)

    def _job(self, where: str, value: Any, declared: list[str]) -> Entry:
        known = ("queue", "at", "run", "level", "key", "weight", "count", "every", "name")
        given = _fields(where, value, known)
        queue = _name(f"{where}.queue", given.get("queue"))
        if declared and queue not in declared:
            raise SimulationError(
                f"{where}.queue = {_show(queue)} is none of the trace's queues; {suggestion(queue, declared)}"
            )
        if not declared and queue not in self.trace.queues:
            self.trace.queues.append(queue)
        entry = Entry(
            queue,
            at=_seconds(f"{where}.at", given.get("at", 0)),
            run=None if given.get("run") is None else _seconds(f"{where}.run", given["run"]),
            level=None
            if given.get("level") is None
            else _integer(f"{where}.level", given["level"], 0, LISTS - 1),
            key="" if given.get("key") is None else _key(f"{where}.key", given["key"]),
            weight=None
            if given.get("weight") is None
            else _weight(f"{where}.weight", given["weight"]),
            count=_integer(f"{where}.count", given.get("count", 1), 0),
            every=_seconds(f"{where}.every", given.get("every", 0)),
            name=str(given.get("name") or ""),
        )
        _seconds(f"{where}: the last arrival", entry.at + max(0, entry.count - 1) * entry.every)
        return entry


def dump(trace: Trace, recorded: Mapping[str, Any] | None = None) -> str:
    """Return the JSON of a trace, one job a line; :func:`parse` reads it."""
    top: dict[str, Any] = {}
    if recorded:
        top["recorded"] = dict(recorded)
    queues = []
    for name in trace.queues:
        more = {"rank": trace.ranks.get(name), "levels": trace.levels.get(name)}
        said = {field: value for field, value in more.items() if value is not None}
        queues.append({"name": name, **said} if said else name)
    top["queues"] = queues
    tenants: dict[str, dict[str, float]] = {}
    for name, what in (("weight", trace.weights), ("cap", trace.caps)):
        for key, value in what.items():
            tenants.setdefault(key, {})[name] = value
    if tenants:
        top["tenants"] = tenants
    if trace.settings:
        top["settings"] = trace.settings
    if trace.slots is not None:
        top["slots"] = trace.slots
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in top.items()]
    jobs = ",\n".join(f"  {json.dumps(_job(entry))}" for entry in trace.entries)
    body = f"[\n{jobs}\n ]" if jobs else "[]"
    return "\n".join(["{", *lines, f' "jobs": {body}', "}"]) + "\n"


def _job(entry: Entry) -> dict[str, Any]:
    plain = Entry(entry.queue)
    names = ("at", "run", "level", "key", "weight", "count", "every", "name")
    values = {name: getattr(entry, name) for name in names}
    said = {name: value for name, value in values.items() if value != getattr(plain, name)}
    return {"queue": entry.queue, **said}


# -- values ------------------------------------------------------------------------------------


def _check_size(trace: Trace) -> None:
    if (total := sum(entry.count for entry in trace.entries)) > MAX_JOBS:
        raise SimulationError(f"these are {total} jobs; a simulation has at most {MAX_JOBS}")


def _fields(where: str, data: Any, known: tuple[str, ...]) -> dict[str, Any]:
    place = where or "the whole"
    if not isinstance(data, dict):
        raise SimulationError(f"{place} = {_show(data)}: must be an object with {', '.join(known)}")
    for name in data:
        if name not in known:
            raise SimulationError(
                f"{where + ': ' if where else ''}{_show(name)} is not a field; {suggestion(name, known)}"
            )
    return data


def _list(where: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _wrong(where, value, "must be a list")
    return value


def _name(where: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong(where, value, "must be the name of a queue, a string that is not empty")
    return value


def _key(where: str, value: Any) -> str:
    try:
        return check_key(value)
    except ValueError as error:
        raise _wrong(where, value, str(error)) from None


def _weight(where: str, value: Any) -> float:
    try:
        return float(check_weight(value))
    except ValueError as error:
        raise _wrong(where, value, str(error)) from None


def _integer(where: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or (low is not None and value < low)
        or (high is not None and value > high)
    ):
        if high is not None:
            raise _wrong(where, value, f"must be an integer from {low} to {high}")
        rule = "must be an integer" if low is None else f"must be an integer, {low} or more"
        raise _wrong(where, value, rule)
    return value


def _seconds(where: str, value: Any) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # A billion seconds are 31 years; NaN and infinity fail the comparison.
    if not number or not 0 <= value <= 1e9 or not math.isfinite(value):
        raise _wrong(where, value, "must be a number of seconds, 0 to 1e9")
    return float(value)


def _wrong(where: str, value: Any, rule: str) -> SimulationError:
    return SimulationError(f"{where} = {_show(value)}: {rule}")


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."

"""The Lua scripts, and the contract each one states in its header.

Owns loading, checking and naming of ``lua/*.lua``. A script's header lists its ``KEYS`` and ``ARGV`` by name;
the Python side declares the same names, and :func:`load` refuses at import when the two, or the use of an
index in the body, disagree.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from importlib.resources import files

_ENTRY = re.compile(r"^-- (KEYS|ARGV)\[(\d+|\.\.\.)(\+?)\] (\w+):?\s+(.+)$")
_USE = re.compile(r"\b(KEYS|ARGV)\[(\d+)\]")
_REQUIRED = ("-- Returns ", "-- Invariant: ")


class ScriptContractError(ImportError):
    """A script's header, its body and its Python caller disagree."""


@dataclass(frozen=True, slots=True)
class Script:
    """One loaded script.

    *source* is what the server gets (shared helpers first); *sha* is what ``EVALSHA`` names.
    """

    name: str
    source: bytes
    sha: str


@cache
def _text(name: str) -> str:
    return (files("celery_strategies.store") / "lua" / f"{name}.lua").read_text("utf-8")


#: What a script needs that also exists for plain sources alone, where it is called most often.
_PLAIN = ("_lib", "_plain")
#: What a script that works on sorted jobs or settles needs, and one that also sorts or draws.
_SORTED = ("_lib", "_sorted", "_moving", "_limits")
_SORTING = (*_SORTED, "_sorting")
#: And one that knows of leases.
_LEASE = ("_lease",)


def load(
    name: str,
    *,
    keys: tuple[str, ...],
    argv: tuple[str, ...],
    helpers: tuple[str, ...] = ("_lib",),
    variant: str = "",
) -> Script:
    """Load ``lua/<name>.lua`` and check that its header declares exactly *keys* and *argv*.

    *helpers* are put before it, in that order; *variant* names what differs from the same file with other helpers.

    Raises:
        ScriptContractError: names, order or indices differ, or a required header line is missing.
    """
    text = _text(name)
    header = [line for line in text.splitlines() if line.startswith("--")]
    body = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("--"))
    for required in _REQUIRED:
        if not any(line.startswith(required) for line in header):
            raise ScriptContractError(f"{name}.lua: header has no line {required.strip()!r}")
    for table, wanted in (("KEYS", keys), ("ARGV", argv)):
        entries = [
            match.groups() for line in header if (match := _ENTRY.match(line)) and match[1] == table
        ]
        declared = tuple(entry[3] for entry in entries)
        if declared != wanted:
            raise ScriptContractError(
                f"{name}.lua declares {table} {declared}, its caller {wanted}"
            )
        fixed = [int(entry[1]) for entry in entries if entry[1] != "..." and not entry[2]]
        is_open = any(entry[2] or entry[1] == "..." for entry in entries)
        if fixed != list(range(1, len(fixed) + 1)):
            raise ScriptContractError(f"{name}.lua: {table} are not numbered from 1")
        used = {int(index) for which, index in _USE.findall(body) if which == table}
        if not is_open and used and max(used) > len(fixed):
            raise ScriptContractError(
                f"{name}.lua uses {table}[{max(used)}], which its header does not name"
            )
    source = "\n".join([*map(_text, helpers), text]).encode()
    return Script(name + variant, source, sha1(source, usedforsecurity=False).hexdigest())


_TAKE_KEYS = ("wake", "sequence", "unacked", "unacked_index", "holder", "sources")
_TAKE_ARGV = (
    "worker",
    "strategy",
    "byte_limit",
    "source_count",
    "list_counts",
    "levels",
    "lists",
    "sorted",
    "single",
    "lease_ttl",
    "sources",
    "call",
)
TAKE = load("take", keys=_TAKE_KEYS, argv=_TAKE_ARGV, helpers=_PLAIN)
TAKE_SORTED = load("take", keys=_TAKE_KEYS, argv=_TAKE_ARGV, helpers=_SORTING, variant="_sorted")
TAKE_SINGLE = load(
    "take",
    keys=_TAKE_KEYS,
    argv=_TAKE_ARGV,
    helpers=(*_SORTING, *_LEASE),
    variant="_single",
)
_SETTLE_KEYS = ("scratch", "unacked", "unacked_index", "holder")
SETTLE = load("settle", keys=_SETTLE_KEYS, argv=("tags",), helpers=_PLAIN)
SETTLE_SORTED = load(
    "settle", keys=_SETTLE_KEYS, argv=("tags",), helpers=_SORTED, variant="_sorted"
)
RESTORE = load(
    "restore",
    keys=("scratch", "unacked", "unacked_index", "items"),
    argv=("limit", "started", "most", "items"),
    helpers=_SORTED,
)
REQUEUE = load(
    "requeue",
    keys=("scratch", "unacked", "unacked_index", "holder", "inbox"),
    argv=("tag", "suffix"),
    helpers=_SORTED,
)
SET_ASIDE = load(
    "set_aside",
    keys=("scratch", "unacked", "unacked_index", "holder", "set_aside"),
    argv=("tag", "suffix", "reason", "worker"),
    helpers=_SORTED,
)
DELAY = load(
    "delay",
    keys=("scratch", "unacked", "unacked_index", "holder", "delayed", "sequence"),
    argv=("tag", "suffix", "due", "mark"),
    helpers=_SORTED,
)
DUE = load("due", keys=("delayed",), argv=("now",))
PROMOTE = load("promote", keys=("scratch", "delayed", "inbox"), argv=("count", "now"))
RELEASE = load("release", keys=("scratch", "delayed"), argv=("cursor",))
ADOPT = load(
    "adopt",
    keys=("policy", "state", "caps", "weights", "lease"),
    argv=("order", "single", "key", "weight", "renew", "caps"),
)
SORT = load(
    "sort",
    keys=("sequence", "sorter", "set_aside", "returned", "inbox"),
    argv=("worker", "ttl", "levels", "lists", "messages", "bytes", "now"),
    helpers=_SORTING,
)
ACQUIRE = load(
    "acquire",
    keys=("scratch", "unacked", "unacked_index", "holder", "limited"),
    argv=("tag", "limit", "to", "duration", "ttl", "now"),
    helpers=_SORTED,
)
RENEW = load("renew", keys=("scratch", "limited"), argv=("ttl", "now", "tags"), helpers=_SORTED)
SERVE = load("serve", keys=("scratch", "lines"), argv=("count", "now"), helpers=_SORTED)
DISPERSE = load(
    "disperse", keys=("scratch", "in_line", "returned"), argv=("count",), helpers=_SORTED
)
STEER = load(
    "steer",
    keys=("policy", "values"),
    argv=("what", "field", "value", "cursor"),
    helpers=_SORTED,
)
GATHER = load(
    "gather",
    keys=("scratch", "policy", "unsorted"),
    argv=("count", "strays"),
    helpers=_SORTING,
)
PURGE = load("purge", keys=("scratch", "policy"), argv=("count",), helpers=_SORTED)
JOIN = load("join", keys=("scratch", "holder"), argv=("session", "ttl"))
LEAVE = load(
    "leave",
    keys=("holder", "alive", "entry"),
    argv=("worker",),
    helpers=(*_SORTED, *_LEASE),
)
BEAT = load(
    "beat",
    keys=("scratch", "alive", "unacked_index", "holder", "entry", "leases", "consumers"),
    argv=(
        "worker",
        "quiet",
        "ttl",
        "entry_ttl",
        "sessions",
        "lease_ttl",
        "priority",
        "now",
        "tags",
    ),
)
STEP_DOWN = load(
    "step_down", keys=("scratch", "leases"), argv=("worker",), helpers=(*_SORTED, *_LEASE)
)
REVIVE = load("revive", keys=("scratch", "dead", "inbox"), argv=("id",))
BURY = load(
    "bury",
    keys=("scratch", "unacked", "unacked_index", "alive", "holder", "entry"),
    argv=("worker", "beat", "session", "most", "count"),
    helpers=(*_SORTED, *_LEASE),
)
REFRESH = load("refresh", keys=("scratch", "unacked_index", "holder"), argv=("ttl", "now", "tags"))
EXPIRED = load("expired", keys=("unacked_index",), argv=("timeout", "count", "now"))
WATCH = load("watch", keys=("wake", "sources"), argv=("watchers", "stale", "now"))
UNWATCH = load("unwatch", keys=("wake", "sources"), argv=())
UNSORT = load("unsort", keys=("scratch", "returned", "unsorted", "inbox"), argv=("count",))

# Of the command line alone: looking.
FIND = load("find", keys=("places",), argv=("id", "step", "bytes", "stretches"))
SURVEY = load("survey", keys=("policy",), argv=("what", "from", "count", "bytes"))

#: What a worker may send.
ALL = (
    TAKE,
    TAKE_SORTED,
    TAKE_SINGLE,
    SETTLE,
    SETTLE_SORTED,
    RESTORE,
    REQUEUE,
    SET_ASIDE,
    DELAY,
    DUE,
    PROMOTE,
    RELEASE,
    ADOPT,
    SORT,
    ACQUIRE,
    RENEW,
    SERVE,
    DISPERSE,
    STEER,
    GATHER,
    PURGE,
    JOIN,
    LEAVE,
    BEAT,
    BURY,
    STEP_DOWN,
    REVIVE,
    REFRESH,
    EXPIRED,
    WATCH,
    UNWATCH,
    UNSORT,
)

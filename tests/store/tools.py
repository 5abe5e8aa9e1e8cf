"""Own what the script tests share: calls as the reader makes them, messages, and looks at the keyspace."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import redis
from redis.exceptions import NoScriptError

from celery_strategies.core.policy import Policy
from celery_strategies.core.strategies import Strategy
from celery_strategies.store import scripts
from celery_strategies.store.keys import Keys
from celery_strategies.store.link import Link
from celery_strategies.store.store import (
    Agreement,
    Grant,
    Place,
    SourceKeys,
    Store,
    TakePlan,
    load_scripts,
)

#: The injected clock, in microseconds: every score is then known.
NOW = 1_700_000_000_250_000
SECONDS = NOW / 1_000_000
#: Milliseconds that a holder lives.
TTL = 60_000
#: Milliseconds after which an idle worker is forgotten.
STALE = 15_000


def message(job: str, *, queue: str = "q", body: str = "W1tdLCB7fV0=", **headers: Any) -> bytes:
    """Return a message as a stock Celery producer writes it; its id and producer's tag are *job*."""
    payload = {
        "body": body,
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {"lang": "py", "task": "tasks.add", "id": job, "retries": 0, **headers},
        "properties": {
            "correlation_id": job,
            "reply_to": "replies",
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": queue},
            "priority": 0,
            "body_encoding": "base64",
            "delivery_tag": f"producer-{job}",
        },
    }
    return json.dumps(payload).encode()


def tagged(policy: Policy, key: str, weight: float = 1.0) -> dict[str, Any]:
    """Return the headers that give a message its key and weight; none for what goes without saying."""
    headers: dict[str, Any] = {policy.key_header: key} if key else {}
    if policy.weight_header and weight != 1:
        headers[policy.weight_header] = weight
    return headers


def job_of(raw: bytes) -> str:
    """Return the *job* of a :func:`message`."""
    return str(json.loads(raw)["headers"]["id"])


def split(packed: bytes) -> list[bytes]:
    """Return the parts of one packed command."""
    parts, rest = [], packed.partition(b"\r\n")[2]
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size[1:])
        parts.append(rest[:length])
        rest = rest[length + 2 :]
    return parts


class Caller:
    """Send packed calls over a connection like the reader's, loading the scripts where they are missing."""

    def __init__(self, client: redis.Redis) -> None:
        self.pool = redis.ConnectionPool(
            **{**client.connection_pool.connection_kwargs, "protocol": 3},
            connection_class=client.connection_pool.connection_class,
        )
        self.changes = 0
        self.link = Link(self.pool.get_connection(), self._changed)

    def _changed(self) -> None:
        self.changes += 1

    def __call__(self, packed: bytes) -> Any:
        """Return the reply; raises the server's error."""
        try:
            return self.link.call(packed)
        except NoScriptError:
            self.load()
            return self.link.call(packed)

    def load(self) -> None:
        """Load every script."""
        for reply in self.link.call_all(load_scripts()):
            assert not isinstance(reply, Exception), reply

    def close(self) -> None:
        """Close the connection."""
        self.link.close()
        self.pool.disconnect()


def source(queue: str, levels: int | None = None, lists: Iterable[int] = range(10)) -> SourceKeys:
    """Return a source that reads *lists*, all by default."""
    return SourceKeys(queue, levels, tuple(lists))


class Worker:
    """One worker's calls, with the clock injected."""

    def __init__(
        self,
        caller: Caller,
        name: str = "w",
        *sources: SourceKeys | str,
        keys: Keys = Keys(),  # noqa: B008  # immutable
        strategy: Strategy = Strategy.PRIORITY,
    ) -> None:
        self.caller = caller
        self.name = name
        self.keys = keys
        self.strategy = strategy
        self.store = Store(keys, name)
        self.sessions = 0
        self.session = ""
        self.now = NOW
        self.read(*sources)

    def read(self, *sources: SourceKeys | str) -> Worker:
        """Read these sources from now on."""
        self.sources = [s if isinstance(s, SourceKeys) else source(s) for s in sources]
        self.plan = TakePlan(self.keys, self.name, self.strategy, self.sources)
        return self

    def join(self) -> dict[str, bytes]:
        """Open the next session; returns what Redis says this worker holds."""
        self.sessions += 1
        self.session = str(self.sessions)
        reply = self.caller(self.store.join(self.session, TTL))
        return {tag.decode(): place for tag, place in zip(reply[::2], reply[1::2], strict=True)}

    def pack_take(self, n: int = 1, **options: Any) -> bytes:
        """Return the packed take."""
        return self.plan.call(self.session, n, **{"now": self.now, **options})

    def take(self, n: int = 1, **options: Any) -> Grant:
        """Take up to *n* messages."""
        return Grant.parse(self.caller(self.pack_take(n, **options)))

    def take_one(self, **options: Any) -> str:
        """Take exactly one message and return its tag."""
        (delivery,) = self.take(1, **options).deliveries
        return delivery.tag

    def entry(self, tag: str, client: redis.Redis) -> bytes:
        """Return this worker's holder entry for *tag*."""
        entry: Any = client.hget(self.keys.holder(self.name), tag)
        assert entry is not None
        return bytes(entry)

    def adopt(
        self, queue: str, policy: Policy | None, caps: Mapping[str, int] | None = None
    ) -> Agreement:
        """Agree on how *queue* is sorted."""
        return Agreement.parse(self.caller(self.store.adopt(queue, policy, caps)))

    def sort(self, source: SourceKeys) -> list[str]:
        """Sort all that is new in *source*; returns what was wrong with the tags."""
        found = []
        for _ in range(5000):
            left, notes, *_ = self.caller(self.store.sort(source, self.now))
            found += [text.decode() for text in notes]
            if left <= 0:
                assert left == 0
                return found
        raise AssertionError("there is always something left to sort")

    def restore(self, client: redis.Redis, *tags: str, **options: Any) -> int:
        """Give *tags* back."""
        items = [(tag, self.entry(tag, client)) for tag in tags]
        return int(self.caller(self.store.restore(items, **options)))


def jobs(grant: Grant) -> list[str]:
    """Return the jobs of a grant, in order."""
    return [job_of(delivery.raw) for delivery in grant.deliveries]


def push(client: redis.Redis, key: str, *messages: bytes) -> None:
    """Publish as a producer does: each at the left."""
    for raw in messages:
        client.lpush(key, raw)


def keyspace(client: redis.Redis) -> dict[str, Any]:
    """Return every key with all it holds; streams without their ids, zsets as member -> score."""
    space: dict[str, Any] = {}
    for key in client.scan_iter(count=1000):
        kind = client.type(key)
        if kind == b"list":
            value: Any = client.lrange(key, 0, -1)
        elif kind == b"hash":
            value = client.hgetall(key)
        elif kind == b"zset":
            members: Any = client.zrange(key, 0, -1, withscores=True)
            value = dict(members)
        elif kind == b"stream":
            entries: Any = client.xrange(key)
            value = [fields for _, fields in entries]
        elif kind == b"set":
            value = client.smembers(key)
        else:
            value = client.get(key)
        space[key.decode()] = _plain(value)
    return space


def _plain(value: Any) -> Any:
    # redis-py answers pairs as tuples or lists, by protocol.
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def assert_ttls(client: redis.Redis, expected: Mapping[str, int]) -> None:
    """Assert that exactly these keys expire, each within its milliseconds and not much before."""
    ttls = {key.decode(): client.pttl(key) for key in client.scan_iter(count=1000)}
    found = {key: ttl for key, ttl in ttls.items() if ttl != -1}
    assert found.keys() == expected.keys()
    for key, ttl in found.items():
        assert expected[key] / 2 < ttl <= expected[key], key


def record(raw: bytes, queue: str = "q") -> bytes:
    """Return Kombu's unacked record of *raw*."""
    return b"[" + raw + f',"",{json.dumps(queue)}]'.encode()


def place(number: int, *, step: int = 0, deliveries: int = 0, queue: str = "q") -> bytes:
    """Return a holder entry."""
    entry = f'{step}:{number}:{deliveries}:,"",{json.dumps(queue)}]'.encode()
    assert Place.parse(entry) == Place(step, number, deliveries, queue)
    return entry


def tag(number: int, worker: str = "w", session: int = 1) -> str:
    """Return the tag that take mints."""
    return f"{worker}:{session}.{number}"


def held(
    worker: Worker,
    items: Mapping[str, tuple[bytes, bytes]],
    *,
    queue: str = "q",
    seconds: float = SECONDS,
) -> dict[str, Any]:
    """Return the keys that say that *worker* holds tag -> (message, holder entry)."""
    space: dict[str, Any] = {
        worker.keys.holder(worker.name): {
            b"": worker.session.encode(),
            **{tag.encode(): entry for tag, (_, entry) in items.items()},
        }
    }
    if items:
        space[worker.keys.unacked] = {
            tag.encode(): record(raw, queue) for tag, (raw, _) in items.items()
        }
        space[worker.keys.unacked_index] = {tag.encode(): seconds for tag in items}
    return space


def member(raw: bytes, number: int, *, step: int = 0, deliveries: int = 0) -> bytes:
    """Return the member of a returned set."""
    return f"{step}:{number}:{deliveries}:".encode() + raw


def score(number: int, step: int = 0) -> float:
    """Return the score of a returned message."""
    return float(step * 2**47 + number)


def in_line_message(entry: bytes) -> bytes:
    """Return the raw message of a member of an in_line set."""
    if entry[:1] == b"p":
        return entry.split(b":", 3)[3]
    *_, size, rest = entry.split(b":", 5)
    return rest[int(size) :]


#: Where a message stands in a key of ours: after how many colons, by the end of the key's name.
_BEHIND = {
    r"\}:returned": 3,
    r"\}:jobs:\d:.*": 3,
    r"\}:front:\d:.*": 3,
    r"\}:delayed": 2,
    r"\}:unsorted": 1,
}


def everywhere(client: redis.Redis) -> list[bytes]:
    """Return the raw messages of all keys, once for each place."""
    found: list[bytes] = []
    for key, value in keyspace(client).items():
        colons = [count for end, count in _BEHIND.items() if re.search(f"{end}$", key, re.DOTALL)]
        if key.endswith("unacked"):
            found += [text[1:].rpartition(b',"",')[0] for text in value.values()]
        elif colons:
            found += [text.split(b":", colons[0])[-1] for text in value]
        elif key.endswith(":in_line"):
            found += map(in_line_message, value)
        elif key.endswith((":set_aside", ":dead")):
            found += [fields[b"message"] for fields in value]
        elif isinstance(value, list):
            found += value
    return found


_COUNTING = b"""
local made, fail_at = 0, %d
local function call(...)
  made = made + 1
  if made == fail_at then error('injected') end
  return redis.call(...)
end
local function try(...)
  made = made + 1
  if made == fail_at then error('injected') end
  return redis.pcall(...)
end
"""
_BINDING = b"local call, try = redis.call, redis.pcall\n"


def failing(packed: bytes, at: int) -> list[bytes]:
    """Return the same call with the script changed so that its Redis call number *at* (from 1) raises."""
    name, sha, *rest = split(packed)
    assert name == b"EVALSHA"
    (script,) = [script for script in scripts.ALL if script.sha.encode() == sha]
    assert script.source.count(_BINDING) == 1
    return [b"EVAL", script.source.replace(_BINDING, _COUNTING % at), *rest]


def fails_at_every_call(
    client: redis.Redis, seed: Callable[[], object], pack: Callable[[], bytes]
) -> Iterator[int]:
    """Seed and make the packed call with its 1st, 2nd, … Redis call failing, yielding after each failure.

    Ends when the script gets through; *pack* returns the call after *seed* has run.
    """
    for at in range(1, 200):
        client.flushall()
        seed()
        try:
            client.execute_command(*failing(pack(), at))
        except redis.ResponseError as error:
            if "injected" not in str(error):
                raise
        else:
            assert at > 2, "the script makes fewer calls than it has effects"
            return
        yield at
    raise AssertionError("unreachable: no script makes that many calls here")

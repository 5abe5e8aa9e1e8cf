"""What a server must be before a worker reads from it.

Owns the checks at the start of a session: what cannot work ends the start, what may lose keys is said once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from redis.exceptions import RedisError

from celery_strategies.errors import ImproperlyConfigured
from celery_strategies.store.store import command, pack

#: Oldest server whose commands the scripts use (``ZMSCORE``).
MINIMUM = (6, 2)

#: One packed ``INFO`` for each section that is looked at.
QUESTIONS = [command(pack("INFO", section)) for section in ("server", "cluster", "memory")]


def parse(replies: Iterable[Any]) -> dict[str, str]:
    """Read replies to :data:`QUESTIONS`; a section that the user may not read is left out."""
    facts: dict[str, str] = {}
    for reply in replies:
        if isinstance(reply, bytes):
            pairs = (line.partition(":") for line in reply.decode("utf-8", "replace").splitlines())
            facts.update((name, value.strip()) for name, found, value in pairs if found)
        elif not isinstance(reply, RedisError):
            raise TypeError(f"INFO replied with {type(reply).__name__}")
    return facts


def check(facts: dict[str, str], warn: Callable[[str, str], None]) -> None:
    """Refuse a server that cannot serve; *warn* (key, text) of one that may drop keys.

    Raises:
        ImproperlyConfigured: the server is too old, or part of a Redis Cluster.
    """
    version = facts.get("redis_version", "")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers and numbers < MINIMUM:
        raise ImproperlyConfigured(
            f"broker_url: the server is Redis {version}; celery-strategies needs Redis 6.2 or newer"
        )
    if facts.get("cluster_enabled") == "1":
        raise ImproperlyConfigured(
            "broker_url: the server is part of a Redis Cluster, which Celery cannot use as a broker; "
            "use a single server, or Sentinel"
        )
    policy = facts.get("maxmemory_policy", "noeviction")
    if facts.get("maxmemory", "0") != "0" and policy != "noeviction":
        warn(
            "eviction",
            f"maxmemory-policy is {policy}: when memory is full Redis may drop "
            + (
                "queues and unacknowledged messages"
                if policy.startswith("allkeys")
                else "places of held messages"
            )
            + "; use noeviction for a broker",
        )

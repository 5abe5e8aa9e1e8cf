"""Remote-control commands that must look into Redis, where stock Celery looks into the worker's memory.

Owns the replacements of ``inspect scheduled`` and ``inspect query_task``; on a worker that is not ours they do what
Celery's do.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import redis
from celery.worker import control

#: Most delayed messages of one queue that an answer lists.
LISTED = 100

_scheduled, _query_task = control.Panel.data["scheduled"], control.Panel.data["query_task"]


def _delayed(consumer: Any) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield the delayed messages of *consumer*'s queues, the first to be due first: seconds, and headers."""
    channel = consumer.reader.connector.channel
    if channel is None:
        return
    keys, client = channel.strategy_keys(), redis.Redis(connection_pool=channel.pool)
    for source in consumer.reader.sources.ordered():
        found: Any = client.zrange(keys.delayed(source.queue), 0, LISTED - 1, withscores=True)
        for member, due in found:
            headers = _headers_of(member)
            if headers is not None:
                yield due / 1000, {**headers, "queue": source.queue}


def _headers_of(member: bytes) -> dict[str, Any] | None:
    try:
        return dict(json.loads(member.split(b":", 2)[2])["headers"])
    except (ValueError, LookupError, TypeError):
        # Not a task: whoever takes it sets it aside.
        return None


def _info(headers: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": headers.get("id"),
        "name": headers.get("task"),
        "type": headers.get("task"),
        "args": headers.get("argsrepr"),
        "kwargs": headers.get("kwargsrepr"),
        "hostname": None,
        "time_start": None,
        "acknowledged": False,
        "delivery_info": {"exchange": "", "routing_key": headers["queue"]},
        "worker_pid": None,
    }


@control.inspect_command(alias="dump_schedule")
def scheduled(state: Any, **kwargs: Any) -> list[dict[str, Any]]:
    """List scheduled tasks: those of the queues that this worker reads wait in Redis, for all workers alike."""
    found: list[dict[str, Any]] = list(_scheduled(state, **kwargs))
    if hasattr(state.consumer, "reader"):
        found += [
            {"eta": headers.get("eta"), "priority": 6, "request": _info(headers), "due": due}
            for due, headers in _delayed(state.consumer)
        ]
    return found


@control.inspect_command(variadic="ids", signature="[id1 [id2 [... [idN]]]]")
def query_task(state: Any, ids: str | Iterable[str], **kwargs: Any) -> dict[str, Any]:
    """Query for task information by id, also among the first delayed tasks of this worker's queues."""
    wanted = {ids} if isinstance(ids, str) else set(ids)
    found: dict[str, Any] = dict(_query_task(state, ids, **kwargs))
    if wanted - set(found) and hasattr(state.consumer, "reader"):
        for _, headers in _delayed(state.consumer):
            if headers.get("id") in wanted and headers["id"] not in found:
                found[headers["id"]] = ("scheduled", _info(headers))
    return found

"""The fencing number of the running task, for systems outside of Redis.

Owns one public function. Needs nothing of a worker but the headers of the task's message.
"""

from __future__ import annotations

from typing import Any

from celery import current_task

from celery_strategies.core.tags import TERM_HEADER

__all__ = ("fencing_term",)


def fencing_term(task: Any = None) -> int | None:
    """Return the term of the lease under which the running task (or *task*, a bound one) was taken.

    It is None outside of tasks, and for tasks of queues without a single active consumer. Terms of one queue rise with
    every change of its leader: a system that remembers the highest term it has seen, and refuses lower ones, cannot be
    changed by a leader that was replaced without knowing it.
    """
    request = getattr(task or current_task, "request", None)
    if request is None:
        return None
    term = request.get(TERM_HEADER) or (request.headers or {}).get(TERM_HEADER)
    return None if term is None else int(term)

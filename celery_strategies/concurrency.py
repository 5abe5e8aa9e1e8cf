"""``limits_concurrency``: how many jobs of a task, or of a key of it, may run at once over all queues and workers.

Owns the rules of a limit and how a task carries one. Knows nothing of Redis: who runs tasks asks :func:`limit_of` and
:meth:`Limit.name`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from celery.local import Proxy, maybe_evaluate

from celery_strategies.core.tags import KEY_BYTES, check_key
from celery_strategies.errors import LimitError, one_line

__all__ = ("Limit", "limit_of", "limits_concurrency")

#: Where a task, its class or its function carries its limit.
ATTRIBUTE = "strategies_limit"
#: Seconds that a permit outlives the last sign of life of its holder, unless the task says otherwise.
DURATION = 300.0

T = TypeVar("T")
#: What tells the key of a job: a callable that gets the arguments of the task, or one key for all.
Key = Callable[..., object] | str | None

#: Limits of lazy tasks, whose objects do not exist yet when their module is imported.
_lazy: list[tuple[Any, Limit]] = []


@dataclass(frozen=True, slots=True)
class Limit:
    """At most *to* jobs of one key run at once; a permit outlives its holder's last sign of life by *duration* seconds.

    *key* is None: one key for all jobs. *group* is what tasks share that share the limit, None: the task's own name.
    """

    to: int
    key: Key = None
    duration: float = DURATION
    group: str | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.to, int) or self.to < 1:
            raise _wrong("to", self.to, "must be an integer of at least 1")
        if not _is_number(self.duration, int, float) or not 0 < self.duration < math.inf:
            raise _wrong("duration", self.duration, "must be a number of seconds above 0")
        if isinstance(self.key, str):
            _check("key", self.key)
        elif self.key is not None and not callable(self.key):
            raise _wrong(
                "key", self.key, "must be a callable that gets the task's arguments, or a string"
            )
        if self.group is not None:
            _check("group", self.group)

    def name(self, task: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
        """Return the name of the limit that holds for a job of *task* with these arguments; None: none does.

        Raises:
            LimitError: the callable failed, or what it returned is no key.
        """
        key: object = self.key
        if callable(key):
            try:
                key = key(*args, **kwargs)
                if key is None:
                    return None
                key = check_key(key)
            except Exception as exc:  # whatever the user's code raises
                raise LimitError(
                    f"limits_concurrency: the key of a job of {task} is unknown: {one_line(repr(exc))}"
                ) from exc
        # A colon in the name would make "a:b" with key "c" the limit of "a" with key "b:c".
        name = (self.group or task).replace("%", "%25").replace(":", "%3A")
        return f"{name}:{key or ''}"


def limits_concurrency(
    to: int, key: Key = None, duration: float = DURATION, group: str | None = None
) -> Callable[[T], T]:
    """Let at most *to* jobs of a task with the same key run at once, over all queues and workers.

    Decorates a function below ``@app.task`` or ``@shared_task``, a task class, or a task. *key* is a callable that gets
    the task's arguments and returns a string, an integer, or None for a job without a limit; or one string for all.
    *duration*, in seconds, is how long a permit outlives the last sign of life of its holder. Tasks with the same
    *group* share one limit.

    Raises:
        LimitError: an argument breaks the rules.
    """
    limit = Limit(to, key, duration, group)

    def decorate(target: T) -> T:
        if isinstance(target, Proxy):
            # To look at it would make the task, and its app, before they are complete.
            _lazy.append((target, limit))
        else:
            _mark(target, limit)
        return target

    return decorate


def limit_of(task: Any) -> Limit | None:
    """Return the limit of *task*, a task object; None if it has none."""
    while _lazy:
        proxy, limit = _lazy[0]
        _mark(maybe_evaluate(proxy), limit)
        del _lazy[0]
    found = vars(task).get(ATTRIBUTE)
    for carrier in (task.run, type(task)):
        found = found or getattr(carrier, ATTRIBUTE, None)
    return found if isinstance(found, Limit) else None


def _mark(target: Any, limit: Limit) -> None:
    if not callable(target):
        raise LimitError(
            f"limits_concurrency decorates a function, a task class or a task, not {one_line(repr(target))}"
        )
    setattr(target, ATTRIBUTE, limit)
    if not isinstance(target, type) and hasattr(target, "run"):
        # A shared task has an object for each app, and one function.
        setattr(getattr(target.run, "__func__", target.run), ATTRIBUTE, limit)


def _is_number(value: object, *types: type) -> bool:
    return isinstance(value, types) and not isinstance(value, bool)


def _check(argument: str, value: object) -> None:
    try:
        if isinstance(value, str):
            check_key(value)
            return
    except ValueError:
        pass
    raise _wrong(
        argument, value, f"must be a string of 1 to {KEY_BYTES} bytes without NUL characters"
    )


def _wrong(argument: str, value: object, rule: str) -> LimitError:
    return LimitError(f"limits_concurrency({argument}={one_line(repr(value))}): {rule}")

"""Threads of the operating system, also under green pools.

gevent and eventlet put greenlets in the place of threads; those stand still while a job computes without yielding.
"""

from __future__ import annotations

import logging
import select
import sys
from collections import deque
from collections.abc import Callable, Iterable
from threading import Thread
from typing import Any


def is_green() -> bool:
    """Whether this process's threads are greenlets."""
    gevent, eventlet = sys.modules.get("gevent.monkey"), sys.modules.get("eventlet.patcher")
    return bool(
        (gevent is not None and gevent.is_module_patched("threading"))
        or (eventlet is not None and eventlet.is_monkey_patched("thread"))
    )


def start_thread(target: Callable[[], None], name: str) -> None:
    """Run *target* in a thread that ends with the process. Sockets it shares with others must never make it wait."""
    gevent, eventlet = sys.modules.get("gevent.monkey"), sys.modules.get("eventlet.patcher")
    if gevent is not None and gevent.is_module_patched("threading"):
        gevent.get_original("_thread", "start_new_thread")(target, ())
    elif eventlet is not None and eventlet.is_monkey_patched("thread"):
        eventlet.original("threading").Thread(target=target, name=name, daemon=True).start()
    else:
        Thread(target=target, name=name, daemon=True).start()


def readable(descriptors: Iterable[int], seconds: float) -> set[int]:
    """Wait, in a thread of :func:`start_thread`, until some of *descriptors* can be read; returns those."""
    eventlet = sys.modules.get("eventlet.patcher")
    module = select
    if eventlet is not None and eventlet.is_monkey_patched("select"):
        # What it leaves of the module has no poll().
        module = eventlet.original("select")
    # Not select(): its descriptors end at 1023.
    poll = module.poll()
    for descriptor in descriptors:
        poll.register(descriptor, module.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(seconds * 1000)}


class ThreadLogger:
    """Log from a thread of :func:`start_thread`.

    Under a green pool the locks of ``logging`` belong to greenlets of one thread: another that holds one while a
    greenlet waits for it ends the worker. There, lines wait for :meth:`flush`.
    """

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)
        self._waiting: deque[tuple[int, str, tuple[Any, ...], Any]] = deque()

    def info(self, message: str, *args: Any) -> None:
        """Log at level INFO."""
        self._log(logging.INFO, message, args, None)

    def warning(self, message: str, *args: Any, exc_info: bool = False) -> None:
        """Log at level WARNING, with the exception that is handled where *exc_info* says so."""
        self._log(logging.WARNING, message, args, sys.exc_info() if exc_info else None)

    def _log(self, level: int, message: str, args: tuple[Any, ...], error: Any) -> None:
        self._waiting.append((level, message, args, error))
        if not is_green():
            self.flush()

    def flush(self) -> None:
        """Write what waits; under a green pool, from the loop's thread only."""
        while self._waiting:
            level, message, args, error = self._waiting.popleft()
            self._logger.log(level, message, *args, exc_info=error)

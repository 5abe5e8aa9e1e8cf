"""Own the only way a test waits: on a condition, with a limit and a description."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

#: Seconds; long enough for a loaded machine with two cores, short enough to stay below the
#: test's own limit.
DEFAULT_TIMEOUT = 20.0


def wait_until(
    condition: Callable[[], T],
    timeout: float = DEFAULT_TIMEOUT,
    description: str = "",
    interval: float = 0.02,
    swallow: type[BaseException] | tuple[type[BaseException], ...] = (),
) -> T:
    """Call `condition` until it returns something true, and return that.

    Args:
        condition: Called again and again; false values mean "not yet".
        timeout: Seconds until the wait has failed.
        description: What is waited for, for the failure.
        interval: Seconds between calls.
        swallow: Exceptions of `condition` that mean "not yet" too.

    Raises:
        AssertionError: Not in time; names the description and the last value or exception.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            value = condition()
        except swallow as error:
            last = f"raised {error!r}"
        else:
            if value:
                return value
            last = f"was {value!r}"
        if time.monotonic() >= deadline:
            what = description or getattr(condition, "__name__", "condition")
            raise AssertionError(f"not within {timeout:g} s: {what} (last {last})")
        time.sleep(interval)


def stays(
    condition: Callable[[], T],
    seconds: float,
    description: str = "",
    interval: float = 0.02,
) -> None:
    """Assert that `condition` is true for `seconds`, the form of "and nothing else happens".

    Raises:
        AssertionError: As soon as it is false once.
    """
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if not value:
            what = description or getattr(condition, "__name__", "condition")
            raise AssertionError(f"did not stay for {seconds:g} s: {what} (was {value!r})")
        if time.monotonic() >= deadline:
            return
        time.sleep(interval)

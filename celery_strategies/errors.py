"""Own the exceptions that a user of this package can meet.

Must not import anything else of the package, and must not log or exit by itself.
"""

from __future__ import annotations

import celery.exceptions
import click

__all__ = (
    "FairShareError",
    "ImproperlyConfigured",
    "LimitError",
    "NotOurTransport",
    "StrategiesError",
    "invalid",
    "one_line",
)

#: Longest ``repr`` of a wrong value that a message shows, in characters.
REPR_LIMIT = 200

#: What a broker URL may start with, as messages and documentation name it.
SUPPORTED_TRANSPORTS = "redis://, rediss://, redis+socket:// (or socket://) and sentinel://"


class StrategiesError(Exception):
    """Stand as the base of what can go wrong while a worker runs, or a producer publishes."""


class FairShareError(StrategiesError, ValueError):
    """Refuse to publish a message whose key or weight breaks the rules. Nothing was queued."""


class LimitError(StrategiesError, ValueError):
    """Refuse a wrong argument of ``limits_concurrency``, where the task is defined, or a job whose key is unknown."""


class ImproperlyConfigured(celery.exceptions.ImproperlyConfigured, click.ClickException):
    """Tell that a worker or a producer cannot start as it is configured.

    It is Celery's own error for programs, and a ``click.ClickException`` for the command line,
    where it prints one line (``Error: ...``) and ends with exit status 1, without a traceback.
    """

    def __init__(self, message: str) -> None:
        click.ClickException.__init__(self, message)


class NotOurTransport(ImproperlyConfigured):
    """Refuse a broker that is not Redis.

    ``transport`` is the name or the scheme of the broker, such as ``amqp``. Pass no URL with a
    password: the message shows the text as it is.
    """

    def __init__(self, transport: str) -> None:
        self.transport = transport
        super().__init__(
            f"celery-strategies reads from Redis only, and the broker transport is {transport!r}; "
            f"supported broker URLs start with {SUPPORTED_TRANSPORTS}"
        )

    def __reduce__(self) -> tuple[type[NotOurTransport], tuple[str]]:
        return type(self), (self.transport,)


def invalid(setting: str, value: object, rule: str) -> ImproperlyConfigured:
    """Return (not raise) the error for a wrong value.

    ``setting`` is spelled as the user spelled it; ``rule`` goes on from the value, as in "must be
    an integer from 1 to 10". The message is always a single line.
    """
    return ImproperlyConfigured(f"{setting} = {one_line(repr(value))}: {rule}")


def one_line(text: str) -> str:
    """Return ``text`` as a single line of bounded length, for a message."""
    shown = " ".join(text.splitlines())
    return shown if len(shown) <= REPR_LIMIT else shown[:REPR_LIMIT] + "..."

"""Messages that cannot start now: a future ETA, or a rate limit that is used up.

Owns the decision, by the server's clock, and sends such a message to wait in Redis: a worker's memory and its slots are
for what runs. What returns from there is due, so Celery's own waiting in the worker is passed by.
"""

from __future__ import annotations

import logging
from typing import Any

from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.utils.limits import TokenBucket

from celery_strategies.transport.reader import Reader

logger = logging.getLogger("celery_strategies")

#: Seconds that a message may wait in the worker for its rate limit: going to Redis and back takes about as long.
SOON = 0.05


class Later:
    """Decide for one consumer's messages, read by *reader* for *app*."""

    def __init__(self, reader: Reader, app: Any) -> None:
        self._reader = reader
        self._app = app
        #: When, in seconds since the epoch by the server's clock, the next deferred message of a task may start.
        self._next_start: dict[str, float] = {}

    # -- ETA --------------------------------------------------------------------------------------------------

    def wait_for_eta(self, message: Any, payload: Any) -> bool:
        """Send *message* away if its ETA is in the future; else have it start at once.

        *payload* is its decoded body under protocol 1, else None.
        """
        fields = message.headers if payload is None else payload
        text = fields.get("eta")
        if not text or not self._reader.settler.owns(message.delivery_tag):
            return False
        due = self._timestamp(text)
        if due is None:
            return False
        if due > self._reader.granted_at:
            self._delay(message, due)
            return True
        # Celery would put it into the worker's timer, beyond the count of its slots.
        fields["eta"] = None
        message.strategies_eta = text
        return False

    def _timestamp(self, text: Any) -> float | None:
        """Return what Celery's request makes of an ETA; None if it cannot, which is Celery's to report."""
        try:
            return float(self._datetime(text).timestamp())
        except (AttributeError, ArithmeticError, TypeError, ValueError):
            return None

    def _datetime(self, text: Any) -> Any:
        eta: Any = maybe_iso8601(text)
        return maybe_make_aware(eta, self._app.timezone)

    def starting(self, request: Any) -> None:
        """Give *request*, which is about to start, back the ETA that was taken off its message."""
        text = getattr(request._message, "strategies_eta", None)
        if text is not None:
            request._request_dict["eta"] = text
            request._eta = self._datetime(text)

    def _delay(self, message: Any, due: float, *, limited: bool = False) -> None:
        reader = self._reader
        reader.settler.delay(message.delivery_tag, due, limited=limited)
        reader.delays.expect(due - reader.granted_at)
        message._state = "REJECTED"

    # -- rate limits ------------------------------------------------------------------------------------------

    def wait_for_limit(self, request: Any, bucket: TokenBucket, tokens: int) -> bool:
        """Send *request*'s message away unless its rate limit lets it start now, or soon.

        Each one that goes gets the next free start: it comes back once, in order, not with all the others.
        """
        message = request._message
        if not self._reader.settler.owns(message.delivery_tag):
            return False
        hold = bucket.expected_time(tokens)
        if not bucket.contents and hold <= SOON:
            return False
        if message.acknowledged:
            return False
        name, pause = request.task.name, tokens / float(bucket.fill_rate or 1)
        now = self._reader.granted_at
        due = max(now + hold + pause * len(bucket.contents), self._next_start.get(name, 0.0))
        self._next_start[name] = due + pause
        self._delay(message, due, limited=True)
        logger.debug("Task %s[%s] waits %.3f s for its rate limit", name, request.id, due - now)
        return True

    def limits_changed(self) -> None:
        """Have what waits for the old rate limits come back now, whichever worker sent it away."""
        self._next_start.clear()
        self._reader.release_limited()

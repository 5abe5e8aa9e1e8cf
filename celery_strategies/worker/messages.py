"""From a message to Celery's strategy for its task, and what happens to a message that is unfit.

Owns the task handler and the ways in which Celery finds a message unfit. Celery discards such a message; here it is set
aside, where an operator can look at it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from celery.exceptions import InvalidTaskError
from celery.worker import state
from celery.worker.consumer import Consumer
from kombu.exceptions import ContentDisallowed, DecodeError

from celery_strategies.concurrency import Limit
from celery_strategies.transport.reader import Reader
from celery_strategies.worker import pools
from celery_strategies.worker.later import Later
from celery_strategies.worker.limits import ask_for, limits_of

logger = logging.getLogger("celery_strategies")


class MessageConsumer(Consumer):
    """Consumer that keeps what it cannot run."""

    reader: Reader
    later: Later
    #: The limits of the tasks that have one, by the task's name; replaced, never changed.
    limits: Mapping[str, Limit] = {}

    def update_strategies(self) -> None:
        """Take up the tasks that there are now, and their limits."""
        super().update_strategies()
        self.limits = limits_of(self.app)

    def create_task_handler(self, **_: Any) -> Callable[[Any], Any]:
        """Return what is called with each message: Celery's own steps, without a promise for each settle.

        Settling only appends to the reader's batch, so there is nothing to put off.
        """
        strategies = self.strategies

        def on_task_received(message: Any) -> Any:
            payload = None
            try:
                name = message.headers["task"]
            except TypeError:
                return self.on_unknown_message(None, message)
            except KeyError:
                # Protocol 1 has the name in the body.
                try:
                    payload = message.decode()
                except Exception as exc:  # noqa: BLE001  # whatever is wrong with the body
                    return self.on_decode_error(message, exc)
                try:
                    name = payload["task"]
                except (TypeError, KeyError):
                    return self.on_unknown_message(payload, message)
            try:
                strategies[name]
            except (KeyError, TypeError) as exc:
                return self.on_unknown_task(None, message, exc)
            return self._if_fit(self._hand_over, name, message, payload)

        return on_task_received

    def _if_fit(
        self, step: Callable[[str, Any, Any], None], name: str, message: Any, payload: Any
    ) -> None:
        """Take a step with a message of the task *name*, and set the message aside if it is not fit for that."""
        try:
            step(name, message, payload)
        except (InvalidTaskError, ContentDisallowed) as exc:
            self.on_invalid_task(payload, message, exc)
        except DecodeError as exc:
            self.on_decode_error(message, exc)
        except pools.DATA_ERRORS as exc:
            # A message that Celery did not foresee would end the loop, or (a KeyError) look like a lost
            # connection for ever. Once there is a request, the error is not about the message.
            if any(request._message is message for request in tuple(state.requests.values())):
                raise
            self.on_invalid_task(payload, message, exc)

    def _hand_over(self, name: str, message: Any, payload: Any) -> None:
        if self.later.wait_for_eta(message, payload):
            return
        limit = self.limits.get(name)
        if limit is not None and message.delivery_tag in self.reader.held:
            ask = ask_for(limit, name, message, payload)
            if ask is not None:
                go_on = partial(self._if_fit, self._start, name, message, payload)
                self.reader.permits.acquire(message.delivery_tag, ask, go_on)
                return
        self._start(name, message, payload)

    def _start(self, name: str, message: Any, payload: Any) -> None:
        self.strategies[name](
            message,
            payload,
            message.ack_log_error,
            message.reject_log_error,
            self.on_task_message,
        )

    def call_soon_ack(self, p: Any, *args: Any, **kwargs: Any) -> Any:
        """Run an acknowledgement at once: with us it only appends to the reader's batch."""
        p(*args, **kwargs)
        return p

    @contextmanager
    def _setting_aside(self, message: Any, reason: str) -> Iterator[None]:
        """Keep a message that Celery is about to discard where an operator can find it."""
        if self.reader.settler.owns(message.delivery_tag) and not message.acknowledged:
            self.reader.settler.set_aside(message.delivery_tag, reason)
            message._state = "REJECTED"
            # Celery rejects it next, which would raise for a message in this state.
            message.reject_log_error = message.ack = nothing
        try:
            yield
        except pools.DATA_ERRORS:
            # Celery's own log line could not be made of it.
            logger.error("Set aside a message that cannot be run: %s", reason)  # noqa: TRY400

    def _on_unfit(self, request: Any, exc: Exception) -> None:
        """Set aside the message of a request that cannot be started, and free its slot."""
        self.on_invalid_task(None, request._message, exc)
        state.task_ready(request)

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        """Set aside a message whose body cannot be decoded."""
        with self._setting_aside(message, f"body cannot be decoded: {exc!r}"):
            super().on_decode_error(message, exc)

    def on_unknown_message(self, body: Any, message: Any) -> None:
        """Set aside a message that is no task."""
        with self._setting_aside(message, "not a task message"):
            super().on_unknown_message(body, message)

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:
        """Set aside a message of a task that is not registered here."""
        with self._setting_aside(message, f"unregistered task {exc}"):
            super().on_unknown_task(body, message, exc)

    def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> None:
        """Set aside a task message that breaks the protocol."""
        with self._setting_aside(message, f"invalid task: {exc!r}"):
            super().on_invalid_task(body, message, exc)


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing: the turn of the loop is the point, or what would be done is done."""

"""The bootstep that ties a reader to the life of Celery's consumer.

Owns nothing but the calls: the reader does the work.
"""

from __future__ import annotations

from typing import Any

from celery import bootsteps
from celery.bootsteps import RUN
from celery.worker.consumer.tasks import Tasks

from celery_strategies.worker import slots


class ReaderStep(bootsteps.StartStopStep):
    """Stop the reader before the task consumer, close it after the pool has drained."""

    label = "strategies reader"
    requires = (Tasks,)

    def stop(self, c: Any) -> None:
        """Drop the connection after a broker loss; at shutdown, take no more."""
        if c.blueprint.state == RUN:
            c.reader.detach()
        else:
            c.reader.drain()

    def shutdown(self, c: Any) -> None:
        """Give back what never ran or never finished, and leave."""
        # A cold shutdown cancels what runs, and Celery forgets a cancelled request at once: what no request
        # speaks for had begun.
        waiting = {
            request._message.delivery_tag for request in slots.requests(c) if not request.time_start
        }
        waiting |= c.reader.permits.tags
        c.reader.shutdown(lambda tag: tag not in waiting)

    def info(self, c: Any) -> dict[str, Any]:
        """Return what ``inspect stats`` shows."""
        return {"strategies": c.strategies_info()}

"""One stretch of a reader's life on one connection.

Owns making it: scripts loaded, client tracking on, earlier sessions of the same worker void.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from celery_strategies.store import checks
from celery_strategies.store import store as calls
from celery_strategies.store.keys import Keys
from celery_strategies.store.link import SUPPORTS_PUSH, Link
from celery_strategies.store.store import Store
from celery_strategies.transport.patience import Patience

#: Milliseconds that a worker's holder outlives its last sign of life, at least.
HOLDER_TTL = 24 * 3600 * 1000


@dataclass(slots=True)
class Session:
    """A connection with everything that belongs to it. *visibility_timeout* is in seconds."""

    link: Link
    store: Store
    keys: Keys
    number: str
    visibility_timeout: float
    tracking: bool = False

    @property
    def ttl(self) -> int:
        """Time to live of this worker's holder, in milliseconds."""
        return max(HOLDER_TTL, int(2000 * self.visibility_timeout))

    def open(self, patience: Patience) -> dict[str, bytes]:
        """Prepare the connection; returns what Redis says this worker still holds, tag to place.

        Raises:
            ImproperlyConfigured: the server cannot serve a strategies worker.
            redis.exceptions.RedisError: the connection's or the server's.
        """
        answers = self.link.call_all([*checks.QUESTIONS, *calls.load_scripts()])
        facts = checks.parse(answers[: len(checks.QUESTIONS)])
        checks.check(facts, lambda key, text: patience.complain(key, "%s", text))
        for error in answers[len(checks.QUESTIONS) :]:
            if isinstance(error, RedisError):
                raise error
        self.tracking = self._track(patience)
        entries: list[Any] = self.link.call(self.store.join(self.number, self.ttl))
        return dict(zip((tag.decode() for tag in entries[::2]), entries[1::2], strict=True))

    def _track(self, patience: Patience) -> bool:
        if not SUPPORTS_PUSH:
            patience.complain("hiredis", "hiredis is older than 3.2: polling instead of waiting")
            return False
        try:
            self.link.call(calls.command(calls.pack("CLIENT", "TRACKING", "ON", "OPTIN", "NOLOOP")))
        except RedisConnectionError:
            raise
        except RedisError as exc:
            patience.complain(
                "tracking", "Redis refuses client tracking (%s): polling instead of waiting", exc
            )
            return False
        return True

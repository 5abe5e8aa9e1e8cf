"""What to do when Redis refuses: pause, say so once, go on.

Owns the pause after an error reply and the memory of what the log has been told. Sends nothing.
"""

from __future__ import annotations

import logging
import random
from time import monotonic

from redis.exceptions import RedisError

logger = logging.getLogger("celery_strategies.reader")

#: First and longest pause, in seconds, between attempts while Redis refuses.
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
#: How many complaints are remembered before all are forgotten.
MEMORY = 1000


class Patience:
    """Grow a pause with every refusal; complain about each thing once."""

    def __init__(self) -> None:
        self._pause = 0.0
        self._until = 0.0
        self._complaints: set[str] = set()

    def refused(self, what: str, error: RedisError) -> None:
        """Note that Redis refused *what*; the next attempt waits."""
        self._pause = min(LONGEST_PAUSE, max(FIRST_PAUSE, 2 * self._pause))
        self._until = monotonic() + self._pause * random.uniform(0.8, 1.2)
        kind = str(error).partition(" ")[0]
        self.complain(
            f"refused {kind}", "Redis refused %s (%s): trying again, nothing is lost", what, error
        )

    def accepted(self) -> None:
        """Note that Redis executed a call."""
        if self._pause:
            self.reset()
            logger.info("Redis accepts calls again")
            self._complaints = {key for key in self._complaints if not key.startswith("refused ")}

    def reset(self) -> None:
        """Forget the pause: a new connection deserves an attempt at once."""
        self._pause = self._until = 0.0

    def remaining(self, now: float) -> float:
        """Return how long, in seconds, to wait before the next attempt; 0 or less: not at all."""
        return self._until - now

    def complain(self, key: str, message: str, *args: object) -> None:
        """Log a warning, once for each *key*."""
        if key in self._complaints:
            return
        if len(self._complaints) >= MEMORY:
            self._complaints.clear()
        self._complaints.add(key)
        logger.warning(message, *args)

"""What to do when Redis refuses: pause, say so once, go on.

Owns the pause after an error reply and the memory of what the log has been told. Sends nothing.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from time import monotonic

from redis.exceptions import RedisError

logger = logging.getLogger("celery_strategies.reader")

#: First and longest pause, in seconds, between attempts while Redis refuses.
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
#: How many complaints are remembered before all are forgotten.
MEMORY = 1000


class Patience:
    """Grow a pause with every refusal of one kind of call; complain about each thing once.

    A kind that is refused must not be forgiven because another is accepted, nor stop the others. *notify* gets each
    new pause, in seconds.
    """

    def __init__(self, notify: Callable[[float], None] = lambda _pause: None) -> None:
        self._notify = notify
        #: Kind of call to its pause and when that ends, both in (monotonic) seconds.
        self._pauses: dict[str, tuple[float, float]] = {}
        self._complaints: set[str] = set()

    def refused(self, what: str, error: RedisError) -> None:
        """Note that Redis refused *what*; the next attempt at that waits."""
        before, _ = self._pauses.get(what, (0.0, 0.0))
        pause = min(LONGEST_PAUSE, max(FIRST_PAUSE, 2 * before))
        wait = pause * random.uniform(0.8, 1.2)
        self._pauses[what] = (pause, monotonic() + wait)
        self._notify(wait)
        kind = str(error).partition(" ")[0]
        self.complain(
            f"refused {kind}", "Redis refused %s (%s): trying again, nothing is lost", what, error
        )

    def accepted(self, what: str) -> None:
        """Note that Redis executed *what*."""
        if what in self._pauses:
            del self._pauses[what]
            logger.info("Redis accepts calls again")
            self._complaints = {key for key in self._complaints if not key.startswith("refused ")}

    def reset(self) -> None:
        """Forget the pauses: a new connection deserves an attempt at once."""
        self._pauses.clear()

    def remaining(self, now: float, *whats: str) -> float:
        """Return how long, in seconds, to wait before an attempt at *whats*; 0: not at all."""
        if not self._pauses:
            return 0.0
        ends = [until for what, (_, until) in self._pauses.items() if what in whats]
        return max(0.0, max(ends) - now) if ends else 0.0

    def complain(self, key: str, message: str, *args: object) -> None:
        """Log a warning, once for each *key*."""
        if key in self._complaints:
            return
        if len(self._complaints) >= MEMORY:
            self._complaints.clear()
        self._complaints.add(key)
        logger.warning(message, *args)

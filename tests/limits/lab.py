"""What the tests with real workers share: the workers' lab, with this folder's project and eyes for limits."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.support.waiting import wait_until
from tests.support.workers import Worker
from tests.worker import lab as workers

PROJECT = "tests.limits.project"
#: Seconds that permits last where a test waits for their end.
SHORT = 3.0


class Lab(workers.Lab):
    """One broker and workers of the project with limited tasks."""

    def worker(self, pool: str = "prefork", **options: Any) -> Worker:
        """Start one of our workers with this inner pool."""
        options.setdefault("app", PROJECT)
        return super().worker(pool, **options)

    def permits(self, limit: str) -> int:
        """Return how many permits of *limit* are taken."""
        return int(self.db.zcard(self.keys.permits(limit)))  # type: ignore[arg-type]

    def line(self, limit: str) -> int:
        """Return how many messages wait for a permit of *limit*."""
        return int(self.db.zcard(self.keys.line(limit)))  # type: ignore[arg-type]

    def wait_line(self, limit: str, count: int) -> None:
        """Wait until *count* messages wait for a permit of *limit*."""
        wait_until(lambda: self.line(limit) == count, 20, f"{count} messages in line")

    def wait_free(self, limit: str, timeout: float = 20) -> None:
        """Wait until nothing has a permit of *limit*, nor waits for one."""
        wait_until(
            lambda: not self.permits(limit) and not self.line(limit), timeout, f"{limit} is free"
        )

    def at_once(self, name: str) -> int:
        """Return how many jobs of the task *name* have run at once at most, by their records."""
        running: Counter[str] = Counter()
        most = 0
        for event in self.events():
            if event.name == name:
                running[event.task] += 1 if event.event == "start" else -1
                most = max(most, sum(running.values()))
        return most

"""Own the question to workers whether they have a task: an acknowledged message is nowhere in Redis."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from celery_strategies.look.answer import Running

__all__ = ("Question",)

#: Seconds that workers have to answer.
PATIENCE = 0.45


class Question:
    """Ask all workers, stock ones too, while somebody searches in Redis."""

    def __init__(self, app: Any, task: str, workers: int) -> None:
        self._app = app
        self._task = task
        #: With as many answers nobody need wait for more; None: wait for all.
        self._limit = workers or None
        self._reply: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        try:
            inspect = self._app.control.inspect(timeout=PATIENCE)
            reply: Any = inspect.query_task(self._task)
            self._reply = dict(reply or {})
        except Exception:  # noqa: BLE001  # remote control is off, or refused: then nobody says anything
            self._reply = {}

    def answer(self, held: Sequence[str] | None = None) -> Running | None:
        """Wait for the answers; None if no worker has it. *held* names who it must be, None: anybody."""
        self._thread.join(PATIENCE * 2)
        for worker, found in self._reply.items():
            told: dict[str, Any] = dict(found or {})
            state, info = told.get(self._task) or ("", None)
            if state in ("active", "reserved") and (held is None or worker in held):
                return Running(worker, state, info.get("time_start") if info else None)
        return None

"""A socket pair that interrupts a poll from any thread or greenlet.

One mechanism for every loop: Celery 5.6's hub has no waker, green pools have no hub at all.
"""

from __future__ import annotations

import socket
from contextlib import suppress


class Waker:
    """Make :meth:`fileno` readable from any thread."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._pending = False

    def fileno(self) -> int:
        """Return the descriptor to poll for reading."""
        return self._reader.fileno()

    def wake(self) -> None:
        """Make the loop turn once more. Safe from any thread, and after :meth:`close`."""
        if not self._pending:
            self._pending = True
            with suppress(OSError):
                self._writer.send(b"\0")

    def drain(self) -> None:
        """Take the wakes that have arrived; the caller's turn of the loop must come after.

        Bytes first, flag second: the other way round, a wake in between would lose its byte here and leave the flag
        set for good. This way it is only not sent, and the turn that follows sees what it was about.
        """
        with suppress(OSError):
            self._reader.recv(4096)
        self._pending = False

    def close(self) -> None:
        """Close both ends."""
        self._reader.close()
        self._writer.close()

"""One connection to Redis for non-blocking calls, with the pushes of client tracking.

Owns the order of replies: each packed command sent has one handler, called with the reply or the error.
Never reconnects and never sends anything twice by itself: a call that may have been executed is its
sender's to judge.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

Handler = Callable[[Any], None]
_PUSH = object()


def _supports_push() -> bool:
    try:
        import hiredis
    except ImportError:
        return True
    return hasattr(hiredis, "PushNotification")


#: Whether the installed parser tells pushes from replies (hiredis before 3.2 does not).
SUPPORTS_PUSH = _supports_push()


def ignore(_reply: Any) -> None:
    """Handle a reply that says nothing, not even when it is an error."""


class Link:
    """Send packed commands over *connection* (a connected redis-py RESP3 connection).

    *on_change* is called, without arguments, when a tracked key changed.
    """

    def __init__(self, connection: Any, on_change: Callable[[], None]) -> None:
        self.connection = connection
        self.busy = False
        #: When something was sent last, in monotonic seconds.
        self.sent_at = monotonic()
        self._on_change = on_change
        self._handlers: deque[tuple[Handler, float]] = deque()
        self._lock = threading.RLock()
        self._parser = connection._parser
        # Whatever the push is about, it must not be taken for a reply: redis-py's own handlers return what they like.
        self._parser.handle_push_response = self._pushed

    def _pushed(self, message: Any, **_: Any) -> object:
        if message[0] in (b"invalidate", "invalidate"):
            self._on_change()
        return _PUSH

    @property
    def alive(self) -> bool:
        """Whether the socket is open."""
        return self.connection._sock is not None

    @property
    def pending(self) -> int:
        """Number of replies still to come."""
        return len(self._handlers)

    def readable(self) -> bool:
        """Whether something has arrived that nobody has read."""
        return bool(self.alive and self.connection.can_read(timeout=0))

    def waited(self, now: float) -> float:
        """Return the age of the oldest unanswered command, in seconds; 0 if all are answered."""
        return now - self._handlers[0][1] if self._handlers else 0.0

    def fileno(self) -> int:
        """Return the socket's file descriptor."""
        return int(self.connection._sock.fileno())

    def send(self, packed: bytes, *handlers: Handler) -> None:
        """Send *packed*, one or more commands, with one handler for each.

        Raises:
            redis.exceptions.ConnectionError: the connection is gone.
        """
        if not self.alive:
            # redis-py would connect again by itself, outside of any session.
            raise RedisConnectionError("Connection to Redis is closed")
        now = self.sent_at = monotonic()
        self._handlers.extend((handler, now) for handler in handlers)
        self.connection.send_packed_command([packed], check_health=False)

    def pump(self) -> None:
        """Handle the replies and pushes of a readable socket, also those already in the parser's buffer."""
        if not self._handlers and not (self.alive and self.connection.can_read(timeout=0)):
            # A call in the same turn of the loop has read it: nothing more need come.
            return
        while self.alive:
            self.read_one()
            if not self._buffered():
                return

    def _buffered(self) -> bool:
        """Whether the parser holds bytes already read, which no poll of the socket would show."""
        reader = getattr(self._parser, "_reader", None)
        if reader is not None:
            # hiredis tells without a system call; whatever is still in the socket, the loop's poll shows,
            # except for what TLS has decrypted already.
            pending = getattr(self.connection._sock, "pending", None)
            return bool(reader.has_data() or (pending is not None and pending()))
        return bool(self.alive and self.connection.can_read(timeout=0))

    def read_one(self) -> None:
        """Read one reply or push, waiting for it if it has not arrived whole."""
        self.busy = True
        try:
            reply = self.connection.read_response(disable_decoding=True, push_request=True)
        except ResponseError as exc:
            # Not so -LOADING and -NOAUTH: they are connection errors to redis-py, which closes the socket.
            reply = exc
        finally:
            self.busy = False
        if reply is _PUSH:
            return
        if not self._handlers:
            raise RedisConnectionError("Redis sent a reply that nobody asked for")
        handler, _ = self._handlers.popleft()
        handler(reply)

    def call(self, packed: bytes) -> Any:
        """Send one command and wait for its reply, handling what comes before it.

        Raises:
            redis.exceptions.RedisError: the server's error reply, or the connection is gone.
        """
        with self._lock:
            answer: list[Any] = []
            self.send(packed, answer.append)
            while not answer:
                self.read_one()
        if isinstance(answer[0], RedisError):
            raise answer[0]
        return answer[0]

    def subscribe(self, packed: bytes, ping: bytes) -> RedisError | None:
        """Send a packed ``SUBSCRIBE``; returns the server's error if it refuses.

        Success comes as a push, which is no reply, so a packed ``PING`` behind it tells when to stop reading.
        """
        with self._lock:
            answers: list[Any] = []
            self.send(packed + ping, answers.append)
            while not answers:
                self.read_one()
            if not isinstance(answers[0], RedisError):
                return None
            self._handlers.append((ignore, monotonic()))
            self.read_one()
        return answers[0]

    def call_all(self, commands: list[bytes]) -> list[Any]:
        """Send several commands at once and wait for their replies; errors are returned, not raised."""
        with self._lock:
            answers: list[Any] = []
            self.send(b"".join(commands), *([answers.append] * len(commands)))
            while len(answers) < len(commands):
                self.read_one()
        return answers

    def close(self) -> None:
        """Close the socket; outstanding handlers are dropped."""
        self._handlers.clear()
        self.connection.disconnect()

"""Own a TCP proxy in front of a Redis server that can be told to misbehave.

It understands RESP (2 and 3) well enough to pair each reply with its request, so that a test can
say "the server did it, and the client never heard": `discard_reply`. Not for TLS.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import ClassVar

from tests.support.ports import HOST, free_port

_CHUNK = 65_536
#: Commands after which replies no longer pair one to one with requests under RESP2.
_UNPAIRED = frozenset({b"SUBSCRIBE", b"PSUBSCRIBE", b"SSUBSCRIBE", b"MONITOR"})


@dataclass(frozen=True)
class Exchange:
    """A request and its reply, as they went over the wire."""

    request: tuple[bytes, ...]
    """The command and its arguments; empty where none could be paired."""
    reply: bytes
    """The raw reply; empty for a request that was not sent on."""

    @property
    def command(self) -> str:
        """The command's name, upper case."""
        return self.request[0].upper().decode() if self.request else ""


Predicate = Callable[[Exchange], bool]


def command(*names: str, containing: bytes | None = None) -> Predicate:
    """Return a predicate for these commands, optionally with `containing` in an argument."""
    wanted = {name.upper() for name in names}

    def matches(exchange: Exchange) -> bool:
        if exchange.command not in wanted:
            return False
        return containing is None or any(containing in part for part in exchange.request)

    return matches


class Order:
    """A pending order to the proxy; `wait` returns when it was carried out."""

    def __init__(self, predicate: Predicate, count: int) -> None:
        self._predicate = predicate
        self._left = count
        self._lock = threading.Lock()
        self._done = threading.Event()
        self.exchanges: list[Exchange] = []

    def matches(self, exchange: Exchange) -> bool:
        """Take this exchange if it matches and the order is not complete."""
        with self._lock:
            if not self._left or not self._predicate(exchange):
                return False
            self._left -= 1
            self.exchanges.append(exchange)
            if not self._left:
                self._done.set()
            return True

    @property
    def done(self) -> bool:
        """Whether it was carried out in full."""
        return self._done.is_set()

    def wait(self, timeout: float = 20) -> list[Exchange]:
        """Wait until it was carried out and return what was lost."""
        assert self._done.wait(timeout), f"nothing matched within {timeout:g} s"
        return self.exchanges

    def cancel(self) -> None:
        """Forget it."""
        with self._lock:
            self._left = 0


class RespError(ValueError):
    """These bytes are not RESP."""


class Frames:
    """Cuts a byte stream into complete RESP values, without copying what they mean."""

    _LINE = b"+-:_,#("
    _BULK = b"$=!"
    _LIST: ClassVar[dict[int, int]] = {
        0x2A: 1,
        0x7E: 1,
        0x3E: 1,
        0x25: 2,
        0x7C: 2,
    }  # * ~ > and the pairs: % |

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes; return the values that are complete now."""
        self._buffer += data
        frames: list[bytes] = []
        while self._buffer:
            end = self._end(0)
            if end is None:
                break
            frames.append(bytes(self._buffer[:end]))
            del self._buffer[:end]
        return frames

    @property
    def rest(self) -> bytes:
        """The bytes of the value that is not complete."""
        return bytes(self._buffer)

    def _end(self, start: int) -> int | None:
        position, pending = start, 1
        while pending:
            stop = self._buffer.find(b"\r\n", position)
            if stop < 0:
                return None
            kind, text = self._buffer[position], self._buffer[position + 1 : stop]
            after = stop + 2
            pending -= 1
            if kind in self._BULK:
                length = self._number(text)
                if length >= 0:
                    after += length + 2
                    if after > len(self._buffer):
                        return None
            elif kind in self._LIST:
                count = max(self._number(text), 0) * self._LIST[kind]
                # An attribute precedes the value it belongs to.
                pending += count + (1 if kind == 0x7C else 0)
            elif kind not in self._LINE:
                raise RespError(bytes(self._buffer[position : position + 40]))
            position = after
        return position

    @staticmethod
    def _number(text: bytearray) -> int:
        try:
            return int(text)
        except ValueError:
            raise RespError(bytes(text)) from None


def _arguments(frame: bytes) -> tuple[bytes, ...]:
    """Return the arguments of a request (an array of bulk strings)."""
    if not frame.startswith(b"*"):
        return tuple(frame.split())
    head, _, rest = frame.partition(b"\r\n")
    parts: list[bytes] = []
    for _ in range(int(head[1:])):
        size, _, rest = rest.partition(b"\r\n")
        length = int(size[1:])
        parts.append(rest[:length])
        rest = rest[length + 2 :]
    return tuple(parts)


@dataclass(eq=False)
class _Connection:
    client: socket.socket
    server: socket.socket
    requests: deque[tuple[bytes, ...]] = field(default_factory=deque)
    paired: bool = True
    lossy: bool = False
    """Whether bytes of it went into the black hole."""

    def cut(self) -> None:
        for end in (self.client, self.server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Proxy:
    """A proxy on 127.0.0.1 to `port` on 127.0.0.1; use as a context manager.

    `drop_all` cuts what is connected; `refuse` and `accept` close and open the door; `black_hole`
    reads and forwards nothing; `delay` slows both directions; `discard_reply` and
    `discard_request` lose single messages and then cut their connection.
    """

    def __init__(self, port: int, timeout: float = 5) -> None:
        self.target = port
        self.port = free_port()
        self._timeout = timeout
        self._lock = threading.Lock()
        self._connections: set[_Connection] = set()
        self._listener: socket.socket | None = None
        self._threads: list[threading.Thread] = []
        self._replies: list[Order] = []
        self._requests: list[Order] = []
        self._hole = False
        self._delay = 0.0
        self._closed = threading.Event()
        self.accepted = 0
        """How many connections were accepted so far."""

    def url(self, db: int = 0) -> str:
        """Return the broker URL through the proxy."""
        return f"redis://{HOST}:{self.port}/{db}"

    @property
    def connections(self) -> int:
        """How many connections are open now."""
        with self._lock:
            return len(self._connections)

    # -- orders ---------------------------------------------------------------------------

    def drop_all(self) -> int:
        """Cut every open connection and return how many there were; new ones are welcome."""
        with self._lock:
            dropped = list(self._connections)
        for connection in dropped:
            connection.cut()
        return len(dropped)

    def refuse(self, *, drop: bool = True) -> None:
        """Refuse new connections; also cut the open ones unless told otherwise."""
        with self._lock:
            listener, self._listener = self._listener, None
        if listener is not None:
            # shutdown wakes the thread that sits in accept; close alone does not
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        if drop:
            self.drop_all()

    def accept(self) -> None:
        """Accept connections (again), on the same port."""
        if self._listener is not None:
            return
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, self.port))
        listener.listen(128)
        with self._lock:
            self._listener = listener
        self._run(self._listen, listener)

    def black_hole(self) -> None:
        """Read everything and forward nothing, in both directions, until `heal`."""
        self._hole = True

    def delay(self, seconds: float) -> None:
        """Hold every piece of data for this long (0 ends it)."""
        self._delay = seconds

    def heal(self) -> None:
        """End every misbehaviour; connections that lost bytes are cut, the others go on."""
        self._hole = False
        self._delay = 0.0
        for order in [*self._replies, *self._requests]:
            order.cancel()
        with self._lock:
            lossy = [connection for connection in self._connections if connection.lossy]
        for connection in lossy:
            connection.cut()
        self.accept()

    def discard_reply(self, predicate: Predicate, count: int = 1) -> Order:
        """Lose the next `count` replies that match: the server has done it, the client is cut."""
        order = Order(predicate, count)
        self._replies.append(order)
        return order

    def discard_request(self, predicate: Predicate, count: int = 1) -> Order:
        """Lose the next `count` requests that match: the server never sees them."""
        order = Order(predicate, count)
        self._requests.append(order)
        return order

    # -- life -----------------------------------------------------------------------------

    def close(self) -> None:
        """Refuse, cut and end all threads."""
        self._closed.set()
        self.refuse()
        for thread in self._threads:
            thread.join(5)

    def __enter__(self) -> Proxy:  # noqa: PYI034  # Self is new in Python 3.11
        self.accept()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, function: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=function, args=args, daemon=True, name="proxy")
        with self._lock:
            self._threads = [t for t in self._threads if t.is_alive()]
            self._threads.append(thread)
            thread.start()

    def _listen(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection((HOST, self.target), self._timeout)
            except OSError:
                # As if the server itself refused: a reset, not a clean end.
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.close()
                continue
            server.settimeout(None)
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = _Connection(client, server)
            with self._lock:
                self._connections.add(connection)
                self.accepted += 1
            self._run(self._serve, connection)

    def _serve(self, connection: _Connection) -> None:
        """Carry requests in this thread and replies in another, until either side ends."""
        back = threading.Thread(
            target=self._carry,
            args=(connection, connection.server, connection.client, self._on_reply),
            daemon=True,
            name="proxy",
        )
        back.start()
        try:
            self._carry(connection, connection.client, connection.server, self._on_request)
        finally:
            connection.cut()
            back.join()
            with self._lock:
                self._connections.discard(connection)
            connection.client.close()
            connection.server.close()

    def _carry(
        self,
        connection: _Connection,
        source: socket.socket,
        target: socket.socket,
        judge: Callable[[_Connection, bytes], bool],
    ) -> None:
        frames: Frames | None = Frames()
        try:
            while data := source.recv(_CHUNK):
                if self._delay:
                    self._closed.wait(self._delay)
                if frames is None:
                    self._forward(connection, target, data)
                    continue
                try:
                    complete = frames.feed(data)
                except RespError:
                    connection.paired = False
                    self._forward(connection, target, frames.rest)
                    frames = None
                    continue
                # Whole values only: a discarded one must not have begun to arrive.
                passed = bytearray()
                for frame in complete:
                    if not judge(connection, frame):
                        self._forward(connection, target, bytes(passed))
                        return
                    passed += frame
                self._forward(connection, target, bytes(passed))
        except OSError:
            pass
        finally:
            connection.cut()

    def _forward(self, connection: _Connection, target: socket.socket, data: bytes) -> None:
        if self._hole:
            connection.lossy = connection.lossy or bool(data)
        elif data and not connection.lossy:
            target.sendall(data)

    def _on_request(self, connection: _Connection, frame: bytes) -> bool:
        arguments = _arguments(frame)
        exchange = Exchange(arguments, b"")
        if any(order.matches(exchange) for order in self._requests):
            return False
        if arguments and arguments[0].upper() in _UNPAIRED:
            connection.paired = False
        connection.requests.append(arguments)
        return True

    def _on_reply(self, connection: _Connection, frame: bytes) -> bool:
        if frame.startswith(b">"):
            exchange = Exchange((), frame)
        elif connection.paired and connection.requests:
            exchange = Exchange(connection.requests.popleft(), frame)
        else:
            exchange = Exchange((), frame)
        return not any(order.matches(exchange) for order in self._replies)

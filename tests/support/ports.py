"""Own the choice of TCP ports: free, on 127.0.0.1, and outside the kernel's ephemeral range.

A client that keeps reconnecting to a stopped server on an *ephemeral* port can be given that very
port as its own and connect to itself; another client can take it while the server is down.
"""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

HOST = "127.0.0.1"
_LOWEST = 10_240
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def _highest() -> int:
    try:
        return int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768


def free_port() -> int:
    """Return a port nobody listens on (`secrets`: a seeded `random` would repeat it)."""
    span = max(_highest() - _LOWEST, 1_024)
    for _ in range(200):
        port = _LOWEST + secrets.randbelow(span)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port on 127.0.0.1")

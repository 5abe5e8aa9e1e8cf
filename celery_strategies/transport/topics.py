"""What ``*`` and ``#`` in a binding mean: what AMQP says.

A routing key is words between dots. In the pattern of a binding to a topic exchange ``*`` stands for exactly one word
and ``#`` for any number of them, none included; the empty key has no words. By Kombu's own expressions ``a.#`` misses
``a``, and before Kombu 5.7 ``a.*`` matches ``a.b.c``.

Kombu keeps each binding in Redis as *routing key, expression, queue*, and every process that binds writes the
expression that it knows, so there may be several for one binding. Ours is right, and a process of ours that publishes
does not look at what is written: an expression only tells it that the binding is a topic's. A stock producer matches by
all that it finds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from kombu.transport.virtual import exchange as kombu_exchange
from kombu.utils.text import escape_regex

#: What ``*`` is to Kombu: before 5.7, and since.
_STARS = (r".*?[^\.]", r"[^\.]+")
#: A line of an exchange's table: routing key, expression ("" unless the exchange is a topic), queue.
Row = tuple[str, str, str]


@lru_cache(maxsize=4096)
def expression(pattern: str) -> str:
    """Return the regular expression, for ``re.match``, of a binding's *pattern*.

    It is free of ``:`` and ``|``, which a user may have made the separator between the parts of a binding.
    """
    words = _words(pattern)
    if words == ("#",):
        return r"^[\s\S]*\Z"
    # Something stands for a word, which the empty key does not have.
    parts, dot = [r"^(?!\Z)" if words else "^"], ""
    for word in words:
        if word == "#":
            # Each of its words with the dot behind it at the beginning, with the dot before it elsewhere.
            parts.append(r"(\.[^.]*)*" if dot else r"([^.]*\.)*")
        else:
            parts.append(dot + (r"[^.]*" if word == "*" else re.escape(word)))
            dot = r"\."
    return "".join(parts) + r"\Z"


@lru_cache(maxsize=4096)
def _words(pattern: str) -> tuple[str, ...]:
    """Return the words of *pattern*; several ``#`` in a row are one."""
    words: list[str] = []
    for word in pattern.split(".") if pattern else ():
        if word != "#" or words[-1:] != ["#"]:
            words.append(word)
    return tuple(words)


def matches(pattern: str, key: str) -> bool:
    """Whether a message with the routing key *key* goes to a queue bound with *pattern*."""
    if pattern == key:
        return True
    wanted, words = _words(pattern), key.split(".") if key else []
    at = word = 0
    # The last # that was met, and the first word that it does not stand for.
    last, after = -1, 0
    while word < len(words):
        if at < len(wanted) and wanted[at] == "#":
            last, after = at, word
            at += 1
        elif at < len(wanted) and wanted[at] in ("*", words[word]):
            at, word = at + 1, word + 1
        elif last >= 0:
            after += 1
            at, word = last + 1, after
        else:
            return False
    return wanted[at:] in ((), ("#",))


def split_row(member: str, sep: str) -> Row | None:
    """Return the parts of a binding as it stands in Redis, None if it is none; *sep* may occur inside of a part."""
    parts = member.split(sep)
    for first in range(1, len(parts) - 1):
        key = sep.join(parts[:first])
        for second in range(first + 1, len(parts)):
            written = sep.join(parts[first:second])
            if len(parts) == 3 or written in ("", expression(key), *kombus(key)):
                return key, written, sep.join(parts[second:])
    return None


def kombus(pattern: str) -> tuple[str, ...]:
    """Return the expressions that Kombu's versions write for *pattern*."""
    words = escape_regex(pattern, ".#*").split(".")
    found = []
    for star in _STARS:
        wildcards = {"*": star, "#": ".*?"}
        found.append("^" + r"\.".join(wildcards.get(word, word) for word in words) + "$")
    return tuple(found)


class DirectExchange(kombu_exchange.DirectExchange):
    """Kombu's, for an exchange that this process has not declared: its bindings tell whether it is a topic."""

    def lookup(self, table: Iterable[Row], exchange: str, routing_key: str, *_: Any) -> set[str]:  # noqa: ARG002  # as Kombu calls it
        """Return the queues that a message with *routing_key* goes to."""
        return {
            queue
            for key, written, queue in table
            if key == routing_key or (written and matches(key, routing_key))
        }


class TopicExchange(kombu_exchange.TopicExchange):
    """Kombu's, with AMQP's meaning of a pattern."""

    def lookup(self, table: Iterable[Row], exchange: str, routing_key: str, *_: Any) -> set[str]:  # noqa: ARG002  # as Kombu calls it
        """Return the queues that a message with *routing_key* goes to, each of them once."""
        return {queue for key, _, queue in table if matches(key, routing_key)}

    def key_to_pattern(self, rkey: str) -> str:
        """Return the expression that a stock producer will match by."""
        return expression(rkey)


EXCHANGE_TYPES = {"direct": DirectExchange, "topic": TopicExchange}


def queues_for(channel: Any, exchange: str, key: str) -> set[str]:
    """Return the queues that a message published over *channel* with the routing key *key* goes to."""
    found: set[str] = channel.typeof(exchange).lookup(
        channel.get_table(exchange), exchange, key, None
    )
    return found

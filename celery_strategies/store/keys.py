"""Every Redis key the package uses, spelled once.

Owns the names; knows nothing of what is stored under them. Kombu's own keys are built here too, with the
``global_keyprefix`` spelled out: Kombu's client prefixes only the first key of an ``EVALSHA``, so our
connection is never that client.

Names are only ever built, never parsed, so a queue may be called anything (spaces, colons, braces, unicode).

Life of the keys (every key has a TTL or a reason):

======================================  =======================================================================
``<queue>``, ``<queue><sep>1`` … ``9``   Kombu's inbox lists; live as long as their messages
``unacked``, ``unacked_index``           Kombu's records; live as long as a delivery
``strategies:{<queue>}:returned``        given-back messages; lives as long as its messages
``strategies:{<queue>}:set_aside``       messages nobody could run; kept until an operator removes them
``strategies:{<queue>}:watchers``        idle workers that watch; TTL
``strategies:{<queue>}:parked``          idle workers that wait for a wake; TTL
``strategies:holder:<worker>``           what a worker holds; TTL, refreshed while it lives
``strategies:wake:<worker>``             a wake for one worker; TTL
``strategies:sequence``                  counter of deliveries; no TTL, since places must keep rising
``strategies:scratch``                   never exists
======================================  =======================================================================
"""

from __future__ import annotations

from dataclasses import dataclass

from celery_strategies.core.levels import LISTS


@dataclass(frozen=True, slots=True)
class Keys:
    """Build key names for one broker.

    *prefix* is Kombu's ``global_keyprefix``; *sep* separates a queue's name from a priority step; the
    ``unacked*`` names are the transport options of the same name, without the prefix.
    """

    prefix: str = ""
    sep: str = "\x06\x16"
    unacked_name: str = "unacked"
    unacked_index_name: str = "unacked_index"

    @property
    def unacked(self) -> str:
        """Hash of Kombu's unacked records."""
        return f"{self.prefix}{self.unacked_name}"

    @property
    def unacked_index(self) -> str:
        """Sorted set of delivery tags by the time, in seconds, of their last sign of life."""
        return f"{self.prefix}{self.unacked_index_name}"

    @property
    def sequence(self) -> str:
        """Counter of deliveries."""
        return f"{self.prefix}strategies:sequence"

    @property
    def scratch(self) -> str:
        """Key that never exists: deleting it is the write with which scripts open."""
        return f"{self.prefix}strategies:scratch"

    def inbox(self, queue: str, step: int) -> str:
        """List of *queue* for one priority step, 0 to 9, as Kombu names it."""
        return f"{self.prefix}{queue}{self.sep}{step}" if step else f"{self.prefix}{queue}"

    def inboxes(self, queue: str) -> list[str]:
        """All ten lists of *queue*, in numeric order."""
        return [self.inbox(queue, step) for step in range(LISTS)]

    def returned(self, queue: str) -> str:
        """Sorted set of given-back messages."""
        return f"{self.prefix}strategies:{{{queue}}}:returned"

    def set_aside(self, queue: str) -> str:
        """Stream of messages that could not be run."""
        return f"{self.prefix}strategies:{{{queue}}}:set_aside"

    def watchers(self, queue: str) -> str:
        """Sorted set of the idle workers that watch *queue*."""
        return f"{self.prefix}strategies:{{{queue}}}:watchers"

    def parked(self, queue: str) -> str:
        """Sorted set of the idle workers that wait to be woken for *queue*."""
        return f"{self.prefix}strategies:{{{queue}}}:parked"

    def holder(self, worker: str) -> str:
        """Hash of what *worker* holds."""
        return f"{self.prefix}strategies:holder:{worker}"

    def wake(self, worker: str) -> str:
        """Key whose change wakes *worker*."""
        return f"{self.prefix}strategies:wake:{worker}"

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
``strategies:{<queue>}:delayed``         messages that are not due yet; lives as long as its messages
``strategies:{<queue>}:policy``          how the queue's jobs are sorted; until ``unsort`` removes it
``strategies:{<queue>}:state``           counters and virtual times of the sorted jobs; as long as there are any
``strategies:{<queue>}:index:<level>``   keys that may run, by finish tag; as long as there are any
``strategies:{<queue>}:old:<level>``     the same, while the index is being rebased
``strategies:{<queue>}:tags:<level>``    how a key came to its finish tag; while the key has jobs
``strategies:{<queue>}:jobs:<level>:…``  jobs of one key; live as long as their messages
``strategies:{<queue>}:front:<level>:…`` jobs of one key that were given back; the same
``strategies:{<queue>}:full``            keys at their cap that have jobs; as long as there are any
``strategies:{<queue>}:running:…``       tags of one key's jobs in flight; as long as there are any
``strategies:{<queue>}:caps``            caps per key; until they are changed
``strategies:{<queue>}:weights``         weights per key that an operator set; until they are changed
``strategies:{<queue>}:ready``           there while a sorted job may run
``strategies:{<queue>}:sorter``          the worker that sorts a backlog; TTL
``strategies:{<queue>}:unsorted``        sorted jobs on their way back to Kombu's lists; as long as there are any
``strategies:{<queue>}:dead``            messages that outlived too many workers; kept until an operator acts
``strategies:{<queue>}:lease``           who may read a single-active queue, and its term; no TTL, since terms must rise
``strategies:{<queue>}:free``            there while nobody has that lease; TTL
``strategies:{<queue>}:consumers``       consumer priority of each worker that reads the queue; as long as there are any
``strategies:{<queue>}:watchers``        idle workers that watch; TTL
``strategies:{<queue>}:parked``          idle workers that wait for a wake; TTL
``strategies:{<queue>}:in_line``         messages that wait for a permit of a limit; lives as long as its messages
``strategies:permits:<limit>``           messages that have a permit, until when; TTL
``strategies:line:<limit>``              messages that wait for a permit, in order; as long as there are any
``strategies:lines``                     limits that have a line, and when to look at it; as long as there are any
``strategies:limits``                    size and duration of the limits that have a line; the same
``strategies:limited:<worker>``          permits of a worker's jobs; TTL, refreshed while it lives
``strategies:holder:<worker>``           what a worker holds; TTL, refreshed while it lives
``strategies:alive``                     last beat of each worker; as long as there are any
``strategies:worker:<worker>``           what a worker says of itself; TTL
``strategies:leases:<worker>``           queues whose lease a worker has; as long as it has any
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
    def alive(self) -> str:
        """Sorted set of workers by the time, in milliseconds, of their last beat."""
        return f"{self.prefix}strategies:alive"

    @property
    def sessions(self) -> str:
        """What the names of the channels that workers subscribe to, as a sign of life, begin with."""
        return f"{self.prefix}strategies:session:"

    def session(self, worker: str) -> str:
        """Channel whose subscription is the session of *worker*; nothing is ever published there."""
        return f"{self.sessions}{worker}"

    def leases(self, worker: str) -> str:
        """Set of the queues whose lease *worker* has."""
        return f"{self.prefix}strategies:leases:{worker}"

    def entry(self, worker: str) -> str:
        """Hash of what *worker* says of itself."""
        return f"{self.prefix}strategies:worker:{worker}"

    @property
    def scratch(self) -> str:
        """Key that never exists: deleting it is the write with which scripts open."""
        return f"{self.prefix}strategies:scratch"

    def base(self, queue: str) -> str:
        """Return what the names of all keys of one queue begin with, except the inbox lists.

        Scripts build the keys of sorted jobs from it, since only they know the level and the key of a job.
        """
        return f"{self.prefix}strategies:{{{queue}}}:"

    def inbox(self, queue: str, step: int) -> str:
        """List of *queue* for one priority step, 0 to 9, as Kombu names it."""
        return f"{self.prefix}{queue}{self.sep}{step}" if step else f"{self.prefix}{queue}"

    def inboxes(self, queue: str) -> list[str]:
        """All ten lists of *queue*, in numeric order."""
        return [self.inbox(queue, step) for step in range(LISTS)]

    def returned(self, queue: str) -> str:
        """Sorted set of given-back messages."""
        return f"{self.base(queue)}returned"

    def set_aside(self, queue: str) -> str:
        """Stream of messages that could not be run."""
        return f"{self.base(queue)}set_aside"

    def delayed(self, queue: str) -> str:
        """Sorted set of messages that are not due yet, by milliseconds since the epoch."""
        return f"{self.base(queue)}delayed"

    def policy(self, queue: str) -> str:
        """Hash that says how the jobs of *queue* are sorted."""
        return f"{self.base(queue)}policy"

    def state(self, queue: str) -> str:
        """Hash of counters and virtual times of the sorted jobs."""
        return f"{self.base(queue)}state"

    def caps(self, queue: str) -> str:
        """Hash of caps, by key."""
        return f"{self.base(queue)}caps"

    def weights(self, queue: str) -> str:
        """Hash of the weights that an operator set, by key."""
        return f"{self.base(queue)}weights"

    def ready(self, queue: str) -> str:
        """Key that exists while a sorted job may run."""
        return f"{self.base(queue)}ready"

    def sorter(self, queue: str) -> str:
        """Name of the worker that sorts the backlog of *queue*."""
        return f"{self.base(queue)}sorter"

    def unsorted(self, queue: str) -> str:
        """List of sorted jobs on their way back to Kombu's lists."""
        return f"{self.base(queue)}unsorted"

    def dead(self, queue: str) -> str:
        """Stream of messages that outlived too many workers."""
        return f"{self.base(queue)}dead"

    def lease(self, queue: str) -> str:
        """Hash that says who may read a single-active queue."""
        return f"{self.base(queue)}lease"

    def free(self, queue: str) -> str:
        """Key that exists while nobody has the lease of *queue*."""
        return f"{self.base(queue)}free"

    def consumers(self, queue: str) -> str:
        """Sorted set of the workers that read *queue* by their consumer priority."""
        return f"{self.base(queue)}consumers"

    def watchers(self, queue: str) -> str:
        """Sorted set of the idle workers that watch *queue*."""
        return f"{self.base(queue)}watchers"

    def parked(self, queue: str) -> str:
        """Sorted set of the idle workers that wait to be woken for *queue*."""
        return f"{self.base(queue)}parked"

    def in_line(self, queue: str) -> str:
        """Sorted set of the messages of *queue* that wait for a permit of a limit."""
        return f"{self.base(queue)}in_line"

    def permits(self, limit: str) -> str:
        """Sorted set of the messages that have a permit of *limit*, by when it expires, in milliseconds."""
        return f"{self.prefix}strategies:permits:{limit}"

    def line(self, limit: str) -> str:
        """Sorted set of the messages that wait for a permit of *limit*."""
        return f"{self.prefix}strategies:line:{limit}"

    @property
    def lines(self) -> str:
        """Sorted set of the limits that have a line, by when to look at it, in milliseconds."""
        return f"{self.prefix}strategies:lines"

    @property
    def limits(self) -> str:
        """Hash of the sizes and durations of the limits that have a line."""
        return f"{self.prefix}strategies:limits"

    def limited(self, worker: str) -> str:
        """Hash of the permits that the jobs of *worker* have, by tag."""
        return f"{self.prefix}strategies:limited:{worker}"

    def holder(self, worker: str) -> str:
        """Hash of what *worker* holds."""
        return f"{self.prefix}strategies:holder:{worker}"

    def wake(self, worker: str) -> str:
        """Key whose change wakes *worker*."""
        return f"{self.prefix}strategies:wake:{worker}"

"""One worker's script calls, made directly: what Redis does without a worker around it.

Imports celery_strategies, so only measures of the package itself use it. Owns one connection.
"""

import contextlib
import time

import redis


class Calls(contextlib.AbstractContextManager):
    """Take and sort messages of the queue ``celery``, by key if *fair*."""

    def __init__(self, server, *, fair):
        from celery_strategies.core.policy import Policy  # noqa: PLC0415 (stock needs none of it)
        from celery_strategies.core.strategies import Strategy  # noqa: PLC0415
        from celery_strategies.store import store as calls  # noqa: PLC0415
        from celery_strategies.store.keys import Keys  # noqa: PLC0415
        from celery_strategies.store.link import Link  # noqa: PLC0415

        self.pool = redis.ConnectionPool(port=server.port, protocol=3, health_check_interval=0)
        self.link = Link(self.pool.get_connection(), lambda: None)
        for reply in self.link.call_all(calls.load_scripts()):
            if isinstance(reply, Exception):
                raise reply
        self.store = calls.Store(Keys(), "bench")
        self.link.call(self.store.join("1", 3_600_000))
        if fair:
            policy = Policy("fair", False, "fair_key", "fair_weight")
            self.link.call(self.store.adopt("celery", policy, None))
        self.source = calls.SourceKeys("celery", None, (0, 3, 6, 9), fair)
        self.plan = calls.TakePlan(Keys(), "bench", Strategy.PRIORITY, [self.source])
        self.grant = calls.Grant
        self.tags = []

    def sort(self):
        """Sort everything, with pauses as long as the calls, as a worker does; returns the number of calls."""
        number = 0
        while True:
            number += 1
            begin = time.perf_counter()
            if self.link.call(self.store.sort(self.source))[0] <= 0:
                return number
            time.sleep(time.perf_counter() - begin)

    def take(self, n):
        """Take *n* messages, settling those of the last take; returns how many there were."""
        grant = self.grant.parse(self.link.call(self.plan.call("1", n, tags=self.tags)))
        self.tags = [delivery.tag for delivery in grant.deliveries]
        return len(self.tags)

    def __exit__(self, *_):
        self.link.close()
        self.pool.disconnect()

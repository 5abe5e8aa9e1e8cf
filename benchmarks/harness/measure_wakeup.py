"""Idle wake-up: from the LPUSH of one job to the first line of its task.

One job at a time, at random gaps, so that the worker is asleep each time. Both ends are
read from CLOCK_MONOTONIC, which all processes of a machine share.
"""

import random
import time

from . import backlog
from .fleet import Fleet, RunError
from .rounds import alternate
from .server import RedisServer
from .tables import Bar, Table, percentile

CASES = (("solo", 1), ("threads", 4), ("prefork", 4))
GAP = (0.02, 0.06)  # seconds


def run(plan):
    table = Table("Idle wake-up", "Publish to task start, one job every 20-60 ms.")
    jobs = 100 if plan.quick else 250
    for pool, slots in CASES:
        name = f"{pool} {slots}"
        if plan.cases and name not in plan.cases and pool not in plan.cases:
            continue

        def measure(variant, pool=pool, slots=slots, name=name):
            with (
                RedisServer(plan.redis_server) as server,
                Fleet(server, variant, pool, slots) as fleet,
            ):
                waits = latencies(server, fleet, jobs, GAP)
            table.row(f"{name}: p50", "ms").add(variant.label, percentile(waits, 50))
            bar = Bar(1.0, at_least=False)
            table.row(f"{name}: p99", "ms", bar).add(variant.label, percentile(waits, 99))

        alternate(table, f"wake-up {name}", plan.variants, plan.rounds, measure)
    return [table]


def latencies(server, fleet, jobs, gap, warm_up=10):
    """Publish *jobs* one by one, waiting for each; return the waits in ms."""
    template = backlog.Template("bench.mark", [0.0])
    waits = []
    for number in range(jobs + warm_up):
        time.sleep(random.uniform(*gap))
        sent = time.monotonic()
        server.client.lpush(template.queue, template.copy([sent]))
        echoed, started = fleet.mark()
        if echoed != sent:
            raise RunError("a job ran twice or out of turn")
        if number >= warm_up:
            waits.append((started - sent) * 1e3)
    return waits

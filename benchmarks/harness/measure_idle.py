"""1 idle worker against 50 on one queue: commands while idle, cost of a job, wake-up.

Workers are solo, without gossip, mingle and heartbeat, forked from one process that has
imported Celery already. Redis CPU per job is net of what the same workers cost idle, so
that neither Redis's own clock nor safety polling flatters the ratio.
"""

import time

from .fleet import Fleet
from .measure_wakeup import latencies
from .rounds import alternate
from .server import RedisServer
from .tables import Bar, Row, Table, percentile

GAP = (0.005, 0.015)  # seconds between jobs
SIZES = (1, 50)


def run(plan):
    idle = Table("Idle workers", "Commands per second that all workers together send to Redis.")
    busy = Table("A job with 1 or 50 idle workers on the queue", "One job at a time; solo.")
    pairs = {}  # (figure, size) -> Row, for the ratio of 50 to 1

    def measure(variant):
        for size in SIZES:
            for name, unit, value in one_fleet(plan, variant, size):
                table = idle if "idle" in name else busy
                table.row(f"{size}: {name}", unit).add(variant.label, value)
                row = pairs.setdefault((name, size), Row(name, unit))
                row.add(variant.label, value)
        for name, bar in BARS.items():
            one, many = (pairs[name, size].samples[variant.label][-1] for size in SIZES)
            row = busy.row(f"{name}, 50 against 1", "x", bar)
            row.add(variant.label, many / one if one > 0 else None)

    alternate(idle, "1 and 50 workers", plan.variants, plan.rounds, measure)
    return [idle, busy]


BARS = {
    "Redis CPU": Bar(3.0, at_least=False, ratio=False),
    "wake-up p50": None,
    "wake-up p99": None,
}


def one_fleet(plan, variant, size):
    """Yield (figure, unit, value) for *size* workers."""
    window = 4.0 if plan.quick else 10.0
    jobs = 100 if plan.quick else 300
    with RedisServer(plan.redis_server) as server, Fleet(server, variant, count=size) as fleet:
        time.sleep(2.0)
        with server.commands() as counted:
            time.sleep(window)
        yield "idle, sent", "per s", counted["sent"] / window
        yield "idle, in scripts", "per s", counted["inside"] / window

        before, start = server.load(), time.perf_counter()
        time.sleep(window)
        resting = (server.load() - before).cpu / (time.perf_counter() - start)
        yield "idle, Redis CPU", "ms per s", resting * 1e3

        latencies(server, fleet, 1, GAP)
        before, start = server.load(), time.perf_counter()
        waits = latencies(server, fleet, jobs, GAP, warm_up=0)
        time.sleep(0.1)
        cpu = (server.load() - before).cpu - resting * (time.perf_counter() - start)
        yield "Redis CPU", "µs/job", cpu / jobs * 1e6
        yield "wake-up p50", "ms", percentile(waits, 50)
        yield "wake-up p99", "ms", percentile(waits, 99)

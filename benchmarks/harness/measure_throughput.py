"""No-op throughput, and what a job costs Redis and the worker; RSS before and after.

The worker boots idle; then the whole backlog is pushed at once. The window is from the
tenth part of the backlog to its last job, so neither boot nor the push is in it. Nothing
but the workers talks to Redis inside the window.
"""

import dataclasses
import time

from . import backlog
from .fleet import Fleet, RunError
from .rounds import alternate
from .server import RedisServer
from .tables import Bar, Table


@dataclasses.dataclass(frozen=True)
class Case:
    """A pool, its slots, and how much to run through it."""

    name: str
    pool: str
    slots: int
    loglevel: str = "WARNING"
    bar: Bar | None = None
    jobs: int = 8000


CASES = (
    Case("solo", "solo", 1, bar=Bar(2.5)),
    Case("threads 4", "threads", 4, bar=Bar(3.5)),
    Case("threads 16", "threads", 16, jobs=4000),
    Case("prefork 4", "prefork", 4, bar=Bar(2.3)),
    Case("prefork 16", "prefork", 16, jobs=4000),
    Case("threads 4, INFO", "threads", 4, "INFO", Bar(2.0), jobs=4000),
    Case("prefork 4, INFO", "prefork", 4, "INFO", Bar(1.6), jobs=4000),
)
COUNTED = 400  # jobs of the untimed pass in which commands are counted


def run(plan):
    speed = Table("Throughput, no-op jobs", "Jobs per second; log level WARNING unless said.")
    cost = Table("Cost of a job", "In the same runs; commands in an untimed pass after them.")
    size = Table("Resident memory of the worker", "MiB; total is the sum over its processes.")
    for case in CASES:
        if plan.cases and case.name not in plan.cases:
            continue
        jobs = 2000 if plan.quick else case.jobs

        def measure(variant, case=case, jobs=jobs):
            result = one_run(plan, variant, case, jobs)
            label = variant.label
            speed.row(case.name, "jobs/s", case.bar).add(label, result["rate"])
            for name, unit in COSTS.items():
                cost.row(f"{case.name}: {name}", unit).add(label, result[name])
            for name in ("parent, idle", "total, idle"):
                size.row(f"{case.name}: {name}", "MiB").add(label, result[name])
            for name in ("parent", "total"):
                row = size.row(f"{case.name}: {name}, after {jobs} jobs", "MiB")
                row.add(label, result[name])

        alternate(speed, case.name, plan.variants, plan.rounds, measure)
    return [speed, cost, size]


COSTS = {
    "commands sent": "per job",
    "commands in scripts": "per job",
    "Redis CPU": "µs/job",
    "worker CPU": "µs/job",
}


def one_run(plan, variant, case, jobs):
    """Return the figures of one worker over one backlog."""
    with (
        RedisServer(plan.redis_server) as server,
        Fleet(server, variant, case.pool, case.slots, loglevel=case.loglevel) as fleet,
    ):
        template = backlog.Template("bench.noop")
        result = dict(zip(("parent, idle", "total, idle"), fleet.rss(), strict=True))
        template.push(server.client, jobs)

        first = fleet.wait_done(jobs // 10)
        start, load, cpu = time.perf_counter(), server.load(), fleet.cpu()
        fleet.wait_done(jobs)
        elapsed = time.perf_counter() - start
        load, cpu = server.load() - load, fleet.cpu() - cpu
        timed = jobs - first

        result["rate"] = timed / elapsed
        result["Redis CPU"] = load.cpu / timed * 1e6
        result["worker CPU"] = cpu / timed * 1e6
        result["parent"], result["total"] = fleet.rss()

        with server.commands() as counted:
            template.push(server.client, COUNTED)
            fleet.wait_done(jobs + COUNTED)
            time.sleep(0.3)  # the last acks
        settle(server, fleet, jobs + COUNTED)
        result["commands sent"] = (counted["sent"] - 1) / COUNTED  # 1: the push
        result["commands in scripts"] = counted["inside"] / COUNTED
        return result


def settle(server, fleet, jobs):
    """Check that every job ran once and that Redis holds none of them any more."""
    deadline = time.monotonic() + 10
    while left := backlog.left_over(server.client):
        if time.monotonic() > deadline:
            raise RunError(f"{left} messages left in Redis after the last job\n{fleet.tail()}")
        time.sleep(0.2)
    if fleet.done() != jobs:
        raise RunError(f"{fleet.done()} runs of {jobs} jobs\n{fleet.tail()}")

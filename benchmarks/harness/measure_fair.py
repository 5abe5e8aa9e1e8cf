"""What fair share costs: in Redis memory, server time, jobs a second; and sorting a backlog.

``memory`` and ``server`` call the scripts directly, without a worker. ``keys``, ``speed`` and
``million`` run workers of 4 prefork slots; ``speed`` alternates stock, ours and ours with fair share
over the same messages. Every message carries a key, whoever reads it.
"""

import dataclasses
import os
import statistics
import threading
import time

import psutil
import redis

from . import backlog, variants
from .calls import Calls
from .fleet import Fleet, RunError
from .measure_memory import used
from .measure_throughput import settle
from .rounds import alternate
from .server import RedisServer
from .tables import Bar, Table, percentile

SLOTS = 4
KEYS = (1, 10, 200, 10_000, 100_000)
#: Bytes of a body, and how many such messages wait.
BODIES = (("100 B", 100, 10_000), ("10 kB", 10_000, 5_000), ("1 MB", 1_000_000, 120))
LONGEST_CALL = Bar(10.0, at_least=False, ratio=False)
MILLION = 1_000_000
#: A take stops adding messages there.
TAKE_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table that compares no variants."""

    label: str


def run(plan):
    cases = {
        "memory": memory,
        "server": server_time,
        "bodies": bodies,
        "keys": by_keys,
        "speed": speed,
    }
    if plan.million:
        cases |= {"million": million}
    for name, case in cases.items():
        if not plan.cases or name in plan.cases:
            yield from case(plan)


def template(size=0):
    """Return a keyed no-op message; *size* is about that of its body in bytes."""
    args = ["x" * (size * 3 // 4 - 80)] if size > 200 else []
    return backlog.Template("bench.noop", args, keyed=True)


# -- without workers ---------------------------------------------------------------------------


def memory(plan):
    """Memory of a waiting message: in Kombu's list, and sorted."""
    table = Table(
        "Fair share: Redis memory per waiting message",
        "In Kombu's list, as stock has it, and sorted by key; the same messages.",
        labels=["list", "sorted"],
    )
    count = 20_000
    for each in (1, 10, 100, 1000):
        for body, size in (("100 B", 100), ("10 kB", 10_000)):
            number = count if size == 100 else count // 10
            with RedisServer(plan.redis_server) as server, Calls(server, fair=True) as calls:
                before = used(server)
                template(size).push_keyed(server.client, number, number // each)
                waiting = used(server)
                calls.sort()
                row = table.row(f"body {body}, {each:,} per key", "bytes")
                row.add("list", (waiting - before) / number)
                row.add("sorted", (used(server) - before) / number)
    return [table]


def server_time(plan):
    """Server time of a take, plain and by key."""
    table = Table(
        "Fair share: server time",
        "Script calls made directly; a take settles what the last one took. Median, µs a job.",
        labels=["plain", "fair"],
    )
    sorting = Table("Fair share: sorting", "The calls that sorted those.", labels=["fair"])
    waiting = [(keys, max(10_000, keys)) for keys in KEYS]
    if plan.million:
        waiting += [(keys, MILLION) for keys in (1, 200, 100_000)]
    for keys, count in waiting:
        name = f"{keys:,} keys, {count:,} waiting"

        def measure(column, keys=keys, count=count, name=name):
            takes, calls = direct(plan, column.label == "fair", keys, count, template())
            for n, values in takes.items():
                row = table.row(f"{name}: a take of {n}", "µs/job")
                row.add(column.label, statistics.median(values) / n)
            _add_sorting(sorting, name, count, calls)

        rounds = 1 if count == MILLION else plan.rounds
        alternate(table, f"fair, {name}", _columns("plain", "fair"), rounds, measure)
    return [table, sorting]


def bodies(plan):
    """Server time by size of the message."""
    table = Table(
        "Fair share: large messages",
        "As above; 200 keys, or as many as there are messages.",
        labels=["plain", "fair"],
    )
    sorting = Table("Fair share: sorting large messages", "", labels=["fair"])
    for body, size, count in BODIES:
        made = template(size)

        def measure(column, body=body, count=count, made=made):
            takes, calls = direct(plan, column.label == "fair", 200, count, made)
            for n, values in takes.items():
                row = table.row(f"{body}: a take of {n}", "µs/job")
                row.add(column.label, statistics.median(values) / n)
            _add_sorting(sorting, f"{body}, {count:,} waiting", count, calls)

        alternate(table, f"fair, {body}", _columns("plain", "fair"), plan.rounds, measure)
    return [table, sorting]


def direct(plan, fair, keys, count, made):
    """Return the µs of takes of 1 and of 10, and of the calls that sorted."""
    with RedisServer(plan.redis_server) as server, Calls(server, fair=fair) as calls:
        made.push_keyed(server.client, count, keys)
        sorts, takes = [], {}
        if fair:
            with server.scripts() as seen:
                number = calls.sort()
            sorts = [value for values in seen.values() for value in values]
            if len(sorts) != number:
                raise RunError(f"{len(sorts)} calls in the slow log of {number}")
        for n in (1, 10):
            if n * len(made.bytes) > TAKE_BYTES:
                continue
            repeat = min(500 if plan.quick else 1500, count // 3 // n)
            with server.scripts() as seen:
                for _ in range(repeat):
                    if calls.take(n) != n:
                        raise RunError(f"a take of {n} gave less")
            takes[n] = [value for values in seen.values() for value in values]
        return takes, sorts


def _add_sorting(table, name, count, calls):
    if calls:
        table.row(f"{name}: sorting", "µs/message").add("fair", sum(calls) / count)
        table.row(f"{name}: longest call", "ms", LONGEST_CALL).add("fair", max(calls) / 1000)


def _columns(*labels):
    return [Column(label) for label in labels]


# -- with workers -----------------------------------------------------------------------------


def by_keys(plan):
    """Jobs a second by number of keys."""
    table = Table(
        "Fair share: jobs a second by active keys",
        f"prefork, {SLOTS} slots, no-op jobs, all keys active at the start.",
        labels=["ours", "fair"],
    )
    for keys in KEYS:
        jobs = max(4000 if plan.quick else 10_000, keys)

        def measure(variant, keys=keys, jobs=jobs):
            for (name, unit), value in drain(plan, variant, keys, jobs).items():
                table.row(f"{keys:,} keys: {name}", unit).add(variant.label, value)

        alternate(table, f"{keys:,} keys", variants.parse("ours,fair"), plan.rounds, measure)
    return [table]


def speed(plan):
    """Fair share beside no fair share and stock Celery."""
    jobs, keys = 4000 if plan.quick else 10_000, 100
    three = variants.parse("stock,ours,fair")
    table = Table(
        "Fair share: throughput",
        f"prefork, {SLOTS} slots, {jobs:,} no-op jobs of {keys} keys; the backlog is sorted meanwhile.",
        labels=[variant.label for variant in three],
    )
    cost = Table("Fair share: against none", "The same runs.", labels=["ours", "fair"])

    def measure(variant):
        for (name, unit), value in drain(plan, variant, keys, jobs).items():
            rate = name == "rate"
            table.row(name, unit, Bar(2.0) if rate else None).add(variant.label, value)
            if variant.is_ours:
                cost.row(name, unit, Bar(0.9) if rate else None).add(variant.label, value)

    alternate(table, "fair, stock, ours", three, plan.rounds, measure)
    return [table, cost]


def drain(plan, variant, keys, jobs):
    """Return rate and cost of a job, from the tenth part of a backlog to its last job."""
    with (
        RedisServer(plan.redis_server) as server,
        Fleet(server, variant, "prefork", SLOTS) as fleet,
    ):
        hidden = "not yet"
        template().push_keyed(server.client, jobs, keys, to=hidden)
        server.client.rename(hidden, "celery")
        first = fleet.wait_done(jobs // 10)
        start, load, cpu, busy = time.perf_counter(), server.load(), fleet.cpu_parts(), _busy()
        fleet.wait_done(jobs)
        elapsed = time.perf_counter() - start
        load, after, busy = server.load() - load, fleet.cpu_parts(), _busy() - busy
        settle(server, fleet, jobs)
    timed = jobs - first
    own = load.cpu + sum(after) - sum(cpu)
    return {
        ("rate", "jobs/s"): timed / elapsed,
        ("Redis CPU", "µs/job"): load.cpu / timed * 1e6,
        ("parent CPU", "µs/job"): (after[0] - cpu[0]) / timed * 1e6,
        ("children CPU", "µs/job"): (after[1] - cpu[1]) / timed * 1e6,
        ("all CPU", "µs/job"): own / timed * 1e6,
        # What else ran, this script included: rounds with much of it say little.
        ("other programs", "% of the machine"): (busy - own) / elapsed / os.cpu_count() * 100,
    }


def _busy():
    """Return the CPU seconds that programs have used: interrupts are nobody's."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system


def million(plan):
    """A backlog of a million that nobody has sorted, and a minnow behind it."""
    table = Table(
        "Fair share: behind an unsorted million",
        f"One worker, prefork {SLOTS}, no-op jobs. The million appears at once; then one job of "
        "another key.",
        labels=["fair"],
    )
    variant = variants.parse("fair")[0]
    for keys in (1, 1000):

        def measure(_, keys=keys):
            for (name, unit), value in behind_a_million(plan, variant, keys).items():
                bar = LONGEST_CALL if name.startswith("longest call") else None
                table.row(f"{keys:,} keys: {name}", unit, bar).add("fair", value)

        alternate(table, f"a million, {keys:,} keys", _columns("fair"), plan.rounds, measure)
    return [table]


def behind_a_million(plan, variant, keys):
    """Return what happens until all is sorted and the minnow has run."""
    hidden = "not yet"
    with (
        RedisServer(plan.redis_server) as server,
        Fleet(server, variant, "prefork", SLOTS) as fleet,
    ):
        template().push_keyed(server.client, MILLION, keys, to=hidden)
        size = used(server)
        minnow = backlog.Template("bench.mark", [0.0], keyed=True)
        client = server.client
        client.config_set("slowlog-max-len", 100_000)
        client.config_set("slowlog-log-slower-than", 1000)
        client.slowlog_reset()
        load, start = server.load(), time.monotonic()
        client.rename(hidden, "celery")
        client.lpush("celery", minnow.copy([start], key="minnow"))
        with _Pings(server.port) as pings:
            _, served = fleet.mark(timeout=300)
            ahead = fleet.done()
            while client.llen("celery"):
                time.sleep(0.01)
            end = time.monotonic()
        load = server.load() - load
        slow = [e["duration"] for e in client.slowlog_get(100_000) if _is_script(e)]
        jobs = fleet.done()
        return {
            ("all sorted", "s"): end - start,
            ("the minnow runs", "s"): served - start,
            ("jobs before it", "jobs"): ahead,
            ("jobs meanwhile", "jobs/s"): jobs / (end - start),
            ("Redis busy", "%"): load.cpu / (end - start) * 100,
            ("longest call", "ms"): max(slow, default=0) / 1000,
            ("calls above 5 ms", "calls"): sum(duration > 5000 for duration in slow),
            ("a PING beside it, p99", "ms"): percentile(pings.seen, 99),
            ("a PING beside it, longest", "ms"): max(pings.seen),
            ("memory, as a list", "MB"): size / 1e6,
            ("memory, sorted", "MB"): used(server) / 1e6,
        }


def _is_script(entry):
    return entry["command"].lower().startswith(b"evalsha")


class _Pings(threading.Thread):
    """Another client's view: how long a PING takes, every 10 ms."""

    def __init__(self, port):
        super().__init__(daemon=True)
        self.client = redis.Redis(port=port)
        self.seen, self.stopped = [], False

    def __enter__(self):
        self.client.ping()
        self.start()
        return self

    def run(self):
        while not self.stopped:
            begin = time.perf_counter()
            self.client.ping()
            self.seen.append((time.perf_counter() - begin) * 1e3)
            time.sleep(0.01)

    def __exit__(self, *_):
        self.stopped = True
        self.join(5)
        self.client.close()

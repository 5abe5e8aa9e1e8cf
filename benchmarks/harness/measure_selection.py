"""Server time of choosing among 50 sources of 3 levels, for each strategy.

A solo worker of ours reads ``-Q q0,…,q49``, one job a take, so each take chooses once. The
slow log times each call; of the scripts seen, the take is the one that declares the most
keys (it names every list of every source). Its median holds against the bar: on a shared
machine the mean is ruled by the few calls during which Redis lost its core. Stock has no
such script and runs only to show its server time per job over the same queues.
"""

import statistics

from . import backlog
from .fleet import Fleet, RunError
from .rounds import alternate
from .server import RedisServer
from .tables import Bar, Table, percentile

SOURCES, LEVELS = 50, 3
STRATEGIES = ("priority", "round_robin", "max_len", "min_len")
BAR = Bar(150.0, at_least=False, ratio=False)


def level_key(queue, level):
    """Return Kombu's list for *level* of *queue*."""
    return f"{queue}\x06\x16{level}" if level else queue


def run(plan):
    table = Table(
        f"Selection over {SOURCES} sources x {LEVELS} levels",
        "Server time. A take is one script call; a whole job is all calls, settling included.",
    )
    for strategy in STRATEGIES:
        for spread in ("1 source", "jobs in all", "jobs in the last"):
            if spread == "1 source" and strategy != "priority":
                continue

            def measure(variant, strategy=strategy, spread=spread):
                if not variant.is_ours and strategy != "priority":
                    return
                take, total = one_run(plan, variant, strategy, spread)
                name, label = f"{strategy}, {spread}", variant.label
                if variant.is_ours:
                    row = table.row(f"{name}: a take, median", "µs", BAR)
                    row.add(label, statistics.median(take))
                    table.row(f"{name}: a take, p90", "µs").add(label, percentile(take, 90))
                table.row(f"{name}: whole job", "µs/job").add(label, total)

            alternate(table, f"selection {strategy}, {spread}", plan.variants, plan.rounds, measure)
    return [table]


def one_run(plan, variant, strategy, spread):
    """Return (µs of each take, µs of server time per job)."""
    sources = 1 if spread == "1 source" else SOURCES
    queues = [f"q{number}" for number in range(sources)]
    settings = {"broker_transport_options": {"priority_steps": list(range(LEVELS))}}
    if variant.is_ours:
        settings |= {"strategies_strategy": strategy, "strategies_priority_levels": LEVELS}
    full = [level_key(q, level) for q in queues for level in range(LEVELS)]
    if spread == "jobs in the last":
        full = full[-1:]
    jobs = 300 if plan.quick else 900
    each = max(1, jobs // len(full))
    with (
        RedisServer(plan.redis_server) as server,
        Fleet(server, variant, queues=queues, settings=settings) as fleet,
    ):
        pipe = server.client.pipeline()  # one transaction: all there before the first take
        for key in full:
            queue = key.split("\x06")[0]
            backlog.Template("bench.noop", queue=queue).push(pipe, each, key)
        pipe.execute()
        total = each * len(full)
        first = fleet.wait_done(total // 10)
        with server.scripts() as calls:
            before = server.load()
            # Stop before the backlog ends: an empty take is not a choice.
            last = fleet.wait_done(total * 9 // 10, every=0.001)
            window = server.load() - before
        fleet.wait_done(total)
    # A script's own commands are counted in its time, and a second time by name.
    spent = window.usec_of("evalsha", "fcall") or window.total_usec
    take = calls[max(calls, key=lambda call: call[1])] if calls else []
    if variant.is_ours and not take:
        raise RunError("no script call was seen")
    return take, spent / max(1, last - first)

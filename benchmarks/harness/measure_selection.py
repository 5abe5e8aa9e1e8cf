"""Server time of choosing among 50 sources of 3 levels, for each strategy.

A solo worker of ours reads ``-Q q0,…,q49``, one job a take, so each script call chooses
once (and settles the job before). Redis reports the time of the calls. Stock has no such
script and runs only to show its whole Redis time per job over the same queues.
"""

from . import backlog
from .fleet import Fleet
from .rounds import alternate
from .server import RedisServer
from .tables import Bar, Table

SOURCES, LEVELS = 50, 3
STRATEGIES = ("priority", "round_robin", "max_len", "min_len")
SCRIPTS = ("evalsha", "eval", "fcall")
BAR = Bar(150.0, at_least=False, ratio=False)


def level_key(queue, level):
    """Return Kombu's list for *level* of *queue*."""
    return f"{queue}\x06\x16{level}" if level else queue


def run(plan):
    table = Table(
        f"Selection over {SOURCES} sources x {LEVELS} levels",
        "Server time from commandstats; a script call takes one job and settles the one before. "
        "Per job: all script calls, or for stock all commands.",
    )
    for strategy in STRATEGIES:
        for spread in ("1 source", "jobs in all", "jobs in the last"):
            if spread == "1 source" and strategy != "priority":
                continue

            def measure(variant, strategy=strategy, spread=spread):
                if not variant.is_ours and strategy != "priority":
                    return
                script, total = one_run(plan, variant, strategy, spread)
                name, label = f"{strategy}, {spread}", variant.label
                table.row(f"{name}: script", "µs/call", BAR).add(label, script)
                table.row(f"{name}: in all", "µs/job").add(label, total)

            alternate(table, f"selection {strategy}, {spread}", plan.variants, plan.rounds, measure)
    return [table]


def one_run(plan, variant, strategy, spread):
    """Return (µs per script call, µs of all commands per job)."""
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
        before = server.load()
        # Stop before the backlog ends: an empty take is not a choice.
        last = fleet.wait_done(total * 9 // 10, every=0.001)
        window = server.load() - before
        fleet.wait_done(total)
        inside = sum(window.usec.get(name, 0) for name in SCRIPTS)
        # A script's own commands are counted in its time, and a second time by name.
        sent = inside or window.total_usec
        return window.per_call(*SCRIPTS), sent / max(1, last - first)

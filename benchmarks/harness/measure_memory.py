"""Redis memory of a waiting message, untouched and while a worker serves the queue.

*Untouched* is the backlog as a stock producer leaves it. *Served* is the slope of
``used_memory`` over the messages still waiting while a worker drains them: whatever a
reader adds per waiting message is in it, and its fixed cost (connections, scripts) is not.
"""

from . import backlog
from .fleet import Fleet, RunError
from .rounds import alternate
from .server import RedisServer
from .tables import Bar, Table


def run(plan):
    table = Table("Redis memory per waiting message", "A no-op job's message; solo worker.")
    jobs = 4000 if plan.quick else 10000

    def measure(variant):
        for name, value in one_run(plan, variant, jobs).items():
            bar = Bar(1.05, at_least=False) if name == "served" else None
            table.row(name, "bytes", bar).add(variant.label, value)

    alternate(table, "memory", plan.variants, plan.rounds, measure)
    return [table]


def one_run(plan, variant, jobs):
    with RedisServer(plan.redis_server) as server, Fleet(server, variant) as fleet:
        with RedisServer(plan.redis_server) as untouched:
            before = used(untouched)
            backlog.Template("bench.noop").push(untouched.client, jobs)
            by_stock = (used(untouched) - before) / jobs
        backlog.Template("bench.noop").push(server.client, jobs)
        points = []
        for share in range(2, 10):  # a fifth to nine tenths drained
            done = fleet.wait_done(jobs * share // 10)
            points.append((jobs - done, used(server)))
        fleet.wait_done(jobs)
        slope = fit(points)
        if slope <= 0:
            raise RunError(f"memory did not fall with the backlog: {points}")
        return {"untouched": by_stock, "served": slope}


def used(server):
    return server.client.info("memory")["used_memory"]


def fit(points):
    """Return the least-squares slope of (x, y) *points*."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum(
        (x - mean_x) ** 2 for x, _ in points
    )

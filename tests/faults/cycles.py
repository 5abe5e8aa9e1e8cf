"""Start and end workers again and again under a producer that numbers its jobs.

`python -m tests.faults.cycles {term,kill} [--cycles 200] [--pool prefork] [--seed N]` runs one long series on a
server of its own and prints the account; the suite runs short ones of the same.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import redis

from tests.faults.helpers import Producer, everywhere, moment, nothing_left, places, pool_options
from tests.support.apps import RAN, ended, started
from tests.support.redis_server import RedisServer, find
from tests.support.waiting import wait_until
from tests.support.workers import Worker

#: Seconds after which Kombu's rules give a dead worker's message back.
VISIBILITY_TIMEOUT = 3


@dataclass
class Account:
    """What became of every number."""

    cycles: int = 0
    published: int = 0
    ran: int = 0
    waiting: int = 0
    missing: list[str] = field(default_factory=list)
    """Neither ran nor lie anywhere."""
    repeated: list[str] = field(default_factory=list)
    """Started more than once."""
    exits: Counter[int] = field(default_factory=Counter)
    seconds: float = 0

    def __str__(self) -> str:
        return (
            f"{self.cycles} cycles in {self.seconds:.0f} s: {self.published} published, {self.ran} ran, "
            f"{self.waiting} waiting, {len(self.missing)} missing, {len(self.repeated)} ran again; "
            f"exit codes {dict(self.exits)}"
        )


@contextmanager
def shown(worker: Worker, client: redis.Redis) -> Iterator[None]:
    """Show where a worker that does not work stands, and what lies in Redis."""
    try:
        yield
    except AssertionError as error:
        worker.signal(signal.SIGUSR1)
        moment(1)
        lying = {place: len(labels) for place, labels in places(client).items()}
        clients = [
            {k: c[k] for k in ("name", "age", "idle", "flags", "cmd")} for c in client.client_list()
        ]
        idle = {
            key: client.zrange(key, 0, -1)
            for kind in ("watchers", "parked")
            for key in client.keys(f"strategies:*:{kind}")
        }
        raise AssertionError(f"{error}\n{lying}\n{idle}\n{clients}\n{worker.log()}") from None


def _until_it_runs(worker: Worker, client: redis.Redis, jobs: int) -> None:
    goal = client.llen(RAN) + jobs
    with shown(worker, client):
        wait_until(
            lambda: client.llen(RAN) >= goal or not worker.running,
            30,
            f"{worker.hostname} records {jobs} starts and ends",
        )


def _wait_gone(worker: Worker) -> None:
    worker.wait_exit(40)


def run_term(server: RedisServer, cycles: int, pool: str, seed: int = 0) -> Account:
    """End each worker with SIGTERM at a random moment of its life; jobs are acknowledged early.

    Half the moments are after some jobs, half are drawn from the time a start takes, so that they hit the boot too.
    """
    chance, begin = random.Random(seed), time.monotonic()
    account = Account(cycles)
    with server.client() as client, Producer(server.url()) as producer:
        boot = 2.0
        for _ in range(cycles):
            with Worker(
                server.url(), concurrency=2, loglevel="WARNING", **pool_options(pool)
            ) as worker:
                at = time.monotonic()
                if chance.random() < 0.5:
                    _until_it_runs(worker, client, chance.randrange(1, 40))
                    boot = 0.8 * boot + 0.2 * (time.monotonic() - at)
                else:
                    moment(chance.uniform(0.3, 1.2) * boot)
                worker.signal(signal.SIGTERM)
                _wait_gone(worker)
                account.exits[worker.returncode or 0] += 1
        published = producer.stop()
        _settle_account(account, client, published)
    account.seconds = time.monotonic() - begin
    return account


def run_kill(server: RedisServer, cycles: int, pool: str, seed: int = 0) -> Account:
    """End each worker and its children with SIGKILL; acks_late and a short visibility timeout bring jobs back."""
    chance, begin = random.Random(seed), time.monotonic()
    account = Account(cycles)
    settings: dict[str, Any] = {
        "task_acks_late": True,
        "broker_transport_options": {"visibility_timeout": VISIBILITY_TIMEOUT},
    }
    options = pool_options(pool, settings)
    with server.client() as client, Producer(server.url()) as producer:
        for _ in range(cycles):
            with Worker(server.url(), concurrency=2, loglevel="WARNING", **options) as worker:
                _until_it_runs(worker, client, chance.randrange(1, 40))
                moment(chance.uniform(0, 0.2))
                worker.kill()
                account.exits[worker.returncode or 0] += 1
        published = producer.stop()
        with Worker(server.url(), concurrency=2, **options) as worker:
            with shown(worker, client):
                wait_until(
                    lambda: set(published) <= set(ended(client)) and nothing_left(client),
                    60 + len(published) / 50,
                    "everything ran to its end",
                    interval=0.5,
                )
            worker.stop()
        _settle_account(account, client, published)
    account.seconds = time.monotonic() - begin
    return account


def _settle_account(account: Account, client: redis.Redis, published: list[str]) -> None:
    counts = Counter(started(client))
    waiting = everywhere(client)
    account.published = len(published)
    account.ran = len(counts)
    account.waiting = len(waiting)
    account.missing = [label for label in published if label not in counts and label not in waiting]
    account.repeated = [label for label, count in counts.items() if count + waiting[label] > 1]


def main() -> int:
    """Run one series and print its account."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("how", choices=("term", "kill"))
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--pool", default="prefork")
    parser.add_argument("--redis", default="any")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    run = run_term if options.how == "term" else run_kill
    with RedisServer(find(options.redis)) as server:
        account = run(server, options.cycles, options.pool, options.seed)
    sys.stdout.write(f"{options.how} {options.pool}: {account}\n")
    if account.missing:
        sys.stdout.write(f"missing: {account.missing}\n")
    return 1 if account.missing else 0


if __name__ == "__main__":
    sys.exit(main())

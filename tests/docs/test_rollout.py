"""Every command in docs/rollout.md and docs/fair-share.md, run in the order of their story."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import redis

from tests.conftest import RedisFactory, WorkerFactory
from tests.support.apps import started
from tests.support.redis_server import RedisServer
from tests.support.waiting import wait_until
from tests.support.workers import PROJECT, Worker, celery, job, publish

from . import pages

PAGES = ("docs/rollout.md", "docs/fair-share.md")
FAIR: dict[str, Any] = {"strategies_fair_share": True}


def shown() -> set[str]:
    """Return the commands in the pages, without their comments; the example has a test of its own."""
    found = set()
    for block in pages.blocks(""):
        if block.page in PAGES:
            for line in block.code.splitlines():
                command = line.partition("#")[0].strip()
                if re.match(r"(celery|redis-cli) ", command):
                    found.add(command)
    return found


class Commands:
    """Runs commands as they are shown, and knows which were."""

    def __init__(self, broker_url: str, client: redis.Redis) -> None:
        self.broker_url = broker_url
        self.client = client
        self.left = shown()
        assert len(self.left) > 15

    def words(self, command: str) -> list[str]:
        assert command in shown(), command
        self.left.discard(command)
        return shlex.split(command)

    def celery(self, command: str) -> str:
        """Run a command of Celery's, and return what it printed."""
        _, option, app, *words = self.words(command)
        assert (option, app) == ("-A", "proj")
        return celery(*words, broker_url=self.broker_url).stdout

    def worker(self, command: str) -> list[str]:
        """Return what follows `celery` in a command that starts a worker of the test project."""
        _, option, _, *words = self.words(command)
        return [option, PROJECT, *words, "-l", "INFO"]

    def redis(self, command: str) -> Any:
        """Run a command of redis-cli's, and return the reply."""
        return self.client.execute_command(*self.words(command)[1:])


def text(reply: dict[bytes, bytes] | list[bytes]) -> dict[str, str]:
    """Return a hash as redis-cli shows it: the client may have made a dict of it, or not."""
    pairs = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
    return {name.decode(): value.decode() for name, value in pairs}


def tagged(key: str, *labels: str) -> list[dict[str, Any]]:
    return [job("record", label, queue="jobs", headers={"fair_key": key}) for label in labels]


BACKLOG = [*tagged("acme", "a1", "a2", "a3", "a4"), *tagged("zed", "z1", "z2")]
IN_TURN = ["a1", "z1", "a2", "z2", "a3", "a4"]


class Story:
    """The chapters, in order: each begins with what the one before has left."""

    def __init__(self, server: RedisServer, workers: WorkerFactory) -> None:
        self.url, self.db, self.workers = server.url(), server.client(), workers
        self.run = Commands(self.url, self.db)

    def worker(self, **options: Any) -> Worker:
        return self.workers(self.url, queues=("jobs",), **options)

    def backlog_behind_one_job(self, **options: Any) -> None:
        """Publish, have a worker sort it all while it takes one job, and stop the worker."""
        ran = len(started(self.db))
        first = [job("sleep_for", 2, "first", queue="jobs", headers={"fair_key": "zed"})]
        later = [job("record", "later", queue="jobs", headers={"fair_key": "zed"}, countdown=600)]
        publish(self.url, [*first, *BACKLOG, *later], stock=True)
        worker = self.worker(**options)
        wait_until(lambda: started(self.db)[ran:] == ["first"], description="the first job runs")
        worker.stop()

    def turn_on_beside_a_worker_without_it(self) -> None:
        plain = self.worker()
        command = self.run.worker("celery -A proj worker -P strategies -Q jobs -c 8")
        keyed = self.workers(self.url, settings=FAIR, command=command)
        plain.wait_log("Queue 'jobs' is sorted by order='fair'")
        policy = text(self.run.redis("redis-cli HGETALL 'strategies:{jobs}:policy'"))
        assert policy["order"] == "fair"
        assert policy["key"] == "fair_key"
        for worker in (keyed, plain):
            worker.stop()

    def look(self) -> None:
        """A worker without fair share has sorted everything."""
        self.backlog_behind_one_job()
        run = self.run
        assert run.redis("redis-cli LLEN jobs") == 0
        assert run.redis("redis-cli HGET 'strategies:{jobs}:state' t") == b"6"
        assert run.redis("redis-cli ZCARD 'strategies:{jobs}:delayed'") == 1
        assert run.redis("redis-cli LLEN 'strategies:{jobs}:jobs:0:acme'") == 4
        index = run.redis("redis-cli ZRANGE 'strategies:{jobs}:index:0' 0 9 WITHSCORES")
        pairs = index if isinstance(index[0], list) else zip(index[::2], index[1::2], strict=True)
        assert {member[17:] for member, _ in pairs} == {b"acme", b"zed"}

    def steer(self) -> None:
        run = self.run
        for command, said in (
            ("weight acme 3", "acme has weight 3"),
            ("weight acme none", "acme has weight none"),
            ("cap acme 1", "acme has cap 1"),
            ("cap '*' 10", "* has cap 10"),
            ("cap acme none", "acme has cap none"),
        ):
            printed = run.celery(f"celery -A proj strategies {command} -q jobs")
            assert f"jobs: {said}" in printed
        assert len(run.redis("redis-cli SMEMBERS 'strategies:{jobs}:full'")) == 0
        assert run.redis("redis-cli SCARD 'strategies:{jobs}:running:acme'") == 0

    def another_policy_is_refused_word_for_word(self) -> None:
        (message,) = [
            line.strip()
            for line in pages.read("docs/rollout.md").splitlines()
            if line.startswith("queue 'jobs' is sorted by")
        ]
        batch = {**FAIR, "strategies_fair_share_memory": "batch"}
        other = self.worker(settings=batch, wait=False)
        other.wait_log(message)
        wait_until(lambda: not other.running, description="the worker ended")
        assert other.returncode

    def turn_off(self) -> None:
        """A stock worker has the jobs in the order in which they would have run."""
        printed = self.run.celery("celery -A proj strategies unsort jobs")
        assert "jobs: 7 messages moved to Kombu's lists" in printed
        assert self.db.llen("jobs") == 7
        assert self.run.redis("redis-cli EXISTS 'strategies:{jobs}:policy'") == 0
        ran = len(started(self.db))
        stock = self.worker(pool="solo", stock=True)
        wait_until(lambda: len(started(self.db)) == ran + 6, description="what is due ran")
        stock.stop()
        assert started(self.db)[ran:] == IN_TURN

    def purge(self) -> None:
        self.backlog_behind_one_job(settings=FAIR)
        # Two that are delayed: the stock worker gave the first one back when it stopped.
        assert "Purged 8 messages" in self.run.celery("celery -A proj purge -f -Q jobs")
        kinds = ("state", "index:0", "delayed", "jobs:0:acme", "jobs:0:zed")
        assert not self.db.exists("jobs", *(f"strategies:{{jobs}}:{kind}" for kind in kinds))

    def roll_back(self) -> None:
        run = self.run
        run.celery("celery -A proj strategies unsort alerts reports emails")
        for name in ("returned", "delayed"):
            assert run.redis(f"redis-cli ZCARD 'strategies:{{alerts}}:{name}'") == 0
        assert run.redis("redis-cli EXISTS 'strategies:{alerts}:policy'") == 0
        assert run.redis("redis-cli HLEN unacked") == 0
        assert run.redis("redis-cli XLEN 'strategies:{alerts}:set_aside'") == 0


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_story(redis_factory: RedisFactory, worker_factory: WorkerFactory) -> None:
    story = Story(redis_factory(), worker_factory)
    story.turn_on_beside_a_worker_without_it()
    story.look()
    story.steer()
    story.another_policy_is_refused_word_for_word()
    story.turn_off()
    story.purge()
    story.roll_back()
    assert story.run.left == set()

"""Kill workers, again and again, and count what is lost, what runs twice, and how long it takes.

    python3 benchmarks/kills.py [--kills 50] [--take-overs 20] [--seed N]

1. A fleet of four workers (two prefork, two threads; three queues, fair share, acks_late) under a producer that
   numbers its jobs. One worker at a time is killed with -9 while it runs a job; the table says how long until the
   jobs that it ran have started elsewhere.
2. Two workers of a queue with a single active consumer. The leader is killed with -9, or stopped with SIGTERM,
   in the middle of a backlog; the table says how long nobody ran anything, and whether the order held.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

from celery import Celery

import celery_strategies  # noqa: F401  # it tags what is published

# profile.py lies beside this file: let the standard library's module of that name win.
sys.path.append(sys.path.pop(0))

from harness.server import RedisServer
from harness.variants import workload_dir

POOLS = ("prefork", "threads", "prefork", "threads")
QUEUES = ("a", "b", "c")
KEYS = ("whale", "acme", "zed", "minnow")
QUIET = ("--without-gossip", "--without-mingle", "--without-heartbeat")


class Workers(contextlib.AbstractContextManager):
    """Named workers on one server; what they ran is recorded on another."""

    def __init__(self, server, records, settings, queues, pools):
        self.records = records.client
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="bench-kills-"))
        self.queues = queues
        self.pools = {f"w{number}": pool for number, pool in enumerate(pools)}
        self.env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(workload_dir()), os.environ.get("PYTHONPATH", "")]),
            "BENCH_BROKER": server.url,
            "BENCH_RECORDS": records.url,
            "BENCH_SETTINGS": json.dumps(settings),
        }
        self.processes = {}
        self.read = 0
        self.rows = []
        for name in self.pools:
            self.start(name)
        for name in self.pools:
            self.wait_ready(name)
        time.sleep(2.0)  # their first beats: from now on each knows the others

    def start(self, name):
        """Start a worker (again)."""
        command = [
            *(str(pathlib.Path(sys.executable).with_name("celery")), "-A", "kills_app", "worker"),
            *("-P", "strategies", "-c", "2", "-n", f"{name}@local", "-l", "INFO"),
            *("-Q", ",".join(self.queues), *QUIET),
        ]
        settings = json.loads(self.env["BENCH_SETTINGS"]) | {"strategies_pool": self.pools[name]}
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**self.env, "BENCH_SETTINGS": json.dumps(settings)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def log(self, name):
        """Return what a worker said since its start."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def wait_ready(self, name):
        """Wait until a worker consumes."""
        self.wait(lambda: " ready." in self.log(name), 60, lambda: self.log(name))

    def kill(self, name):
        """Kill a worker and its children; return when."""
        os.killpg(self.processes[name].pid, signal.SIGKILL)
        self.processes[name].wait()
        return time.monotonic()

    def stop(self, name):
        """Have a worker end warmly; does not wait."""
        self.processes[name].send_signal(signal.SIGTERM)

    def runs(self):
        """Return (worker, number, event, moment) of everything so far, in order."""
        lines = self.records.lrange("ran", self.read, -1)
        self.read += len(lines)
        for line in lines:
            name, number, event, moment = line.decode().split()
            self.rows.append((name, int(number), event, float(moment)))
        return self.rows

    def running(self, name):
        """Return the numbers of the jobs that a worker is running."""
        last = {number: (its, event) for its, number, event, _ in self.runs()}
        return {number for number, found in last.items() if found == (name, "start")}

    def wait(self, condition, seconds, why=lambda: ""):
        """Wait until *condition* returns something true, and return that."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            if time.monotonic() > deadline:
                sys.exit(f"not within {seconds} s\n{why()}")
            time.sleep(0.002)
        return found

    def __exit__(self, *_):
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class Producer(threading.Thread):
    """Publish numbered jobs at a rate, to all queues and keys."""

    def __init__(self, app, rate):
        super().__init__(daemon=True)
        self.app, self.rate = app, rate
        self.published = 0
        self.stopped = threading.Event()

    def run(self):
        """Publish until told to stop."""
        while not self.stopped.wait(1 / self.rate):
            self.app.send_task(
                "kills.work",
                (self.published, random.uniform(0.01, 0.1)),
                queue=random.choice(QUEUES),
                headers={"fair_key": random.choice(KEYS)},
            )
            self.published += 1


def producer_app(server, settings):
    """Return an app that publishes to *server*."""
    app = Celery("producer", broker=server.url, set_as_current=False)
    app.conf.update(imports=("celery_strategies",), **settings)
    return app


def quantiles(values):
    values = sorted(values)
    if not values:
        return "-"
    p95 = values[max(0, -(-len(values) * 95 // 100) - 1)]
    return f"{statistics.median(values):.2f} / {p95:.2f} / {values[-1]:.2f} s"


def fleet(kills):
    settings = {"strategies_fair_share": True}
    with RedisServer() as server, RedisServer() as records:
        app = producer_app(server, settings)
        with Workers(server, records, settings, QUEUES, POOLS) as workers:
            producer = Producer(app, 60)
            producer.start()
            recovery, cut_off = [], set()
            for number in range(kills):
                name = f"w{number % len(POOLS)}"
                time.sleep(random.uniform(0.2, 1.0))
                workers.wait(lambda name=name: workers.running(name), 60)
                moment = workers.kill(name)
                ran = workers.running(name)
                cut_off |= ran

                def restarted(ran=ran, moment=moment):
                    found = {}
                    for _, its, event, at in workers.runs():
                        if event == "start" and its in ran and at > moment:
                            found.setdefault(its, at - moment)
                    return found.keys() == ran and list(found.values())

                recovery += workers.wait(restarted, 90) if ran else []
                workers.start(name)
                workers.wait_ready(name)
                time.sleep(1.5)
            producer.stopped.set()
            producer.join()
            last = [0, time.monotonic()]

            def drained():
                ended = {its for _, its, event, _ in workers.runs() if event == "end"}
                if len(ended) != last[0]:
                    last[:] = len(ended), time.monotonic()
                return len(ended) == producer.published or time.monotonic() - last[1] > 30

            workers.wait(drained, 300)
            ended, starts = set(), {}
            for _, its, event, _ in workers.runs():
                if event == "end":
                    ended.add(its)
                else:
                    starts[its] = starts.get(its, 0) + 1
            again = {its for its, count in starts.items() if count > 1}
            print(f"| kills of one worker of four | {kills} |")
            print(f"| jobs published | {producer.published:,} |")
            print(f"| lost | {producer.published - len(ended)} |")
            print(f"| run again | {len(again)}, of which were running when killed: "
                  f"{len(again & cut_off)} |")  # fmt: skip
            print(f"| a killed worker's job runs again after, median / p95 / max | "
                  f"{quantiles(recovery)} |", flush=True)  # fmt: skip


def lead(changes, how):
    settings = {"strategies_single_active_consumer": ["ordered"]}
    with RedisServer() as server, RedisServer() as records:
        app = producer_app(server, settings)
        with Workers(server, records, settings, ("ordered",), ("threads", "threads")) as workers:
            gaps, published = [], 0
            for _ in range(changes):
                for _ in range(400):
                    app.send_task("kills.work", (published, 0.005), queue="ordered")
                    published += 1
                target = published - 400 + random.randint(50, 150)
                workers.wait(lambda t=target: any(r[1] >= t for r in workers.runs()[-20:]), 60)
                name = workers.runs()[-1][0]
                other = "w1" if name == "w0" else "w0"
                before = len(workers.runs())
                if how == "kill":
                    since = workers.kill(name)
                else:
                    workers.stop(name)
                    since = None
                first = workers.wait(
                    lambda o=other, b=before: next(
                        (r for r in workers.runs()[b:] if r[0] == o), None
                    ),
                    60,
                )
                if since is None:
                    since = max(r[3] for r in workers.runs() if r[0] == name)
                    workers.processes[name].wait()
                gaps.append(first[3] - since)
                workers.start(name)
                workers.wait_ready(name)
                time.sleep(1.5)
            workers.wait(
                lambda: sum(r[2] == "end" for r in workers.runs()[-3000:]) and
                {r[1] for r in workers.runs() if r[2] == "end"} >= set(range(published)), 120
            )  # fmt: skip
            numbers = [its for _, its, event, _ in workers.runs() if event == "start"]
            order = [n for i, n in enumerate(numbers) if not i or n != numbers[i - 1]]
            verdict = "in order" if order == list(range(published)) else "OUT OF ORDER"
            title = "take-over after kill -9" if how == "kill" else "hand-over at SIGTERM"
            print(f"| {title}: {changes}, jobs | {published:,}, {verdict}, "
                  f"{len(numbers) - len(order)} run again |")  # fmt: skip
            print(f"| {title}: nobody ran anything for, median / p95 / max | {quantiles(gaps)} |",
                  flush=True)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--take-overs", type=int, default=20, help="and as many hand-overs")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    random.seed(options.seed)
    print("| | |\n|---|---|")
    if options.kills:
        fleet(options.kills)
    if options.take_overs:
        lead(options.take_overs, "kill")
        lead(options.take_overs, "term")


if __name__ == "__main__":
    main()

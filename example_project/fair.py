"""Run a whale and ten minnows on one queue, with stock Celery and with fair share.

`python3 example_project/fair.py` makes its own environment, starts private redis-servers, and
prints how long each tenant's jobs waited: in jobs that started meanwhile, and in seconds.
`--plot FILE` draws the order too.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# This folder first on the path would make `import celery` find the example's own celery.py.
sys.path[0] = str(Path(__file__).resolve().parent.parent)
from example_project import environment  # noqa: E402
from example_project.run import (  # noqa: E402
    STOP_TIMEOUT,
    ExampleError,
    find_redis_server,
    redis_server,
)

SLOTS = 4
STALL_TIMEOUT = 60.0
#: Heading, app, and what starts its worker.
VARIANTS = (
    ("Stock Celery", "example_project.stock", ("-P", "prefork")),
    ("Fair share", "example_project.celery", ("-P", "strategies")),
)


class Plan(NamedTuple):
    """What is queued, and how long a job takes, in seconds."""

    whale: int
    minnows: int
    each: int
    #: How many jobs have started when the minnows come.
    after: int
    seconds: float

    @property
    def jobs(self) -> int:
        """Return the number of all jobs."""
        return self.whale + self.minnows * self.each


class Job(NamedTuple):
    """A job that ran; times are in seconds since the first one started."""

    tenant: str
    queued: float
    started: float
    #: How many jobs started before it, and how many of them since it was queued.
    place: int
    before: int


def read(file: Path) -> dict[tuple[str, str], float]:
    """Return when something happened to each job."""
    rows = (line.split() for line in file.read_text().splitlines())
    return {(tenant, number): float(moment) for tenant, number, moment in rows}


def waits(sent: Path, ran: Path) -> list[Job]:
    """Return all jobs in the order in which they started."""
    queued, started = read(sent), read(ran)
    order = sorted(started, key=lambda job: started[job])
    moments = [started[job] for job in order]
    begin = moments[0]
    return [
        Job(
            job[0],
            max(0.0, queued[job] - begin),
            started[job] - begin,
            place,
            place - bisect_left(moments, queued[job]),
        )
        for place, job in enumerate(order)
    ]


@contextlib.contextmanager
def process(command: list[str], env: dict[str, str], log: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a program in a group of its own until the block ends."""
    with log.open("w") as output:
        child = subprocess.Popen(
            command,
            cwd=environment.ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if "-m" in command else output,
            stderr=output,
            text=True,
            start_new_session=True,
        )
    try:
        yield child
        child.terminate()
        child.wait(STOP_TIMEOUT)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def lines(file: Path) -> int:
    """Return how many lines a file has."""
    return file.read_bytes().count(b"\n") if file.exists() else 0


def run(plan: Plan, app: str, options: tuple[str, ...], folder: Path) -> list[Job]:
    """Queue everything, have a worker do it, and return what ran."""
    sent, ran = folder / "sent.txt", folder / "ran.txt"
    with redis_server(find_redis_server(), folder) as url:
        env = {k: v for k, v in os.environ.items() if not k.startswith("CELERY_")}
        env |= {"EXAMPLE_BROKER_URL": url, "EXAMPLE_RAN": str(ran), "EXAMPLE_SENT": str(sent)}
        publish = [sys.executable, "-m", "example_project.tenants", app, *map(str, plan)]
        work = [str(Path(sys.executable).with_name("celery")), "-A", app, "worker", *options]
        work += ["-Q", "jobs", "-c", str(SLOTS), "-l", "WARNING"]
        logs = folder / "producer.log", folder / "worker.log"
        with process(publish, env, logs[0]) as producer:
            assert producer.stdout is not None  # noqa: S101  # for the type checker
            if producer.stdout.readline() != "queued\n":
                raise ExampleError(f"The producer failed:\n{logs[0].read_text()}")
            with process(work, env, logs[1]) as worker:
                _wait(plan, ran, worker, producer, logs)
        if lines(ran) != plan.jobs:
            raise ExampleError(f"{lines(ran)} runs of {plan.jobs} jobs")
        return waits(sent, ran)


def _wait(
    plan: Plan,
    ran: Path,
    worker: subprocess.Popen[str],
    producer: subprocess.Popen[str],
    logs: tuple[Path, Path],
) -> None:
    """Wait until all jobs ran."""
    last, since = -1, time.monotonic()
    while (done := lines(ran)) < plan.jobs:
        if done != last:
            last, since = done, time.monotonic()
        stalled = time.monotonic() - since > STALL_TIMEOUT
        if stalled or worker.poll() is not None or producer.poll():
            text = "".join(log.read_text(errors="replace") for log in logs)
            raise ExampleError(f"Only {done} of {plan.jobs} jobs ran:\n{text}")
        time.sleep(0.05)


def share(values: list[float], part: float) -> float:
    """Return the nearest-rank percentile of sorted values."""
    return values[max(0, -int(-len(values) * part // 1) - 1)]


def table(title: str, jobs: list[Job], plan: Plan) -> str:
    """Return the waits of each tenant."""
    width = max(len(text) for text in (*(title for title, *_ in VARIANTS), "minnow-10"))
    text = [
        f"{title:<{width}}           jobs that went first         seconds",
        f"{'tenant':<{width}}    jobs   median     p95    last   median     p95    last",
    ]
    for tenant in ("whale", *(f"minnow-{number}" for number in range(1, plan.minnows + 1))):
        mine = [job for job in jobs if job.tenant == tenant]
        before = sorted(float(job.before) for job in mine)
        seconds = sorted(job.started - job.queued for job in mine)
        text.append(
            f"{tenant:<{width}}  {len(mine):>6,}  "
            + "".join(f"{share(before, part):>7,.0f} " for part in (0.5, 0.95, 1.0))
            + "".join(f" {share(seconds, part):>7.2f}" for part in (0.5, 0.95, 1.0))
        )
    return "\n".join(text) + "\n"


def plot(results: dict[str, list[Job]], plan: Plan, file: Path) -> None:
    """Draw which tenant's jobs started when, one row for each."""
    import matplotlib as mpl  # noqa: PLC0415  # only with --plot

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    tenants = ["whale", *(f"minnow-{number}" for number in range(1, plan.minnows + 1))]
    size = (9, 1.2 + 0.42 * len(tenants))
    figure, panels = plt.subplots(len(results), 1, sharex=True, figsize=size, squeeze=False)
    for axes, (title, jobs) in zip(panels[:, 0], results.items(), strict=True):
        rows = [[job.place for job in jobs if job.tenant == tenant] for tenant in tenants]
        colors = ["#4c72b0", *["#c44e52"] * plan.minnows]
        axes.eventplot(rows, colors=colors, linelengths=0.8, linewidths=0.6)
        axes.axvline(plan.after, color="black", linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(tenants)), tenants, fontsize=8)
        axes.invert_yaxis()
        axes.set_title(title, loc="left", fontsize=10)
        axes.margins(x=0.01)
    panels[-1, 0].set_xlabel(
        f"jobs started so far; each line is one job; the minnows' were queued after {plan.after:,}"
    )
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def last_minnow(jobs: list[Job]) -> int:
    """Return how many jobs went before the minnow job that waited longest."""
    return max(job.before for job in jobs if job.tenant != "whale")


def main(arguments: argparse.Namespace) -> int:
    """Run both variants, print the tables, return the exit code."""
    after = arguments.whale // 20
    plan = Plan(arguments.whale, arguments.minnows, arguments.each, after, arguments.seconds)
    print(f"Redis: {find_redis_server()}")
    print(
        f"A whale queues {plan.whale:,} jobs. After {plan.after:,} of them, {plan.minnows} minnows "
        f"queue {plan.each} each.\n"
        f"One queue, {SLOTS} processes, {plan.seconds * 1000:g} ms a job. "
        "Waits are from queueing to start.\n",
        flush=True,
    )
    results = {}
    for title, app, options in VARIANTS:
        # A short folder name: a unix socket's path has a limit of about 100 bytes.
        with tempfile.TemporaryDirectory(prefix="example-", dir="/tmp") as name:
            results[title] = run(plan, app, options, Path(name))
        print(table(title, results[title], plan), flush=True)
    stock, fair = map(last_minnow, results.values())
    print(f"Before a minnow's last job went {stock:,} others with stock Celery, {fair:,} here.")
    if arguments.plot:
        plot(results, plan, arguments.plot)
        print(f"Drawn: {arguments.plot}")
    return int(fair > stock / 2)


def options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--whale", type=int, default=10_000, metavar="JOBS")
    parser.add_argument("--minnows", type=int, default=10, metavar="N")
    parser.add_argument("--each", type=int, default=20, metavar="JOBS", help="jobs of a minnow")
    parser.add_argument("--seconds", type=float, default=0.005, help="what a job takes")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the order (PNG, SVG, PDF)")
    return parser.parse_args()


if __name__ == "__main__":
    chosen = options()
    environment.enter("server,plot" if chosen.plot else "server")
    try:
        sys.exit(main(chosen))
    except ExampleError as error:
        sys.exit(f"\n{error}")

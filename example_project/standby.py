"""Run a primary and a fallback on one queue, and an ordered primary with its stand-by on another.

`python3 example_project/standby.py` makes its own environment, starts a private redis-server and four
workers, and prints who did what while the primaries are there, after they were stopped, and after they
were killed. `--multi` starts the four with one `celery multi` command line.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

# This folder first on the path would make `import celery` find the example's own celery.py.
sys.path[0] = str(Path(__file__).resolve().parent.parent)
from example_project import environment  # noqa: E402
from example_project.run import (  # noqa: E402
    RUN_TIMEOUT,
    START_TIMEOUT,
    STOP_TIMEOUT,
    ExampleError,
    find_redis_server,
    redis_server,
)

APP = ("-A", "example_project.pair")
#: Name, queue, slots, consumer priority.
WORKERS = (
    ("primary", "default", 10, 10),
    ("fallback", "default", 5, 0),
    ("ordered_primary", "ordered_events", 1, 10),
    ("ordered_standby", "ordered_events", 1, 0),
)
SECONDS = 0.02


class Run(NamedTuple):
    """A line of the file in which the jobs say what they do."""

    worker: str
    number: int
    event: str
    at: float


def worker_command(name: str, queue: str, slots: int, priority: int) -> list[str]:
    """Return the arguments after `celery` that start one worker."""
    options = ["-P", "strategies", "-Q", queue, "-c", str(slots), "-n", f"{name}@example"]
    return [*APP, "worker", *options, f"--consumer-priority={priority}"]


def multi_command() -> list[str]:
    """Return the arguments after `celery` that start all four at once."""
    names = [name for name, *_ in WORKERS]
    command = [*APP, "multi", "start", *names, "-P", "strategies"]
    for name, queue, slots, priority in WORKERS:
        command += [f"-Q:{name}", queue, f"-c:{name}", str(slots)]
        command += [f"--consumer-priority:{name}={priority}"]
    return command


class Fleet:
    """The workers of the example, by name."""

    def __init__(self, url: str, folder: Path) -> None:
        self.folder = folder
        self.ran = folder / "ran.txt"
        self.ran.touch()
        env = {k: v for k, v in os.environ.items() if not k.startswith("CELERY_")}
        self.env = env | {"EXAMPLE_BROKER_URL": url, "EXAMPLE_RAN": str(self.ran)}
        os.environ["EXAMPLE_BROKER_URL"] = url
        self.pids: dict[str, int] = {}
        self._children: list[subprocess.Popen[bytes]] = []

    def _celery(self, arguments: list[str], output: Path) -> subprocess.Popen[bytes]:
        program = str(Path(sys.executable).with_name("celery"))
        with output.open("ab") as log:
            return subprocess.Popen(
                [program, *arguments],
                cwd=environment.ROOT,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def log(self, name: str) -> str:
        """Return what a worker said."""
        file = self.folder / f"{name}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def start(self, *names: str) -> None:
        """Start workers, each with a command of its own, and wait until they are ready."""
        ready = {name: self.log(name).count(" ready.") for name in names}
        for name, queue, slots, priority in WORKERS:
            if name in names:
                command = [*worker_command(name, queue, slots, priority), "-l", "INFO"]
                child = self._celery(command, self.folder / f"{name}.log")
                self._children.append(child)
                self.pids[name] = child.pid
        self._wait_ready(ready)

    def start_all(self) -> None:
        """Start all workers with one command line."""
        names = [name for name, *_ in WORKERS]
        files = [f"--pidfile={self.folder}/%n.pid", f"--logfile={self.folder}/%n.log"]
        output = self.folder / "multi.log"
        if self._celery([*multi_command(), *files, "-l", "INFO"], output).wait(RUN_TIMEOUT):
            raise ExampleError(output.read_text())
        self._wait_ready(dict.fromkeys(names, 0))
        for name in names:
            self.pids[name] = int((self.folder / f"{name}.pid").read_text())

    def _wait_ready(self, before: dict[str, int]) -> None:
        for name, count in before.items():
            wait(
                lambda: self.log(name).count(" ready.") > count,  # noqa: B023
                START_TIMEOUT,
                f"{name} did not start:\n{self.log(name)}",
            )
        # Everybody's first beats, by which the others know of them.
        time.sleep(1.5)

    def stop(self, name: str) -> None:
        """Have a worker end warmly; does not wait."""
        os.kill(self.pids[name], signal.SIGTERM)

    def kill(self, name: str) -> None:
        """End a worker and its children at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(os.getpgid(self.pids[name]), signal.SIGKILL)

    def close(self) -> None:
        """End whatever is left."""
        for name in self.pids:
            self.kill(name)
        for child in self._children:
            child.wait(STOP_TIMEOUT)

    def runs(self) -> list[Run]:
        """Return what the jobs said so far."""
        rows = [line.split() for line in self.ran.read_text().splitlines()]
        return [Run(name, int(number), event, float(at)) for name, number, event, at in rows]


def wait(condition: Callable[[], object], seconds: float, failure: str) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise ExampleError(failure)
        time.sleep(0.01)


class Row:
    """Publishes jobs with rising numbers to one queue, and tells who ran them."""

    def __init__(self, fleet: Fleet, queue: str, first: int) -> None:
        from example_project.pair import work  # noqa: PLC0415  # it reads the environment

        self.fleet, self.queue, self.work = fleet, queue, work
        self.first = self.next = first

    def publish(self, count: int) -> range:
        """Publish jobs; return their numbers."""
        numbers = range(self.next, self.next + count)
        for number in numbers:
            self.work.apply_async((number, SECONDS), queue=self.queue)
        self.next += count
        return numbers

    def of(self, numbers: range) -> list[Run]:
        """Return what ran of these jobs."""
        return [run for run in self.fleet.runs() if run.number in numbers]

    def wait_for(self, numbers: range, count: int) -> None:
        """Wait until so many of these jobs have ended."""
        wait(
            lambda: len({run.number for run in self.of(numbers) if run.event == "end"}) >= count,
            RUN_TIMEOUT,
            f"Only these ran of {numbers}: {self.of(numbers)}",
        )

    def tell(self, title: str, numbers: range, since: float | None = None) -> bool:
        """Print who ran these jobs; return whether each ran, and in order if it has to be."""
        starts = [run for run in self.of(numbers) if run.event == "start"]
        by = Counter(run.worker for run in starts)
        names = [name for name, queue, *_ in WORKERS if queue == self.queue]
        line = f"  {title:<44}" + "".join(f"{name} {by[name]:>3}   " for name in names)
        order = list(dict.fromkeys(run.number for run in starts))
        again = len(starts) - len(order)
        fine = sorted(order) == list(numbers)
        if self.queue == "ordered_events":
            fine = fine and order == sorted(order)
            line += "in order   " if order == sorted(order) else "OUT OF ORDER   "
        line += f"again {again}"
        if since is not None:
            after = [run.at - since for run in starts if run.at > since and run.worker == names[1]]
            line += f"   first after {min(after, default=0.0):.2f} s"
        print(line, flush=True)
        return fine


def shared(fleet: Fleet, jobs: int) -> bool:
    """Show the primary and the fallback of one queue."""
    row = Row(fleet, "default", 0)
    fine = True
    for there in (True, False):
        numbers = range(row.next, row.next)
        for _ in range(jobs // 5):
            part = row.publish(5)
            row.wait_for(part, 5)
            numbers = range(numbers.start, part.stop)
        fine = row.tell("the primary has free slots" if there else "it is back", numbers) and fine
        numbers = row.publish(4 * jobs)
        row.wait_for(numbers, 4 * jobs)
        fine = row.tell("more than it has slots for", numbers) and fine
        numbers = row.publish(2 * jobs)
        row.wait_for(numbers, jobs // 2)
        since = time.monotonic()
        (fleet.stop if there else fleet.kill)("primary")
        row.wait_for(numbers, 2 * jobs)
        title = "stopped halfway" if there else "killed halfway"
        fine = row.tell(title, numbers, since) and fine
        if there:
            _wait_gone(fleet, "primary")
            fleet.start("primary")
    return fine


def ordered(fleet: Fleet, jobs: int) -> bool:
    """Show the ordered primary and its stand-by."""
    row = Row(fleet, "ordered_events", 1_000_000)
    fine = True
    for there in (True, False):
        numbers = row.publish(jobs)
        row.wait_for(numbers, jobs)
        fine = row.tell("the primary leads" if there else "it is back, and leads", numbers) and fine
        numbers = row.publish(2 * jobs)
        row.wait_for(numbers, jobs // 2)
        since = time.monotonic()
        (fleet.stop if there else fleet.kill)("ordered_primary")
        row.wait_for(numbers, 2 * jobs)
        title = "stopped halfway" if there else "killed halfway"
        fine = row.tell(title, numbers, since) and fine
        if there:
            _wait_gone(fleet, "ordered_primary")
            fleet.start("ordered_primary")
    return fine


def _wait_gone(fleet: Fleet, name: str) -> None:
    def gone() -> bool:
        for child in fleet._children:  # noqa: SLF001  # the same module's
            child.poll()
        try:
            os.kill(fleet.pids[name], 0)
        except ProcessLookupError:
            return True
        return False

    wait(gone, STOP_TIMEOUT, f"{name} did not end:\n{fleet.log(name)}")


@contextlib.contextmanager
def workers(url: str, folder: Path, *, multi: bool) -> Iterator[Fleet]:
    """Run the four workers."""
    fleet = Fleet(url, folder)
    try:
        if multi:
            fleet.start_all()
        else:
            fleet.start(*(name for name, *_ in WORKERS))
        yield fleet
    finally:
        fleet.close()


def main(arguments: argparse.Namespace) -> int:
    """Run the example, return the exit code."""
    print(f"Redis: {find_redis_server()}\n")
    if arguments.multi:
        print(f"celery {shlex.join(multi_command())}")
    else:
        for worker in WORKERS:
            print(f"celery {shlex.join(worker_command(*worker))}")
    # A short folder name: a unix socket's path has a limit of about 100 bytes.
    with tempfile.TemporaryDirectory(prefix="example-", dir="/tmp") as name:
        folder = Path(name)
        with (
            redis_server(find_redis_server(), folder) as url,
            workers(url, folder, multi=arguments.multi) as fleet,
        ):
            print("\nConsumer priority: who ran how many jobs", flush=True)
            fine = shared(fleet, arguments.jobs)
            print("\nSingle active consumer: who ran how many jobs", flush=True)
            fine = ordered(fleet, arguments.jobs) and fine
    print("\nEvery job ran." if fine else "\nA job is missing, or out of order.")
    return int(not fine)


def options() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--jobs", type=int, default=100, metavar="N", help="jobs of a step")
    parser.add_argument("--multi", action="store_true", help="start all with `celery multi`")
    return parser.parse_args()


if __name__ == "__main__":
    chosen = options()
    environment.enter("server")
    try:
        sys.exit(main(chosen))
    except ExampleError as error:
        sys.exit(f"\n{error}")

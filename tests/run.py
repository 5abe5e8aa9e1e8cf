"""Run the suite on every redis-server that this machine has.

`python3 tests/run.py [--redis 6.2|7.0|all] [--full] [--fast] [pytest arguments]` makes its own
environment.
The newest server gets the whole suite, in two halves side by side; the others, beside it, the
part that depends on the server (`--full`: the whole, too). The output is pytest's, once for each
run, with the slowest tests of each, and its last line is pytest's own: that of the first run that
failed, else that of the last run. With CI set, what failed is run once more, alone, and named.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# `tests` itself must not stand on the path: `import support` or `import core` would find it.
sys.path[0] = str(ROOT / "example_project")
import environment  # noqa: E402

sys.path[0] = str(ROOT)

_CLOSING = re.compile(r"\b\d+ (passed|failed|errors?|skipped|deselected)\b|\bno tests ran\b")
_SLOWEST = ("--durations=20", "--durations-min=2")


#: What an older server might do otherwise: every script, and each kind of worker's doings once.
SERVER_PART = (
    "tests/store",
    "tests/properties",
    "tests/smoke",
    "tests/limits/test_scripts.py",
    "tests/limits/test_failures.py",
    "tests/leases/test_lease_model.py",
    "tests/leases/test_single_active.py",
    "tests/fair/test_shares.py",
    "tests/faults/test_restarts.py",
    "tests/worker/test_order.py",
)

#: The whole suite in two parts of about the same length: its tests wait for processes most of the time.
HALVES = (
    (
        *("worker", "smoke", "limits", "events", "docs", "core", "settings", "simulation"),
        *("support", "packaging"),
    ),
    ("faults", "fair", "leases", "look", "publish", "properties", "store"),
)


@dataclass
class Run:
    """One run of pytest on one server, and how it ended."""

    series: str
    name: str
    part: tuple[str, ...] = ()
    """What to run where the command line names nothing; empty: the whole suite."""
    code: int = 0
    closing: str = ""
    """pytest's closing line, empty if it died before that."""
    closed: bool = False
    """Whether that was the last line it printed."""

    def execute(self, arguments: list[str], write: Callable[[str], object]) -> None:
        """Run pytest with *arguments*; what it prints goes to *write*, line by line."""
        # What stands later on the command line wins.
        command = [
            *(sys.executable, "-m", "pytest", *_SLOWEST),
            *("-o", f"cache_dir=.pytest_cache/{self.name}", *arguments, *self.part),
        ]
        env = {**os.environ, "REDIS_VERSION": self.series}
        self.closing, self.closed = "", False
        with subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace",
        ) as process:  # fmt: skip
            assert process.stdout is not None
            for line in process.stdout:
                write(line)
                self.closed = bool(_CLOSING.search(line) and re.search(r" in [\d.]+s", line))
                if self.closed:
                    self.closing = line.rstrip("\n")
        # A pytest that a signal ended has a negative code.
        self.code = abs(process.returncode)

    def again(self, arguments: list[str], write: Callable[[str], object]) -> None:
        """Run what failed once more, with nothing beside it, and name it."""
        write(f"\n=== Once more on {self.name}, alone: what failed above\n")
        self.execute(["--last-failed", "--last-failed-no-failures=none", *arguments], write)
        if self.code == 0:
            write(f"=== FLAKY on {self.name}: failed above and passed alone\n")


def halves() -> list[tuple[str, ...]]:
    """Return the two halves as paths; no folder of tests may be in neither."""
    named = {name for half in HALVES for name in half}
    found = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    if found != named:
        environment.fail(f"tests/run.py: HALVES and the folders differ: {sorted(found ^ named)}")
    return [tuple(f"tests/{name}" for name in half) for half in HALVES]


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def run_all(runs: list[Run], arguments: list[str], *, retry: bool) -> None:
    """Run all of them at once, on their servers.

    The last one's output is shown as it comes, the others' after it.
    """
    outputs: list[list[str]] = [[] for _ in runs[:-1]]
    threads = [
        threading.Thread(target=run.execute, args=(arguments, output.append))
        for run, output in zip(runs, outputs, strict=False)
    ]
    for thread in threads:
        thread.start()
    runs[-1].execute(arguments, _print)
    for thread, output, run in zip(threads, outputs, runs, strict=False):
        thread.join()
        _print(f"\n=== The suite on {run.name}\n{''.join(output)}")
    for run in runs:
        # 1: tests failed; anything else is not theirs to mend.
        if retry and run.code == 1:
            run.again(arguments, _print)


def main() -> int:
    """Run the suite on the chosen servers and return the exit code."""
    from tests.support import redis_server as servers

    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--redis", default="all", help="6.2, 7.0, another series, or all found")
    parser.add_argument("--full", action="store_true", help="the whole suite on every server")
    parser.add_argument("--fast", action="store_true", help="leave out what is marked slow")
    options, arguments = parser.parse_known_args()
    if options.fast:
        arguments = ["-m", "not slow", *arguments]
    try:
        if options.redis == "all":
            chosen = {binary.series: binary for binary in reversed(servers.find_all())}
            binaries = [chosen[series] for series in sorted(chosen)] or [servers.find()]
        else:
            binaries = [servers.find(options.redis)]
    except servers.RedisNotFoundError as error:
        environment.fail(str(error))
    for binary in binaries:
        print(f"=== The suite on {binary}", flush=True)
    named = any((ROOT / argument.partition("::")[0]).exists() for argument in arguments)
    runs = []
    for binary in binaries:
        parts = (
            [()] if named else halves() if options.full or binary is binaries[-1] else [SERVER_PART]
        )
        for number, part in enumerate(parts, 1):
            name = f"{binary.series}-{number}" if len(parts) > 1 else binary.series
            runs.append(Run(binary.series, name, part))
    run_all(runs, arguments, retry="CI" in os.environ)
    if len(runs) > 1:
        print()
        for binary in binaries:
            codes = [run.code for run in runs if run.series == binary.series and run.code]
            print(f"{binary}: {f'FAILED (exit code {codes[0]})' if codes else 'ok'}")
    # What decides the exit code also has the last word.
    decisive = next((run for run in runs if run.code), runs[-1])
    if len(runs) > 1 or not decisive.closed:
        print(decisive.closing, flush=True)
    return decisive.code


if __name__ == "__main__":
    environment.enter("test")
    sys.exit(main())

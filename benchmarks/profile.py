"""Say where the time of a worker's parent process goes in a throughput run.

    python3 benchmarks/profile.py [--variant ours] [--pool prefork] [--slots 4]

py-spy attaches for the middle of the run if it is installed and allowed; otherwise the
parent runs under cProfile (main thread, overhead included, so compare shares only).
"""

import argparse
import json
import pathlib
import pstats
import shutil
import signal
import subprocess
import sys
import tempfile

# This file must not stand in for the standard library's module of the same name.
sys.path.append(sys.path.pop(0))

from harness import backlog, stacks, variants
from harness.fleet import Fleet, RunError
from harness.server import RedisServer, find_server


def options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", default="ours", choices=variants.NAMES)
    parser.add_argument("--pool", default="prefork")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--loglevel", default="WARNING")
    parser.add_argument("--seconds", type=int, default=5, help="how long py-spy samples")
    parser.add_argument("--tool", choices=("py-spy", "cprofile"), help="default: py-spy if usable")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON")
    parser.add_argument("--top", type=int, default=20, help="functions to list")
    parser.add_argument("--output", type=pathlib.Path, help="write the report here too")
    parser.add_argument("--redis-server")
    return parser.parse_args()


def find_py_spy():
    beside = pathlib.Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def by_py_spy(py_spy, chosen, variant, binary, folder):
    """Return the profile, or None if py-spy may not attach."""
    raw = folder / "raw"
    with (
        RedisServer(binary) as server,
        Fleet(server, variant, chosen.pool, chosen.slots, loglevel=chosen.loglevel) as fleet,
    ):
        template = backlog.Template("bench.noop")
        for _ in range(chosen.seconds + 3):  # more than it can do; the rest is dropped
            template.push(server.client, 5000)
        fleet.wait_done(1000)
        ended = subprocess.run(
            [
                *(py_spy, "record", "--pid", str(fleet.process.pid), "--rate", "200"),
                *("--duration", str(chosen.seconds), "--format", "raw", "--full-filenames"),
                *("--output", str(raw)),
            ],
            check=False,
            capture_output=True,
            text=True,
            timeout=chosen.seconds + 60,
        )
        server.client.delete(template.queue)
    if ended.returncode or not raw.exists():
        print(f"py-spy cannot attach, using cProfile: {ended.stderr.strip()[-200:]}\n")
        return None
    profile = stacks.Profile()
    for stack, count in stacks.parse_raw(raw.read_text()):
        profile.add(stack, count)
    return profile


def by_cprofile(chosen, variant, binary, folder):
    """Return pstats of the parent's main thread over 8,000 jobs."""
    output = folder / "cprofile"
    program = [sys.executable, str(variants.workload_dir() / "profiled_celery.py")]
    program.append(str(output))
    if variant.name == "stock":
        program.append("--stock")
    with (
        RedisServer(binary) as server,
        Fleet(
            server, variant, chosen.pool, chosen.slots, loglevel=chosen.loglevel, program=program
        ) as fleet,
    ):
        backlog.Template("bench.noop").push(server.client, 8000)
        fleet.wait_done(8000)
        fleet.process.send_signal(signal.SIGTERM)
        fleet.process.wait(20)
    if not output.exists():
        raise RunError("cProfile wrote nothing")
    profile = stacks.Profile()
    for (path, line, name), (_, _, own, below, callers) in pstats.Stats(str(output)).stats.items():
        # One level of callers is all that cProfile keeps: enough to place built-ins.
        if path == "~" and callers:
            for (caller_path, caller_line, caller), row in callers.items():
                profile.add([(caller, caller_path, caller_line), (name, path, line)], row[2])
        else:
            profile.add([(name, path, line)], own)
        profile.set_below((name, path, line), below)
    return profile


def main():
    chosen = options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    extra = [(k, _value(v)) for k, _, v in (text.partition("=") for text in chosen.set)]
    (variant,) = variants.parse(chosen.variant, extra)
    binary = find_server(chosen.redis_server)
    py_spy = find_py_spy() if chosen.tool != "cprofile" else None
    with tempfile.TemporaryDirectory(prefix="bench-profile-") as name:
        folder = pathlib.Path(name)
        profile, unit = None, "samples"
        if py_spy:
            profile = by_py_spy(py_spy, chosen, variant, binary, folder)
        if profile is None:
            profile, unit = by_cprofile(chosen, variant, binary, folder), "s"
    title = f"# {variant.name}, {chosen.pool} {chosen.slots}, {chosen.loglevel}: the parent\n"
    report = f"{title}\n{profile.render(unit, chosen.top)}"
    print(report)
    if chosen.output:
        chosen.output.write_text(report)


def _value(text):
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    main()

"""Start, watch and stop worker processes of one variant.

Owns the processes and their reports (see workload/bench_app.py). Ends only what it
started, by pid.
"""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time

import psutil

from .variants import workload_dir

QUIET = ("--without-gossip", "--without-mingle", "--without-heartbeat")


class RunError(Exception):
    """A worker did not boot, stalled, or lost or repeated a job."""


class Fleet(contextlib.AbstractContextManager):
    """One worker, or a herd of *count* solo workers, on *server*."""

    def __init__(
        self,
        server,
        variant,
        pool="solo",
        slots=1,
        *,
        loglevel="WARNING",
        queues=("celery",),
        settings=None,
        count=1,
        program=None,
    ):
        self.count = count
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="bench-fleet-"))
        (self.dir / "tally").touch()
        self.marks = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.marks.bind(str(self.dir / "marks"))
        option, own = variant.pool(pool)
        arguments = [
            *("-A", "bench_app", "worker", "-P", option, "-c", str(slots)),
            *("-l", loglevel, "-Q", ",".join(queues), *QUIET),
        ]
        if count == 1:
            command = [*(program or variant.program()), *arguments, "-n", "bench@%h"]
        else:
            stock = ["--stock"] if variant.name == "stock" else []
            herd = str(workload_dir() / "herd.py")
            command = [variant.program()[0], herd, str(count), *stock, "--"]
            command += [*arguments, "-n", "bench%i@local"]
        self.log = (self.dir / "log").open("wb")
        self.process = subprocess.Popen(
            command,
            cwd=self.dir,
            env=environment(server, self.dir, {**own, **(settings or {})}),
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            self._wait_ready()
        except BaseException:
            self.__exit__()
            raise

    def _wait_ready(self):
        deadline = time.monotonic() + 30 + self.count
        while len(list(self.dir.glob("ready.*"))) < self.count:
            if self.process.poll() is not None:
                raise RunError(f"worker ended at boot ({self.process.returncode})\n{self.tail()}")
            if time.monotonic() > deadline:
                raise RunError(f"worker not ready\n{self.tail()}")
            time.sleep(0.02)
        time.sleep(1.0)  # the loop's first turns; pool children come up

    def tail(self, lines=25):
        """Return the end of the workers' log, indented."""
        self.log.flush()
        text = (self.dir / "log").read_text(errors="replace").splitlines()
        return "\n".join("    | " + line for line in text[-lines:])

    def tree(self):
        """Return the parent and all its descendants."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def cpu(self):
        """Return CPU seconds used so far by the living processes."""
        return sum(self.cpu_parts())

    def cpu_parts(self):
        """Return CPU seconds used so far, as /proc counts them: (parent, its children)."""
        seconds = []
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                seconds.append(times.user + times.system)
        return seconds[0], sum(seconds[1:])

    def rss(self):
        """Return resident MiB: (parent, sum over the tree)."""
        sizes = []
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                sizes.append(process.memory_info().rss / 2**20)
        return sizes[0], sum(sizes)

    def done(self):
        """Return the number of ``noop`` jobs that ran."""
        return (self.dir / "tally").stat().st_size

    def wait_done(self, target, every=0.005, stall=20.0):
        """Wait until *target* jobs ran; fail when none runs for *stall* seconds."""
        last, since = -1, time.monotonic()
        while (done := self.done()) < target:
            if done != last:
                last, since = done, time.monotonic()
            elif time.monotonic() - since > stall:
                raise RunError(f"stalled at {done} of {target} jobs\n{self.tail()}")
            if self.process.poll() is not None:
                raise RunError(f"worker ended during the run\n{self.tail()}")
            time.sleep(every)
        return done

    def mark(self, timeout=10.0):
        """Return (sent, started) of the next ``mark`` job that ran."""
        self.marks.settimeout(timeout)
        try:
            sent, started = self.marks.recv(200).split()
        except TimeoutError:
            raise RunError(f"a job did not start within {timeout} s\n{self.tail()}") from None
        return float(sent), float(started)

    def __exit__(self, *_):
        try:
            self._end()
        finally:
            self.marks.close()
            self.log.close()
            shutil.rmtree(self.dir, ignore_errors=True)

    def _end(self):
        if self.process.poll() is not None:
            return
        tree = self.tree()
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(15)
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(5)


def environment(server, folder, settings):
    """Return the environment in which bench_app runs."""
    return {
        **os.environ,
        "PYTHONPATH": str(workload_dir()),
        "PYTHONDONTWRITEBYTECODE": "1",
        "BENCH_BROKER": server.url,
        "BENCH_SETTINGS": json.dumps(settings),
        "BENCH_DIR": str(folder),
    }

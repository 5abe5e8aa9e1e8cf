"""The Celery application that benchmark workers and producers load.

Owns the tasks and their reporting. Everything that differs between two runs comes in
through environment variables, so that both variants run exactly this module:

``BENCH_BROKER``    broker URL
``BENCH_SETTINGS``  JSON object of Celery settings, applied last
``BENCH_DIR``       folder for the reports below

A job reports that it ran without touching Redis, which is what is being measured: ``noop``
appends one byte to a file (about 1 µs), ``mark`` sends a datagram with its start time.
"""

import json
import os
import pathlib
import socket
import time

from celery import Celery
from celery.signals import worker_ready

DIR = pathlib.Path(os.environ["BENCH_DIR"])
MARKS = str(DIR / "marks")

app = Celery("bench", broker=os.environ["BENCH_BROKER"])
app.conf.update(
    task_ignore_result=True,
    worker_send_task_events=False,
    broker_connection_retry_on_startup=True,
    worker_hijack_root_logger=True,
    **json.loads(os.environ.get("BENCH_SETTINGS", "{}")),
)

_opened = {}  # pid -> file descriptor; a pool may close what it inherits over a fork


def _tally():
    pid = os.getpid()
    if pid not in _opened:
        _opened[pid] = os.open(DIR / "tally", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    return _opened[pid]


@app.task(name="bench.noop")
def noop(*_):
    os.write(_tally(), b".")


@app.task(name="bench.mark")
def mark(sent):
    started = time.monotonic()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as report:
        report.sendto(f"{sent!r} {started!r}".encode(), MARKS)


@worker_ready.connect
def _ready(**_):
    (DIR / f"ready.{os.getpid()}").touch()

"""The keeper's thread is one of the operating system, also where all others are greenlets."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.workers import ROOT

#: The thread logs while a greenlet logs; a line takes as long as a slow terminal.
SCRIPT = """
import {pool}
{patch}
import logging, sys, time
from celery_strategies.transport.threads import ThreadLogger, start_thread

{original}

class Slow(logging.Handler):
    def emit(self, record):
        slowly(0.3)
        sys.stdout.write(record.getMessage() + "\\n")

logging.basicConfig(level=logging.INFO, handlers=[Slow()])
logger, state = ThreadLogger("keeper"), []

def run():
    state.append("begun")
    try:
        raise OSError("away")
    except OSError:
        logger.warning("the thread says %s", "hello", exc_info=True)
    state.append("ended")

start_thread(run, "t")
deadline = time.monotonic() + 20
while not state and time.monotonic() < deadline:
    time.sleep(0.001)
logging.info("a greenlet")
while "ended" not in state and time.monotonic() < deadline:
    time.sleep(0.01)
logger.flush()
logging.info("the end")
"""
POOLS = {
    "eventlet": (
        "eventlet.monkey_patch()",
        "import eventlet.patcher\nslowly = eventlet.patcher.original('time').sleep",
    ),
    "gevent": (
        "from gevent import monkey; monkey.patch_all()",
        "slowly = monkey.get_original('time', 'sleep')",
    ),
    "threading": ("", "slowly = time.sleep"),
}


@pytest.mark.parametrize("pool", POOLS)
def test_a_thread_may_log_while_a_greenlet_does(pool: str) -> None:
    """eventlet: "Cannot switch to MAINLOOP from MAINLOOP" ended a worker whose keeper logged a lost connection."""
    patch, original = POOLS[pool]
    code = SCRIPT.format(pool=pool, patch=patch, original=original)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["a greenlet", "the end", "the thread says hello"]
    assert done.stdout.splitlines()[-1] == "the end"

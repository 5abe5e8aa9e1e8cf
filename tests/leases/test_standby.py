"""The example of a primary and its stand-by runs, started by one command line."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.support.workers import ROOT

JOBS = 10
ROW = re.compile(r"^  ([\w ,]+?)  +(\w+) +(\d+) +(\w+) +(\d+) +(in order +)?again (\d+)")
#: What each row is about, how many jobs ran in it, and at most how many again.
STEPS = (
    ("the primary has free slots", JOBS, 0),
    ("more than it has slots for", 4 * JOBS, 0),
    ("stopped halfway", 2 * JOBS, 0),
    ("it is back", JOBS, 0),
    ("more than it has slots for", 4 * JOBS, 0),
    ("killed halfway", 2 * JOBS, 10),
    ("the primary leads", JOBS, 0),
    ("stopped halfway", 2 * JOBS, 0),
    ("it is back, and leads", JOBS, 0),
    ("killed halfway", 2 * JOBS, 1),
)


@pytest.mark.slow
def test_the_example_runs() -> None:
    # Started by `celery multi`; it starts the primaries again with commands of their own.
    done = subprocess.run(
        [sys.executable, "example_project/standby.py", "--jobs", str(JOBS), "--multi"],
        cwd=ROOT,
        # It runs in this environment, not in one that it makes.
        env={**os.environ, "CELERY_STRATEGIES_VENV": "server"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("\nEvery job ran.\n")
    rows = [match for line in done.stdout.splitlines() if (match := ROW.match(line))]
    assert [row[1] for row in rows] == [title for title, _, _ in STEPS]
    for row, (title, jobs, most) in zip(rows, STEPS, strict=True):
        primary, stand_by, again = int(row[3]), int(row[5]), int(row[7])
        assert primary + stand_by == jobs + again, row[0]
        assert again <= most
        if "leads" in title:
            assert not stand_by
        elif "ordered_primary" in row[0] and "halfway" in title:
            assert stand_by

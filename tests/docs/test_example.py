"""The example of fair share runs, and its minnows do not wait for its whale."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from . import pages

WHALE, MINNOWS, EACH = 300, 3, 5
SLOTS = 4
#: What one take sorts at most of a backlog that it finds: the rest goes first in, first out.
SORTED_AT_ONCE = 256


def tables(output: str) -> dict[str, dict[str, list[float]]]:
    """Return the figures behind each tenant's name, table by table."""
    found: dict[str, dict[str, list[float]]] = {}
    for line in output.splitlines():
        title = re.match(r"(\w+ \w+) +jobs that went first +seconds$", line)
        row = re.match(r"(whale|minnow-\d+) +([\d,. ]+)$", line)
        if title:
            found[title[1]] = {}
        elif row:
            figures = [float(word.replace(",", "")) for word in row[2].split()]
            list(found.values())[-1][row[1]] = figures
    return found


@pytest.mark.slow
def test_minnows_do_not_wait_for_a_whale() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "example_project/fair.py", "--whale", str(WHALE)),
            *("--minnows", str(MINNOWS), "--each", str(EACH)),
        ],
        cwd=pages.ROOT,
        # It runs in this environment, not in one that it makes.
        env={**os.environ, "CELERY_STRATEGIES_VENV": "server"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = tables(done.stdout)
    assert list(found) == ["Stock Celery", "Fair share"]
    tenants = {"whale": WHALE, **{f"minnow-{n}": EACH for n in range(1, MINNOWS + 1)}}
    for table in found.values():
        assert {tenant: figures[0] for tenant, figures in table.items()} == tenants
    for tenant in [*tenants][1:]:
        # jobs, then what went first: median, p95, last
        assert found["Stock Celery"][tenant][3] > WHALE * 0.8
        unsorted = WHALE - SORTED_AT_ONCE
        assert found["Fair share"][tenant][3] <= len(tenants) * EACH + SLOTS + unsorted


def test_the_tables_in_the_readme_are_what_it_prints() -> None:
    found = tables(pages.read("README.md"))
    assert list(found) == ["Stock Celery", "Fair share"]
    stock, fair = (
        max(figures[3] for tenant, figures in table.items() if tenant != "whale")
        for table in found.values()
    )
    last = (
        f"Before a minnow's last job went {stock:,.0f} others with stock Celery, {fair:,.0f} here."
    )
    assert last in pages.read("README.md")

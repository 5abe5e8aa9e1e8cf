"""Publish jobs from a process of its own: `python -m tests.support.produce < jobs.json`.

The other side of `workers.publish`: a JSON array of {"task", "args", "kwargs", "options"} comes in,
the ids of the published tasks go out, one a line.
"""

from __future__ import annotations

import json
import os
import sys

from tests.support.project import app


def main() -> None:
    """Publish what stands on stdin."""
    for job in json.load(sys.stdin):
        result = app.send_task(
            job["task"], job.get("args"), job.get("kwargs"), **job.get("options", {})
        )
        sys.stdout.write(f"{result.id}\n")
    if os.environ.get("STOCK") == "1" and "celery_strategies" in sys.modules:
        raise SystemExit("a stock producer must not have loaded celery_strategies")


if __name__ == "__main__":
    main()

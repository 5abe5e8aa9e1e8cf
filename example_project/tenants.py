"""Own the publishing for `fair.py`: a whale's backlog, and minnows that come later.

`python -m example_project.tenants APP WHALE MINNOWS EACH AFTER SECONDS`. APP is a module of this
project with an `app`. It writes when each job was queued to the file named by EXAMPLE_SENT, says
`queued` when the whale is done, and waits until AFTER jobs have started.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path

QUEUE = "jobs"


def started() -> int:
    """Return how many jobs have started."""
    ran = Path(os.environ["EXAMPLE_RAN"])
    return ran.read_bytes().count(b"\n") if ran.exists() else 0


def main(module: str, whale: int, minnows: int, each: int, after: int, seconds: float) -> None:
    """Publish everything."""
    app = importlib.import_module(module).app
    with (
        Path(os.environ["EXAMPLE_SENT"]).open("w", buffering=1) as sent,
        app.producer_pool.acquire(block=True) as producer,
    ):

        def publish(tenant: str, number: int) -> None:
            # Noted first: a job that waits for nobody may have started before the next line.
            sent.write(f"{tenant} {number} {time.monotonic():.6f}\n")
            app.send_task(
                "example.serve",
                (number,),
                {"tenant": tenant, "seconds": seconds},
                queue=QUEUE,
                producer=producer,
            )

        for number in range(1, whale + 1):
            publish("whale", number)
        print("queued", flush=True)
        while started() < after:
            time.sleep(0.005)
        for number in range(1, each + 1):
            for minnow in range(1, minnows + 1):
                publish(f"minnow-{minnow}", number)


if __name__ == "__main__":
    counts = [int(word) for word in sys.argv[2:6]]
    main(sys.argv[1], counts[0], counts[1], counts[2], counts[3], float(sys.argv[6]))

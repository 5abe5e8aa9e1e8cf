"""Own the publishing: fill the three queues, emails first.

A *stock* Celery client: it has never heard of celery-strategies, as a producer in another
repository, another language or last year's release has not.
"""

from __future__ import annotations

import os
import sys

from celery import Celery

#: (queue, how many), in the order in which they are published.
FILL = (("emails", 3), ("reports", 1), ("alerts", 2))


def main() -> None:
    """Publish the jobs."""
    app = Celery("producer", broker=os.environ["EXAMPLE_BROKER_URL"])
    for queue, count in FILL:
        for number in range(1, count + 1):
            app.send_task("example.handle", (f"{queue.removesuffix('s')} {number}",), queue=queue)
    if "celery_strategies" in sys.modules:
        raise SystemExit("this was meant to be a stock producer")


if __name__ == "__main__":
    main()

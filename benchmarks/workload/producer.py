"""Publish jobs as a web process would, and print jobs per second.

``python producer.py JOBS [--plugin]``: with ``--plugin``, celery_strategies is imported
first, as a project that uses it does in its producers.
"""

import sys
import time

if "--plugin" in sys.argv:
    import celery_strategies  # noqa: F401

from bench_app import noop

jobs = int(sys.argv[1])
for _ in range(50):  # connect, and warm every cache
    noop.apply_async(queue="celery")
start = time.perf_counter()
for _ in range(jobs):
    noop.apply_async(queue="celery")
print(jobs / (time.perf_counter() - start))

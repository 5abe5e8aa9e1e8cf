# ruff: noqa: PLC0415 (what to hide must be hidden before Celery is imported)
"""Run ``celery`` under cProfile and write the statistics at exit.

``python profiled_celery.py OUTPUT [--stock] <celery arguments>``. Only the main thread of
the parent is profiled: in every pool but solo that is the thread that reads Redis.
"""

import cProfile
import os
import sys


def main():
    output = sys.argv[1]
    sys.argv = ["celery", *sys.argv[2:]]
    if "--stock" in sys.argv:
        sys.argv.remove("--stock")
        from stock_celery import hide_package

        hide_package()
    from celery.__main__ import main as celery_main

    parent = os.getpid()
    profiler = cProfile.Profile()
    try:
        profiler.runcall(celery_main)
    finally:
        if os.getpid() == parent:
            profiler.dump_stats(output)


if __name__ == "__main__":
    main()

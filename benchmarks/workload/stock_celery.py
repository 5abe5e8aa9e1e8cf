"""Run ``celery`` as if celery_strategies were not installed.

An installed celery_strategies is loaded by every ``celery`` command through its entry
point. A stock worker measured beside it must not be: hide the entry point and make any
import of the package fail loudly.
"""

import importlib.metadata
import sys

PACKAGE = "celery_strategies"


def hide_package():
    """Hide the package's entry points from Celery and forbid its import."""
    real = importlib.metadata.entry_points

    def entry_points(**params):
        found = real(**params)
        return importlib.metadata.EntryPoints(
            point for point in found if not point.value.startswith(PACKAGE)
        )

    importlib.metadata.entry_points = entry_points
    sys.modules[PACKAGE] = None


if __name__ == "__main__":
    hide_package()
    from celery.__main__ import main

    main()

"""The project of these tests in a process whose clock is off by TEST_CLOCK_AHEAD seconds."""

from __future__ import annotations

import os
import time

_real = time.time
_ahead = float(os.environ["TEST_CLOCK_AHEAD"])
time.time = lambda: _real() + _ahead

from tests.fair.project import app  # noqa: E402  # the clock first

__all__ = ["app"]

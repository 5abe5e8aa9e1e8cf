"""The test suite: real servers and processes; `tests/run.py` runs all of it."""

"""Run one case in alternating rounds (stock, ours, stock, ours, …).

A variant that fails a case is dropped from the rest of it; the reason goes to the table.
"""

import sys

from .fleet import RunError


def alternate(table, case, variants, rounds, measure):
    """Call ``measure(variant)`` for each variant in each round."""
    dropped = set()
    for number in range(1, rounds + 1):
        for variant in variants:
            if variant.label in dropped:
                continue
            _show(f"{case}: round {number}/{rounds}, {variant.label}")
            try:
                measure(variant)
            except RunError as problem:
                dropped.add(variant.label)
                table.problems.append(f"{case}, {variant.label}: {problem}")
    _show("")


def _show(text):
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

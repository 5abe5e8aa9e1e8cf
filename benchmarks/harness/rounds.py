"""Run one case in alternating rounds: stock, ours, stock, ours, …

A variant that fails a case is dropped from the rest of it; the reason goes to the table.
"""

import sys

from .fleet import Failed


def alternate(table, case, variants, rounds, measure):
    """Call ``measure(variant)`` for each variant in each round."""
    dropped = set()
    for number in range(1, rounds + 1):
        for variant in variants:
            if variant.label in dropped:
                continue
            print(f"\r\033[K{case}: round {number}/{rounds}, {variant.label}", end="", file=sys.stderr)
            try:
                measure(variant)
            except Failed as problem:
                dropped.add(variant.label)
                table.problems.append(f"{case}, {variant.label}: {problem}")
    print("\r\033[K", end="", file=sys.stderr, flush=True)

"""Own the picture of one run or several: how many jobs wait, over time, of each queue or tenant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path

from celery_strategies.simulation.engine import Arrival, Result
from celery_strategies.simulation.errors import SimulationError
from celery_strategies.simulation.reasons import called

__all__ = ("plot",)

#: Most lines of a panel; smaller tenants share one more.
_SERIES = 9


def plot(results: Mapping[str, Result], file: Path) -> None:
    """Draw a panel for each run, a line for each queue or tenant, and write it to ``file`` as PNG.

    Raises SimulationError without matplotlib, and for a file that cannot be written.
    """
    try:
        import matplotlib as mpl  # noqa: PLC0415  # only with --plot, and an extra
    except ImportError:
        raise SimulationError(
            "--plot needs matplotlib: pip install 'celery-strategies[plot]'"
        ) from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415  # after the choice of a backend

    jobs = next(iter(results.values())).jobs
    size = (8, 1 + 2.6 * len(results))
    figure, panels = plt.subplots(
        len(results), 1, sharex=True, sharey=True, figsize=size, squeeze=False
    )
    for (panel,), (label, result) in zip(panels, results.items(), strict=True):
        for name, (times, lengths) in _waiting(result).items():
            panel.step(times, lengths, where="post", linewidth=1.2, label=name)
        panel.set_title(label, loc="left", fontsize=10)
        panel.set_ylabel("jobs waiting")
        panel.set_ylim(bottom=0)
    panels[-1][0].set_xlabel("seconds")
    if jobs:
        panels[0][0].legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
    try:
        figure.savefig(file, format="png", dpi=120, bbox_inches="tight")
    except OSError as error:
        raise SimulationError(f"--plot {file}: {error.strerror or error}") from None
    finally:
        plt.close(figure)


def _waiting(result: Result) -> dict[str, tuple[list[float], list[int]]]:
    """Return when the number of waiting jobs changes, and to what, for each line of the picture."""
    keyed = any(job.key for job in result.jobs)
    names = Counter(_series(job, keyed) for job in result.jobs)
    shown = {name for name, _ in names.most_common(_SERIES)}
    changes: dict[str, Counter[float]] = {name: Counter() for name in names if name in shown}
    for job in result.jobs:
        name = _series(job, keyed)
        change = changes.setdefault(name if name in shown else "others", Counter())
        change[job.at] += 1
        if job.number in result.starts:
            change[result.starts[job.number]] -= 1
    end = max([*result.starts.values(), *result.ends.values(), 0.0])
    found = {}
    for name, change in changes.items():
        times = sorted({*change, 0.0, end})
        found[name] = (times, list(accumulate(change[time] for time in times)))
    return found


def _series(job: Arrival, keyed: bool) -> str:
    return f"{job.queue}: {called(job.key)}" if keyed else job.queue

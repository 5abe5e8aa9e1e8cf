"""The order of three queues by each strategy, ranks, and priority levels."""

from __future__ import annotations

from typing import Any

import pytest

from tests.smoke.tasks import hold, record
from tests.support.smoke import StrategiesSetup

pytestmark = pytest.mark.smoke

#: The job that holds the only slot while the queues fill comes from a queue of its own, first in
#: the list: it leaves round robin's turn at `alerts`.
QUEUES = ("-c", "1", "-Q", "first,alerts,reports,emails")
FILL = {"emails": 3, "reports": 1, "alerts": 2}
PROMISED = {
    "priority": "a1 a2 r1 e1 e2 e3",
    "round_robin": "a1 r1 e1 a2 e2 e3",
    "max_len": "e1 a1 e2 a2 r1 e3",
    "min_len": "r1 a1 a2 e1 e2 e3",
}


def run(setup: StrategiesSetup, *jobs: tuple[str, dict[str, Any]]) -> list[str]:
    """Publish while the only slot is held; return the order in which the jobs then ran."""
    hold.apply_async(("first",), queue="first")
    setup.wait_ran("first")
    for label, options in jobs:
        record.apply_async((label,), **options)
    setup.open()
    order = setup.wait_ran(*(label for label, _ in jobs))
    setup.wait_settled()
    return order[1:]


def backlog() -> list[tuple[str, dict[str, Any]]]:
    """Return the jobs of three queues, the last queue's first."""
    return [
        (f"{queue[0]}{number}", {"queue": queue})
        for queue, count in FILL.items()
        for number in range(1, count + 1)
    ]


@pytest.mark.parametrize("smoke_args", [QUEUES])
@pytest.mark.parametrize(
    ("smoke_settings", "promised"),
    [({"strategies_strategy": name}, order) for name, order in PROMISED.items()],
    ids=PROMISED,
)
def test_each_strategy_keeps_its_order(celery_setup: StrategiesSetup, promised: str) -> None:
    assert run(celery_setup, *backlog()) == promised.split()


@pytest.mark.parametrize(
    "smoke_args", [(*QUEUES, "--strategy", "PRIORITY", "--rank", "emails=0", "--rank", "reports=5")]
)
@pytest.mark.parametrize("smoke_settings", [{"strategies_ranks": {"reports": -1, "alerts": 1}}])
def test_ranks_of_the_command_line_win(celery_setup: StrategiesSetup) -> None:
    assert run(celery_setup, *backlog()) == "e1 e2 e3 a1 a2 r1".split()
    assert celery_setup.queues() == ["emails", "alerts", "reports", "first"]


@pytest.mark.parametrize("smoke_args", [QUEUES])
@pytest.mark.parametrize("smoke_settings", [{"strategies_priority_levels": {"alerts": 3}}])
def test_levels(celery_setup: StrategiesSetup) -> None:
    """Lower first; a job without a priority is of level 1; another queue has no levels."""
    jobs: list[tuple[str, dict[str, Any]]] = [
        (f"a{priority}", {"queue": "alerts", "priority": priority}) for priority in (2, 1, 0)
    ]
    jobs += [("unset", {"queue": "alerts"}), ("a7", {"queue": "alerts", "priority": 7})]
    jobs += [("r2", {"queue": "reports", "priority": 0})]
    assert run(celery_setup, *jobs) == "a0 a1 unset a2 a7 r2".split()
    levels = {
        source["queue"]: source["levels"] for source in celery_setup.worker.reads()["sources"]
    }
    assert levels == {"first": None, "alerts": 3, "reports": None, "emails": None}


@pytest.mark.parametrize("smoke_args", [QUEUES])
@pytest.mark.parametrize("smoke_settings", [{"strategies_ranks": {"extra": -1}}])
def test_consumers_come_and_go(celery_setup: StrategiesSetup) -> None:
    """An added queue has the rank that the settings give it; a cancelled one is left alone."""
    app, names = celery_setup.app, [celery_setup.worker.hostname()]
    (reply,) = app.control.add_consumer("extra", destination=names, reply=True, timeout=10)
    assert "ok" in reply[names[0]]
    (reply,) = app.control.cancel_consumer("reports", destination=names, reply=True, timeout=10)
    assert "ok" in reply[names[0]]
    assert celery_setup.queues() == ["extra", "first", "alerts", "emails"]
    record.apply_async(("r1",), queue="reports")
    jobs = [(queue[0], {"queue": queue}) for queue in ("emails", "alerts")]
    assert run(celery_setup, *jobs, ("x", {"queue": "extra"})) == ["x", "a", "e"]
    assert celery_setup.messages.llen("reports") == 1

"""Case 1 and the bar of 200 cycles: workers that come and go lose nothing."""

from __future__ import annotations

import pytest

from tests.conftest import RedisFactory
from tests.faults.cycles import run_kill, run_term

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_case_1_sigterm_at_any_moment_loses_nothing(
    redis_factory: RedisFactory, cycles: int
) -> None:
    account = run_term(redis_factory(), cycles, "prefork")
    assert not account.missing, account
    assert not account.repeated, account
    # -15: the signal came before Celery had a handler for it.
    assert set(account.exits) <= {0, -15}, account
    assert account.ran > cycles, account


def test_case_1_kill_and_restart_lose_nothing(redis_factory: RedisFactory, cycles: int) -> None:
    account = run_kill(redis_factory(), cycles, "prefork")
    assert not account.missing, account
    assert account.waiting == 0, account
    # Only what ran when its worker died may run again.
    assert len(account.repeated) <= 2 * cycles, account


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_case_1_other_pools(redis_factory: RedisFactory, cycles: int, pool: str) -> None:
    account = run_term(redis_factory(), cycles // 3, pool)
    assert not account.missing, account
    assert not account.repeated, account

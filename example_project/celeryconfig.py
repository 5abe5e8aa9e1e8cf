"""Own the worker's settings: everything that celery-strategies needs is in here."""

from __future__ import annotations

import os

import celery_strategies  # noqa: F401  # in producers too: it tags what they publish

broker_url = os.environ.get("EXAMPLE_BROKER_URL", "redis://127.0.0.1:6379/0")
broker_connection_retry_on_startup = True
task_ignore_result = True

imports = ("celery_strategies", "example_project.tasks")
strategies_strategy = "priority"  # or round_robin, max_len, min_len
strategies_ranks = {"alerts": 1, "reports": 2}  # emails has no rank: it comes last
strategies_fair_share = "example_project.tenancy:fair_share"

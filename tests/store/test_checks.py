"""A server that cannot serve is refused; one that may drop keys is named."""

from __future__ import annotations

import pytest
from redis.exceptions import NoPermissionError

from celery_strategies.errors import ImproperlyConfigured
from celery_strategies.store import checks


def _warned(facts: dict[str, str]) -> list[str]:
    said: list[str] = []
    checks.check(facts, lambda _key, text: said.append(text))
    return said


@pytest.mark.parametrize("version", ["5.0.14", "6.0.20", "4.0"])
def test_an_old_server_is_refused_with_its_version(version: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=rf"broker_url: .*Redis {version}.*6\.2"):
        _warned({"redis_version": version})


@pytest.mark.parametrize("version", ["6.2.0", "7.0.15", "8.2.1", "255.255.255"])
def test_newer_servers_pass(version: str) -> None:
    assert _warned({"redis_version": version}) == []


def test_a_cluster_is_refused() -> None:
    with pytest.raises(ImproperlyConfigured, match="Redis Cluster"):
        _warned({"redis_version": "7.0.0", "cluster_enabled": "1"})


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("allkeys-lru", "queues and unacknowledged messages"),
        ("volatile-lru", "places of held messages"),
    ],
)
def test_an_eviction_policy_that_drops_keys_is_named(policy: str, words: str) -> None:
    (said,) = _warned({"maxmemory": "1000000", "maxmemory_policy": policy})
    assert policy in said
    assert words in said


@pytest.mark.parametrize(("maxmemory", "policy"), [("0", "allkeys-lru"), ("1000000", "noeviction")])
def test_no_warning_where_nothing_can_be_dropped(maxmemory: str, policy: str) -> None:
    assert _warned({"maxmemory": maxmemory, "maxmemory_policy": policy}) == []


def test_sections_that_may_not_be_read_are_left_out() -> None:
    replies = [
        NoPermissionError("no"),
        b"# Cluster\r\ncluster_enabled:0\r\n",
        NoPermissionError("no"),
    ]
    assert checks.parse(replies) == {"cluster_enabled": "0"}
    assert _warned(checks.parse(replies)) == []

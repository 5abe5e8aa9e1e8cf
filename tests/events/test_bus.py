"""The event bus end to end: real workers, real producers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from celery import Celery
from celery.result import AsyncResult

from celery_strategies import UNKEYED, FairShareError
from celery_strategies.events import EVENT_TASK, Event, EventBus, UnroutableEvent
from celery_strategies.store.keys import Keys
from tests.events.conftest import EventLab
from tests.support.waiting import stays, wait_until
from tests.support.workers import ROOT, clean_environment

#: What goes to whom.
TOPICS = {
    "orders": {"audit", "mail"},
    "orders.new": {"audit", "mail", "billing"},
    "orders.new.eu": {"audit", "mail"},
    "refunds": {"audit", "billing"},
    "refunds.eu.de": {"audit", "billing"},
    "users.new": {"audit"},
}
PLAIN = ["billing", "audit", "mail"]


def raw(lab: EventLab, queue: str) -> list[dict[str, Any]]:
    """Return the messages that wait in level 0 of *queue*, the next one first."""
    lines: Any = lab.db.lrange(queue, 0, -1)
    return [json.loads(line) for line in reversed(lines)]


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent"])
def test_each_handler_gets_the_events_of_its_patterns_once(lab: EventLab, pool: str) -> None:
    lab.worker(pool)
    ids = {topic: lab.bus.publish(topic, {"topic": topic}) for topic in TOPICS}
    expected = sorted((topic, handler) for topic, them in TOPICS.items() for handler in them)
    lab.wait_calls(len(expected))
    lab.wait_empty()
    assert sorted((call["topic"], call["handler"]) for call in lab.calls()) == expected
    for call in lab.calls():
        assert (call["id"], call["payload"]) == (ids[call["topic"]], {"topic": call["topic"]})


def test_a_worker_with_a_stock_pool_serves_the_bus_too(lab: EventLab) -> None:
    """Without `-P strategies`: Celery's own reading, with our package in the process."""
    worker = lab._workers(lab.url, pool="threads", app="tests.events.project")
    lab.bus.publish("orders.new", {"fail": 1})
    lab.wait_calls(4)
    lab.wait_empty()
    assert Counter(call["handler"] for call in lab.calls()) == {"mail": 2, "billing": 1, "audit": 1}
    assert "[strategies]" not in worker.log()


def test_several_workers_share_the_queues(lab: EventLab) -> None:
    workers = [lab.worker("threads"), lab.worker("threads")]
    lab.bus.publish("slow.one")
    lab.bus.publish("slow.two")
    # Both run at the same time, so there is one in each worker.
    lab.wait_calls(2, "slow")
    assert {call["pid"] for call in lab.calls("slow")} == {worker.pid for worker in workers}
    lab.open(2)
    lab.wait_empty()
    for number in range(50):
        lab.bus.publish("orders.new", {"number": number})
    for handler in PLAIN:
        calls = [c for c in lab.wait_calls(50, handler) if c["topic"] == "orders.new"]
        assert sorted(call["payload"]["number"] for call in calls) == list(range(50))


def test_ranks_order_the_handlers_queues(lab: EventLab) -> None:
    for number in range(3):
        lab.bus.publish("orders.new", {"number": number})
    lab.worker(queues=PLAIN)
    lab.wait_calls(9)
    order = [(call["handler"], call["payload"]["number"]) for call in lab.calls()]
    assert order == [(handler, n) for handler in ("mail", "billing", "audit") for n in range(3)]


def test_the_settings_rank_wins_and_the_strategy_counts(lab: EventLab) -> None:
    for number in range(2):
        lab.bus.publish("orders.new", {"number": number})
    ranks = {"audit": 0, "mail": 3}
    lab.worker(
        queues=PLAIN,
        settings={"strategies_ranks": ranks, "strategies_strategy": "round_robin"},
    )
    lab.wait_calls(6)
    assert [c["handler"] for c in lab.calls()] == ["audit", "billing", "mail"] * 2


def test_a_selection_serves_its_handlers_only(lab: EventLab) -> None:
    lab.worker(queues=["mail"])
    lab.bus.publish("orders.new")
    lab.wait_calls(1)
    lab.wait_settled()
    assert [call["handler"] for call in lab.calls()] == ["mail"]
    assert [lab.db.llen(queue) for queue in PLAIN] == [1, 1, 0]


@pytest.mark.parametrize("countdown", [0, 0.2])
def test_a_retry_goes_to_its_own_queue_only(lab: EventLab, countdown: float) -> None:
    lab.worker()
    event_id = lab.bus.publish("orders.new", {"fail": 2, "countdown": countdown}, headers={"x": 1})
    lab.wait_calls(5)
    lab.wait_empty()
    assert Counter(call["handler"] for call in lab.calls()) == {"mail": 3, "billing": 1, "audit": 1}
    mails = lab.calls("mail")
    assert [call["retries"] for call in mails] == [0, 1, 2]
    # It is the same task, for the same event, each time.
    assert {call["task"] for call in mails} == {lab.bus.task_id(event_id, "mail")}
    assert {(call["id"], call["headers"]["x"], call["topic"]) for call in mails} == {
        (event_id, 1, "orders.new")
    }


@pytest.mark.parametrize("protocol", [1, 2])
def test_task_protocols(lab: EventLab, protocol: int) -> None:
    settings = {"task_protocol": protocol}
    lab.worker(settings=settings)
    bus = lab.another_bus(**settings)
    event_id = bus.publish("orders.new", {"fail": 1}, headers={"x": 1})
    lab.wait_calls(4)
    lab.wait_empty()
    assert Counter(call["handler"] for call in lab.calls()) == {"mail": 2, "billing": 1, "audit": 1}
    assert {call["id"] for call in lab.calls()} == {event_id}
    assert {call["headers"].get("x") for call in lab.calls()} == {1}


# -- producers -----------------------------------------------------------------------------------

STOCK = f"""
import sys
from celery import Celery
from kombu import Exchange
app = Celery(broker=sys.argv[1])
app.conf.task_protocol = int(sys.argv[2])
events = Exchange("events", type="topic")
for topic in ("orders.new", "orders", "refunds.eu", "users"):
    app.send_task({EVENT_TASK!r}, [topic, {{"from": "stock"}}], exchange="events", routing_key=topic, declare=[events])
assert "celery_strategies" not in sys.modules
"""


@pytest.mark.parametrize("protocol", [1, 2])
def test_a_stock_producer(lab: EventLab, protocol: int) -> None:
    """It goes by the expressions that our processes have written."""
    lab.worker()
    done = subprocess.run(
        [sys.executable, "-c", STOCK, lab.url, str(protocol)],
        env=clean_environment([ROOT]),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = {
        "orders.new": {"mail", "billing", "audit"},
        "orders": {"mail", "audit"},
        "refunds.eu": {"billing", "audit"},
        "users": {"audit"},
    }
    lab.wait_calls(sum(map(len, expected.values())))
    lab.wait_empty()
    seen = Counter((call["topic"], call["handler"]) for call in lab.calls())
    assert seen == {(topic, handler): 1 for topic, them in expected.items() for handler in them}
    assert {call["payload"]["from"] for call in lab.calls()} == {"stock"}


def test_a_producer_that_knows_the_handlers_needs_no_worker(lab: EventLab) -> None:
    lab.bus.publish("orders.new", {"number": 1})
    assert [lab.db.llen(queue) for queue in PLAIN] == [1, 1, 1]
    lab.worker()
    lab.wait_calls(3)


def test_a_producer_that_knows_none_relies_on_bindings_that_are_there(lab: EventLab) -> None:
    producer = lab.empty_bus()
    producer.publish("orders.new")
    with pytest.raises(UnroutableEvent, match=r"topic 'orders.new' of exchange 'events'"):
        producer.publish("orders.new", mandatory=True)
    assert [lab.db.llen(queue) for queue in PLAIN] == [0, 0, 0]
    # As a deployment may do it.
    lab.bus.declare()
    producer.publish("orders.new")
    producer.publish("orders.new", mandatory=True)
    assert [lab.db.llen(queue) for queue in PLAIN] == [2, 2, 2]


def test_a_mandatory_event_must_have_a_queue(lab: EventLab) -> None:
    bus = lab.empty_bus()
    bus.on("a.*", queue="one")(lambda event: None)
    bus.publish("a.b", mandatory=True)
    with pytest.raises(UnroutableEvent):
        bus.publish("a", mandatory=True)
    assert lab.db.llen("one") == 1


def test_publishing_inside_a_task_and_options_of_the_task_message(lab: EventLab) -> None:
    lab.bus.publish("orders", priority=3, expires=100, serializer="json", headers={"x": [1]})
    (message,) = raw_of_all(lab, "audit")
    headers = message["headers"]
    assert (headers["task"], headers["x"]) == (EVENT_TASK, [1])
    assert headers["expires"] is not None
    assert message["properties"]["priority"] == 3
    assert message["properties"]["delivery_info"] == {
        "exchange": "events",
        "routing_key": "orders",
    }
    with pytest.raises(TypeError):
        lab.bus.publish("orders", queue="mail", routing_key="x")


def raw_of_all(lab: EventLab, queue: str) -> list[dict[str, Any]]:
    """Return the messages that wait in any list of *queue*."""
    lines: list[Any] = [line for key in Keys().inboxes(queue) for line in lab.db.lrange(key, 0, -1)]  # type: ignore[union-attr]
    return [json.loads(line) for line in lines]


# -- tasks ---------------------------------------------------------------------------------------


def test_results_and_revocation_by_event_and_queue(lab: EventLab) -> None:
    settings = {"result_backend": lab.url, "task_ignore_result": False}
    worker = lab.worker("threads", queues=["slow", "audit"], settings=settings)
    bus = lab.another_bus(**settings)
    app = bus.app
    bus.publish("slow.one")
    lab.wait_calls(1, "slow")
    kept, revoked = bus.publish("users.a"), bus.publish("users.b")
    lab.control("revoke", worker, task_id=bus.task_id(revoked, "audit"))
    lab.open()
    assert AsyncResult(bus.task_id(kept, "audit"), app=app).get(timeout=20) == "users.a"
    result: Any = AsyncResult(bus.task_id(revoked, "audit"), app=app)
    wait_until(lambda: result.state == "REVOKED", description="the other was revoked")
    assert "users.b" not in [call["topic"] for call in lab.calls()]
    # `slow` and `mail` ignore their results, whatever the publisher says.
    assert not lab.db.exists(f"celery-task-meta-{bus.task_id(kept, 'slow')}")


def test_delayed_events_start_when_they_are_due(lab: EventLab) -> None:
    lab.worker()
    lab.bus.publish("users.later", countdown=1.5)
    lab.bus.publish("users.now")
    lab.wait_calls(2)
    assert [call["topic"] for call in lab.calls()] == ["users.now", "users.later"]


def test_an_event_whose_handler_is_gone_is_set_aside(lab: EventLab) -> None:
    """The queue is consumed, but no handler is known under its name."""
    lab.bus.publish("users.new")
    lab.worker(queues=["audit"], app="tests.worker.project")
    wait_until(lambda: lab.set_aside("audit"), description="the event is set aside")
    assert EVENT_TASK in lab.set_aside("audit")[0]["reason"]


def test_kill_9_brings_an_event_back_to_its_own_queue(lab: EventLab) -> None:
    timeout = {"broker_transport_options": {"visibility_timeout": 2}}
    worker = lab.worker(settings=timeout, concurrency=2)
    lab.bus.publish("slow.one")
    lab.wait_calls(1, "slow")
    lab.wait_calls(1, "audit")
    wait_until(lambda: lab.unacked() == 1, description="audit is acknowledged")
    worker.kill()
    lab.worker(settings=timeout)
    lab.wait_calls(2, "slow")
    lab.open()
    lab.wait_empty()
    assert [call["redelivered"] for call in lab.calls("slow")] == [False, True]
    assert len({call["id"] for call in lab.calls("slow")}) == 1
    assert len(lab.calls("audit")) == 1


def test_a_cold_shutdown_gives_an_event_back_and_it_keeps_its_id(lab: EventLab) -> None:
    worker = lab.worker()
    event_id = lab.bus.publish("slow.one")
    lab.wait_calls(1, "slow")
    worker.quit()
    worker.wait_exit()
    lab.open()
    lab.worker()
    lab.wait_calls(2, "slow")
    lab.wait_empty()
    assert {call["id"] for call in lab.calls("slow")} == {event_id}


# -- levels and fair share -----------------------------------------------------------------------


def test_levels(lab: EventLab) -> None:
    settings = {"strategies_priority_levels": {"audit": 3}}
    bus = lab.another_bus(**settings)
    for priority in (2, None, 1, 0):
        bus.publish(f"users.{priority}", priority=priority)
    lab.worker(queues=["audit"], settings=settings)
    lab.wait_calls(4)
    # Unset is the default level, 1.
    assert [c["topic"] for c in lab.calls()] == [f"users.{p}" for p in (0, None, 1, 2)]


def keys_of(lab: EventLab, queue: str) -> list[tuple[Any, Any]]:
    found = [message["headers"] for message in raw(lab, queue)]
    return [(h.get("fair_key"), h.get("fair_weight")) for h in found]


def by_tenant(event: Event) -> Any:
    assert isinstance(event, Event)
    assert event.id
    return event.payload.get("tenant")


def test_event_fair_share_marks_the_headers(lab: EventLab) -> None:
    settings: dict[str, Any] = {
        "strategies_event_fair_share": by_tenant,
        # It is about tasks: events are not its business.
        "strategies_fair_share": lambda publication: "wrong",
    }
    bus = lab.another_bus(**settings)
    for tenant in ("a", 7, ("b", 3), None, UNKEYED, ("c", 1)):
        bus.publish("users.x", {"tenant": tenant if tenant is not UNKEYED else None})
    bus.publish("users.x", {"tenant": "a"}, headers={"fair_key": "given"})
    expected = [("a", None), ("7", None), ("b", 3), (None, None), (None, None), ("c", None)]
    assert keys_of(lab, "audit") == [*expected, ("given", None)]
    # Never in the payload.
    assert "fair_key" not in json.dumps([message["body"] for message in raw(lab, "audit")])


def test_names_of_ones_own_for_the_headers(lab: EventLab) -> None:
    settings = {
        "strategies_event_fair_share": by_tenant,
        "strategies_fair_key_header": "tenant",
        "strategies_fair_weight_header": "share",
    }
    bus = lab.another_bus(**settings)
    bus.publish("users.x", {"tenant": ("a", 2)})
    (headers,) = [message["headers"] for message in raw(lab, "audit")]
    assert (headers["tenant"], headers["share"]) == ("a", 2)


@pytest.mark.parametrize("tenant", ["", ("a", 0), ("a", float("nan")), ("a", 1e9), 3.5, ("a",)])
def test_a_wrong_key_fails_the_publish(lab: EventLab, tenant: Any) -> None:
    bus = lab.another_bus(strategies_event_fair_share=by_tenant)
    with pytest.raises(FairShareError, match="strategies_event_fair_share"):
        bus.publish("users.x", {"tenant": tenant})
    # What it raises comes through, and nothing is published either.
    with pytest.raises(AttributeError):
        bus.publish("users.x", "no dict")
    assert not lab.db.exists("audit")


@pytest.mark.parametrize("fair", [True, None])
def test_without_event_fair_share_an_event_has_no_key(lab: EventLab, fair: Any) -> None:
    settings: dict[str, Any] = {"strategies_fair_share": fair and (lambda publication: "wrong")}
    bus = lab.another_bus(**settings)
    bus.publish("users.x")
    assert keys_of(lab, "audit") == [(None, None)]
    assert "fair_key" not in raw(lab, "audit")[0]["headers"]


def test_events_share_fairly(lab: EventLab) -> None:
    bus = lab.another_bus(strategies_event_fair_share=by_tenant)
    for tenant in "aaaabb":
        bus.publish("users.x", {"tenant": tenant})
    lab.worker(queues=["audit"], settings={"strategies_fair_share": True})
    lab.wait_calls(6)
    assert "".join(call["payload"]["tenant"] for call in lab.calls()) == "ababaa"
    lab.wait_empty()


# -- bindings ------------------------------------------------------------------------------------


def test_case_59_a_pattern_that_a_handler_has_no_more_delivers_no_more(lab: EventLab) -> None:
    def bus(*patterns: str) -> EventBus:
        bus = lab.empty_bus()
        bus.on(*patterns, queue="one", name="one")(lambda event: None)
        return bus

    old = bus("a.*", "b")
    old.publish("a.x")
    old.publish("b")
    assert lab.db.llen("one") == 2
    bus("b", "c").declare()
    for topic in ("a.x", "b", "c"):
        old.publish(topic)
    assert lab.db.llen("one") == 4


@pytest.mark.slow
def test_case_58_a_worker_keeps_its_bindings(lab: EventLab) -> None:
    lab.worker()
    wait_until(lambda: lab.db.scard("_kombu.binding.events") == 5, description="all are bound")
    lab.db.delete("_kombu.binding.events", "_kombu.binding_permanent.events")
    wait_until(
        lambda: lab.db.exists("_kombu.binding.events"), 30, "the worker has bound them again"
    )
    lab.empty_bus().publish("orders.new", mandatory=True)
    lab.wait_calls(3)


def test_case_58_a_producer_that_knows_the_handlers_binds_again(lab: EventLab) -> None:
    lab.bus.publish("orders.new")
    lab.db.delete("_kombu.binding.events", "_kombu.binding_permanent.events")
    lab.bus.publish("orders.new")
    assert [lab.db.llen(queue) for queue in PLAIN] == [2, 2, 2]


# -- other brokers -------------------------------------------------------------------------------


def test_a_broker_that_is_not_redis_is_refused_for_what_it_cannot_do() -> None:
    from celery_strategies import NotOurTransport

    with Celery("memory", broker="memory://", set_as_current=False) as app:
        bus = EventBus(app)
        with pytest.raises(NotOurTransport):
            bus.publish("a", mandatory=True)


def test_nothing_is_delivered_to_a_queue_that_was_never_bound(lab: EventLab) -> None:
    lab.bus.publish("nobody")
    stays(lambda: lab.db.llen("billing") == 0, 0.2, "billing gets nothing")
    assert lab.db.llen("audit") == 1

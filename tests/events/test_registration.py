"""Handlers, their queues and their tasks, without a broker."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from kombu import Queue

from celery_strategies import ImproperlyConfigured
from celery_strategies.events import EVENT_TASK, Event, EventBus, UnroutableEvent
from celery_strategies.events.model import address, task_id
from celery_strategies.events.queue import EventQueue
from celery_strategies.settings import load
from celery_strategies.worker import banner
from celery_strategies.worker.ranks import ranks_of


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("events", broker="redis://127.0.0.1:1/0", set_as_current=False)
    yield app
    app.close()


def nothing(event: Event) -> None:
    """A handler."""


def consumed(app: Celery) -> list[str]:
    return list(app.amqp.queues.consume_from)


# -- queues --------------------------------------------------------------------------------------


def test_the_queues_of_handlers_are_consumed_beside_the_others(app: Celery) -> None:
    bus = EventBus(app)
    bus.on("a.*", queue="one")(nothing)
    app.conf.task_queues = [Queue("plain")]
    assert consumed(app) == ["plain", "one"]
    bus.on("b", queue="two", name="late")(nothing)
    assert consumed(app) == ["plain", "one", "two"]


def test_making_a_bus_does_not_read_the_configuration(app: Celery) -> None:
    bus = EventBus(app)
    bus.on("a", queue="one", acks_late=True)(nothing)
    assert not app.configured
    app.config_from_object({"task_default_queue": "other", "broker_url": "redis://127.0.0.1:1/0"})
    assert consumed(app) == ["other", "one"]


def test_a_selection_leaves_the_rest_for_routing(app: Celery) -> None:
    bus = EventBus(app)
    bus.on("a", queue="one")(nothing)
    bus.on("a", queue="two", name="two")(nothing)
    queues: Any = app.amqp.queues
    queues.select(["two", "celery"])
    assert consumed(app) == ["two", "celery"]
    bus.on("a", queue="three", name="three")(nothing)
    assert consumed(app) == ["two", "celery"]
    assert isinstance(queues["one"], EventQueue)


def test_a_handler_that_comes_after_its_name_in_q(app: Celery) -> None:
    """As with `-Q late -I handlers`: the worker has made up a queue of that name."""
    bus = EventBus(app)
    queues: Any = app.amqp.queues
    queues.select(["late"])
    bus.on("a", queue="late")(nothing)
    assert isinstance(queues.consume_from["late"], EventQueue)
    assert isinstance(queues["late"], EventQueue)


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("declared", [[Queue("one")], {"one": {}}, None])
def test_a_queue_of_the_app_is_not_a_handlers(app: Celery, declared: Any, late: bool) -> None:
    app.conf.task_queues = declared
    name = "celery" if declared is None else "one"
    bus = EventBus(app)
    if late:
        assert consumed(app) == [name]
        with pytest.raises(ImproperlyConfigured, match=f"queue '{name}' of the handler"):
            bus.on("a", queue=name)(nothing)
    else:
        bus.on("a", queue=name)(nothing)
        with pytest.raises(ImproperlyConfigured, match=f"queue '{name}' of the handler"):
            consumed(app)


def test_two_buses_share_an_app_but_no_queue(app: Celery) -> None:
    one, two = EventBus(app), EventBus(app, "other")
    one.on("a", queue="one")(nothing)
    two.on("a", queue="two", name="two")(nothing)
    assert consumed(app) == ["celery", "one", "two"]
    with pytest.raises(ImproperlyConfigured, match="another bus has it"):
        two.on("a", queue="one", name="three")(nothing)


def test_a_queue_survives_what_celery_and_kombu_do_with_it(app: Celery) -> None:
    bus = EventBus(app)
    bus.on("a.*", "b", queue="one", rank=3)(nothing)
    queue: Any = app.amqp.queues["one"]
    for copy in (queue, pickle.loads(pickle.dumps(queue))):
        assert (copy.name, copy.rank, copy.exchange.name) == ("one", 3, "one")
        assert copy.task == "tests.events.test_registration.nothing"
        assert {binding.routing_key for binding in copy.bindings} == {"a.*", "b"}
    # `inspect active_queues` sends this.
    assert json.loads(json.dumps(queue.as_dict(recurse=True)))["rank"] == 3
    # A name alone reaches this queue only, by way of the anonymous exchange.
    assert queue.exchange.type == "direct"


# -- ranks ---------------------------------------------------------------------------------------


def test_a_handlers_rank_counts_unless_the_settings_have_one(app: Celery) -> None:
    bus = EventBus(app)
    for name, rank in (("one", 1), ("two", 2), ("three", None)):
        bus.on("a", queue=name, rank=rank, name=name)(nothing)
    settings = load({"strategies_ranks": {"two": 0, "celery": 9}})
    assert ranks_of(app, settings) == {"one": 1, "two": 0, "celery": 9}
    assert banner.text(app, settings).split("\n")[1:-1] == [
        f"                .> {line}"
        for line in ("two     rank 0", "one     rank 1", "celery  rank 9", "three   rank unset")
    ]


# -- handlers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"patterns": [], "queue": "q"}, "name at least one"),
        ({"patterns": [""], "queue": "q"}, "pattern = ''"),
        ({"patterns": [3], "queue": "q"}, "pattern = 3"),
        ({"patterns": ["a.b*"], "queue": "q"}, "whole words"),
        ({"patterns": ["a", "##"], "queue": "q"}, "whole words"),
        ({"patterns": ["a"], "queue": ""}, "queue = ''"),
        ({"patterns": ["a"], "queue": None}, "queue = None"),
        ({"patterns": ["a"], "queue": "q", "rank": "1"}, "rank of queue 'q' = '1'"),
        ({"patterns": ["a"], "queue": "q", "rank": True}, "must be an integer"),
    ],
)
def test_wrong_arguments(app: Celery, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ImproperlyConfigured, match=said):
        EventBus(app).on(*arguments.pop("patterns"), **arguments)
    with pytest.raises(ImproperlyConfigured, match="exchange = ''"):
        EventBus(app, "")


def test_a_queue_belongs_to_one_handler(app: Celery) -> None:
    bus = EventBus(app)
    bus.on("a", queue="one")(nothing)
    with pytest.raises(ImproperlyConfigured, match="a queue belongs to one handler"):
        bus.on("b", queue="one", name="other")(nothing)
    # The same function twice: two handlers, which need two names.
    with pytest.raises(ImproperlyConfigured, match="another name="):
        bus.on("b", queue="two")(nothing)
    assert list(bus.handlers) == ["one"]


def test_the_function_stays_a_function_and_the_options_are_the_tasks(app: Celery) -> None:
    bus = EventBus(app)

    @bus.on("a", queue="one", acks_late=True, max_retries=7, rate_limit="3/s", name="bill")
    def bill(event: Event) -> Any:
        """Bill."""
        return event.payload

    assert bill(Event("a", 5)) == 5
    task = app.tasks["bill"]
    assert (task.acks_late, task.max_retries, task.rate_limit) == (True, 7, "3/s")
    assert (task.ignore_result, task.__doc__) == (True, "Bill.")
    assert bus.handlers["one"].task == "bill"


def test_a_base_of_ones_own(app: Celery) -> None:
    class Base(app.Task):  # type: ignore[misc,name-defined]
        abstract = True
        acks_late = True

    bus = EventBus(app)
    bus.on("a", queue="one", base=Base)(nothing)
    task = app.tasks[bus.handlers["one"].task]
    assert isinstance(task, Base)
    assert task.acks_late


def test_another_app_does_not_get_the_tasks(app: Celery) -> None:
    bus = EventBus(app)
    bus.on("a", queue="one", name="only.here")(nothing)
    with Celery("other", set_as_current=False) as other:
        assert "only.here" not in other.tasks
    assert "only.here" in app.tasks


# -- what a queue makes of a message -------------------------------------------------------------


def message(headers: Any, body: Any = None) -> Any:
    def decode() -> Any:
        if isinstance(body, Exception):
            raise body
        return body

    return SimpleNamespace(headers=headers, decode=decode)


def test_an_event_is_addressed_to_the_handler_of_its_queue() -> None:
    one = message({"task": EVENT_TASK, "id": "1", "root_id": "1", "ignore_result": True, "x": 1})
    address(one, "bill", "one")
    assert one.headers == {
        "task": "bill",
        "id": task_id("1", "one"),
        "root_id": "1",
        "event_id": "1",
        "x": 1,
    }
    # Each queue has an id of its own, the same on every delivery.
    assert len({task_id("1", "one"), task_id("1", "two"), task_id("2", "one")}) == 3
    assert task_id("1", "one") == EventBus.task_id("1", "one")


def test_an_event_of_protocol_1() -> None:
    body = {"task": EVENT_TASK, "id": "1", "args": ["a", 5]}
    one = message({"x": 1}, body)
    address(one, "bill", "one")
    assert body == {"task": "bill", "id": task_id("1", "one"), "args": ["a", 5]}
    assert one.headers == {"x": 1, "event_id": "1"}


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"task": "other", "id": "1"}, None),
        (None, {"task": EVENT_TASK}),
        ({}, {"task": "other"}),
        ({}, ["no", "task"]),
        ({}, ValueError("cannot be decoded")),
        ({"task": None}, None),
    ],
)
def test_what_is_no_event_is_left_alone(headers: Any, body: Any) -> None:
    one = message(None if headers is None else dict(headers), body)
    address(one, "bill", "one")
    assert one.headers == headers


# -- eager ---------------------------------------------------------------------------------------


def test_eager_events_run_their_handlers_at_once(app: Celery) -> None:
    app.conf.task_always_eager = True
    bus, seen = EventBus(app), []

    @bus.on("a.*", queue="one")
    def one(event: Event) -> None:
        seen.append(("one", event))

    @bus.on("a.#", queue="two", bind=True, max_retries=1)
    def two(self: Any, event: Event) -> None:
        seen.append(("two", event))
        if not self.request.retries:
            raise self.retry(countdown=0)

    event_id = bus.publish("a.b", {"n": 1}, headers={"x": 1})
    event = Event("a.b", {"n": 1}, {"x": 1}, event_id)
    assert seen == [("one", event), ("two", event), ("two", event)]
    seen.clear()
    bus.publish("a", mandatory=True)
    assert [handler for handler, _ in seen] == ["two", "two"]
    bus.publish("b")
    with pytest.raises(UnroutableEvent):
        bus.publish("b", mandatory=True)


@pytest.mark.parametrize("topic", ["", None, 3])
def test_a_topic_is_a_string(app: Celery, topic: Any) -> None:
    with pytest.raises(ValueError, match="a topic must be"):
        EventBus(app).publish(topic)

"""Keys and weights in what is published, as they lie in Redis."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, group
from celery.beat import ScheduleEntry, Scheduler
from kombu import Exchange, Queue

from celery_strategies import UNKEYED, FairShareError, ImproperlyConfigured, Publication
from tests.publish.lab import QUEUE, Producer, running, send
from tests.support.apps import PREFIX

LEVELS = {"strategies_priority_levels": 3}


class Tenants:
    """A callable that says what it is told to, and remembers what it was asked."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[Publication] = []

    def __call__(self, publication: Publication) -> Any:
        self.asked.append(publication)
        answer = self.answers[min(len(self.asked), len(self.answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer


def by_argument(publication: Publication) -> Any:
    """The label of a job is its tenant."""
    return publication.args[0]


# -- what the callable returns ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "tag"),
    [
        ("tenant-42", ("tenant-42", None)),
        (42, ("42", None)),
        (("t", 3), ("t", 3)),
        (["t", 0.5], ("t", 0.5)),
        (("t", 1), ("t", None)),
        (("t", 1.0), ("t", None)),
        (("t", None), ("t", None)),
        (None, (None, None)),
        ((None, 3), (None, None)),
        (UNKEYED, (None, None)),
        ("schlüssel ␆", ("schlüssel ␆", None)),
    ],
    ids=repr,
)
def test_what_the_callable_returns(producer: Producer, returned: Any, tag: Any) -> None:
    app = producer.app(strategies_fair_share=lambda publication: returned)
    send(app)
    assert producer.tags() == [tag]
    headers = producer.queued()[0].headers
    assert [name for name in headers if name.startswith("fair_")] == [
        name for name, value in zip(("fair_key", "fair_weight"), tag, strict=True) if value
    ]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("", "returned '' for task test.record: a key must not be empty"),
        (True, "returned True for task test.record: a key must be a string or an integer"),
        (3.5, "returned 3.5 for task test.record: a key must be a string or an integer"),
        ("x" * 513, "for task test.record: a key must be at most 512 bytes long in UTF-8"),
        (("t", 0), "returned ('t', 0) for task test.record: a weight must be a number from 1e-06"),
        (("t", -1), "returned ('t', -1) for task test.record: a weight must be a number from"),
        (("t", "3"), "returned ('t', '3') for task test.record: a weight must be a number from"),
        (("t", True), "returned ('t', True) for task test.record: a weight must be a number from"),
        (("t", math.nan), "returned ('t', nan) for task test.record: a weight must be a number"),
        (("t", math.inf), "returned ('t', inf) for task test.record: a weight must be a number"),
        (("t", 1, 2), "returned ('t', 1, 2) for task test.record: must be a key, or a pair"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_wrong_answer_fails_the_publish(producer: Producer, returned: Any, message: str) -> None:
    app = producer.app(strategies_fair_share=lambda publication: returned)
    with pytest.raises(FairShareError) as caught:
        send(app)
    assert str(caught.value).startswith("strategies_fair_share returned ")
    assert message in str(caught.value)
    assert producer.db.keys("*") == []


@pytest.mark.parametrize("error", [RuntimeError("no tenant"), ValueError("v"), AttributeError("a")])
def test_what_it_raises_fails_the_publish(producer: Producer, error: Exception) -> None:
    app = producer.app(strategies_fair_share=Tenants(error))
    with pytest.raises(type(error)) as caught:
        send(app)
    assert caught.value is error
    assert producer.db.keys("*") == []


@pytest.mark.parametrize("error", [KeyError("tenant"), OSError("no file"), TimeoutError()])
def test_what_kombu_would_take_for_a_lost_connection_has_a_name(
    producer: Producer, error: Exception
) -> None:
    app = producer.app(strategies_fair_share=Tenants(error))
    with pytest.raises(FairShareError) as caught:
        send(app)
    assert str(caught.value) == f"strategies_fair_share raised {error!r} for task test.record"
    assert caught.value.__cause__ is error
    assert producer.db.keys("*") == []


def test_one_none_in_a_bulk_leaves_only_that_one_untagged(producer: Producer) -> None:
    app = producer.app(strategies_fair_share=by_argument)
    record = app.tasks[PREFIX + "record"]
    group(record.s(label) for label in ("a", None, "b", "a")).apply_async()
    assert producer.keys() == ["a", None, "b", "a"]


def test_an_error_in_a_bulk_stops_it_there(producer: Producer) -> None:
    app = producer.app(strategies_fair_share=Tenants("a", RuntimeError("no tenant"), "b"))
    record = app.tasks[PREFIX + "record"]
    with pytest.raises(RuntimeError, match="no tenant"):
        group(record.s(label) for label in "abc").apply_async()
    assert producer.keys() == ["a"]


# -- what the callable gets ------------------------------------------------------------------------


def test_it_is_asked_once_with_the_publication(producer: Producer) -> None:
    tenants = Tenants("acme")
    app = producer.app(strategies_fair_share=tenants, **LEVELS)
    given = {"tenant": "acme"}
    task_id = send(app, "record", "label", kwargs={"a": 1}, headers=given, priority=2)
    (asked,) = tenants.asked
    assert asked == Publication(
        task=PREFIX + "record",
        id=task_id,
        args=("label",),
        kwargs={"a": 1},
        queue="celery",
        priority=2,
        headers={"tenant": "acme"},
        app=app,
    )
    with pytest.raises(TypeError):
        asked.headers["tenant"] = "other"  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        asked.queue = "other"  # type: ignore[misc]
    assert given == {"tenant": "acme"}


@pytest.mark.parametrize(
    ("options", "queue", "priority"),
    [
        ({}, "celery", 1),
        ({"queue": "emails"}, "emails", 1),
        ({"queue": Queue("emails", Exchange("emails"), "emails")}, "emails", 1),
        ({"exchange": "topics", "routing_key": "a.b", "exchange_type": "topic"}, None, 1),
        ({"priority": 0}, "celery", 0),
        ({"countdown": 60, "queue": "emails"}, "emails", 1),
    ],
    ids=repr,
)
def test_the_queue_and_the_level(
    producer: Producer, options: dict[str, Any], queue: str | None, priority: int
) -> None:
    tenants = Tenants(None)
    app = producer.app(strategies_fair_share=tenants, **LEVELS)
    send(app, **options)
    assert [(asked.queue, asked.priority) for asked in tenants.asked] == [(queue, priority)]


def test_each_way_to_publish_asks_once_for_each_message(producer: Producer) -> None:
    tenants = Tenants("acme")
    app = producer.app(strategies_fair_share=tenants, result_backend="cache+memory://")
    add, record = app.tasks[PREFIX + "add"], app.tasks[PREFIX + "record"]
    record.delay("a")
    record.apply_async(("a",), countdown=60)
    record.s("a").apply_async()
    (record.si("a") | record.si("b")).delay()
    (group(add.s(1, number) for number in range(3)) | record.si("body")).delay()
    record.map(range(3)).delay()
    record.starmap([(1,), (2,)]).delay()
    record.chunks([(1,), (2,), (3,)], 2).delay()
    assert producer.keys() == ["acme"] * 11
    assert len(tenants.asked) == 11


def test_a_dotted_path_is_imported_at_the_first_publish(
    producer: Producer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"tenancy_{tmp_path.name}_{producer.protocol}"
    (tmp_path / f"{name}.py").write_text("def tenant(publication):\n    return 'acme'\n", "utf-8")
    app = producer.app(strategies_fair_share=f"{name}:tenant")
    assert name not in sys.modules
    send(app)
    assert producer.keys() == ["acme"]
    assert sys.modules.pop(name)


def test_a_wrong_path_fails_each_publish(producer: Producer) -> None:
    app = producer.app(strategies_fair_share="tests.publish.nowhere:tenant")
    for _ in range(2):
        with pytest.raises(ImproperlyConfigured, match="strategies_fair_share = 'tests"):
            send(app)
    assert producer.db.keys("*") == []


# -- off -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"strategies_max_in_flight": {"*": 2}}], ids=repr)
def test_without_fair_share_nothing_is_touched(
    producer: Producer, settings: dict[str, Any]
) -> None:
    ours, stock = producer.app(**settings), producer.app(stock=True)
    headers = {"fair_key": ["anything"], "fair_weight": "heavy"}
    for app in (ours, stock):
        with running(app, {"fair_key": "parent"}, producer.protocol):
            send(app, "record", "a", task_id="a", headers=headers)
            send(app, "record", "b", task_id="b")
    first, second, *as_stock = producer.queued()
    assert [first, second] == as_stock
    assert first.tag == (["anything"], "heavy")
    assert second.tag == (None, None)


# -- what the publish says -------------------------------------------------------------------------

SHARES = pytest.mark.parametrize(
    "share", [True, lambda publication: ("callable", 9)], ids=["True", "callable"]
)


@SHARES
@pytest.mark.parametrize(
    ("headers", "tag"),
    [
        ({"fair_key": "explicit"}, ("explicit", None)),
        ({"fair_key": "explicit", "fair_weight": 2}, ("explicit", 2)),
        ({"fair_key": "explicit", "fair_weight": 1}, ("explicit", None)),
        ({"fair_key": "explicit", "fair_weight": None}, ("explicit", None)),
        ({"fair_key": 42}, ("42", None)),
        ({"fair_key": None}, (None, None)),
        ({"fair_key": UNKEYED}, (None, None)),
        ({"fair_key": None, "fair_weight": 2}, (None, 2)),
    ],
    ids=repr,
)
def test_headers_of_the_publish_win(
    producer: Producer, share: Any, headers: dict[str, Any], tag: Any
) -> None:
    app = producer.app(strategies_fair_share=share)
    given = {**headers, "other": 1}
    with running(app, {"fair_key": "parent", "fair_weight": 5}, producer.protocol):
        send(app, headers=given)
    assert producer.tags() == [tag]
    assert producer.queued()[0].headers["other"] == 1
    assert given == {**headers, "other": 1}


def test_a_weight_alone_goes_with_the_key_that_is_found(producer: Producer) -> None:
    app = producer.app(strategies_fair_share=by_argument)
    with running(app, {"fair_key": "parent", "fair_weight": 5}, producer.protocol):
        for label in ("a", None):
            send(app, "record", label, headers={"fair_weight": 2})
    assert producer.tags() == [("a", 2), ("parent", 2)]


@SHARES
@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({"fair_key": ""}, "header fair_key = '' of task test.record: a key must not be empty"),
        ({"fair_key": 3.5}, "header fair_key = 3.5 of task test.record: a key must be a string"),
        ({"fair_key": True}, "header fair_key = True of task test.record: a key must be a string"),
        (
            {"fair_key": ("t", 2)},
            "header fair_key = ('t', 2) of task test.record: a key must be a string",
        ),
        (
            {"fair_key": "t", "fair_weight": 0},
            "header fair_weight = 0 of task test.record: a weight must be a number from 1e-06",
        ),
        (
            {"fair_weight": "3"},
            "header fair_weight = '3' of task test.record: a weight must be a number from 1e-06",
        ),
    ],
    ids=repr,
)
def test_wrong_headers_fail_the_publish(
    producer: Producer, share: Any, headers: dict[str, Any], message: str
) -> None:
    app = producer.app(strategies_fair_share=share)
    with pytest.raises(FairShareError) as caught:
        send(app, headers=headers)
    assert str(caught.value).startswith(message)
    assert producer.db.keys("*") == []


def test_the_headers_may_have_other_names(producer: Producer) -> None:
    app = producer.app(
        strategies_fair_share=lambda publication: (publication.args[0], 2),
        strategies_fair_key_header="_schema_name",
        strategies_fair_weight_header="plan",
    )
    send(app, "record", "a")
    send(app, "record", "a", headers={"_schema_name": "public", "fair_key": "not ours"})
    with running(app, {"_schema_name": "parent", "plan": 3}, producer.protocol):
        send(app, "record", None)
    found = [message.headers for message in producer.queued()]
    assert [headers.get("_schema_name") for headers in found] == ["a", "public", "parent"]
    assert [headers.get("plan") for headers in found] == [2, None, 3]
    assert [headers.get("fair_key") for headers in found] == [None, "not ours", None]


def test_another_tools_inner_headers_carry_the_key_too(producer: Producer) -> None:
    # As Sentry and Datadog do it: Celery's retry copies only the inner ones.
    app = producer.app(strategies_fair_share=lambda publication: ("acme", 2))
    inner = {"trace": "1"}
    send(app, headers={"trace": "1", "headers": inner})
    send(app, headers={"headers": "no mapping"})
    first, second = producer.queued()
    tag = {"fair_key": "acme", "fair_weight": 2}
    assert first.headers["headers"] == {"trace": "1", **tag}
    assert tag.items() <= first.headers.items()
    assert second.headers["headers"] == "no mapping"
    assert second.tag == ("acme", 2)
    assert inner == {"trace": "1"}


# -- what a running task hands down ----------------------------------------------------------------

PARENT = {"fair_key": "parent", "fair_weight": 5}


@pytest.mark.parametrize(
    ("share", "tag"),
    [
        (True, ("parent", 5)),
        (lambda publication: None, ("parent", 5)),
        (lambda publication: (None, 3), ("parent", 5)),
        (lambda publication: "own", ("own", None)),
        (lambda publication: UNKEYED, (None, None)),
    ],
    ids=["True", "None", "(None, 3)", "own", "UNKEYED"],
)
def test_a_running_task_hands_down_key_and_weight(producer: Producer, share: Any, tag: Any) -> None:
    app = producer.app(strategies_fair_share=share)
    with running(app, PARENT, producer.protocol):
        send(app)
    send(app)
    first, second = producer.tags()
    assert first == tag
    assert second == (tag if tag[0] == "own" else (None, None))


def test_a_weight_without_a_key_is_not_handed_down(producer: Producer) -> None:
    app = producer.app(strategies_fair_share=True)
    with running(app, {"fair_weight": 5}, producer.protocol):
        send(app)
    assert producer.tags() == [(None, None)]


@pytest.mark.parametrize(
    ("headers", "tag"),
    [
        ({"fair_key": 42}, ("42", None)),
        ({"fair_key": ""}, (None, None)),
        ({"fair_key": ["t"], "fair_weight": 5}, (None, None)),
        ({"fair_key": "t", "fair_weight": 0}, ("t", None)),
        ({"fair_key": "t", "fair_weight": "3"}, ("t", None)),
        ({"fair_key": "t", "fair_weight": 1e-17}, ("t", 1e-6)),
        ({"fair_key": "t", "fair_weight": 1e17}, ("t", 1e6)),
    ],
    ids=repr,
)
def test_what_a_foreign_producer_has_set_wrongly_fails_nothing(
    producer: Producer, headers: dict[str, Any], tag: Any
) -> None:
    app = producer.app(strategies_fair_share=True)
    with running(app, headers, producer.protocol):
        send(app)
    assert producer.tags() == [tag]


def test_a_task_called_as_a_function_is_part_of_the_one_that_runs(producer: Producer) -> None:
    app = producer.app(strategies_fair_share=True)
    record = app.tasks[PREFIX + "record"]

    @app.task(shared=False)
    def publish() -> None:
        record.delay()

    @app.task(shared=False, bind=True)
    def again(self: Any, depth: int) -> None:
        self(depth - 1) if depth else record.delay()

    with running(app, PARENT, producer.protocol):
        publish()
        again(2)
        publish.apply(throw=True)
        publish.apply(throw=True, headers={"fair_key": "eager"})
        publish.apply(throw=True, headers={"other": "x"})
    assert producer.keys() == ["parent", "parent", "parent", "eager", "parent"]


def test_the_innermost_worker_task_counts(producer: Producer) -> None:
    app = producer.app(strategies_fair_share=True)
    with running(app, PARENT, producer.protocol), running(app, {}, producer.protocol):
        send(app)
    assert producer.keys() == [None]


# -- retries ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "tag"),
    [
        (PARENT, ("parent", 5)),
        ({}, (None, None)),
        ({"fair_key": "t", "fair_weight": "heavy"}, ("t", None)),
        ({"fair_key": 3.5}, (None, None)),
        # In protocol 2, Celery copies only what a tracing tool has put in here.
        ({**PARENT, "headers": {"trace": "1"}}, ("parent", 5)),
    ],
    ids=repr,
)
@pytest.mark.parametrize("options", [{}, {"headers": {"x": 1}}], ids=["plain", "headers"])
def test_a_retry_keeps_what_it_has_and_asks_nobody(
    producer: Producer, headers: dict[str, Any], tag: Any, options: dict[str, Any]
) -> None:
    # An exception would be the job's end: Celery rejects a task whose retry is not published.
    tenants = Tenants(RuntimeError("no tenant in a worker"))
    app = producer.app(strategies_fair_share=tenants)
    values = {"delivery_info": {"exchange": "", "routing_key": "celery"}, "args": ["a"]}
    with running(app, headers, producer.protocol, kwargs={}, **values) as task:
        task.retry(throw=False, countdown=0, **options)
    assert producer.tags() == [tag]
    assert tenants.asked == []


# -- errbacks --------------------------------------------------------------------------------------


def errback_headers(signature: dict[str, Any]) -> Any:
    return signature["options"].get("headers")


TAG = {"fair_key": "acme", "fair_weight": 2}


def acme(publication: Publication) -> Any:
    return "acme", 2


def test_errbacks_get_the_key_of_their_task(producer: Producer) -> None:
    app = producer.app(strategies_fair_share=acme)
    fail = app.tasks[PREFIX + "fail"]
    errbacks = [
        fail.s("plain"),
        fail.s("own").set(headers={"fair_key": "own", "x": 1}),
        fail.s("none").set(headers={"fair_key": None}),
        group(fail.s("a"), fail.s("b")),
        fail.s("first") | fail.s("second"),
        group(fail.s("c"), fail.s("d")) | fail.s("body"),
    ]
    before = [dict(errback) for errback in errbacks]
    app.tasks[PREFIX + "record"].apply_async(link_error=errbacks, link=fail.s("link"))
    (message,) = producer.queued()
    plain, own, none, many, chain, chord = message.embed["errbacks"]
    assert errback_headers(plain) == TAG
    assert errback_headers(own) == {**TAG, "fair_key": "own", "x": 1}
    assert errback_headers(none) == {**TAG, "fair_key": None}
    assert [errback_headers(task) for task in many["kwargs"]["tasks"]] == [TAG, TAG]
    assert [errback_headers(task) for task in chain["kwargs"]["tasks"]] == [TAG, None]
    assert [errback_headers(task) for task in chord["kwargs"]["header"]] == [TAG, TAG]
    assert errback_headers(chord["kwargs"]["body"]) is None
    assert errback_headers(message.embed["callbacks"][0]) is None
    assert [dict(errback) for errback in errbacks] == before
    for errback in message.embed["errbacks"]:
        assert app.signature(errback).apply_async is not None


def test_signatures_may_be_published_again_for_another_key(producer: Producer) -> None:
    app = producer.app(strategies_fair_share=Tenants("a", "b", UNKEYED))
    errback = app.tasks[PREFIX + "fail"].s("errback")
    signature = app.tasks[PREFIX + "record"].s("x").on_error(errback)
    for _ in range(3):
        signature.delay()
    assert producer.keys() == ["a", "b", None]
    headers = [errback_headers(message.embed["errbacks"][0]) for message in producer.queued()]
    assert headers == [{"fair_key": "a"}, {"fair_key": "b"}, None]
    assert errback.options == {}


def test_the_errbacks_of_a_chord_get_the_key_of_its_header(producer: Producer) -> None:
    app = producer.app(strategies_fair_share=acme, result_backend="cache+memory://")
    add, fail = app.tasks[PREFIX + "add"], app.tasks[PREFIX + "fail"]

    def body(label: str) -> Any:
        return fail.s(label).on_error(fail.s("errback"))

    (group(add.s(1, 1), add.s(2, 2)) | body("a task")).delay()
    (group(add.s(1, 1), add.s(2, 2)) | group(body("a"), body("b"))).delay()
    (group(add.s(1, 1) | add.s(1), add.s(2, 2)) | body("after a chain")).delay()
    bodies: list[Any] = []
    for message in producer.queued():
        steps = message.embed.get("chain") or message.embed.get("callbacks") or []
        chord = message.embed["chord"] or steps[0]["options"]["chord"]
        tasks = chord["kwargs"].get("tasks") or [chord]
        bodies += tasks
        assert message.tag == ("acme", 2)
    if producer.protocol == 2:
        assert len(bodies) == 8
        assert all(errback_headers(task["options"]["link_error"][0]) == TAG for task in bodies)
    assert all(errback_headers(task) is None for task in bodies)


# -- groups ----------------------------------------------------------------------------------------


def group_keys(producer: Producer) -> list[Any]:
    return [message.headers.get("group_key") for message in producer.queued()]


def test_a_group_key(producer: Producer) -> None:
    app = producer.app(strategies_group_key=by_argument)
    for label in ("order-17", 17, None):
        send(app, "record", label)
    assert group_keys(producer) == ["order-17", "17", None]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"strategies_group_key": lambda publication: "asked"}, ["explicit", "asked"]),
        ({"strategies_group_key": lambda publication: None}, ["explicit", "parent"]),
        ({"strategies_group_key": lambda publication: UNKEYED}, ["explicit", None]),
        ({"strategies_group_mode": "fifo"}, ["explicit", "parent"]),
        ({"strategies_fair_share": True}, ["explicit", None]),
        ({}, ["explicit", None]),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_where_a_group_key_comes_from(
    producer: Producer, settings: dict[str, Any], expected: list[Any]
) -> None:
    app = producer.app(**settings)
    with running(app, {"group_key": "parent", "fair_weight": 3}, producer.protocol):
        send(app, headers={"group_key": "explicit"})
        send(app)
    assert group_keys(producer) == expected
    assert producer.tags() == [(None, None)] * 2


@pytest.mark.parametrize("returned", ["", ("g", 2), ["g"], 2.5, True], ids=repr)
def test_a_group_has_a_key_and_no_weight(producer: Producer, returned: Any) -> None:
    app = producer.app(strategies_group_key=lambda publication: returned)
    with pytest.raises(FairShareError, match=r"strategies_group_key returned .*: a key must"):
        send(app)
    assert producer.db.keys("*") == []


def test_a_group_and_a_share_do_not_mix(producer: Producer) -> None:
    app = producer.app(
        strategies_fair_share=lambda publication: ("tenant", 2),
        strategies_group_key=lambda publication: "order",
        strategies_group_key_header="order",
    )
    send(app, link_error=app.tasks[PREFIX + "fail"].s("errback"))
    (message,) = producer.queued()
    tag = {"fair_key": "tenant", "fair_weight": 2, "order": "order"}
    assert tag.items() <= message.headers.items()
    assert errback_headers(message.embed["errbacks"][0]) == tag


# -- others ----------------------------------------------------------------------------------------


def test_levels_and_keys_go_together(producer: Producer) -> None:
    app = producer.app(strategies_fair_share=by_argument, **LEVELS)
    send(app, "record", "a")
    (message,) = producer.queued("celery\x06\x161")
    assert (message.tag, message.priority) == (("a", None), 1)


def test_beat_publishes_with_a_key(producer: Producer) -> None:
    app = producer.app(strategies_fair_share=lambda publication: publication.kwargs.get("tenant"))
    scheduler = Scheduler(app, lazy=True)
    entries: list[dict[str, Any]] = [
        {"task": PREFIX + "record", "kwargs": {"tenant": "acme"}},
        {"task": "only.workers.know.it", "kwargs": {"tenant": "acme"}},
        {"task": PREFIX + "record", "options": {"headers": {"fair_key": "explicit"}}},
        {"task": PREFIX + "record"},
    ]
    app.tasks[PREFIX + "record"].typing = False
    for entry in entries:
        scheduler.apply_async(ScheduleEntry(**entry, schedule=60, app=app), advance=False)
    assert producer.keys() == ["acme", "acme", "explicit", None]


def test_an_app_that_has_published_before_keeps_its_sender_wrapped(producer: Producer) -> None:
    # One wrap for each app, with that app's settings.
    first = producer.app(strategies_fair_share=lambda publication: "first")
    second = producer.app(strategies_fair_share=lambda publication: "second")
    for app in (first, second, first):
        send(app)
    assert producer.keys() == ["first", "second", "first"]


def test_eager_tasks_are_not_published_and_not_asked_for(producer: Producer) -> None:
    tenants = Tenants(RuntimeError("no tenant"))
    app: Celery = producer.app(strategies_fair_share=tenants, task_always_eager=True)
    assert app.tasks[PREFIX + "add"].delay(1, 2).get() == 3
    assert tenants.asked == []


def test_a_sent_event_says_level_key_and_weight(producer: Producer) -> None:
    app = producer.app(
        strategies_fair_share=lambda publication: ("acme", 3),
        strategies_priority_levels=3,
        task_send_sent_event=True,
    )
    events: list[dict[str, Any]] = []

    class Dispatcher:
        def publish(self, kind: str, fields: dict[str, Any], *_: Any, **__: Any) -> None:
            events.append({"type": kind, **fields})

    with app.producer_or_acquire() as one:
        for options in ({}, {"priority": 2, "headers": {"fair_key": "zed"}}):
            message = app.amqp.create_task_message(
                "id", "test.record", ("x",), {}, create_sent_event=True
            )
            app.amqp.send_task_message(
                one, "test.record", message, queue=QUEUE, event_dispatcher=Dispatcher(), **options
            )
    said = [
        tuple(e.get(n) for n in ("type", "queue", "priority", "fair_key", "fair_weight"))
        for e in events
    ]
    assert said == [("task-sent", QUEUE, 1, "acme", 3), ("task-sent", QUEUE, 2, "zed", None)]

"""`limits_concurrency`: what it accepts, where it may stand, and the name of the limit of a job."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery, Task, _state, shared_task

import celery_strategies
from celery_strategies import LimitError, limits_concurrency
from celery_strategies.concurrency import Limit, limit_of
from celery_strategies.worker.limits import ask_for, limits_of


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("limits", broker="redis://", set_as_current=False)
    yield app
    app.close()


# -- rules ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"to": 0}, "limits_concurrency(to=0): must be an integer of at least 1"),
        ({"to": -1}, "to=-1"),
        ({"to": True}, "to=True"),
        ({"to": 2.0}, "to=2.0"),
        ({"to": "3"}, "to='3'"),
        ({"to": None}, "to=None"),
        ({"to": 1, "duration": -5}, "duration=-5): must be a number of seconds above 0"),
        ({"to": 1, "duration": 0}, "duration=0"),
        ({"to": 1, "duration": float("inf")}, "duration=inf"),
        ({"to": 1, "duration": float("nan")}, "duration=nan"),
        ({"to": 1, "duration": "300"}, "duration='300'"),
        ({"to": 1, "duration": None}, "duration=None"),
        ({"to": 1, "key": 5}, "key=5): must be a callable that gets the task's arguments"),
        ({"to": 1, "key": ["a"]}, "key=['a']"),
        ({"to": 1, "key": ""}, "key=''): must be a string of 1 to 512 bytes"),
        ({"to": 1, "key": "x" * 513}, "must be a string of 1 to 512 bytes"),
        ({"to": 1, "group": ""}, "group=''"),
        ({"to": 1, "group": 7}, "group=7"),
    ],
)
def test_a_wrong_argument_is_refused_where_the_task_is_defined(
    app: Celery, arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(LimitError) as caught:

        @app.task(shared=False)
        @limits_concurrency(**arguments)
        def task() -> None: ...

    assert isinstance(caught.value, ValueError)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {"to": 1},
        {"to": 10**6, "key": str, "duration": 0.001, "group": "a b:c"},
        {"to": 1, "key": functools.partial(str), "duration": 10**9},
        {"to": 1, "key": "one"},
    ],
)
def test_a_right_argument_is_taken(arguments: dict[str, Any]) -> None:
    Limit(**arguments)


@pytest.mark.parametrize("target", [5, "text", None])
def test_it_decorates_nothing_else(target: Any) -> None:
    with pytest.raises(LimitError, match="decorates a function, a task class or a task"):
        limits_concurrency(to=1)(target)


def test_it_is_public() -> None:
    assert {"limits_concurrency", "LimitError"} <= set(celery_strategies.__all__)


# -- where it stands -----------------------------------------------------------------------------------


def plain(app: Celery) -> Any:
    @app.task(shared=False)
    @limits_concurrency(to=7)
    def task(account: int) -> None: ...

    return task


def bound(app: Celery) -> Any:
    @app.task(shared=False, bind=True, autoretry_for=(ValueError,), acks_late=True)
    @limits_concurrency(to=7)
    def task(self: Task, account: int) -> None: ...

    return task


def ready(app: Celery) -> Any:
    @app.task(shared=False, lazy=False)
    def task(account: int) -> None: ...

    return limits_concurrency(to=7)(task)


def lazy(app: Celery) -> Any:
    @app.task(shared=False)
    def task(account: int) -> None: ...

    return limits_concurrency(to=7)(task)


def a_class(app: Celery) -> Any:
    @limits_concurrency(to=7)
    class Export(Task):
        name = "export"

        def run(self, account: int) -> None: ...

    return app.register_task(Export())


def an_instance(app: Celery) -> Any:
    class Export(Task):
        name = "export"

        def run(self, account: int) -> None: ...

    return limits_concurrency(to=7)(app.register_task(Export()))


def a_base(app: Celery) -> Any:
    @limits_concurrency(to=7)
    class Base(Task): ...

    @app.task(shared=False, base=Base)
    def task(account: int) -> None: ...

    return task


def below_a_base(app: Celery) -> Any:
    @limits_concurrency(to=1)
    class Base(Task): ...

    @app.task(shared=False, base=Base)
    @limits_concurrency(to=7)
    def task(account: int) -> None: ...

    return task


FORMS = [plain, bound, ready, lazy, a_class, an_instance, a_base, below_a_base]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_a_task_carries_its_limit(app: Celery, form: Callable[[Celery], Any]) -> None:
    name = form(app).name
    app.finalize()
    assert limits_of(app) == {name: Limit(7)}


@pytest.mark.parametrize("above", [True, False])
def test_a_shared_task_carries_it_in_every_app(
    app: Celery, above: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Or every app made later in this process would get the task too.
    monkeypatch.setattr(_state, "_on_app_finalizers", set(_state._on_app_finalizers))

    def function(account: int) -> None: ...

    function.__name__ = f"shared_{above}"
    limit, share = limits_concurrency(to=7), shared_task
    task = limit(share(function)) if above else share(limit(function))
    before = _state.get_current_app()
    app.set_current()
    try:
        name = task.name
        with Celery("other", set_as_current=False) as other:
            assert limits_of(app)[name] == Limit(7)
            assert limits_of(other)[name] == Limit(7)
    finally:
        _state._set_current_app(before)


def test_decorating_a_lazy_task_does_not_make_it(app: Celery) -> None:
    @limits_concurrency(to=1)
    @app.task(shared=False)
    def task() -> None: ...

    assert not app.finalized
    assert not task.__evaluated__()
    # Leave nothing for later.
    assert limit_of(task) == Limit(1)


def test_other_tasks_have_none(app: Celery) -> None:
    @app.task(shared=False)
    def task() -> None: ...

    assert limit_of(task) is None
    assert limits_of(app) == {}


# -- keys ----------------------------------------------------------------------------------------------


def by(*_: Any, key: Any = None, **__: Any) -> Any:
    return key


@pytest.mark.parametrize(
    ("limit", "name"),
    [
        (Limit(1), "proj.sync:"),
        (Limit(1, "k"), "proj.sync:k"),
        (Limit(1, by), "proj.sync:acme"),
        (Limit(1, by, group="crm"), "crm:acme"),
        (Limit(1, lambda *_, **__: 42), "proj.sync:42"),
        (Limit(1, lambda account, **_: account), "proj.sync:first"),
        (Limit(1, lambda *_, **__: "a:b", group="x:y%"), "x%3Ay%25:a:b"),
        (Limit(1, lambda *_, **__: None), None),
    ],
)
def test_the_name_of_a_limit(limit: Limit, name: str | None) -> None:
    assert limit.name("proj.sync", ("first",), {"key": "acme"}) == name


def test_no_two_pairs_of_name_and_key_share_a_limit() -> None:
    one = Limit(1, lambda: "b:c", group="a").name("t", (), {})
    other = Limit(1, lambda: "c", group="a:b").name("t", (), {})
    assert one != other


@pytest.mark.parametrize("key", ["", 1.5, True, b"x", ["a"], "x" * 513, "a\0b", "\ud800", object()])
def test_a_key_of_the_wrong_kind(key: Any) -> None:
    with pytest.raises(LimitError, match=r"the key of a job of proj\.sync is unknown"):
        Limit(1, lambda: key).name("proj.sync", (), {})


def test_a_callable_that_fails() -> None:
    limit = Limit(1, lambda account: account)
    with pytest.raises(LimitError, match="is unknown: TypeError"):
        limit.name("proj.sync", (), {"other": 1})
    with pytest.raises(LimitError, match="is unknown: ZeroDivisionError"):
        Limit(1, lambda: 1 / 0).name("proj.sync", (), {})


# -- messages ------------------------------------------------------------------------------------------


class Message:
    """A message with a decoded body."""

    def __init__(self, payload: Any) -> None:
        self.payload = payload


BY_ACCOUNT = Limit(2, lambda account, **_: account, duration=1.5)


@pytest.mark.parametrize(
    ("body", "payload"),
    [
        ([["acme"], {}, {}], None),
        ([[], {"account": "acme"}, {}], None),
        ({"args": ["acme"], "kwargs": {}}, None),
        (None, {"task": "t", "args": ["acme"]}),
        (None, {"task": "t", "kwargs": {"account": "acme", "more": 1}}),
    ],
)
def test_arguments_of_both_protocols(body: Any, payload: Any) -> None:
    assert ask_for(BY_ACCOUNT, "t", Message(body), payload) == ("t:acme", 2, 1500)


@pytest.mark.parametrize("body", [5, [], [[]], "text", None, [5, {}, {}], [[], 5, {}]])
def test_what_is_no_task_message_is_left_to_celery(body: Any) -> None:
    assert ask_for(BY_ACCOUNT, "t", Message(body), None) is None


def test_without_a_callable_the_body_is_not_decoded() -> None:
    class Sealed:
        @property
        def payload(self) -> Any:
            raise AssertionError("decoded")

    assert ask_for(Limit(1, "k", 0.0001), "t", Sealed(), None) == ("t:k", 1, 1)


def test_an_eager_task_is_not_limited(app: Celery) -> None:
    app.conf.task_always_eager = True

    @app.task(shared=False)
    @limits_concurrency(to=1)
    def task(depth: int) -> int:
        return 1 if not depth else 1 + task.delay(depth - 1).get(disable_sync_subtasks=False)

    assert task.delay(3).get() == 4
    assert task(2) == 3

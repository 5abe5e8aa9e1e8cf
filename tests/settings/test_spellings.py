"""Names: three spellings, unknown names, and what Celery's own settings stand beside."""

from __future__ import annotations

import json as strategies_module
from types import ModuleType
from typing import Any

import celery.exceptions
import pytest
from celery import Celery

from celery_strategies.core.strategies import Strategy
from celery_strategies.errors import ImproperlyConfigured
from celery_strategies.settings import Settings, load

RANKS = {"alerts": 1}

NEW = {"task_acks_late": True, "worker_concurrency": 2}
OLD = {"CELERY_ACKS_LATE": True, "CELERYD_CONCURRENCY": 2, "BROKER_URL": "redis://"}


@pytest.fixture(params=["module", "dict"])
def app_with(request: pytest.FixtureRequest) -> Any:
    """Return a maker of apps that are configured from a module, or from a dict."""

    def make(config: dict[str, Any], namespace: str | None = None) -> Celery:
        source: Any = config
        if request.param == "module":
            source = ModuleType("celeryconfig")
            vars(source).update(config)
        app = Celery("proj", set_as_current=False)
        app.config_from_object(source, namespace=namespace)
        return app

    return make


@pytest.mark.parametrize("others", [{}, NEW, OLD], ids=["alone", "beside new", "beside old"])
@pytest.mark.parametrize(
    "spelling", ["strategies_ranks", "STRATEGIES_RANKS", "CELERY_STRATEGIES_RANKS"]
)
def test_each_spelling_beside_new_and_old_settings_of_celery(
    app_with: Any, spelling: str, others: dict[str, Any]
) -> None:
    app = app_with({spelling: RANKS, **others})
    assert load(app.conf).ranks == RANKS
    assert app.conf.task_acks_late is bool(others)


@pytest.mark.parametrize(
    ("namespace", "spelling"),
    [
        ("CELERY", "CELERY_STRATEGIES_RANKS"),
        ("CELERY_", "CELERY_STRATEGIES_RANKS"),
        ("celery", "celery_strategies_ranks"),
        ("PROJ", "PROJ_STRATEGIES_RANKS"),
        ("CELERY", "strategies_ranks"),
        ("CELERY", "STRATEGIES_RANKS"),
    ],
)
def test_a_namespace(app_with: Any, namespace: str, spelling: str) -> None:
    app = app_with({spelling: RANKS, "CELERY_TASK_ACKS_LATE": True}, namespace)
    assert load(app.conf).ranks == RANKS


def test_celery_itself_maps_the_namespace(app_with: Any) -> None:
    assert app_with({"CELERY_STRATEGIES_RANKS": RANKS}, "CELERY").conf.strategies_ranks == RANKS


def test_all_settings_in_old_upper_case(app_with: Any) -> None:
    conf = app_with(
        {
            "CELERY_STRATEGIES_STRATEGY": "round_robin",
            "STRATEGIES_RANKS": RANKS,
            "CELERY_STRATEGIES_PRIORITY_LEVELS": 3,
            "CELERY_STRATEGIES_DEFAULT_PRIORITY": 2,
            "CELERY_STRATEGIES_POOL": "threads",
            "CELERY_STRATEGIES_READ_AHEAD": 1,
            "CELERY_STRATEGIES_POLLING_INTERVAL": 1,
            "STRATEGIES_FAIR_SHARE": True,
            "CELERY_STRATEGIES_FAIR_SHARE_MEMORY": "batch",
            "CELERY_STRATEGIES_FAIR_KEY_HEADER": "tenant",
            "CELERY_STRATEGIES_FAIR_WEIGHT_HEADER": "plan",
            "CELERY_STRATEGIES_EVENT_FAIR_SHARE": "proj.tenancy:event",
            "CELERY_STRATEGIES_MAX_IN_FLIGHT": {"*": 5},
            "CELERY_STRATEGIES_GROUP_MODE": None,
            "CELERY_STRATEGIES_GROUP_KEY": "proj.orders.group",
            "CELERY_STRATEGIES_GROUP_KEY_HEADER": "order",
            **OLD,
        }
    ).conf
    assert load(conf) == Settings(
        strategy=Strategy.ROUND_ROBIN,
        ranks=RANKS,
        priority_levels=3,
        default_priority=2,
        pool="threads",
        read_ahead=1,
        polling_interval=1.0,
        fair_share=True,
        fair_share_memory="batch",
        fair_key_header="tenant",
        fair_weight_header="plan",
        event_fair_share="proj.tenancy:event",
        max_in_flight={"*": 5},
        group_mode=None,
        group_key="proj.orders.group",
        group_key_header="order",
    )


@pytest.mark.parametrize("namespace", [None, "CELERY"])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("strategies_strategy", "CELERY_STRATEGIES_STRATEGY"),
        ("strategies_strategy", "STRATEGIES_STRATEGY"),
        ("STRATEGIES_STRATEGY", "CELERY_STRATEGIES_STRATEGY"),
    ],
)
def test_two_spellings(app_with: Any, one: str, other: str, namespace: str | None) -> None:
    with pytest.raises(ImproperlyConfigured, match="two spellings of one setting") as caught:
        load(app_with({one: "max_len", other: "min_len"}, namespace).conf)
    if namespace is None:
        assert f"{one} = 'max_len'" in str(caught.value)
        assert f"{other} = 'min_len'" in str(caught.value)
    same = {one: "max_len", other: "MaxLen"}
    assert load(app_with(same, namespace).conf).strategy is Strategy.MAX_LEN
    unset = {one: None, other: "min_len"}
    assert load(app_with(unset, namespace).conf).strategy is Strategy.MIN_LEN


def test_both_spellings_are_checked() -> None:
    with pytest.raises(ImproperlyConfigured, match="CELERY_STRATEGIES_POOL = 'forks'"):
        load({"strategies_pool": "solo", "CELERY_STRATEGIES_POOL": "forks"})


@pytest.mark.parametrize("read_first", [False, True])
@pytest.mark.parametrize("namespace", [None, "CELERY"])
def test_code_overrides_the_file(app_with: Any, read_first: bool, namespace: str | None) -> None:
    spelling = "CELERY_STRATEGIES_RANKS" if namespace else "strategies_ranks"
    app = app_with({spelling: RANKS}, namespace)
    if read_first:
        assert app.conf.task_acks_late is False
    app.conf.strategies_ranks = {"reports": 2}
    assert load(app.conf).ranks == {"reports": 2}


def test_code_may_unset(app_with: Any) -> None:
    app = app_with({"strategies_ranks": RANKS})
    app.conf.strategies_ranks = None
    assert load(app.conf).ranks == {}


def test_an_old_spelling_in_the_file_is_not_overridden_silently(app_with: Any) -> None:
    app = app_with({"CELERY_STRATEGIES_RANKS": RANKS})
    app.conf.strategies_ranks = {"reports": 2}
    with pytest.raises(ImproperlyConfigured, match="two spellings"):
        load(app.conf)


def test_defaults_added_by_code() -> None:
    app = Celery("proj", set_as_current=False)
    app.add_defaults({"strategies_ranks": RANKS})
    assert load(app.conf).ranks == RANKS


def test_an_app_without_any_configuration() -> None:
    assert load(Celery("proj", set_as_current=False).conf) == Settings()


@pytest.mark.parametrize(
    ("spelling", "namespace", "meant"),
    [
        ("strategies_rank", None, "strategies_ranks"),
        ("strategies_rnks", None, "strategies_ranks"),
        ("STRATEGIES_STRATEGIE", None, "STRATEGIES_STRATEGY"),
        ("CELERY_STRATEGIES_PRIORITY_LEVEL", None, "CELERY_STRATEGIES_PRIORITY_LEVELS"),
        ("CELERY_STRATEGIES_POLL_INTERVAL", "CELERY", "CELERY_STRATEGIES_POLLING_INTERVAL"),
        ("PROJ_STRATEGIES_POLL", "PROJ", "PROJ_STRATEGIES_POOL"),
        ("strategies_readahead", "CELERY", "strategies_read_ahead"),
        ("Strategies_Ranks", None, "strategies_ranks"),
    ],
)
def test_an_unknown_name(app_with: Any, spelling: str, namespace: str | None, meant: str) -> None:
    with pytest.raises(ImproperlyConfigured) as caught:
        load(app_with({spelling: 1, **(OLD if namespace is None else {})}, namespace).conf)
    message = str(caught.value)
    assert message.startswith(f"{spelling} is not a setting; did you mean ")
    assert repr(meant).lower() in message.lower()


def test_a_name_like_none_lists_them_all() -> None:
    with pytest.raises(ImproperlyConfigured, match="strategies_strategy, strategies_ranks, "):
        load({"strategies_xyzzy": None})


def test_what_is_not_a_setting_is_left_alone(app_with: Any) -> None:
    config = {
        "celery_strategies": strategies_module,  # `import celery_strategies` in the module
        "strategies_helpers": strategies_module,
        "Strategy": Strategy,
        "broker_failover_strategy": "shuffle",
        "MY_STRATEGIES_RANKS": 1,
    }
    assert load(app_with(config).conf) == Settings()
    # In a Django settings module, names without the namespace belong to the project.
    assert load(app_with({"STRATEGIES_ENABLED": True}, "CELERY").conf) == Settings()


def test_errors_use_the_spelling_of_the_user(app_with: Any) -> None:
    conf = app_with({"CELERY_STRATEGIES_POOL": "forks"}, "CELERY").conf
    with pytest.raises(ImproperlyConfigured, match=r"^CELERY_STRATEGIES_POOL = 'forks': must be"):
        load(conf)
    conf = app_with(
        {"CELERY_STRATEGIES_DEFAULT_PRIORITY": 3, "CELERY_STRATEGIES_PRIORITY_LEVELS": 3}, "CELERY"
    ).conf
    with pytest.raises(ImproperlyConfigured, match=r"^CELERY_STRATEGIES_DEFAULT_PRIORITY = 3: "):
        load(conf)


@pytest.mark.parametrize("ours", ["strategies_ranks", "CELERY_STRATEGIES_RANKS"])
def test_mixing_celerys_own_settings_stays_celerys_error(app_with: Any, ours: str) -> None:
    # Our names never count as new or old: they neither cause nor hide Celery's own refusal.
    app = app_with({ours: RANKS, "task_acks_late": True, "CELERYD_CONCURRENCY": 2})
    with pytest.raises(celery.exceptions.ImproperlyConfigured, match="Cannot mix new"):
        load(app.conf)

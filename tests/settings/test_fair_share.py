"""The settings of keys, weights, caps and groups: values, paths, and what they mean for a worker."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from celery.app.task import Context

from celery_strategies.core.policy import Policy
from celery_strategies.errors import ImproperlyConfigured
from celery_strategies.settings import PROTOCOL_HEADERS, Settings, load


def tenant(publication: object) -> str:
    return "acme"


class Tenant:
    def __call__(self, publication: object) -> str:
        return "acme"


CALLABLES: list[Any] = [tenant, Tenant(), len, lambda publication: None]
PATHS = ["proj:tenant", "proj.tenancy:tenant", "proj.tenancy.tenant", "_p1.q_2:t", "schlüssel:ä"]
NO_PATHS = ["", "proj", "proj:", ":tenant", "proj tenancy:x", "proj:a.b", "a:b:c", "1a:b", "a..b"]


@pytest.mark.parametrize("value", [*CALLABLES, *PATHS], ids=repr)
@pytest.mark.parametrize("name", ["fair_share", "event_fair_share", "group_key"])
def test_a_callable_or_a_path(name: str, value: Any) -> None:
    assert getattr(load({f"strategies_{name}": value}), name) is value


def test_fair_share_may_be_true() -> None:
    assert load({"strategies_fair_share": True}).fair_share is True


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        *(
            ("fair_share", value, "must be True, a callable, or where to import one from")
            for value in (*NO_PATHS, False, 1, 0, 1.0, {"key": "x"}, [tenant], b"proj:tenant")
        ),
        *(
            (name, value, "must be a callable, or where to import one from")
            for name in ("event_fair_share", "group_key")
            for value in (*NO_PATHS, True, False, 1, {"key": "x"})
        ),
        *(
            ("fair_share_memory", value, "must be one of shared, batch")
            for value in ("", "Shared", "redis", True, 1, ["batch"])
        ),
        *(
            ("group_mode", value, "must be one of fifo, round_robin")
            for value in ("", "FIFO", "round-robin", True, 1, ["fifo"])
        ),
        *(
            (name, value, rule)
            for name in ("fair_key_header", "fair_weight_header", "group_key_header")
            for value, rule in [
                *(
                    (value, "a string that is not empty")
                    for value in ("", 1, True, b"key", ["key"])
                ),
                *((value, "must not be a name that Celery") for value in ("id", "task", "group")),
            ]
        ),
        *(
            ("max_in_flight", value, "must be a dict of keys (or '*') and integers")
            for value in (5, "acme=5", [("acme", 5)], True)
        ),
    ],
    ids=repr,
)
def test_wrong_values_name_setting_value_and_rule(name: str, value: Any, rule: str) -> None:
    with pytest.raises(ImproperlyConfigured) as caught:
        load({f"strategies_{name}": value})
    assert str(caught.value).startswith(f"strategies_{name} = {value!r}: ")
    assert rule in str(caught.value)


# -- headers -------------------------------------------------------------------------------------


def test_a_header_that_exists_serves_unchanged() -> None:
    settings = load(
        {"strategies_fair_key_header": "_schema_name", "strategies_fair_weight_header": "X-Plan"}
    )
    assert (settings.fair_key_header, settings.fair_weight_header) == ("_schema_name", "X-Plan")


def test_no_header_is_one_of_celerys() -> None:
    protocol = """task id lang eta expires group root_id parent_id retries timelimit argsrepr
        kwargsrepr origin ignore_result shadow stamped_headers stamps replaced_task_nesting
        group_index"""
    request = {name for name in vars(Context) if not name.startswith("_")}
    assert {*protocol.split()} | request <= PROTOCOL_HEADERS


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        (
            {"fair_key_header": "k", "fair_weight_header": "k"},
            "strategies_fair_weight_header = 'k': must differ from strategies_fair_key_header",
        ),
        (
            {"fair_key_header": "fair_weight"},
            "strategies_fair_weight_header = 'fair_weight': must differ from",
        ),
        (
            {"group_key_header": "fair_key"},
            "strategies_group_key_header = 'fair_key': must differ from strategies_fair_key_header",
        ),
        (
            {"group_key_header": "k", "fair_weight_header": "k"},
            "strategies_group_key_header = 'k': must differ from strategies_fair_weight_header",
        ),
    ],
)
def test_the_headers_differ(conf: dict[str, str], message: str) -> None:
    with pytest.raises(ImproperlyConfigured) as caught:
        load({f"strategies_{name}": value for name, value in conf.items()})
    assert str(caught.value).startswith(message)


def test_an_error_about_two_settings_spells_them_as_the_user_did() -> None:
    conf = {"CELERY_STRATEGIES_FAIR_KEY_HEADER": "k", "STRATEGIES_FAIR_WEIGHT_HEADER": "k"}
    with pytest.raises(ImproperlyConfigured) as caught:
        load(conf)
    assert all(spelling in str(caught.value) for spelling in conf)


# -- caps ----------------------------------------------------------------------------------------


def test_caps() -> None:
    given = {"*": 5, "acme": 2, 7: 1}
    assert load({"strategies_max_in_flight": given}).max_in_flight == {"*": 5, "acme": 2, "7": 1}


@pytest.mark.parametrize("cap", [0, -1, 1.0, "2", True, None, math.inf])
def test_a_cap_is_an_integer_1_or_more(cap: Any) -> None:
    with pytest.raises(ImproperlyConfigured) as caught:
        load({"strategies_max_in_flight": {"*": 5, "acme": cap}})
    rule = f"strategies_max_in_flight['acme'] = {cap!r}: must be an integer, 1 or more"
    assert str(caught.value) == rule


@pytest.mark.parametrize("key", ["", None, 1.5, True, "a\0b", "x" * 513])
def test_the_key_of_a_cap_is_a_key(key: Any) -> None:
    with pytest.raises(ImproperlyConfigured, match=r"strategies_max_in_flight = .*: a key must "):
        load({"strategies_max_in_flight": {key: 1}})


def test_a_key_has_one_cap() -> None:
    with pytest.raises(ImproperlyConfigured, match="strategies_max_in_flight = '1': a key must no"):
        load({"strategies_max_in_flight": {1: 5, "1": 5}})


# -- paths ---------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current folder, which is not on the module path, as under `celery`."""
    name = f"proj_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(
        "def tenant(publication):\n    return 'acme'\n\nplan = 3\n", "utf-8"
    )
    (tmp_path / f"{name}_broken.py").write_text("raise RuntimeError('two\\nlines')", "utf-8")
    monkeypatch.chdir(tmp_path)
    return name


@pytest.mark.parametrize("separator", [":", "."])
@pytest.mark.parametrize("setting", ["fair_share", "event_fair_share", "group_key"])
def test_a_path_is_imported_when_it_is_asked_for(
    project: str, setting: str, separator: str
) -> None:
    settings = load({f"strategies_{setting}": f"{project}{separator}tenant"})
    assert project not in sys.modules
    found = settings.tagger(setting)
    assert found is not None
    assert found(None) == "acme"
    assert sys.modules.pop(project).tenant is found


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("{}_none:tenant", "cannot be imported: ModuleNotFoundError: No module named '{}_none'"),
        ("{}:nobody", "cannot be imported: AttributeError: module '{}' has no attribute 'nobody'"),
        ("{}_broken:tenant", "cannot be imported: RuntimeError: two lines"),
        ("{}:plan", "must lead to a callable, not to int"),
    ],
)
@pytest.mark.parametrize("setting", ["fair_share", "event_fair_share", "group_key"])
def test_a_path_that_leads_nowhere_stops_a_worker(
    project: str, setting: str, path: str, why: str
) -> None:
    path = path.format(project)
    settings = load({f"strategies_{setting}": path})
    with pytest.raises(ImproperlyConfigured) as caught:
        settings.check_taggers()
    assert str(caught.value) == f"strategies_{setting} = {path!r}: {why.format(project)}"


def test_what_needs_no_import() -> None:
    settings = Settings(fair_share=True, group_key=tenant)
    settings.check_taggers()
    assert settings.tagger("fair_share") is None
    assert settings.tagger("event_fair_share") is None
    assert settings.tagger("group_key") is tenant


def test_a_configuration_module_may_define_the_callable() -> None:
    module = ModuleType("celeryconfig")
    vars(module)["strategies_fair_share"] = tenant
    assert load(vars(module)).tagger("fair_share") is tenant


# -- what a worker makes of it -------------------------------------------------------------------

FAIR = ("fair_key", "fair_weight")


@pytest.mark.parametrize(
    ("conf", "policy"),
    [
        ({}, None),
        ({"max_in_flight": {}}, None),
        ({"group_key": tenant}, None),
        ({"event_fair_share": tenant}, None),
        ({"fair_share_memory": "batch"}, None),
        ({"fair_share": True}, Policy("fair", False, *FAIR)),
        ({"fair_share": tenant}, Policy("fair", False, *FAIR)),
        ({"fair_share": True, "fair_share_memory": "batch"}, Policy("batch", False, *FAIR)),
        ({"fair_share": True, "max_in_flight": {"*": 1}}, Policy("fair", False, *FAIR)),
        (
            {"fair_share": True, "fair_key_header": "t", "fair_weight_header": "w"},
            Policy("fair", False, "t", "w"),
        ),
        ({"max_in_flight": {"*": 1}}, Policy("age", False, *FAIR)),
        ({"max_in_flight": {"a": 1}, "fair_key_header": "t"}, Policy("age", False, "t", FAIR[1])),
        ({"group_mode": "fifo"}, Policy("age", True, "group_key", "")),
        ({"group_mode": "round_robin"}, Policy("turn", True, "group_key", "")),
        ({"group_mode": "fifo", "group_key_header": "g"}, Policy("age", True, "g", "")),
        ({"group_mode": "fifo", "max_in_flight": {"*": 1}}, Policy("age", True, "group_key", "")),
    ],
    ids=repr,
)
def test_the_policy(conf: dict[str, Any], policy: Policy | None) -> None:
    settings = load({f"strategies_{name}": value for name, value in conf.items()})
    assert settings.policy() == policy
    assert settings.fair is ("fair_share" in conf)


@pytest.mark.parametrize("mode", ["fifo", "round_robin"])
@pytest.mark.parametrize("share", [True, tenant, "proj.tenancy:tenant"], ids=repr)
def test_groups_and_fair_share_exclude_each_other(mode: str, share: Any) -> None:
    with pytest.raises(ImproperlyConfigured) as caught:
        load({"STRATEGIES_GROUP_MODE": mode, "strategies_fair_share": share})
    message = f"STRATEGIES_GROUP_MODE = {mode!r}: must not be set together with strategies_fair_sh"
    assert str(caught.value).startswith(message)


def test_a_producer_may_only_tag() -> None:
    # With its group, beside fair share: which of them a queue heeds is the workers' to say.
    assert load({"strategies_group_key": tenant, "strategies_fair_share": True}).policy()


def test_the_page_on_settings_shows_this_error() -> None:
    with pytest.raises(ImproperlyConfigured) as caught:
        load({"strategies_group_mode": "fifo", "strategies_fair_share": True})
    page = Path(__file__).parents[2] / "docs" / "settings.md"
    assert f"Error: {caught.value}\n" in page.read_text("utf-8")

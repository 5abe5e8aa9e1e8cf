"""`scripts.py`: a script's header is a contract that is checked when the module is imported."""

from __future__ import annotations

import re
from collections.abc import Callable
from hashlib import sha1

import pytest
import redis

from celery_strategies.store import scripts
from celery_strategies.store.scripts import ScriptContractError, load

GOOD = """-- Do something.
--
-- KEYS[1] one string
-- KEYS[2] two list: of things
-- ARGV[1] count number
-- Returns nothing
-- Invariant: none
call('SET', KEYS[1], ARGV[1])
return call('LLEN', KEYS[2])
"""
Write = Callable[[str], None]


@pytest.fixture
def write(monkeypatch: pytest.MonkeyPatch) -> Write:
    """Have `load` find this text under the name `it`."""
    texts = {"_lib": "-- shared\n"}
    monkeypatch.setattr(scripts, "_text", texts.__getitem__)
    return lambda text: texts.update(it=text)


def load_it(
    keys: tuple[str, ...] = ("one", "two"), argv: tuple[str, ...] = ("count",)
) -> scripts.Script:
    """Load the text under test."""
    return load("it", keys=keys, argv=argv)


def test_a_script_that_keeps_its_contract(write: Write) -> None:
    write(GOOD)
    script = load_it()
    assert script.source == f"-- shared\n\n{GOOD}".encode()
    assert script.sha == sha1(script.source).hexdigest()


@pytest.mark.parametrize(
    ("keys", "argv"),
    [
        (("one",), ("count",)),
        (("one", "two", "three"), ("count",)),
        (("two", "one"), ("count",)),
        (("one", "twa"), ("count",)),
        (("one", "two"), ()),
        (("one", "two"), ("number",)),
        (("one", "two"), ("count", "more")),
    ],
)
def test_other_names_than_the_header_has(
    write: Write, keys: tuple[str, ...], argv: tuple[str, ...]
) -> None:
    write(GOOD)
    with pytest.raises(ScriptContractError, match=r"it\.lua declares (KEYS|ARGV)"):
        load_it(keys, argv)


@pytest.mark.parametrize("line", ["-- Returns nothing\n", "-- Invariant: none\n"])
def test_a_header_line_that_is_missing(write: Write, line: str) -> None:
    write(GOOD.replace(line, ""))
    with pytest.raises(ScriptContractError, match="header has no line"):
        load_it()


@pytest.mark.parametrize("use", ["KEYS[3]", "ARGV[2]", "KEYS[12]"])
def test_an_index_that_the_header_does_not_name(write: Write, use: str) -> None:
    write(GOOD.replace("return", f"call('DEL', {use})\nreturn"))
    with pytest.raises(ScriptContractError, match=rf"it\.lua uses {re.escape(use)}"):
        load_it()


def test_a_comment_is_no_use(write: Write) -> None:
    write(GOOD.replace("return", "  -- unlike KEYS[3]\nreturn"))
    load_it()


@pytest.mark.parametrize(
    ("old", "new"), [("KEYS[1] one", "KEYS[0] one"), ("KEYS[2] two", "KEYS[3] two")]
)
def test_numbers_that_leave_a_gap(write: Write, old: str, new: str) -> None:
    write(GOOD.replace(f"-- {old}", f"-- {new}"))
    with pytest.raises(ScriptContractError, match="not numbered from 1"):
        load_it()


@pytest.mark.parametrize("index", ["2+", "..."])
def test_an_open_list_may_use_any_index(write: Write, index: str) -> None:
    write(
        GOOD.replace("KEYS[2] two", f"KEYS[{index}] two").replace(
            "return", "call('DEL', KEYS[7])\nreturn"
        )
    )
    load_it()


def test_a_script_that_does_not_exist() -> None:
    with pytest.raises(FileNotFoundError):
        load("no_such_script", keys=(), argv=())


def test_the_error_is_one_of_importing() -> None:
    assert issubclass(ScriptContractError, ImportError)


# -- the real ones ----------------------------------------------------------------------------------------------


def test_every_file_is_loaded() -> None:
    folder = scripts.files("celery_strategies.store").joinpath("lua")
    names = {
        file.name.removesuffix(".lua") for file in folder.iterdir() if file.name.endswith(".lua")
    }
    helpers = {name for name in names if name.startswith("_")}
    # Those that only look are no part of what workers load.
    every = [value for value in vars(scripts).values() if isinstance(value, scripts.Script)]
    loaded = {re.sub("_(sorted|single)$", "", script.name) for script in every}
    assert names == loaded | helpers
    # Helpers are there to be used.
    for name in helpers:
        text = folder.joinpath(f"{name}.lua").read_text("utf-8").encode()
        assert any(text in script.source for script in scripts.ALL), name


def test_the_server_agrees_on_names(redis_db: redis.Redis) -> None:
    for script in scripts.ALL:
        assert redis_db.script_load(script.source) == script.sha


@pytest.mark.parametrize("script", scripts.ALL, ids=lambda script: script.name)
def test_house_rules(script: scripts.Script) -> None:
    text = script.source.decode()
    calls = re.findall(r"'([A-Z]{3,})'", text)
    assert not {"KEYS", "SCAN", "FLUSHALL", "EVAL", "SMEMBERS", "SORT"} & set(calls)
    assert "os.time" not in text
    assert "math.random" not in text
    # A global would be an error in the server; seen here, it has a line number.
    assert not re.findall(r"^(?!local )\s*function ", text, re.MULTILINE)

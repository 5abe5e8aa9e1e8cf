"""What the documentation says of names, values and orders is what the code does."""

from __future__ import annotations

import ast
import inspect
import re
from itertools import groupby

import pytest
from celery.bin.worker import worker

from celery_strategies import cli, settings
from celery_strategies.core.model import Model
from celery_strategies.core.sources import SourceList
from celery_strategies.core.strategies import Strategy
from celery_strategies.store.keys import Keys

from . import pages

SETTINGS = pages.read("docs/settings.md")
TABLE = [row for row in pages.rows(pages.section(SETTINGS, "The settings")) if row[0] != "setting"]
OURS = [
    param
    for param in worker.params
    if getattr(param, "help_group", "") == cli.worker_options._GROUP
]


def value(cell: str) -> object:
    """Evaluate a cell that is one literal between backquotes."""
    return ast.literal_eval(cell.strip("`"))


# -- settings ------------------------------------------------------------------------------------


def test_every_setting_is_in_the_table_once_and_no_other() -> None:
    assert sorted(row[0].strip("`") for row in TABLE) == sorted(settings.NAMES)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0].strip("`"))
def test_the_table_shows_the_default_and_an_example_that_loads(row: list[str]) -> None:
    name, _, default, _, example = row
    setting = name.strip("`")
    field = setting.removeprefix("strategies_")
    shown = getattr(settings.load({}), field)
    assert value(default) == (shown.label if isinstance(shown, Strategy) else shown)
    assert getattr(settings.load({setting: value(example)}), field) is not None
    assert settings.load({setting: value(default)}) == settings.load({})


def test_the_choices_are_spelled_out() -> None:
    rules = {row[0].strip("`"): row[3] for row in TABLE}
    assert all(f"`{label}`" in rules["strategies_strategy"] for label in Strategy.labels())
    assert all(f"`{pool}`" in rules["strategies_pool"] for pool in settings.POOLS)
    assert str(settings.MAX_POLLING_INTERVAL) in rules["strategies_polling_interval"]


@pytest.mark.parametrize("name", pages.for_users())
def test_no_page_names_a_setting_that_does_not_exist(name: str) -> None:
    text = pages.read(name).replace(
        # The page on settings shows what a wrong name says.
        "Error: strategies_rank is not a setting; did you mean 'strategies_ranks'?",
        "",
    )
    found = {word.lower() for word in re.findall(r"\bstrategies_[a-z_]+|STRATEGIES_[A-Z_]+", text)}
    assert found - set(settings.NAMES) <= {"strategies_x"}


def test_the_errors_shown_are_the_errors_raised() -> None:
    for conf in ({"strategies_read_ahead": -1}, {"strategies_rank": 1}):
        with pytest.raises(settings.ImproperlyConfigured) as error:
            settings.load(conf)
        assert f"Error: {error.value}\n" in SETTINGS


def test_every_option_of_ours_is_documented() -> None:
    assert OURS
    table = {row[0] for row in pages.rows(pages.section(SETTINGS, "Command line"))}
    for param in OURS:
        assert f"`{param.opts[0]} {param.metavar}`" in table


@pytest.mark.parametrize("name", pages.names())
def test_every_option_of_a_worker_command_exists(name: str) -> None:
    known = {opt for param in worker.params for opt in (*param.opts, *param.secondary_opts)}
    known |= {"--pidfile", "--logfile", "-A"}
    for line in re.findall(
        r"celery -A \S+ (?:multi start .*?)?(?:worker )?(-.*)", pages.read(name)
    ):
        used = re.findall(r"(?<!\S)(--?[a-zA-Z][\w-]*)", line.partition("#")[0].partition("`")[0])
        assert set(used) <= known, line


def test_every_command_of_ours_is_named() -> None:
    section = pages.section(pages.read("README.md"), "Not yet")
    named = set(re.findall(r"`(\w+)`", section.partition("`celery strategies` has")[2]))
    assert set(cli.strategies.commands) == named


# -- timelines -----------------------------------------------------------------------------------


def timelines() -> list[tuple[Strategy, list[list[str]]]]:
    text = pages.section(pages.read("README.md"), "The four strategies")
    found = []
    for title in re.findall(r"^### (.+)$", text, re.MULTILINE):
        name = title.partition(",")[0]
        body = pages.section(text, title)
        found.append((Strategy.parse(name), list(pages.rows(body))))
    return found


def test_each_strategy_has_a_timeline() -> None:
    assert sorted(strategy for strategy, _ in timelines()) == sorted(Strategy)


@pytest.mark.parametrize(("strategy", "table"), timelines(), ids=lambda value: str(value)[:11])
def test_a_timeline_is_what_the_model_yields(strategy: Strategy, table: list[list[str]]) -> None:
    (_, *queues, _, _), *slots = table
    bound = SourceList({"alerts": 1, "reports": 2})
    for queue in queues:
        bound.bind(queue)
    model = Model(strategy, [(source.queue, source.levels) for source in bound])
    for queue, length in zip(queues, slots[0][1:-2], strict=True):
        for number in range(int(length)):
            model.push(queue, f"{queue} {number}")
    for number, (slot, *lengths, takes, why) in enumerate(slots, 1):
        assert int(slot) == number
        assert model.lengths() == dict(zip(queues, map(int, lengths), strict=True))
        assert [taken.queue for taken in model.take()] == [takes]
        assert why
    assert model.take() == []


def test_the_order_that_the_example_prints_is_that_of_the_timelines() -> None:
    readme = pages.read("README.md")
    for strategy, table in timelines():
        letters = " ".join(row[-2][0].upper() for row in table[1:])
        assert re.search(rf"^{strategy.label} +{letters} +{letters} +ok$", readme, re.MULTILINE)


# -- Redis ---------------------------------------------------------------------------------------


def keys_in_the_table() -> set[str]:
    section = pages.section(pages.read("docs/how-it-works.md"), "Keys")
    return {name for row in pages.rows(section) for name in re.findall(r"`([^`]+)`", row[0])}


def test_every_key_is_in_the_table_of_keys() -> None:
    keys, built = Keys(sep="<sep>"), set()
    arguments = {"queue": "queue", "worker": "<worker>", "limit": "<limit>", "step": 1}
    for name, member in inspect.getmembers(Keys):
        # A list of names, and beginnings of names.
        if name.startswith("_") or name in ("inboxes", "base", "sessions"):
            continue
        if isinstance(member, property):
            built.add(getattr(keys, name))
        elif callable(member):
            built.add(
                member(keys, *(arguments[p] for p in [*inspect.signature(member).parameters][1:]))
            )
    built.add(keys.inbox("queue", 0))
    built.add(keys.inbox("queue", 9))
    assert built <= keys_in_the_table()


def test_the_table_of_keys_has_those_that_scripts_build_too_and_no_others() -> None:
    text = inspect.getmodule(Keys).__doc__ or ""
    said = set(re.findall(r"``((?:strategies:|unacked)[^`]*)``", text))
    said = {name.replace("<queue>", "queue").replace("…", "<key>") for name in said}
    inbox = {"queue", "queue<sep>1", "queue<sep>9"}
    # A channel is no key.
    table = keys_in_the_table() - {Keys().session("<worker>")}
    assert table == said | inbox


# -- pages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", pages.names())
def test_links_inside_the_repository_resolve(name: str) -> None:
    page = pages.ROOT / name
    for target in pages.links(name):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        assert place.exists(), f"{name}: {target}"
        if anchor:
            assert anchor in pages.anchors(place.read_text("utf-8")), f"{name}: {target}"


def test_the_index_links_every_page() -> None:
    linked = {(pages.ROOT / "docs" / link).resolve() for link in pages.links("docs/index.md")}
    assert {page for page in pages.PAGES if page.name not in ("index.md", "results.md")} <= linked


@pytest.mark.parametrize("block", pages.blocks("python"), ids=str)
def test_python_compiles(block: pages.Block) -> None:
    compile(block.code, str(block), "exec")


@pytest.mark.parametrize(
    "block", [block for block in pages.blocks("python") if pages.ours(block.code)], ids=str
)
def test_configurations_load(block: pages.Block) -> None:
    assert settings.load(pages.ours(block.code)) is not None


def test_there_are_configurations_in_every_spelling() -> None:
    found = [name for block in pages.blocks("python") for name in pages.ours(block.code)]
    assert {name.isupper() for name in found} == {True, False}


@pytest.mark.parametrize("name", pages.names())
def test_no_heading_appears_twice(name: str) -> None:
    text = pages.prose(pages.read(name))
    # A changelog repeats "Added" for every release.
    titles = sorted(re.findall(r"^#{1,2} +(.+)$", text, re.MULTILINE))
    assert [title for title, same in groupby(titles) if len(list(same)) > 1] == []

"""`store.py` and `keys.py`: calls as bytes, and replies as values."""

from __future__ import annotations

import pytest

from celery_strategies.core.levels import LISTS
from celery_strategies.core.strategies import Strategy
from celery_strategies.store import scripts
from celery_strategies.store import store as calls
from celery_strategies.store.keys import Keys
from celery_strategies.store.store import (
    HAS_ENDED,
    Delivery,
    Grant,
    Place,
    SourceKeys,
    Store,
    TakePlan,
)

from .tools import split


def test_arguments_are_counted_in_bytes() -> None:
    packed = calls.command(calls.pack("ü", b"\xff\r\n", 12, 0.5), calls.pack(""))
    assert (
        packed == b"*5\r\n$2\r\n\xc3\xbc\r\n$3\r\n\xff\r\n\r\n$2\r\n12\r\n$3\r\n0.5\r\n$0\r\n\r\n"
    )
    assert split(packed) == ["ü".encode(), b"\xff\r\n", b"12", b"0.5", b""]


@pytest.mark.parametrize(
    "place", [Place(0, 1, 0, "q"), Place(9, 2**47 - 1, 12, "a:b:c"), Place(3, 4, 5, 'q"ü,"",[')]
)
def test_a_place_can_be_read_back(place: Place) -> None:
    entry = f"{place.list}:{place.number}:{place.deliveries}:{calls.suffix_of(place.queue)}"
    assert Place.parse(entry.encode()) == place


@pytest.mark.parametrize("key", ["", "a", '7:,"', "ż" * 256])
def test_a_sorted_place_can_be_read_back(key: str) -> None:
    size = len(key.encode())
    entry = f"3:4:5:0.5:{size}:{key}{calls.suffix_of('q:1')}"
    assert Place.parse(entry.encode()) == Place(3, 4, 5, "q:1", key)


def test_a_key_of_any_bytes_leaves_its_place_readable() -> None:
    assert Place.parse(b'3:4:5::2:\xff\xfe,"","q"]') == Place(3, 4, 5, "q", "\ufffd\ufffd")


def test_a_grant_is_read_from_the_reply() -> None:
    reply = [
        1,
        2,
        1,
        [0, b"w:1.1", 3, 4, b"raw", 1, b"w:1.2", 0, 0, b"\xff"],
        [1, b"1-1", b"why"],
        [0, b"WRONGTYPE \xff"],
        [b"w:1.0"],
        b"1700000000250000",
        [1, 300],
        [0, b"fair_key is no key: \xff"],
        [2],
        [0, b"17", 1, b"-1"],
        1500,
        3,
    ]
    assert Grant.parse(reply) == Grant(
        valid=True,
        turn=2,
        more=True,
        deliveries=(Delivery(0, "w:1.1", 3, 4, b"raw"), Delivery(1, "w:1.2", 0, 0, b"\xff")),
        set_aside=((1, "1-1", "why"),),
        broken=((0, "WRONGTYPE \ufffd"),),
        lost=("w:1.0",),
        now=1_700_000_000.25,
        unsorted=((1, 300),),
        notes=((0, "fair_key is no key: \ufffd"),),
        unknown=(2,),
        terms=((0, 17), (1, -1)),
        soon=1.5,
        moved=3,
    )
    assert Grant.parse([0]) == Grant(valid=False)


def test_the_worker_is_read_from_its_tags() -> None:
    assert calls.worker_of("celery@host-0123:4.17") == "celery@host-0123"
    assert calls.worker_of("a:b@c:d:4.17") == "a:b@c:d"
    assert calls.worker_of("3f9c1b1e-producer") == ""


@pytest.mark.parametrize(
    ("sources", "tags", "script"),
    [
        ([SourceKeys("q", None, (0,))], ["w:1.1"], scripts.TAKE),
        ([SourceKeys("q", None, (0,))], ["w:1.1k"], scripts.TAKE_SORTED),
        ([SourceKeys("q", None, (0,))], [f"{HAS_ENDED}w:1.1"], scripts.TAKE_SORTED),
        ([SourceKeys("q", None, (0,)), SourceKeys("r", None, (0,), True)], [], scripts.TAKE_SORTED),
        ([SourceKeys("q", None, (0,), False, True)], [], scripts.TAKE_SINGLE),
    ],
)
def test_a_take_is_no_longer_than_it_has_to_be(
    sources: list[SourceKeys], tags: list[str], script: scripts.Script
) -> None:
    packed = TakePlan(Keys(), "w", Strategy.PRIORITY, sources).call("1", 1, tags=tags)
    assert split(packed)[1] == script.sha.encode()


def test_every_script_is_loaded_with_its_source() -> None:
    commands = [split(packed) for packed in calls.load_scripts()]
    assert commands == [[b"SCRIPT", b"LOAD", script.source] for script in scripts.ALL]


def test_a_plan_is_packed_once_and_called_often() -> None:
    sources = [SourceKeys("q", 3, (0, 1, 2)), SourceKeys("r", None, (0, 9))]
    plan = TakePlan(Keys(prefix="p:"), "w", Strategy.MAX_LEN, sources)
    first = split(plan.call("1", 4, turn=1, idle=True, tags=["x", "y"], now=17))
    again = split(plan.call("2", 64))
    assert first[:-8] == again[:-6]
    assert first[-8:] == [b"1", b"4", b"1", b"1", b"17", b"", b"x", b"y"]
    assert again[-6:] == [b"2", b"64", b"0", b"0", b"", b""]
    keys = first[3 : 3 + int(first[2])]
    assert len(keys) == 5 + (4 + 3) + (4 + 2)
    assert all(key.startswith(b"p:") for key in keys)


@pytest.mark.parametrize("prefix", ["", "p:", "{x}"])
def test_every_key_has_the_prefix_and_a_name_of_its_own(prefix: str) -> None:
    keys = Keys(prefix=prefix, sep="|", unacked_name="u", unacked_index_name="i")
    names = [
        keys.unacked,
        keys.unacked_index,
        keys.sequence,
        keys.scratch,
        keys.holder("w"),
        keys.wake("w"),
    ]
    for queue in ("q", "q2"):
        names += [*keys.inboxes(queue), keys.returned(queue), keys.set_aside(queue)]
        names += [keys.watchers(queue), keys.parked(queue), keys.delayed(queue)]
        names += [keys.policy(queue), keys.state(queue), keys.caps(queue), keys.weights(queue)]
        names += [keys.ready(queue), keys.sorter(queue), keys.unsorted(queue)]
    assert len(set(names)) == len(names)
    assert all(name.startswith(prefix) for name in names)
    assert keys.inboxes("q") == [f"{prefix}q", *(f"{prefix}q|{step}" for step in range(1, LISTS))]
    assert (keys.unacked, keys.unacked_index) == (f"{prefix}u", f"{prefix}i")


def test_calls_name_only_declared_keys_in_their_order() -> None:
    store = Store(Keys(), "w")
    parts = split(store.restore([("x:1.2", b'0:2:0:,"","q"]')], limit="7", started=True))
    assert parts == [
        b"EVALSHA",
        scripts.RESTORE.sha.encode(),
        b"4",
        b"strategies:scratch",
        b"unacked",
        b"unacked_index",
        b"strategies:holder:x",
        b"7",
        b"1",
        b"0",
        b"x:1.2",
        b'0:2:0:,"","q"]',
    ]

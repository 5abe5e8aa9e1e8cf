"""Own the rules for a fairness tag: what is a key, what is a weight, and what a callable may return.

Every rule raises a ValueError that says what is wanted; who asked adds what was found, and where.
"""

from __future__ import annotations

import enum
from typing import Literal, NamedTuple

__all__ = (
    "KEY_BYTES",
    "MAX_WEIGHT",
    "MIN_WEIGHT",
    "TERM_HEADER",
    "UNKEYED",
    "Tag",
    "Unkeyed",
    "check_key",
    "check_weight",
    "heed",
    "read_key",
    "read_tag",
)

#: Header with the fencing number of the lease under which a message was taken.
TERM_HEADER = "strategies_term"

#: Longest key, in bytes of UTF-8. Keys are members of Redis sets and names of Redis keys.
KEY_BYTES = 512

#: The weights that exist. One message of weight 1e-17 would stop its queue for ever.
MIN_WEIGHT = 1e-6
MAX_WEIGHT = 1e6


class Unkeyed(enum.Enum):
    """Hold the one value :data:`UNKEYED`."""

    UNKEYED = "unkeyed"

    def __repr__(self) -> str:
        return "celery_strategies.UNKEYED"


#: What a callable returns for "no key at all", where None leaves it to the task that publishes.
UNKEYED: Literal[Unkeyed.UNKEYED] = Unkeyed.UNKEYED


class Tag(NamedTuple):
    """Pair a key with a weight. ``key`` is None where nothing was said, UNKEYED where "none" was."""

    key: str | Unkeyed | None
    weight: float = 1


def check_key(value: object) -> str:
    """Return ``value``, a string or an integer, as a key. Raises ValueError if it cannot be one."""
    if isinstance(value, int) and not isinstance(value, bool):
        # An IntEnum is its number. Python refuses to spell numbers of some thousand digits.
        key = str(int(value)) if value.bit_length() < 4 * KEY_BYTES else "9" * (KEY_BYTES + 1)
    elif isinstance(value, str):
        key = str.__str__(value)  # A StrEnum or a lazy string is its text.
    else:
        raise ValueError("a key must be a string or an integer")  # noqa: TRY004  # one error for all
    if not key:
        raise ValueError("a key must not be empty")
    if "\0" in key:
        raise ValueError("a key must not contain a NUL character")
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise ValueError(
            "a key must be text that UTF-8 can hold, without lone surrogates"
        ) from None
    if size > KEY_BYTES:
        raise ValueError(f"a key must be at most {KEY_BYTES} bytes long in UTF-8")
    return key


def check_weight(value: object) -> float:
    """Return ``value`` as a weight; None is 1. Raises ValueError if it cannot be one."""
    if value is None:
        return 1
    # NaN fails the comparison; infinity and huge integers do too.
    if isinstance(value, (int, float)) and not isinstance(value, bool):  # noqa: SIM102  # two rules
        if MIN_WEIGHT <= value <= MAX_WEIGHT:
            return int(value) if isinstance(value, int) else float(value)
    raise ValueError(f"a weight must be a number from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")


def read_key(returned: object) -> str | Unkeyed | None:
    """Return what a callable that gives a key said. Raises ValueError."""
    if returned is None or isinstance(returned, Unkeyed):
        return returned
    return check_key(returned)


def read_tag(returned: object) -> Tag:
    """Return what a callable that gives a key, or a pair (key, weight), said. Raises ValueError.

    A weight is checked also where there is no key for it, and then dropped.
    """
    if not isinstance(returned, (tuple, list)):
        return Tag(read_key(returned))
    if len(returned) != 2:
        raise ValueError("must be a key, or a pair (key, weight)")
    key, weight = read_key(returned[0]), check_weight(returned[1])
    return Tag(key, weight) if isinstance(key, str) else Tag(key)


def heed(key: object, weight: object) -> Tag:
    """Return what headers that somebody else has set amount to. Never raises.

    As a worker reads them: what cannot be a key is none, a weight outside the range is brought into
    it, and anything else that is not a weight is 1.
    """
    try:
        known = None if key is None else check_key(key)
    except ValueError:
        known = None
    try:
        return Tag(known, check_weight(weight))
    except ValueError:
        if isinstance(weight, (int, float)) and not isinstance(weight, bool) and weight > 0:
            return Tag(known, MIN_WEIGHT if weight < MIN_WEIGHT else MAX_WEIGHT)
        return Tag(known)

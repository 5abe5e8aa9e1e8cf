"""Own the settings: their names, spellings, defaults and rules.

A wrong value, an unknown ``strategies_*`` name, or two spellings that disagree end the start with
an ImproperlyConfigured that names setting, value and rule. Nothing is corrected silently. Must
not touch Redis, nor change the app's configuration.

Three spellings mean the same setting: ``strategies_ranks`` (lower case),
``CELERY_STRATEGIES_RANKS`` (with ``namespace="CELERY"``, as in Django, or in an old upper-case
configuration) and ``STRATEGIES_RANKS`` (old upper case). Celery itself maps only the first, and
the second if there is a namespace, so the keys are looked through here.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple, cast

from .core.levels import LISTS, levels_for_max_priority
from .core.strategies import Strategy
from .errors import ImproperlyConfigured, invalid

__all__ = ("NAMES", "POOLS", "Settings", "load")

#: The pools that can run the tasks, the default first.
POOLS = ("prefork", "threads", "solo", "gevent", "eventlet")

#: Longest polling interval, in seconds.
MAX_POLLING_INTERVAL = 60

#: Level of a job without a priority, unless strategies_default_priority says otherwise.
DEFAULT_LEVEL = 1

_PREFIX = "strategies_"
_NAMESPACE = "CELERY_"


@dataclass(frozen=True)
class Settings:
    """Hold the checked settings of one worker or producer.

    ``polling_interval`` is in seconds; ``read_ahead`` counts messages beyond the free slots.
    ``priority_levels`` is None, one number for all queues, or a number per queue.
    """

    strategy: Strategy = Strategy.PRIORITY
    ranks: Mapping[str, int] = field(default_factory=dict)
    priority_levels: int | Mapping[str, int] | None = None
    default_priority: int | None = None
    pool: str = POOLS[0]
    read_ahead: int = 0
    polling_interval: float = 0.1

    def levels_for(self, queue: str, max_priority: int | None = None) -> int | None:
        """Return the number of levels of ``queue`` (1 to 10), or None if it has no levels.

        An entry for the queue in the setting wins, then ``max_priority``, which is the queue's own
        argument ``x-max-priority``, then the number for all queues. Raises ImproperlyConfigured if
        ``max_priority`` is needed and is not an integer, 0 or more.
        """
        levels = self.priority_levels
        if isinstance(levels, Mapping):
            if queue in levels:
                return levels[queue]
            levels = None
        if max_priority is None:
            return levels
        try:
            return levels_for_max_priority(max_priority)
        except ValueError:
            raise invalid(
                f"x-max-priority of queue {queue!r}", max_priority, "must be an integer, 0 or more"
            ) from None

    def default_level(self, levels: int) -> int:
        """Return the level of a job without a priority in a queue with ``levels`` levels.

        The built-in default gives way to a queue with fewer levels. One that the user has set does
        not: raises ImproperlyConfigured if the queue has no such level.
        """
        if self.default_priority is None:
            return min(DEFAULT_LEVEL, levels - 1)
        if self.default_priority >= levels:
            raise invalid(
                "strategies_default_priority", self.default_priority, _below(levels, "a queue")
            )
        return self.default_priority


def load(
    conf: Mapping[str, Any],
    *,
    strategy: str | Strategy | None = None,
    ranks: Iterable[str | tuple[str, int]] = (),
) -> Settings:
    """Return the settings in ``conf``, which is ``app.conf`` or any mapping.

    ``strategy`` and ``ranks`` are what one worker's command line says (``--strategy NAME``,
    ``--rank QUEUE=N``, as strings or as pairs): they win over the configuration, and the last rank
    of a queue wins. A setting that is None counts as not set. Raises ImproperlyConfigured.
    """
    spelled: dict[str, str] = {}
    values: dict[str, Any] = {}
    for name, found in _find(conf).items():
        chosen = _agree(name, found)
        if chosen is not None:
            spelled[name] = chosen.spelling
            values[_FIELDS[name]] = _PARSERS[name](chosen.spelling, chosen.value)
    if strategy is not None:
        values["strategy"] = _strategy("--strategy", strategy)
    merged = dict(values.get("ranks", {}))
    merged.update(_rank_option(rank) for rank in ranks)
    settings = Settings(**{**values, "ranks": merged})
    _check_default_priority(
        settings, spelled.get("strategies_default_priority", "strategies_default_priority")
    )
    return settings


# -- values ------------------------------------------------------------------------------------


def _strategy(setting: str, value: Any) -> Strategy:
    try:
        return Strategy.parse(value)
    except ValueError:
        rule = f"must be one of {', '.join(Strategy.labels())}"
        raise invalid(setting, value, rule) from None


def _ranks(setting: str, value: Any) -> dict[str, int]:
    if isinstance(value, Mapping):
        pairs: list[Any] = list(value.items())
    elif isinstance(value, (list, tuple)):
        pairs = list(value)
    else:
        raise invalid(setting, value, "must be a dict of queue names and integers, or such pairs")
    ranks: dict[str, int] = {}
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise invalid(setting, pair, "must be a pair (queue name, integer)")
        queue, rank = pair
        _check_queue(setting, queue)
        if not _is_int(rank):
            raise invalid(f"{setting}[{queue!r}]", rank, "must be an integer (lower goes first)")
        ranks[queue] = rank
    return ranks


def _rank_option(value: str | tuple[str, int]) -> tuple[str, int]:
    if not isinstance(value, str):
        ((queue, rank),) = _ranks("--rank", [value]).items()
        return queue, rank
    # A queue name may hold a "=", a rank may not.
    queue, found, text = value.rpartition("=")
    if not found or not queue or not re.fullmatch(r"\s*[+-]?[0-9]{1,18}\s*", text):
        raise invalid("--rank", value, "must be QUEUE=N, where N is an integer (lower goes first)")
    return queue, int(text)


def _priority_levels(setting: str, value: Any) -> int | dict[str, int]:
    rule = f"must be an integer from 1 to {LISTS}"
    if isinstance(value, Mapping):
        for queue, levels in value.items():
            _check_queue(setting, queue)
            if not _is_int(levels, 1, LISTS):
                raise invalid(f"{setting}[{queue!r}]", levels, rule)
        return dict(value)
    if not _is_int(value, 1, LISTS):
        raise invalid(setting, value, f"{rule}, or a dict of queue names and such integers")
    return cast("int", value)


def _default_priority(setting: str, value: Any) -> int:
    if not _is_int(value, 0, LISTS - 1):
        raise invalid(setting, value, f"must be an integer from 0 (highest) to {LISTS - 1}")
    return cast("int", value)


def _pool(setting: str, value: Any) -> str:
    if not isinstance(value, str) or value not in POOLS:
        raise invalid(setting, value, f"must be one of {', '.join(POOLS)}")
    return value


def _read_ahead(setting: str, value: Any) -> int:
    if not _is_int(value, 0):
        raise invalid(setting, value, "must be an integer, 0 or more")
    return cast("int", value)


def _polling_interval(setting: str, value: Any) -> float:
    number = isinstance(value, float) or _is_int(value)
    # NaN fails both comparisons; infinity the second.
    if not number or not 0 < value <= MAX_POLLING_INTERVAL:
        rule = f"must be a number of seconds above 0, at most {MAX_POLLING_INTERVAL}"
        raise invalid(setting, value, rule)
    return float(value)


def _check_queue(setting: str, queue: Any) -> None:
    if not isinstance(queue, str) or not queue:
        raise invalid(setting, queue, "a queue name must be a string, and not empty")


def _is_int(value: Any, low: float = -math.inf, high: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _below(levels: int, whose: str) -> str:
    return f"must be below the number of levels of {whose}, which is {levels}"


def _check_default_priority(settings: Settings, spelling: str) -> None:
    default, levels = settings.default_priority, settings.priority_levels
    if default is None or levels is None:
        return
    per_queue = {None: levels} if isinstance(levels, int) else levels
    for queue, count in per_queue.items():
        if default >= count:
            whose = "every queue" if queue is None else f"queue {queue!r}"
            raise invalid(spelling, default, _below(count, whose))


_PARSERS: dict[str, Callable[[str, Any], Any]] = {
    "strategies_strategy": _strategy,
    "strategies_ranks": _ranks,
    "strategies_priority_levels": _priority_levels,
    "strategies_default_priority": _default_priority,
    "strategies_pool": _pool,
    "strategies_read_ahead": _read_ahead,
    "strategies_polling_interval": _polling_interval,
}

#: Every setting that exists, in lower case.
NAMES = tuple(_PARSERS)

_FIELDS = {name: name.removeprefix(_PREFIX) for name in NAMES}


# -- spellings ---------------------------------------------------------------------------------


class _Found(NamedTuple):
    spelling: str
    value: Any
    #: 0 for what code has set on ``app.conf``, higher for what that hides.
    layer: int
    #: True for the two spellings that Celery itself knows in an app with a namespace.
    native: bool


def _find(conf: Mapping[str, Any]) -> dict[str, list[_Found]]:
    """Return all spellings of each setting in ``conf``, each with the value that is in force."""
    conf.get(NAMES[0])  # The first access makes a lazy app.conf read its configuration.
    prefix: str = getattr(conf, "prefix", None) or ""
    found: dict[str, list[_Found]] = {}
    seen: set[str] = set()
    for layer, mapping in enumerate(getattr(conf, "maps", None) or [conf]):
        for spelling in _spellings(mapping):
            name = _plain(spelling, prefix)
            if name is None or spelling in seen:
                continue
            # Not mapping[...]: a module's dir() may list what it does not give.
            value = mapping.get(spelling)
            if isinstance(value, ModuleType):
                continue  # `import celery_strategies.x as strategies_x` in a configuration module
            if name not in NAMES or not (spelling.islower() or spelling.isupper()):
                if prefix and spelling.isupper() and not spelling.startswith((prefix, _NAMESPACE)):
                    continue  # With a namespace, other upper-case names are not Celery's.
                raise ImproperlyConfigured(_unknown(spelling, name))
            seen.add(spelling)
            native = bool(prefix) and (spelling == name or spelling.startswith(prefix))
            if value is not None:
                found.setdefault(name, []).append(_Found(spelling, value, layer, native))
    return found


def _spellings(mapping: Mapping[Any, Any]) -> Iterator[str]:
    # Not iter(mapping): Celery wraps a configuration module in something that has keys() only.
    return (key for key in mapping.keys() if isinstance(key, str))  # noqa: SIM118


def _plain(spelling: str, prefix: str) -> str | None:
    """Return the lower-case name without a namespace, or None if the key is none of ours."""
    lowered = spelling.lower()
    for start in ("", prefix.lower(), _NAMESPACE.lower()):
        name = lowered.removeprefix(start)
        if name.startswith(_PREFIX):
            return name
    return None


def _agree(name: str, found: list[_Found]) -> _Found | None:
    """Return the entry in force. Raises ImproperlyConfigured if two spellings disagree."""
    chosen, *others = found
    for other in others:
        # app.conf.strategies_x = ... in code over CELERY_STRATEGIES_X in the configuration file:
        # in Celery that is how one changes a setting of an app with a namespace.
        if chosen.native and other.native and chosen.layer < other.layer:
            continue
        parse = _PARSERS[name]
        if parse(chosen.spelling, chosen.value) != parse(other.spelling, other.value):
            raise ImproperlyConfigured(
                f"{chosen.spelling} = {chosen.value!r} and {other.spelling} = {other.value!r} are "
                f"two spellings of one setting: set only one of them, or both to the same value"
            )
    return chosen


def _unknown(spelling: str, name: str) -> str:
    # Compare what follows the common prefix, or everything would look alike.
    close = difflib.get_close_matches(name.removeprefix(_PREFIX), _FIELDS.values(), n=1)
    if not close:
        return f"{spelling} is not a setting; the strategies settings are {', '.join(NAMES)}"
    # Suggest in the style of the user: CELERY_STRATEGIES_RNKS -> CELERY_STRATEGIES_RANKS.
    start = spelling[: len(spelling) - len(name)]
    meant = _PREFIX + close[0]
    meant = meant.upper() if spelling.isupper() else meant
    return f"{spelling} is not a setting; did you mean {start + meant!r}?"

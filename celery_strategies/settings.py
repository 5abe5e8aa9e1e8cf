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
from typing import Any, Literal, NamedTuple, TypeAlias, cast

from celery.utils.imports import import_from_cwd

from .core.levels import LISTS, levels_for_max_priority
from .core.policy import Policy
from .core.strategies import Strategy
from .core.tags import check_key
from .errors import ImproperlyConfigured, invalid, one_line

__all__ = ("ANY_KEY", "GROUP_MODES", "MEMORIES", "NAMES", "POOLS", "Settings", "Tagger", "load")

#: The pools that can run the tasks, the default first.
POOLS = ("prefork", "threads", "solo", "gevent", "eventlet")

#: What fair share remembers from one take to the next, the default first.
MEMORIES = ("shared", "batch")

#: How the groups of a queue follow each other.
GROUP_MODES = ("fifo", "round_robin")

#: The entry of strategies_max_in_flight that stands for every key without one.
ANY_KEY = "*"

#: A callable that says the key of what is published.
Tagger: TypeAlias = Callable[[Any], Any]

#: Longest polling interval, in seconds.
MAX_POLLING_INTERVAL = 60

#: Highest and, negative, lowest consumer priority.
MAX_CONSUMER_PRIORITY = 1_000_000

#: Seconds of silence after which a worker may count as dead.
MIN_STALE_AFTER, MAX_STALE_AFTER = 2, 3600

#: Level of a job without a priority, unless strategies_default_priority says otherwise.
DEFAULT_LEVEL = 1

_CELERYS = """
args argsrepr as_execution_options callbacks called_directly chain children chord clear compression
correlation_id delivery_info errbacks eta expires get group group_index headers hostname id
ignore_result is_eager kwargs kwargsrepr lang logfile loglevel meth origin parent_id properties
replaced_task_nesting reply_to retries root_id shadow soft_time_limit stamped_headers stamps task
taskset time_limit timelimit update utc
"""

#: What Celery keeps in the headers of a message, and what else a task's request has: a header of
#: such a name changes the task, or is lost when the task is retried.
PROTOCOL_HEADERS = frozenset(_CELERYS.split())

_PREFIX = "strategies_"
_NAMESPACE = "CELERY_"
_PATH = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*)[:.]([^\W\d]\w*)")


@dataclass(frozen=True)
class Settings:
    """Hold the checked settings of one worker or producer.

    ``polling_interval`` is in seconds; ``read_ahead`` counts messages beyond the free slots.
    ``priority_levels`` is None, one number for all queues, or a number per queue. ``fair_share``,
    ``event_fair_share`` and ``group_key`` are as they were set: :meth:`tagger` resolves them.
    """

    strategy: Strategy = Strategy.PRIORITY
    ranks: Mapping[str, int] = field(default_factory=dict)
    priority_levels: int | Mapping[str, int] | None = None
    default_priority: int | None = None
    pool: str = POOLS[0]
    read_ahead: int = 0
    polling_interval: float = 0.1
    fair_share: Tagger | str | Literal[True] | None = None
    fair_share_memory: str = MEMORIES[0]
    fair_key_header: str = "fair_key"
    fair_weight_header: str = "fair_weight"
    event_fair_share: Tagger | str | None = None
    max_in_flight: Mapping[str, int] | None = None
    max_deliveries: int = 5
    single_active_consumer: tuple[str, ...] = ()
    consumer_priority: int = 0
    stale_after: float = 10.0
    group_mode: str | None = None
    group_key: Tagger | str | None = None
    group_key_header: str = "group_key"

    @property
    def fair(self) -> bool:
        """Whether the keys of a queue share it."""
        return self.fair_share is not None

    def policy(self) -> Policy | None:
        """Return how a worker serves the keys of its queues, or None if keys mean nothing to it."""
        if self.group_mode is not None:
            order: Literal["age", "turn"] = "age" if self.group_mode == "fifo" else "turn"
            return Policy(order, True, self.group_key_header, "")
        headers = (self.fair_key_header, self.fair_weight_header)
        if self.fair:
            return Policy(
                "fair" if self.fair_share_memory == "shared" else "batch", False, *headers
            )
        return Policy("age", False, *headers) if self.max_in_flight else None

    def tagger(self, name: str) -> Tagger | None:
        """Return the callable of ``fair_share``, ``event_fair_share`` or ``group_key``, None without.

        A path is imported here, so that a producer does so when it first publishes. Raises
        ImproperlyConfigured if it leads to nothing that can be called.
        """
        value = getattr(self, name)
        if value is None or value is True:
            return None
        return _resolve(_PREFIX + name, value) if isinstance(value, str) else cast("Tagger", value)

    def check_taggers(self) -> None:
        """Resolve all that has a path, for a worker at boot. Raises ImproperlyConfigured."""
        for name in _TAGGERS:
            self.tagger(name)

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
    consumer_priority: int | None = None,
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
    if consumer_priority is not None:
        values["consumer_priority"] = _consumer_priority("--consumer-priority", consumer_priority)
    merged = dict(values.get("ranks", {}))
    merged.update(_rank_option(rank) for rank in ranks)
    settings = Settings(**{**values, "ranks": merged})
    _check_default_priority(
        settings, spelled.get("strategies_default_priority", "strategies_default_priority")
    )
    _check_headers(settings, spelled)
    _check_group_mode(settings, spelled)
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


def _read_ahead(setting: str, value: Any) -> int:
    if not _is_int(value, 0):
        raise invalid(setting, value, "must be an integer, 0 or more")
    return cast("int", value)


def _single_active_consumer(setting: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, (list, tuple, set, frozenset)):
        raise invalid(setting, value, "must be a list of queue names")
    for queue in value:
        _check_queue(setting, queue)
    return tuple(dict.fromkeys(value))


def _consumer_priority(setting: str, value: Any) -> int:
    if not _is_int(value, -MAX_CONSUMER_PRIORITY, MAX_CONSUMER_PRIORITY):
        limit = MAX_CONSUMER_PRIORITY
        raise invalid(setting, value, f"must be an integer from {-limit} to {limit}, higher first")
    return cast("int", value)


def _max_deliveries(setting: str, value: Any) -> int:
    if not _is_int(value, 0):
        raise invalid(setting, value, "must be an integer, 0 (any number) or more")
    return cast("int", value)


def _stale_after(setting: str, value: Any) -> float:
    number = isinstance(value, float) or _is_int(value)
    if not number or not MIN_STALE_AFTER <= value <= MAX_STALE_AFTER:
        rule = f"must be a number of seconds from {MIN_STALE_AFTER} to {MAX_STALE_AFTER}"
        raise invalid(setting, value, rule)
    return float(value)


def _polling_interval(setting: str, value: Any) -> float:
    number = isinstance(value, float) or _is_int(value)
    # NaN fails both comparisons; infinity the second.
    if not number or not 0 < value <= MAX_POLLING_INTERVAL:
        rule = f"must be a number of seconds above 0, at most {MAX_POLLING_INTERVAL}"
        raise invalid(setting, value, rule)
    return float(value)


def _fair_share(setting: str, value: Any) -> Tagger | str | bool:
    # Not 1, which equals True.
    if value is True:
        return True
    if not _is_tagger(value):
        raise invalid(setting, value, f"must be True, {_TAGGER_RULE}")
    return cast("Tagger | str", value)


def _tagger(setting: str, value: Any) -> Tagger | str:
    if not _is_tagger(value):
        raise invalid(setting, value, f"must be {_TAGGER_RULE}")
    return cast("Tagger | str", value)


_TAGGER_RULE = "a callable, or where to import one from, as in 'proj.tenancy:fair_share'"


def _is_tagger(value: Any) -> bool:
    return _PATH.fullmatch(value) is not None if isinstance(value, str) else callable(value)


def _resolve(setting: str, path: str) -> Tagger:
    match = _PATH.fullmatch(path)
    if match is None:
        raise invalid(setting, path, f"must be {_TAGGER_RULE}")
    module, name = match.groups()
    try:
        # As Celery imports what `imports` names: the current folder counts.
        found = getattr(import_from_cwd(module), name)
    except Exception as error:
        why = one_line(f"{type(error).__name__}: {error}")
        raise invalid(setting, path, f"cannot be imported: {why}") from error
    if not callable(found):
        raise invalid(setting, path, f"must lead to a callable, not to {type(found).__name__}")
    return cast("Tagger", found)


def _one_of(choices: tuple[str, ...]) -> Callable[[str, Any], str]:
    def parse(setting: str, value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise invalid(setting, value, f"must be one of {', '.join(choices)}")
        return value

    return parse


def _header(setting: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise invalid(setting, value, "must be the name of a header, a string that is not empty")
    if value in PROTOCOL_HEADERS:
        raise invalid(setting, value, "must not be a name that Celery uses itself")
    return value


def _max_in_flight(setting: str, value: Any) -> dict[str, int]:
    if not isinstance(value, Mapping):
        raise invalid(setting, value, f"must be a dict of keys (or {ANY_KEY!r}) and integers")
    caps: dict[str, int] = {}
    for given, cap in value.items():
        try:
            key = check_key(given)
        except ValueError as error:
            raise invalid(setting, given, str(error)) from None
        if key in caps:
            raise invalid(setting, given, "a key must not appear twice")
        if not _is_int(cap, 1):
            raise invalid(f"{setting}[{given!r}]", cap, "must be an integer, 1 or more")
        caps[key] = cap
    return caps


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


def _check_headers(settings: Settings, spelled: Mapping[str, str]) -> None:
    seen: dict[str, str] = {}
    for name in ("fair_key_header", "fair_weight_header", "group_key_header"):
        header = getattr(settings, name)
        setting = spelled.get(_PREFIX + name, _PREFIX + name)
        if header in seen:
            raise invalid(setting, header, f"must differ from {seen[header]}, which is the same")
        seen[header] = setting


def _check_group_mode(settings: Settings, spelled: Mapping[str, str]) -> None:
    if settings.group_mode is None or not settings.fair:
        return
    mode, share = spelled["strategies_group_mode"], spelled["strategies_fair_share"]
    rule = (
        f"must not be set together with {share}: groups are served one message at a time, "
        "and fair share divides the slots among keys"
    )
    raise invalid(mode, settings.group_mode, rule)


_TAGGERS = ("fair_share", "event_fair_share", "group_key")

_PARSERS: dict[str, Callable[[str, Any], Any]] = {
    "strategies_strategy": _strategy,
    "strategies_ranks": _ranks,
    "strategies_priority_levels": _priority_levels,
    "strategies_default_priority": _default_priority,
    "strategies_pool": _one_of(POOLS),
    "strategies_read_ahead": _read_ahead,
    "strategies_polling_interval": _polling_interval,
    "strategies_single_active_consumer": _single_active_consumer,
    "strategies_consumer_priority": _consumer_priority,
    "strategies_max_deliveries": _max_deliveries,
    "strategies_stale_after": _stale_after,
    "strategies_fair_share": _fair_share,
    "strategies_fair_share_memory": _one_of(MEMORIES),
    "strategies_fair_key_header": _header,
    "strategies_fair_weight_header": _header,
    "strategies_event_fair_share": _tagger,
    "strategies_max_in_flight": _max_in_flight,
    "strategies_group_mode": _one_of(GROUP_MODES),
    "strategies_group_key": _tagger,
    "strategies_group_key_header": _header,
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

"""Own how options, settings and a trace become the worker and the jobs of a simulation.

What is said in several places holds in this order: the command line, the settings (``--config``, else those of the app
that ``-A`` names), the trace, the default. Everything that is named must exist.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from celery_strategies import settings as settings_module
from celery_strategies.core.policy import Policy
from celery_strategies.core.sources import SourceList
from celery_strategies.core.strategies import Strategy
from celery_strategies.core.tags import check_key, check_weight
from celery_strategies.errors import one_line
from celery_strategies.publish.levels import max_priority_of
from celery_strategies.settings import ANY_KEY, Settings
from celery_strategies.simulation.engine import Arrival, Setup
from celery_strategies.simulation.errors import SimulationError, check_known, meant, suggestion
from celery_strategies.simulation.trace import Trace

__all__ = ("Options", "Scenario", "assemble", "load_module")


@dataclass(frozen=True)
class Options:
    """What the command line says; None or empty: nothing."""

    strategy: Strategy | None = None
    queues: tuple[str, ...] = ()
    ranks: tuple[str, ...] = ()
    levels: tuple[str, ...] = ()
    slots: int | None = None
    run_time: float = 1.0
    fair: bool | None = None
    memory: str | None = None
    group: str | None = None
    weights: tuple[str, ...] = ()
    caps: tuple[str, ...] = ()
    paused: tuple[str, ...] = ()


@dataclass
class Scenario:
    """One worker and its jobs; ``notes`` are what the user should know of them."""

    setup: Setup
    jobs: list[Arrival]
    settings: Settings
    notes: list[str] = field(default_factory=list)

    def with_strategy(self, strategy: Strategy) -> Setup:
        """Return the same worker under another strategy."""
        return replace(self.setup, strategy=strategy)

    def with_fair_share(self, on: bool) -> Setup:
        """Return the same worker with fair share on or off. Raises SimulationError where there are groups."""
        if self.settings.group_mode is not None:
            raise SimulationError("--compare fair: groups exclude fair share; leave them out")
        fair = self.settings.fair_share if self.settings.fair else True
        settings = replace(self.settings, fair_share=fair if on else None)
        return replace(self.setup, **_policy(settings, self.setup.caps, self.setup.weights))


def load_module(name: str) -> dict[str, Any]:
    """Return what a configuration module has. Raises SimulationError if it cannot be imported."""
    if name.endswith(".py") or "/" in name:
        module = name.removesuffix(".py").strip("./").replace("/", ".")
        raise SimulationError(f"--config {name}: must be the name of a module, such as {module}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return dict(vars(import_module(name)))
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            modules = [path.stem for path in Path.cwd().glob("*.py")]
            why = f"there is no such module{meant(name, modules)}"
            raise SimulationError(f"--config {name}: {why}") from None
        raise SimulationError(f"--config {name}: {one_line(str(error))}") from None
    except Exception as error:  # noqa: BLE001  # a module may raise anything
        why = one_line(f"{type(error).__name__}: {error}")
        raise SimulationError(f"--config {name}: cannot be imported: {why}") from None


def assemble(
    options: Options, trace: Trace, conf: Mapping[str, Any] | None, app: Any = None
) -> Scenario:
    """Return what to simulate. ``conf`` is None where there are no settings but those of the trace.

    ``app`` is asked what it says of its queues. Raises SimulationError, and ImproperlyConfigured for wrong settings.
    """
    if conf is None and trace.settings:
        conf = trace.settings
    settings = settings_module.load(conf or {}, strategy=options.strategy, ranks=options.ranks)
    if options.levels:
        settings = replace(settings, priority_levels=None)
    notes: list[str] = []
    settings = _with_keys(settings, options, trace, configured=conf is not None, notes=notes)

    names = _bind_order(options, trace)
    for option, named in (("--rank", options.ranks), ("--levels", options.levels)):
        for pair in named:
            if "=" in pair or option == "--rank":
                check_known(f"{option} {pair}: queue", pair.rpartition("=")[0], names)
    for queue in options.paused:
        check_known("--pause: queue", queue, names)

    declared = {} if app is None else {name: app.amqp.queues.get(name) for name in names}
    levels = {
        queue: _levels(queue, options, settings, trace, max_priority_of(declared.get(queue)))
        for queue in names
    }
    bound = SourceList({**trace.ranks, **settings.ranks})
    for queue in names:
        bound.bind(queue, levels[queue])
    jobs = trace.jobs(
        options.run_time,
        lambda queue: 0 if (count := levels[queue]) is None else settings.default_level(count),
    )
    single = {queue for queue in settings.single_active_consumer if queue in names}
    single |= {name for name, queue in declared.items() if _is_single(queue)}
    keys = [*trace.keys, *trace.weights]
    caps = {**trace.caps, **(settings.max_in_flight or {}), **_caps(options.caps, keys)}
    setup = Setup(
        strategy=settings.strategy,
        sources=bound.ordered(),
        slots=options.slots or trace.slots or 1,
        read_ahead=settings.read_ahead,
        single=frozenset(single),
        paused=frozenset(options.paused),
    )
    weights = _weights(options.weights, keys)
    setup = replace(setup, **_policy(settings, caps, weights))
    if weights and (setup.policy is None or not setup.policy.weight_header or not settings.fair):
        raise SimulationError("--weight means nothing without fair share; --fair turns it on")
    if trace.keys and setup.policy is None:
        notes.append("The keys do nothing: fair share is off (--fair turns it on).")
    return Scenario(setup, jobs, settings, notes)


def _policy(
    settings: Settings, caps: Mapping[str, int], weights: Mapping[str, float]
) -> dict[str, Any]:
    """Return the fields of a setup that say how keys are served."""
    settings = replace(settings, max_in_flight=dict(caps) or None)
    policy: Policy | None = settings.policy()
    if policy is None:
        return {"policy": None, "caps": {}, "weights": {}}
    return {
        "policy": policy,
        "caps": {} if policy.single else dict(caps),
        "weights": dict(weights) if settings.fair else {},
    }


def _with_keys(
    settings: Settings, options: Options, trace: Trace, *, configured: bool, notes: list[str]
) -> Settings:
    """Return the settings with what the command line says of fair share and groups."""
    if options.group is not None and options.fair:
        raise SimulationError("--group and --fair exclude each other: groups run one job at a time")
    if options.group is not None:
        settings = replace(settings, group_mode=options.group, fair_share=None)
    elif options.fair:
        settings = replace(settings, fair_share=True, group_mode=None)
    elif options.fair is False:
        settings = replace(settings, fair_share=None)
    elif not configured and (trace.keys or options.weights or options.memory):
        settings = replace(settings, fair_share=True)
        notes.append("Fair share is on, as there are keys; --no-fair turns it off.")
    if options.memory is not None:
        settings = replace(settings, fair_share_memory=options.memory)
    return settings


def _bind_order(options: Options, trace: Trace) -> list[str]:
    """Return the queues that the worker reads, in the order of ``-Q``, else of the trace."""
    if not options.queues:
        return list(trace.queues)
    names = list(dict.fromkeys(options.queues))
    for queue in trace.queues:
        if queue not in names:
            raise SimulationError(
                f"-Q does not name {queue!r}, which has jobs; {suggestion(queue, names)}"
            )
    return names


def _levels(
    queue: str, options: Options, settings: Settings, trace: Trace, max_priority: int | None
) -> int | None:
    found = None
    for pair in options.levels:
        name, _, number = pair.rpartition("=")
        if not re.fullmatch(r"[1-9]|10", number):
            raise SimulationError(
                f"--levels {pair}: must be N or QUEUE=N, where N is an integer from 1 to 10"
            )
        if not name or name == queue:
            found = int(number)
    if found is None:
        found = settings.levels_for(queue, max_priority)
    return trace.levels.get(queue) if found is None else found


def _is_single(queue: Any) -> bool:
    arguments = getattr(queue, "queue_arguments", None) or {}
    return bool(arguments.get("x-single-active-consumer"))


def _weights(pairs: Iterable[str], keys: list[str]) -> dict[str, float]:
    found = {}
    for pair in pairs:
        key, number = _pair("--weight", pair)
        check_known(f"--weight {pair}: key", key, keys)
        try:
            found[key] = float(check_weight(float(number)))
        except ValueError:
            rule = "must be KEY=WEIGHT, a number from 1e-6 to 1e6"
            raise SimulationError(f"--weight {pair}: {rule}") from None
    return found


def _caps(pairs: Iterable[str], keys: list[str]) -> dict[str, int]:
    found = {}
    for pair in pairs:
        key, number = _pair("--cap", pair)
        if key != ANY_KEY:
            check_known(f"--cap {pair}: key", key, keys)
        if not re.fullmatch(r"[0-9]{1,9}", number) or int(number) < 1:
            raise SimulationError(f"--cap {pair}: must be KEY=N, an integer, 1 or more")
        found[key] = int(number)
    return found


def _pair(option: str, pair: str) -> tuple[str, str]:
    key, found, value = pair.rpartition("=")
    try:
        return check_key(key), value
    except ValueError:
        wrong = "must be KEY=NUMBER" if not found else "there is no key before the ="
        raise SimulationError(f"{option} {pair}: {wrong}") from None

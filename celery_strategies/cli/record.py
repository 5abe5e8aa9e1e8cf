"""The command ``record``: a trace of a live system, which ``simulate`` replays."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from celery.bin.base import CeleryCommand
from kombu.exceptions import OperationalError
from redis.exceptions import RedisError

from celery_strategies import settings as settings_module
from celery_strategies.cli.group import broker, strategies
from celery_strategies.cli.recorder import Recording, Survey, settings_of
from celery_strategies.core.policy import Policy
from celery_strategies.settings import Settings
from celery_strategies.simulation.trace import dump

#: Seconds that workers have to answer.
_PATIENCE = 1.0


@strategies.command(name="record", cls=CeleryCommand)
@click.option(
    "-q",
    "--queue",
    "queues",
    multiple=True,
    metavar="QUEUE",
    help="Queue to record, in bind order; may be repeated (default: those that workers read).",
)
@click.option(
    "--seconds", type=click.FloatRange(0, 86400), default=60.0, metavar="N", help="Default: 60."
)
@click.option(
    "--interval",
    type=click.FloatRange(0.05, 10),
    default=0.2,
    metavar="SECONDS",
    help="Between two looks at Redis (default: 0.2).",
)
@click.option(
    "--backlog",
    type=click.IntRange(0, 100_000),
    default=10_000,
    metavar="N",
    help="Waiting messages of a queue that are read at the start (default: 10000).",
)
@click.option(
    "--enable-events", is_flag=True, help="Have workers send events while it records (as with -E)."
)
@click.option("-o", "--output", metavar="FILE", help="Where to write the trace (default: stdout).")
@click.pass_context
def record(
    ctx: click.Context,
    /,
    queues: tuple[str, ...],
    seconds: float,
    interval: float,
    backlog: int,
    enable_events: bool,
    output: str | None,
) -> None:
    """Record what arrives, and how long it runs, as a trace for "simulate --trace". Only reads.

    Arrivals come from task-sent events (task_send_sent_event) and from looks at Redis, run times from workers with -E.
    """
    app: Any = ctx.obj.app
    settings = settings_module.load(app.conf)
    try:
        with broker(ctx) as (client, keys):
            stats = app.control.inspect(timeout=_PATIENCE).stats() or {}
            recording = _recording(settings, list(queues) or _queues(app, stats))
            survey = Survey(client, keys, recording, backlog)
            listener = _Listener(app, recording, enable_events)
            try:
                _look(survey, recording.begun, seconds, interval)
            finally:
                listener.stop()
    except (OSError, OperationalError, RedisError) as error:
        raise click.ClickException(f"cannot read from the broker: {error}") from None
    trace, facts = recording.trace(time.time() - recording.begun)
    trace.settings = settings_of(settings, recording.queues)
    trace.slots = _slots(stats)
    text = dump(trace, facts)
    if output is None:
        click.echo(text, nl=False)
    else:
        try:
            Path(output).write_text(text, "utf-8")
        except OSError as error:
            raise click.ClickException(f"-o {output}: {error.strerror}") from None
    if listener.error is not None:
        click.echo(
            f"Events could not be received to the end: {listener.error}; what came then is from looks at Redis alone",
            err=True,
        )
    said = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items())
    click.echo(f"Recorded: {said}", err=True)


def _recording(settings: Settings, queues: list[str]) -> Recording:
    # Without a policy of the app's own, somebody else's may be there, with the usual headers.
    default = Policy("fair", False, settings.fair_key_header, settings.fair_weight_header)
    policy = settings.policy() or default
    return Recording(time.time(), queues, policy.key_header, policy.weight_header)


def _look(survey: Survey, begun: float, seconds: float, interval: float) -> None:
    """Read the backlog, then what comes, until the time is over or somebody interrupts it."""
    with suppress(KeyboardInterrupt):
        survey.start(begun)
        while (left := begun + seconds - time.time()) > 0:
            time.sleep(min(interval, left))
            survey.look(time.time())


class _Listener:
    """Receive events in a thread, over a connection of its own."""

    def __init__(self, app: Any, recording: Recording, enable: bool) -> None:
        self.app = app
        self.enable = enable
        self.ready = threading.Event()
        #: What ended the receiving of events before its time.
        self.error: Exception | None = None
        self.connection = app.connection_for_read()
        self.receiver = app.events.Receiver(self.connection, handlers={"*": recording.event})
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        # Before the backlog is read, so that nothing is between the two.
        self.ready.wait(_PATIENCE)
        if enable:
            app.control.enable_events()

    def _run(self) -> None:
        self.receiver.on_consume_ready = lambda *_, **__: self.ready.set()
        try:
            self.receiver.capture(limit=None, timeout=None, wakeup=False)
        except (OSError, OperationalError, RedisError) as error:
            # Looks at Redis go on; what is missing from then on is told at the end.
            self.error = error
        finally:
            self.ready.set()

    def stop(self) -> None:
        """Stop, once the last events have come in."""
        time.sleep(0.2)
        self.receiver.should_stop = True
        self.thread.join(_PATIENCE * 2)
        if self.enable:
            self.app.control.disable_events()
        self.connection.release()


def _queues(app: Any, stats: dict[str, Any]) -> list[str]:
    """Return the queues that strategies workers read, in list order, else those of the app."""
    found: list[str] = []
    for worker in stats.values():
        for source in (worker.get("strategies") or {}).get("sources", []):
            if source["queue"] not in found:
                found.append(source["queue"])
    return found or list(app.amqp.queues)


def _slots(stats: dict[str, Any]) -> int | None:
    """Return the slots of all workers together."""
    slots = 0
    for worker in stats.values():
        ours = (worker.get("strategies") or {}).get("slots")
        slots += int(ours or (worker.get("pool") or {}).get("max-concurrency") or 0)
    return slots or None

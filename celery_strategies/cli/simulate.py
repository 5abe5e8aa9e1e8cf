"""The command ``simulate``: what a worker would do with a backlog or a trace, and why. Needs no broker and no app."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from celery.bin.base import CeleryCommand

from celery_strategies.cli.group import console_of, strategies
from celery_strategies.cli.scenario import Options, Scenario, assemble, load_module
from celery_strategies.core.strategies import Strategy
from celery_strategies.settings import GROUP_MODES, MEMORIES
from celery_strategies.simulation.engine import Setup, simulate
from celery_strategies.simulation.errors import SimulationError, meant, suggestion
from celery_strategies.simulation.plot import plot
from celery_strategies.simulation.trace import Trace, parse, parse_backlog

#: What --compare can put side by side.
COMPARISONS = ("strategies", "fair")


def _one_of(names: tuple[str, ...]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """Return a callback that lets no other name pass."""

    def check(_ctx: click.Context, _param: click.Parameter, value: Any) -> Any:
        if value is not None and value not in names:
            raise click.BadParameter(f"{value!r} does not exist; {suggestion(value, names)}")
        return value

    return check


def _strategy(_ctx: click.Context, _param: click.Parameter, value: str | None) -> Strategy | None:
    try:
        return None if value is None else Strategy.parse(value)
    except ValueError:
        close = suggestion(str(value), Strategy.labels())
        raise click.BadParameter(f"{value!r} is not a strategy; {close}") from None


def _comma(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in (value or "").split(",") if name.strip())


@strategies.command(name="simulate", cls=CeleryCommand)
@click.argument("backlog", nargs=-1)
@click.option("--trace", "trace_file", metavar="FILE", help="JSON trace to run; - reads stdin.")
@click.option("--config", metavar="MODULE", help="Take the strategies settings of this module.")
@click.option(
    "--strategy", callback=_strategy, metavar="NAME", help=f"{', '.join(Strategy.labels())}."
)
@click.option(
    "-Q", "--queues", callback=_comma, metavar="A,B", help="Bind order, if not that of the backlog."
)
@click.option("--rank", "ranks", multiple=True, metavar="QUEUE=N", help="Rank, lower first.")
@click.option(
    "--levels", multiple=True, metavar="[QUEUE=]N", help="Levels of a queue, or of every queue."
)
@click.option("--slots", type=click.IntRange(1, 100_000), metavar="N", help="Slots (default: 1).")
@click.option(
    "--run-time",
    type=click.FloatRange(0, 1e9),
    default=1.0,
    metavar="SECONDS",
    help="Run time of a job that names none (default: 1).",
)
@click.option(
    "--fair/--no-fair",
    default=None,
    help="Fair share on or off (default: as the settings say; without any, on if there are keys).",
)
@click.option(
    "--memory",
    callback=_one_of(MEMORIES),
    metavar="NAME",
    help="Of fair share: shared, batch.",
)
@click.option(
    "--group",
    callback=_one_of(GROUP_MODES),
    metavar="MODE",
    help="Keys are groups: fifo, round_robin.",
)
@click.option("--weight", "weights", multiple=True, metavar="KEY=W", help="Weight of a key.")
@click.option(
    "--cap", "caps", multiple=True, metavar="KEY=N", help='Most jobs of a key, or of "*".'
)
@click.option("--pause", "paused", multiple=True, metavar="QUEUE", help="Queue that nobody serves.")
@click.option(
    "--compare",
    callback=_one_of(COMPARISONS),
    metavar="WHAT",
    help="Side by side: the four strategies, or fair share on and off (fair).",
)
@click.option("--plot", "plot_file", metavar="FILE.png", help="Draw each job's wait.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with all picks.")
@click.option(
    "--limit",
    type=click.IntRange(0),
    default=50,
    metavar="N",
    help="Picks that are printed (default: 50; 0: none).",
)
@click.pass_context
def simulate_command(
    ctx: click.Context,
    /,
    backlog: tuple[str, ...],
    trace_file: str | None,
    config: str | None,
    compare: str | None,
    plot_file: str | None,
    as_json: bool,
    limit: int,
    **options: Any,
) -> None:
    """Print which job each free slot would get, why, and how long all of them wait. Needs no Redis.

    BACKLOG is what waits, a QUEUE=NUMBER for each queue, in bind order; with keys QUEUE=KEY:NUMBER,KEY:NUMBER; with
    @LEVEL behind a number for a level:

    \b
      celery strategies simulate --strategy max_len alerts=2 reports=1 emails=3
      celery strategies simulate emails=acme:30,minnow:2 --weight acme=3
      celery -A proj strategies simulate --trace trace.json --compare fair
    """  # noqa: D301  # click wants the character, not its name
    try:
        _check_plot(plot_file)
        trace = _trace(backlog, trace_file)
        app = ctx.obj.app if ctx.find_root().params.get("app") else None
        conf = load_module(config) if config else app.conf if app is not None else None
        scenario = assemble(Options(**options), trace, conf, app)
        setups = _setups(scenario, compare)
        shown = None if as_json else limit
        results = {
            label: simulate(setup, scenario.jobs, explain=shown) for label, setup in setups.items()
        }
        if plot_file:
            plot(results, Path(plot_file))
    except SimulationError as error:
        raise click.ClickException(str(error)) from None
    for note in scenario.notes:
        click.echo(note, err=True)
    # Not above: every start of `celery` imports this module.
    from celery_strategies.simulation import report

    if as_json:
        runs = {label: report.as_json(result) for label, result in results.items()}
        one = next(iter(runs.values()))
        json.dump(
            one if compare is None else {"compare": compare, "runs": runs}, sys.stdout, indent=1
        )
        click.echo()
        return
    console = console_of(ctx)
    if compare is None:
        report.show_run(console, next(iter(results.values())), limit)
    else:
        report.show_comparison(console, results, limit)
    if plot_file:
        console.print(f"Drawn to {plot_file}", soft_wrap=True)


def _trace(backlog: tuple[str, ...], file: str | None) -> Trace:
    if file is None:
        if not backlog:
            raise SimulationError(
                "there is nothing to simulate: name a backlog, as in alerts=2 reports=1, or --trace FILE"
            )
        return parse_backlog(backlog)
    if backlog:
        raise SimulationError(f"--trace and a backlog ({backlog[0]}) exclude each other")
    if file == "-":
        return parse(sys.stdin.read(), "stdin")
    path = Path(file)
    try:
        return parse(path.read_text("utf-8"), file)
    except FileNotFoundError:
        near = [str(path.with_name(one.name)) for one in path.parent.glob("*.json")]
        raise SimulationError(f"--trace {file}: no such file{meant(file, near)}") from None
    except OSError as error:
        raise SimulationError(f"--trace {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SimulationError(f"--trace {file}: is not UTF-8") from None


def _check_plot(file: str | None) -> None:
    if file is not None and not file.lower().endswith(".png"):
        raise SimulationError(f"--plot {file}: the picture is a PNG; name it so")


def _setups(scenario: Scenario, compare: str | None) -> dict[str, Setup]:
    if compare == "strategies":
        return {label: scenario.with_strategy(Strategy.parse(label)) for label in Strategy.labels()}
    if compare == "fair":
        return {
            "fair share": scenario.with_fair_share(True),
            "no fair share": scenario.with_fair_share(False),
        }
    return {scenario.setup.strategy.label: scenario.setup}

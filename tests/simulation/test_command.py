"""`celery strategies simulate` from the command line: output, options, errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Run = Callable[..., Result]
ISSUE = ("alerts=2", "reports=1", "emails=3")


def simulate(run: Run, *words: str, code: int = 0, stdin: str | None = None) -> str:
    output: str = run("strategies", "simulate", *words, code=code, stdin=stdin).output
    return output


def picks(run: Run, *words: str) -> str:
    return " ".join(
        pick["queue"][0].upper()
        for pick in json.loads(run("strategies", "simulate", "--json", *words).stdout)["picks"]
    )


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("priority", "A A R E E E"),
        ("round_robin", "A R E A E E"),
        ("MaxLen", "E A E A R E"),
        ("min-len", "R A A E E E"),
    ],
)
def test_the_picker_without_app_and_without_redis(run: Run, strategy: str, expected: str) -> None:
    assert (
        picks(run, "--strategy", strategy, "--rank", "alerts=1", "--rank", "reports=2", *ISSUE)
        == expected
    )


def test_what_is_printed(run: Run) -> None:
    shown = simulate(run, "--strategy", "max_len", *ISSUE)
    lines = [line.rstrip() for line in shown.splitlines()]
    assert lines[0] == "max_len over alerts, reports, emails; 1 slot; no fair share"
    assert lines[3] == "1 |  0 |      2 |       1 |      3 | emails     | emails has 3, the most"
    assert "emails  |    3 |       3 |      2 |   5 |       5" in lines
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in shown


def test_long_names_still_fit(run: Run) -> None:
    words = [f"{'a-queue-with-a-long-name-' * 2}{n}={'key-' * 12}{n}:2,other:1" for n in range(5)]
    for more in ([], ["--compare", "strategies"], ["--compare", "fair"]):
        shown = run("strategies", "simulate", *more, *words).stdout
        assert max(len(line) for line in shown.splitlines()) <= 80, more


def test_only_so_many_picks_are_printed(run: Run) -> None:
    shown = simulate(run, "--limit", "2", "q=5")
    assert "... and 3 more picks; --limit shows more." in shown
    assert "the only queue" not in simulate(run, "--limit", "0", "q=5")


def test_keys_turn_fair_share_on_where_nothing_else_is_said(run: Run) -> None:
    done = run("strategies", "simulate", "--json", "q=whale:4,minnow:1")
    assert [pick["key"] for pick in json.loads(done.stdout)["picks"]][:2] == ["whale", "minnow"]
    assert done.stderr == "Fair share is on, as there are keys; --no-fair turns it off.\n"
    done = run("strategies", "simulate", "--json", "--no-fair", "q=whale:4,minnow:1")
    assert json.loads(done.stdout)["picks"][-1]["key"] == "minnow"
    assert "keys do nothing" in done.stderr


def test_weights_caps_groups_levels_slots(run: Run) -> None:
    def keys(*words: str) -> str:
        data = json.loads(run("strategies", "simulate", "--json", *words).stdout)
        return "".join(pick["key"] or "-" for pick in data["picks"])

    assert keys("--weight", "a=3", "q=a:6,b:2") == "aaabaaab"
    assert keys("--memory", "batch", "q=a:2,b:2") == "aabb"
    assert keys("--cap", "a=1", "--slots", "3", "--no-fair", "q=a:3,b:2") == "abbaa"
    assert keys("--cap", "*=1", "--slots", "2", "q=a:2,b:2") == "abab"
    assert keys("--group", "round_robin", "q=a:2,b:2") == "abab"
    assert keys("--levels", "2", "q=a:2@1,b:1@0") == "baa"
    assert keys("--levels", "q=2", "q=a:1,b:1@0") == "ba"  # no level: level 1


def test_two_slots_and_a_run_time(run: Run) -> None:
    data = json.loads(simulate(run, "--json", "--slots", "2", "--run-time", "0.5", "q=4"))
    assert [pick["at"] for pick in data["picks"]] == [0, 0, 0.5, 0.5]
    assert data["slots"] == 2
    assert data["waits"]["queues"] == [
        {"queue": "q", "jobs": 4, "started": 4, "median": 0, "p95": 0.5, "longest": 0.5}
    ]


def test_bind_order(run: Run) -> None:
    assert picks(run, "-Q", "reports,unused,alerts", "alerts=1", "reports=1") == "R A"


def test_a_paused_queue(run: Run) -> None:
    shown = simulate(run, "--pause", "alerts", *ISSUE)
    assert "alerts is paused" in shown
    assert "2 jobs never start" in shown


def test_compare_strategies(run: Run) -> None:
    shown = simulate(run, "--compare", "strategies", *ISSUE)
    rows = [[cell.strip() for cell in line.split("|")] for line in shown.splitlines()]
    start = rows.index(["#", "priority", "round_robin", "max_len", "min_len"])
    columns = list(zip(*rows[start + 2 : start + 8], strict=True))[1:]
    assert [" ".join(name[0].upper() for name in column) for column in columns] == [
        "A A R E E E",
        "A R E A E E",
        "E A E A R E",
        "R A A E E E",
    ]
    assert ["reports", "median", "2", "1", "4", "0"] in rows


def test_compare_fair_share(run: Run) -> None:
    data = json.loads(
        run("strategies", "simulate", "--compare", "fair", "--json", "q=w:50,m:2").stdout
    )
    waits = {
        label: {row["key"]: row["longest"] for row in one["waits"]["tenants"]}
        for label, one in data["runs"].items()
    }
    assert waits == {"fair share": {"w": 51, "m": 3}, "no fair share": {"w": 49, "m": 51}}
    assert all(pick["why"] for one in data["runs"].values() for pick in one["picks"])
    assert "fair share | no fair share" in simulate(run, "--compare", "fair", "q=w:50,m:2")


@pytest.mark.parametrize("more", [[], ["--compare", "strategies"]])
def test_plot(run: Run, tmp_path: Path, more: list[str]) -> None:
    shown = simulate(run, "--plot", "out.png", *more, "q=" + ",".join(f"k{n}:2" for n in range(15)))
    assert "Drawn to out.png" in shown
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_plot_without_matplotlib(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert "pip install 'celery-strategies[plot]'" in simulate(
        run, "--plot", "x.png", "q=1", code=1
    )


TRACE = {
    "queues": [{"name": "alerts", "rank": 1}, "emails"],
    "tenants": {"acme": {"weight": 3}},
    "settings": {"strategies_fair_share": True},
    "slots": 2,
    "jobs": [
        {"queue": "emails", "key": "acme", "count": 6},
        {"queue": "emails", "key": "zed", "count": 2},
        {"queue": "alerts", "at": 2.5, "run": 0.5, "name": "late"},
    ],
}


def test_a_trace_from_a_file_and_from_stdin(run: Run, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps(TRACE))
    first = json.loads(simulate(run, "--json", "--trace", "t.json"))
    assert first == json.loads(simulate(run, "--json", "--trace", "-", stdin=json.dumps(TRACE)))
    assert [pick["key"] for pick in first["picks"]][:4] == ["acme", "acme", "acme", "zed"]
    assert [pick["at"] for pick in first["picks"] if pick["job"] == "late"] == [3]
    assert "late" in simulate(run, "--trace", "t.json")


def test_settings_of_a_module(run: Run, tmp_path: Path) -> None:
    (tmp_path / "sim_conf_a.py").write_text(
        "strategies_strategy = 'min_len'\nCELERY_STRATEGIES_RANKS = {'emails': 1, 'unused': 7}\n"
        "broker_url = 'redis://nowhere'\n"
    )
    assert picks(run, "--config", "sim_conf_a", *ISSUE) == "R A A E E E"
    assert picks(run, "--config", "sim_conf_a", "--strategy", "priority", *ISSUE) == "E E E A A R"


def test_the_settings_of_the_app_are_the_defaults(run: Run, tmp_path: Path) -> None:
    (tmp_path / "sim_proj.py").write_text(
        "from celery import Celery\nfrom kombu import Queue\n"
        "app = Celery('p', broker='redis://127.0.0.1:1/0')\n"
        "app.conf.update(strategies_strategy='max_len', strategies_fair_share='not.there:yet',\n"
        "  strategies_max_in_flight={'*': 1}, task_queues=[Queue('a', max_priority=2), Queue('b')])\n"
    )
    done = run("-A", "sim_proj", "strategies", "simulate", "--json", "a=x:2,y:1", "b=1")
    data = json.loads(done.stdout)
    assert (data["strategy"], data["keys"]["order"]) == ("max_len", "fair")
    assert [queue["levels"] for queue in data["queues"]] == [3, None]
    done = run("-A", "sim_proj", "strategies", "simulate", "--strategy", "priority", "a=1")
    assert done.stdout.startswith("priority over a; 1 slot; fair share; caps *=1")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "there is nothing to simulate: name a backlog"),
        (["alerts"], "a backlog is QUEUE=NUMBER"),
        (["--strategy", "max_length", "q=1"], "'max_length' is not a strategy; did you mean 'max_len'?"),
        (["--strategy", "fifo", "q=1"], "known: priority, round_robin, max_len, min_len"),
        (["--rank", "alert=1", "alerts=1"], "queue 'alert' does not exist; did you mean 'alerts'?"),
        (["--rank", "alerts=x", "alerts=1"], "--rank = 'alerts=x': must be QUEUE=N"),
        (["--levels", "alert=3", "alerts=1"], "did you mean 'alerts'?"),
        (["--levels", "11", "alerts=1"], "--levels 11: must be N or QUEUE=N"),
        (["--pause", "alrts", "alerts=1"], "did you mean 'alerts'?"),
        (["-Q", "alert", "alerts=1"], "-Q does not name 'alerts', which has jobs; did you mean 'alert'?"),
        (["--weight", "acm=2", "q=acme:1"], "key 'acm' does not exist; did you mean 'acme'?"),
        (["--weight", "acme=0", "q=acme:1"], "--weight acme=0: must be KEY=WEIGHT, a number from 1e-6"),
        (["--weight", "acme=1", "--no-fair", "q=acme:1"], "--weight means nothing without fair share"),
        (["--weight", "acme", "q=acme:1"], "--weight acme: must be KEY=NUMBER"),
        (["--cap", "acm=2", "q=acme:1"], "key 'acm' does not exist; did you mean 'acme'?"),
        (["--cap", "acme=0", "q=acme:1"], "--cap acme=0: must be KEY=N"),
        (["--group", "fifoo", "q=a:1"], "'fifoo' does not exist; did you mean 'fifo'?"),
        (["--group", "fifo", "--fair", "q=a:1"], "--group and --fair exclude each other"),
        (["--memory", "bacth", "q=a:1"], "did you mean 'batch'?"),
        (["--compare", "strategy", "q=1"], "did you mean 'strategies'?"),
        (["--compare", "fair", "--group", "fifo", "q=a:1"], "--compare fair: groups exclude fair share"),
        (["--plot", "out.svg", "q=1"], "--plot out.svg: the picture is a PNG"),
        (["--plot", "no/where.png", "q=1"], "--plot no/where.png: No such file or directory"),
        (["--trace", "trcae.json"], "--trace trcae.json: no such file; did you mean 'trace.json'?"),
        (["--trace", "trace.json", "q=1"], "--trace and a backlog (q=1) exclude each other"),
        (["--trace", "."], "--trace .: Is a directory"),
        (["--trace", "latin.json"], "--trace latin.json: is not UTF-8"),
        (["--trace", "trace.json"], "trace.json: 'job' is not a field; did you mean 'jobs'?"),
        (["--trace", "settings.json"], "strategies_rank is not a setting; did you mean 'strategies_ranks'?"),
        (["--config", "sim_conf", "q=1"], "--config sim_conf: there is no such module; did you mean 'sim_conf_"),
        (["--config", "sim_conf_b.py", "q=1"], "must be the name of a module, such as sim_conf_b"),
        (["--config", "sim_conf_b", "q=1"], "--config sim_conf_b: cannot be imported: ZeroDivisionError"),
        (["--config", "sim_conf_c", "q=1"], "strategies_strateg is not a setting; did you mean"),
        (["--slots", "0", "q=1"], "Invalid value for '--slots'"),
        (["--slot", "1", "q=1"], "'--slots'"),
    ],
)  # fmt: skip
def test_wrong_names_and_values_get_one_clear_line(
    run: Run, tmp_path: Path, words: list[str], said: str
) -> None:
    (tmp_path / "trace.json").write_text('{"job": []}')
    (tmp_path / "latin.json").write_bytes(b'{"jobs": "\xff"}')
    (tmp_path / "settings.json").write_text('{"settings": {"strategies_rank": {}}, "jobs": []}')
    (tmp_path / "sim_conf_b.py").write_text("1 / 0\n")
    (tmp_path / "sim_conf_c.py").write_text("strategies_strateg = 'priority'\n")
    usage = "Usage" in (done := run_any(run, words)).output
    assert done.exit_code == (2 if usage else 1)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("Error:")]
    assert said in line


def run_any(run: Run, words: list[str]) -> Result:
    try:
        return run("strategies", "simulate", *words, code=1)
    except AssertionError:
        return run("strategies", "simulate", *words, code=2)


def test_no_jobs_at_all(run: Run) -> None:
    assert "No jobs." in simulate(run, "q=0")
    assert "No jobs." in simulate(run, "--compare", "strategies", "q=0")
    simulate(run, "--plot", "x.png", "q=0")

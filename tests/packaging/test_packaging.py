"""What is installed is complete: names, files, entry point, metadata.

These tests use nothing but the installed package. `tox -e packaging` copies them away from the
source tree and runs them against the built wheel (PACKAGING_WHEEL=1); anywhere else they check
the development install.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.resources
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

FROM_WHEEL = os.environ.get("PACKAGING_WHEEL") == "1"
DISTRIBUTION = "celery-strategies"


def run(tmp_path: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in an empty folder, as from a clean shell."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("CELERY_", "PYTHON"))}
    return subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
    )


def celery(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this environment's `celery`."""
    return run(tmp_path, str(Path(sys.executable).with_name("celery")), *arguments)


def modules() -> list[str]:
    """Return the names of all modules of the package."""
    package = importlib.import_module("celery_strategies")
    found = pkgutil.walk_packages(package.__path__, "celery_strategies.")
    return ["celery_strategies", *(module.name for module in found)]


def test_it_comes_from_where_it_should() -> None:
    """From this environment's own packages, or, in a development install, from beside the tests."""
    package = importlib.import_module("celery_strategies")
    place = sys.prefix if FROM_WHEEL else Path(__file__).resolve().parents[2]
    assert Path(package.__file__ or "").is_relative_to(place)


def test_the_version_is_one() -> None:
    package = importlib.import_module("celery_strategies")
    assert importlib.metadata.version(DISTRIBUTION) == package.__version__


@pytest.mark.parametrize("name", modules())
def test_every_module_imports(tmp_path: Path, name: str) -> None:
    done = run(tmp_path, sys.executable, "-c", f"import {name}")
    assert done.returncode == 0, done.stderr


def test_public_names_exist() -> None:
    package = importlib.import_module("celery_strategies")
    assert package.__all__
    assert [name for name in package.__all__ if not hasattr(package, name)] == []


def test_it_says_that_it_is_typed() -> None:
    assert importlib.resources.files("celery_strategies").joinpath("py.typed").is_file()


def test_the_scripts_are_there() -> None:
    folder = importlib.resources.files("celery_strategies.store").joinpath("lua")
    scripts = [file for file in folder.iterdir() if file.name.endswith(".lua")]
    assert scripts
    assert all(file.read_text() for file in scripts)


def test_dependencies_are_declared() -> None:
    required = importlib.metadata.requires(DISTRIBUTION) or []
    names = {line.split(";")[0].split(">")[0].strip() for line in required if "extra" not in line}
    assert names == {"celery[redis]", "kombu", "redis", "click", "rich"}


def test_the_licence_is_shipped() -> None:
    metadata = importlib.metadata.metadata(DISTRIBUTION)
    assert "BSD-3-Clause" in (metadata.get("License-Expression") or metadata.get("License") or "")
    files = importlib.metadata.files(DISTRIBUTION) or []
    assert not FROM_WHEEL or [file for file in files if file.name == "LICENSE"]


def test_nothing_but_the_package_is_installed() -> None:
    files = importlib.metadata.files(DISTRIBUTION) or []
    assert not FROM_WHEEL or {
        file.parts[0] for file in files if not file.parts[0].endswith(".dist-info")
    } == {"celery_strategies"}


def test_celery_knows_the_command(tmp_path: Path) -> None:
    (entry,) = importlib.metadata.entry_points(group="celery.commands", name="strategies")
    assert entry.value == "celery_strategies.cli:strategies"
    entry.load()
    done = celery(tmp_path, "--help")
    assert done.returncode == 0, done.stderr
    assert "strategies" in done.stdout


def test_celery_knows_the_pool_from_a_clean_shell(tmp_path: Path) -> None:
    done = celery(tmp_path, "worker", "--help")
    assert done.returncode == 0, done.stderr
    assert "strategies" in done.stdout
    assert "--strategy" in done.stdout

"""What is compared: each variant is a way to start the same Celery application.

``stock``      Celery with the package hidden, as if it were not installed
``ours``       ``-P strategies``
``fair``       ``-P strategies`` with fair share, by the headers of the messages
``installed``  a stock worker in an environment that has the package (should cost nothing)
"""

import dataclasses
import importlib.metadata
import pathlib
import sys

NAMES = ("stock", "ours", "fair", "installed")


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to start a worker, and its column."""

    name: str
    label: str  # column title; differs from name only when one name is given twice
    extra: tuple = ()  # settings of `ours` from --set

    @property
    def is_ours(self):
        """Say whether this variant reads with the package."""
        return self.name in ("ours", "fair")

    def program(self):
        """Return the start of the command line that runs ``celery``."""
        if self.name == "stock":
            return [sys.executable, str(workload_dir() / "stock_celery.py")]
        return [sys.executable, "-m", "celery"]

    def pool(self, inner):
        """Return the ``-P`` value and the settings that give the *inner* pool."""
        if not self.is_ours:
            return inner, {}
        return "strategies", {
            "strategies_pool": inner,
            "imports": ["celery_strategies"],
            **({"strategies_fair_share": True} if self.name == "fair" else {}),
            **dict(self.extra),
        }


def workload_dir():
    return pathlib.Path(__file__).resolve().parent.parent / "workload"


def parse(text, extra=()):
    """Turn ``stock,ours`` into variants; a repeated name is numbered."""
    extra = tuple(extra)
    variants = []
    for name in text.split(","):
        if name not in NAMES:
            raise SystemExit(f"unknown variant {name!r}: choose from {', '.join(NAMES)}")
        seen = sum(v.name == name for v in variants)
        variants.append(Variant(name, f"{name}#{seen + 1}" if seen else name, extra))
    if any(v.name != "stock" for v in variants) and not _installed():
        raise SystemExit(
            "celery_strategies is not installed in this environment "
            f"({sys.prefix}).\nInstall it first, from the folder above benchmarks/:\n"
            f"    {sys.executable} -m pip install -e . psutil hiredis"
        )
    return variants


def _installed():
    """Say whether the `celery` command of this environment knows the package."""
    points = importlib.metadata.entry_points(group="celery.commands")
    return any(point.value.startswith("celery_strategies") for point in points)

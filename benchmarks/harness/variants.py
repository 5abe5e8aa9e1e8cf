"""What is compared: each variant is a way to start the same Celery application.

``stock``      Celery with the package hidden, as if it were not installed
``ours``       ``-P strategies``
``installed``  a stock worker in an environment that has the package (should cost nothing)
"""

import dataclasses
import importlib.util
import os
import sys

NAMES = ("stock", "ours", "installed")


@dataclasses.dataclass(frozen=True)
class Variant:
    name: str
    label: str  # column title; differs from name only when one name is given twice
    extra: tuple = ()  # settings of `ours` from --set

    @property
    def is_ours(self):
        return self.name == "ours"

    def program(self):
        """Return the start of the command line that runs ``celery``."""
        if self.name == "stock":
            return [sys.executable, os.path.join(workload_dir(), "stock_celery.py")]
        return [sys.executable, "-m", "celery"]

    def pool(self, inner):
        """Return the ``-P`` value and the settings that give the *inner* pool."""
        if not self.is_ours:
            return inner, {}
        return "strategies", {
            "strategies_pool": inner,
            "imports": ["celery_strategies"],
            **dict(self.extra),
        }


def workload_dir():
    here = os.path.dirname(os.path.abspath(__file__))
    return os.path.join(os.path.dirname(here), "workload")


def parse(text, extra=()):
    """Turn ``stock,ours`` into variants; a repeated name is numbered."""
    variants = []
    for name in text.split(","):
        if name not in NAMES:
            raise SystemExit(f"unknown variant {name!r}: choose from {', '.join(NAMES)}")
        seen = sum(v.name == name for v in variants)
        variants.append(Variant(name, f"{name}#{seen + 1}" if seen else name, tuple(extra)))
    if any(v.name != "stock" for v in variants) and not importlib.util.find_spec(
        "celery_strategies"
    ):
        raise SystemExit(
            "celery_strategies is not installed in this environment "
            f"({sys.prefix}).\nInstall it first, from the folder above benchmarks/:\n"
            f"    {sys.executable} -m pip install -e . psutil hiredis"
        )
    return variants

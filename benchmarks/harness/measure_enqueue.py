"""Enqueue rate of a plain producer process, without and with celery_strategies imported.

``stock`` is the plain producer; any other variant imports the package first.
"""

import subprocess
import sys
import tempfile

from .fleet import RunError, environment
from .rounds import alternate
from .server import RedisServer
from .tables import Bar, Table


def run(plan):
    table = Table("Enqueue rate", "apply_async of a no-op from one process, no worker.")
    jobs = 3000 if plan.quick else 8000
    bar = Bar(0.95)

    def measure(variant):
        plugin = ["--plugin"] if variant.is_ours else []
        with (
            RedisServer(plan.redis_server) as server,
            tempfile.TemporaryDirectory(prefix="bench-producer-") as folder,
        ):
            settings = dict(variant.extra) if variant.is_ours else {}
            env = environment(server, folder, settings)
            producer = f"{env['PYTHONPATH']}/producer.py"
            done = subprocess.run(
                [sys.executable, producer, str(jobs), *plugin],
                env=env,
                cwd=folder,
                check=False,
                capture_output=True,
                text=True,
                timeout=120,
            )
            if done.returncode:
                raise RunError(f"producer ended with {done.returncode}\n{done.stderr[-1500:]}")
            queued = server.client.llen("celery")
            if queued != jobs + 50:
                raise RunError(f"{queued} messages queued of {jobs + 50}")
        table.row("apply_async", "jobs/s", bar).add(variant.label, float(done.stdout))

    alternate(table, "enqueue", plan.variants, plan.rounds, measure)
    return [table]

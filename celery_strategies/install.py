"""Make a process ours: transports, the ``-P strategies`` name, and the task sender.

Owns every change to what belongs to Celery and Kombu, in one place:

* ``kombu.transport.TRANSPORT_ALIASES``: our transports behind the Redis names (an extension point);
* ``celery.concurrency.ALIASES`` and the ``--pool`` choices of ``celery worker``, which are frozen before any plugin
  loads (the second is the only way in);
* the ``worker_init`` signal (an extension point);
* ``celery.app.amqp.AMQP._create_task_sender``, the one declared patch: ``before_task_publish`` swallows exceptions and
  ``Celery.amqp_cls`` is copied when an app is made, so nothing else can change or fail a publish in every app.
"""

from __future__ import annotations

import sys
from typing import Any

import kombu.transport
from celery import concurrency, signals
from celery._state import _get_active_apps
from celery.app.amqp import AMQP

from celery_strategies.publish.sender import wrap
from celery_strategies.worker import boot, pool

_TRANSPORTS = {
    "redis": "celery_strategies.transport.redis:Transport",
    "rediss": "celery_strategies.transport.redis:Transport",
    "sentinel": "celery_strategies.transport.redis:SentinelTransport",
    "rediscluster": "celery_strategies.transport.redis:ClusterTransport",
    "redis-cluster": "celery_strategies.transport.redis:ClusterTransport",
    "rediss-cluster": "celery_strategies.transport.redis:ClusterTransport",
}

_installed = False


def install() -> None:
    """Install once; calling it again does nothing."""
    global _installed  # noqa: PLW0603  # a process is installed or it is not
    if _installed:
        return
    _install_transports()
    _install_pool()
    signals.worker_init.connect(boot.prepare, weak=False, dispatch_uid="celery_strategies")
    signals.worker_ready.connect(
        lambda sender, **_: boot.warn_unused(sender.controller),
        weak=False,
        dispatch_uid="celery_strategies",
    )
    _install_sender()
    _installed = True


def _install_transports() -> None:
    for alias, path in _TRANSPORTS.items():
        kombu.transport.TRANSPORT_ALIASES[alias] = path
        # A connection made before us may have had the alias resolved already.
        kombu.transport._transport_cache.pop(alias, None)


def _install_pool() -> None:
    concurrency.ALIASES[pool.NAME] = "celery_strategies.worker.pool:TaskPool"
    # A producer has no use for Celery's command line.
    if "celery.bin.worker" in sys.modules:
        offer_pool()


def offer_pool() -> None:
    """Make ``strategies`` one of the ``--pool`` choices of ``celery worker``."""
    from celery.bin.worker import WORKERS_POOL

    if pool.NAME not in WORKERS_POOL.choices:
        WORKERS_POOL.choices = (*WORKERS_POOL.choices, pool.NAME)


def _install_sender() -> None:
    create = AMQP._create_task_sender

    def _create_task_sender(self: Any) -> Any:
        return wrap(self, create(self))

    AMQP._create_task_sender = _create_task_sender
    for app in _get_active_apps():
        # An app that has published before us has its sender cached.
        amqp = app.__dict__.get("amqp")
        if amqp is not None:
            amqp.__dict__.pop("send_task_message", None)

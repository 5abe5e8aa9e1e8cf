"""An event bus: publish to a topic, and every queue whose handler asked for it gets a copy.

A handler is a Celery task that reads one queue of its own. What it shares with other tasks it has from Celery (retries,
late acknowledgement, time limits, monitoring) and from this package (strategies, ranks, levels, fair share).
"""

from __future__ import annotations

from celery_strategies.events.bus import EventBus
from celery_strategies.events.model import EVENT_TASK, Event, UnroutableEvent

__all__ = ("EVENT_TASK", "Event", "EventBus", "UnroutableEvent")

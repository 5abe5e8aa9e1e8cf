"""Put headers on the errbacks inside a message.

An errback that the worker's parent process publishes (after a hard time limit, or when a process died) has no running
task to take a key from. So it gets its headers along with the task that it belongs to. The caller's signatures may be
published again, for another key: what is changed is copied first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kombu.utils.functional import maybe_list


def mark_errbacks(embed: dict[str, Any], headers: Mapping[str, Any]) -> None:
    """Put *headers* on all errbacks that the failure of a task can cause, where they say nothing of the kind.

    *embed* is the part of a task message with its callbacks. These are the task's own errbacks, those of the chord that
    it is part of, and those of the chord that the rest of its chain is part of.
    """
    if embed.get("errbacks"):
        embed["errbacks"] = [_marked(errback, headers) for errback in maybe_list(embed["errbacks"])]
    if embed.get("chord"):
        embed["chord"] = _with_marked_errbacks(embed["chord"], headers)
    if embed.get("chain"):
        embed["chain"] = [_with_marked_chord(step, headers) for step in embed["chain"]]


def _marked(signature: Any, headers: Mapping[str, Any]) -> Any:
    """Return *signature* with *headers* on every task that it publishes when it is called."""
    parts = signature.get("kwargs") or {}
    match signature.get("subtask_type"):
        case "group":
            tasks = [_marked(task, headers) for task in parts["tasks"]]
        case "chain":
            first, *rest = parts["tasks"]
            tasks = [_marked(first, headers), *rest]
        case "chord":
            header = parts["header"]
            if isinstance(header, Mapping):
                header = _marked(header, headers)
            else:
                header = [_marked(task, headers) for task in header]
            return {**signature, "kwargs": {**parts, "header": header}}
        case _:
            options = signature.get("options") or {}
            own = {**headers, **(options.get("headers") or {})}
            return {**signature, "options": {**options, "headers": own}}
    return {**signature, "kwargs": {**parts, "tasks": tasks}}


def _with_marked_chord(step: Any, headers: Mapping[str, Any]) -> Any:
    options = step.get("options") or {}
    if not options.get("chord"):
        return step
    chord = _with_marked_errbacks(options["chord"], headers)
    return {**step, "options": {**options, "chord": chord}}


def _with_marked_errbacks(signature: Any, headers: Mapping[str, Any]) -> Any:
    """Return *signature* with *headers* on its errbacks, and on those of the tasks that it stands for."""
    options, parts = signature.get("options") or {}, signature.get("kwargs") or {}
    if options.get("link_error"):
        marked = [_marked(errback, headers) for errback in maybe_list(options["link_error"])]
        signature = {**signature, "options": {**options, "link_error": marked}}
    kind = signature.get("subtask_type")
    if kind == "group":
        tasks = [_with_marked_errbacks(task, headers) for task in parts["tasks"]]
        signature = {**signature, "kwargs": {**parts, "tasks": tasks}}
    elif kind == "chord" and parts.get("body"):
        body = _with_marked_errbacks(parts["body"], headers)
        signature = {**signature, "kwargs": {**parts, "body": body}}
    return signature

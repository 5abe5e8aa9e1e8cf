"""Which key, and which weight, a published task carries in its headers.

A key comes, first of all, from the headers of the publish; then from the callable of the settings; then from the task
that runs here and publishes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from celery import Celery
from celery._state import _task_stack  # type: ignore[attr-defined]

from celery_strategies.core.tags import (
    UNKEYED,
    Tag,
    Unkeyed,
    check_weight,
    heed,
    read_key,
    read_tag,
)
from celery_strategies.errors import FairShareError, one_line
from celery_strategies.publish.errbacks import mark_errbacks
from celery_strategies.settings import Settings, Tagger


@dataclass(frozen=True)
class Publication:
    """Describe one message that is about to be published: what ``strategies_fair_share`` is called with.

    ``args`` and ``kwargs`` are the task's own; leave them as they are. ``queue`` is None for a publish to an exchange.
    ``headers`` are those that the publish names, without Celery's.
    """

    task: str
    id: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    queue: str | None
    priority: int | None
    headers: Mapping[str, Any]
    app: Celery


@dataclass(frozen=True)
class Marker:
    """Put one kind of key into the headers of what is published.

    ``weight_header`` is "" for a key without a weight. Without a ``tagger`` only the headers of the publish and the
    running task have a say. ``read`` raises ValueError for what a tagger must not return.
    """

    setting: str
    key_header: str
    weight_header: str
    tagger: Tagger | None
    read: Callable[[object], Tag]

    def mark(
        self, app: Celery, producer: Any, name: str, message: Any, options: dict[str, Any]
    ) -> None:
        """Make *options*, those of the publish of *message*, carry key and weight.

        Raises what the callable raises, and FairShareError for a wrong key or weight.
        """
        given: Mapping[str, Any] = options.get("headers") or {}
        body = message[2]
        if isinstance(body, dict):  # protocol 1
            fields, args, kwargs, embed = body, body["args"], body["kwargs"], body
        else:
            fields, (args, kwargs, embed) = message[0], body
        if fields["retries"]:
            # The same job once more. It keeps what it has, right or wrong, and nobody is asked: an
            # exception would be its end, since Celery rejects a task whose retry is not published.
            tag = self._kept(given)
        else:
            key, weight = self._explicit(name, given)
            tag = Tag(key)
            if key is None and self.tagger is not None:
                publication = Publication(
                    task=name,
                    id=fields["id"],
                    args=args,
                    kwargs=kwargs,
                    queue=_queue(app, options),
                    priority=options.get("priority"),
                    headers=MappingProxyType(given),
                    app=app,
                )
                tag = self._asked(self.tagger, publication, producer)
            if tag.key is None:
                tag = self._inherited()
            if weight is not None:
                tag = tag._replace(weight=weight)

        ours = self._written(tag)
        if ours or self.key_header in given or self.weight_header in given:
            options["headers"] = self._merged(given, ours)
        if self.key_header in ours:
            mark_errbacks(embed, ours)

    def _kept(self, given: Mapping[str, Any]) -> Tag:
        """Return what a retry has: Celery copies the headers, unless the user names others."""
        if self.key_header in given:
            return heed(given[self.key_header], given.get(self.weight_header))
        return self._inherited()

    def _explicit(
        self, name: str, given: Mapping[str, Any]
    ) -> tuple[str | Unkeyed | None, float | None]:
        """Return what the publish itself names. A key that is None there is none on purpose."""
        header = self.key_header
        try:
            key = (read_key(given[header]) or UNKEYED) if header in given else None
            header = self.weight_header
            weight = given.get(header)
            return key, None if weight is None else check_weight(weight)
        except ValueError as error:
            shown = one_line(repr(given[header]))
            raise FairShareError(f"header {header} = {shown} of task {name}: {error}") from None

    def _asked(self, tagger: Tagger, publication: Publication, producer: Any) -> Tag:
        """Return what the callable says."""
        try:
            returned = tagger(publication)
        except producer.connection.recoverable_connection_errors as error:
            # Kombu, around us, would take a KeyError or an OSError for a lost connection.
            what = one_line(f"raised {error!r}")
            raise FairShareError(f"{self.setting} {what} for task {publication.task}") from error
        try:
            return self.read(returned)
        except ValueError as error:
            what = f"returned {one_line(repr(returned))}"
            raise FairShareError(
                f"{self.setting} {what} for task {publication.task}: {error}"
            ) from None

    def _inherited(self) -> Tag:
        """Return what the task that runs here hands down."""
        for request in _running():
            key = _header(request, self.key_header)
            if key is not None:
                tag = heed(key, _header(request, self.weight_header))
                return tag if tag.key is not None else Tag(None)
        return Tag(None)

    def _written(self, tag: Tag) -> dict[str, Any]:
        """Return the headers that say *tag*."""
        headers: dict[str, Any] = {}
        if isinstance(tag.key, str):
            headers[self.key_header] = tag.key
        if tag.weight != 1 and self.weight_header:
            headers[self.weight_header] = tag.weight
        return headers

    def _merged(self, given: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
        merged = dict(given)
        merged.pop(self.key_header, None)
        merged.pop(self.weight_header, None)
        # Tracing tools put headers into a second dict inside the headers, and where there is one,
        # that is all that Celery copies when it retries.
        inner = merged.get("headers")
        if ours and isinstance(inner, Mapping):
            merged["headers"] = {**inner, **ours}
        return {**merged, **ours}


def markers(settings: Settings) -> tuple[Marker, ...]:
    """Return what is marked under *settings*; imports what they name."""
    found = []
    if settings.fair:
        headers = (settings.fair_key_header, settings.fair_weight_header)
        tagger = settings.tagger("fair_share")
        found.append(Marker("strategies_fair_share", *headers, tagger, read_tag))
    if settings.group_mode is not None or settings.group_key is not None:
        header, tagger = settings.group_key_header, settings.tagger("group_key")
        found.append(Marker("strategies_group_key", header, "", tagger, _read_group))
    return tuple(found)


def _read_group(returned: object) -> Tag:
    return Tag(read_key(returned))


def _queue(app: Any, options: Mapping[str, Any]) -> str | None:
    # A publish to an exchange names the default queue too: Celery's router fills it in.
    if options.get("exchange") and options.get("routing_key"):
        return None
    queue = options.get("queue") or app.conf.task_default_queue
    return queue if isinstance(queue, str) else queue.name


def _running() -> Iterator[Any]:
    """Yield the requests of the tasks that run in this thread, from the inside out, to the one that a worker got.

    Tasks that were only called as functions have no headers; one that was applied eagerly need not have any.
    """
    for task in reversed(_task_stack.stack):
        for request in reversed(task.request_stack.stack):
            if not request.called_directly:
                yield request
                if not request.is_eager:
                    return


def _header(request: Any, name: str) -> Any:
    # Protocol 2 keeps the headers of a message beside each other in the request, protocol 1 in a
    # dict of their own.
    value = vars(request).get(name)
    if value is None and isinstance(request.headers, Mapping):
        value = request.headers.get(name)
    return value

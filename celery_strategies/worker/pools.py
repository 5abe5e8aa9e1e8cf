"""What a strategies worker needs from the pools it did not write.

Owns the wrap around ``apply_async`` that wakes the reader when a slot frees, and the careful version of
``AsynPool.flush``. Touches no message.
"""

from __future__ import annotations

from collections.abc import Callable
from time import sleep
from typing import Any

from celery.concurrency.prefork import TaskPool as Prefork
from celery.concurrency.solo import TaskPool as Solo
from celery.worker import state

#: What a message of the wrong shape raises, as against a broker, a backend or a pool that fails.
DATA_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)

#: What green pools report of a job whose greenlet was killed: not failed, no result, no run time.
KILLED = (False, None, None)


def watch_slots(
    pool: Any,
    wake: Callable[[], None],
    flush: Callable[[], None],
    *,
    in_loop: bool,
    blocks: Callable[[bool], None] = lambda _blocked: None,
) -> None:
    """Have *pool* call *wake* whenever a job ends, and *flush* before a job that will block the loop.

    *blocks* is told when such a job begins and ends.

    *in_loop* says that the pool's callbacks run in the loop itself, where no wake is needed. Must run before
    ``Consumer.update_strategies``, which captures the bound method. ``task_postrun`` would be too early: Celery
    frees the slot in the pool's callback, after it.
    """
    apply_async = pool.apply_async
    if isinstance(pool, Solo):

        def blocking(
            target: Any,
            args: Any = None,
            kwargs: Any = None,
            accept_callback: Any = None,
            **options: Any,
        ) -> Any:
            def accepted(pid: int, time_accepted: float) -> None:
                accept_callback(pid, time_accepted)
                flush()

            blocks(True)
            try:
                return apply_async(
                    target, args, kwargs, accept_callback=accept_callback and accepted, **options
                )
            finally:
                blocks(False)

        pool.apply_async = blocking
    elif not in_loop:

        def after(callback: Callable[..., Any] | None) -> Callable[..., Any] | None:
            if callback is None:
                return None

            def call(*args: Any, **kwargs: Any) -> Any:
                try:
                    if args == (KILLED,):
                        # Celery takes it for a success and acknowledges; whoever killed it has told the rest.
                        return None
                    return callback(*args, **kwargs)
                finally:
                    wake()

            return call

        def watched(
            target: Any,
            args: Any = None,
            kwargs: Any = None,
            callback: Any = None,
            error_callback: Any = None,
            timeout_callback: Any = None,
            **options: Any,
        ) -> Any:
            return apply_async(
                target,
                args,
                kwargs,
                callback=after(callback),
                error_callback=after(error_callback),
                timeout_callback=after(timeout_callback),
                **options,
            )

        pool.apply_async = watched


def works_on(pool: Any, request: Any) -> bool:
    """Whether a child process of *pool* still works on *request*.

    Celery is done with a request that it terminates as soon as the signal is sent; its child may take longer to go.
    """
    if not isinstance(pool, Prefork) or request._apply_result is None:
        return False
    result = request._apply_result()
    return result is not None and not result.ready()


def guard_starts(
    controller: Any,
    unfit: Callable[[Any, Exception], None],
    starting: Callable[[Any], bool] = lambda _request: True,
) -> Callable[[Any], Any]:
    """Hand a request that cannot even be given to the pool to *unfit*; return what starts a request.

    *starting* is asked about each request before it is given to the pool; False drops it, and frees its slot.

    Its message has a shape that nobody foresaw (time limits, stamps): the error would end the loop,
    and the message, back at the head of its queue, the next worker's loop.
    """
    process = controller._process_task

    def start(request: Any) -> Any:
        try:
            for limit in request.time_limits:
                if limit is not None and not isinstance(limit, (int, float)):
                    raise TypeError(f"a time limit is {limit!r}")
            if not starting(request):
                state.task_ready(request)
                if hasattr(controller, "_quick_release"):
                    controller._quick_release()
                return None
            return process(request)
        except DATA_ERRORS as exc:
            if request.time_start is not None or request._apply_result is not None:
                raise
            unfit(request, exc)
            if hasattr(controller, "_quick_release"):
                controller._quick_release()

    # With a semaphore the controller looks it up for each request, else it has been handed out.
    controller._process_task = start
    return start


def finish_writes(pool: Any) -> None:
    """Complete what is half written to child processes, and keep everything else as it is.

    After a lost broker connection Celery's own flush throws away the jobs that no child has accepted yet, since the
    broker redelivers them. Ours are still ours: one whose bytes may be in a pipe counts as started, one that was
    not begun goes back to the head of the outbound buffer.
    """
    asyn = getattr(pool, "_pool", None)
    writers = getattr(asyn, "_active_writers", None)
    if asyn is None or writers is None:
        return
    jobs = {}
    for job in tuple(asyn._cache.values()):
        writer = getattr(job, "_writer", None)
        generator = writer() if callable(writer) else None
        if generator is not None:
            jobs[generator] = job
    for generator in list(writers):
        job = jobs.get(generator)
        if generator.gi_frame is not None and generator.gi_frame.f_lasti == -1 and job is not None:
            writers.discard(generator)
            asyn.outbound_buffer.appendleft(job)
        elif job is not None and job._write_to is not None and job._write_to._is_alive():
            asyn._flush_writer(job._write_to, generator)
        else:
            while generator in writers and _advance(generator):
                sleep(0.01)
            writers.discard(generator)
    asyn._active_writes.clear()


def _advance(generator: Any) -> bool:
    try:
        next(generator)
    except (StopIteration, OSError, EOFError):
        return False
    return True


def drop_unwritten(pool: Any) -> None:
    """Forget jobs that were never written to a child, so that a warm shutdown does not wait for them for ever."""
    asyn = getattr(pool, "_pool", None)
    if asyn is None or getattr(asyn, "outbound_buffer", None) is None:
        return
    finish_writes(pool)
    while asyn.outbound_buffer:
        asyn.outbound_buffer.popleft().discard()

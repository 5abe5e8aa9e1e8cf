# ruff: noqa: PLC0415 (what to hide must be hidden before Celery is imported)
"""Boot many workers quickly: import Celery once, then fork each worker before it starts.

``python herd.py N [--stock] -- <celery arguments>``; ``%i`` in an argument becomes the
worker's number. Nothing is connected and no thread runs before the forks, so each child
is an ordinary ``celery worker``. SIGTERM to the herd is passed on to all of them.
"""

import gc
import os
import signal
import sys
import time


def main(argv):
    split = argv.index("--")
    own, arguments = argv[:split], argv[split + 1 :]
    if "--stock" in own:
        from stock_celery import hide_package

        hide_package()
    import celery.apps.worker
    import celery.bin.celery
    import celery.concurrency.solo
    import celery.worker.consumer
    import kombu.transport.redis  # noqa: F401

    gc.collect()
    gc.freeze()
    children = []
    signal.signal(signal.SIGTERM, lambda *_: [os.kill(pid, signal.SIGTERM) for pid in children])
    for number in range(int(own[0])):
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            sys.argv = ["celery"] + [a.replace("%i", str(number)) for a in arguments]
            code = 1
            try:
                celery.bin.celery.main()
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(pid)
        time.sleep(0.05)
    while children:
        pid, _ = os.wait()
        children.remove(pid)


if __name__ == "__main__":
    main(sys.argv[1:])

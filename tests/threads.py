"""Work of several threads at once, switched as often as the interpreter can."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence


def run_together(works: Sequence[Callable[[], object]]) -> None:
    """Run each in a thread of its own; what one of them raises is raised here."""
    failed: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    if failed:
        raise failed[0]

"""Comparisons that prepare side by side and are timed one after the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

STOP_S = 15  # for a comparison that was stopped to write what it has


class Closable(Protocol):
    """A worker of a comparison, as far as turns know it."""

    def close(self) -> None:
        """End it if it still runs."""


class Turns:
    """A turn for each of ``count`` comparisons, which need ``needed_bytes`` of the device; none begins before all are ready, or have given up."""

    def __init__(self, count: int = 1, needed_bytes: float = 0):
        self._preparing, self.needed_bytes, self.stopped = count, needed_bytes, False
        self._changed, self._timing = threading.Condition(), threading.Lock()
        self._workers: list[Sequence[Closable]] = []

    def watch(self, workers: Sequence[Closable]) -> None:
        """Workers that ``stop`` has to end; the list may grow afterwards."""
        self._workers.append(workers)

    def give_up(self) -> None:
        """A comparison that will not ask for its turn."""
        with self._changed:
            self._preparing -= 1
            self._changed.notify_all()

    @contextmanager
    def take(self) -> Iterator[None]:
        """Wait until everyone is ready, then for one's turn."""
        with self._changed:
            self._preparing -= 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._preparing <= 0)
        with self.alone():
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A moment at which no other comparison is timed."""
        with self._timing:
            yield

    def stop(self) -> None:
        """End every worker: the comparisons then fail, and nobody waits for them."""
        self.stopped = True
        for worker in [w for workers in self._workers for w in workers]:
            worker.close()
        with self._changed:
            self._preparing = 0
            self._changed.notify_all()


def together(work: Sequence[Any], turns: Turns) -> list[Any]:
    """Results of callables, each in a thread; the first error is raised after all have ended."""
    results: list[Any] = [None] * len(work)
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            results[i] = work[i]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(work))]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:  # Ctrl-C reaches this thread alone
        turns.stop()
        for thread in threads:  # what was measured by then is written
            thread.join(STOP_S)
        raise
    if errors:
        raise errors[0]
    return results

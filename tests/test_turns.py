"""Comparisons side by side: none is timed before all are ready, and never two at once."""

from __future__ import annotations

import threading
import time

import pytest

from compare.turns import Turns, together


def test_everyone_is_ready_before_anyone_is_timed_and_none_beside_another():
    turns, events = Turns(4), []

    def one(i: int):
        def run() -> int:
            time.sleep(0.02 * i)
            events.append(("ready", i))
            with turns.take():
                events.append(("begin", i))
                time.sleep(0.01)
                events.append(("end", i))
            return i

        return run

    assert together([one(i) for i in range(4)], turns) == [0, 1, 2, 3]
    assert {event for event, _ in events[:4]} == {"ready"}
    assert [event for event, _ in events[4:]] == ["begin", "end"] * 4
    assert all(events[4 + 2 * i][1] == events[5 + 2 * i][1] for i in range(4))


def test_one_that_fails_keeps_nobody_waiting():
    turns, timed = Turns(3), []

    def fails() -> None:
        turns.give_up()
        raise ValueError("no reference")

    def works() -> None:
        with turns.take():
            timed.append(1)

    with pytest.raises(ValueError, match="no reference"):
        together([works, fails, works], turns)
    assert timed == [1, 1]


def test_an_interruption_ends_all_workers(monkeypatch):
    """Ctrl-C reaches the main thread alone, while others wait for their workers."""
    turns, closed = Turns(2), threading.Event()

    class Worker:
        def close(self) -> None:
            closed.set()

    def waits() -> None:
        turns.watch([Worker()])
        assert closed.wait(20)

    def interrupted(self, timeout=None) -> None:
        time.sleep(0.05)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        together([waits, waits], turns)
    assert closed.is_set()

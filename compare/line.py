"""The line between a comparison and its workers: events go up, words to go on come down.

A worker prepares beside the others, says so, and waits for its turn: nothing else runs on the
machine while it is timed.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

log = logging.getLogger(__name__)


class Line:
    """A worker's end. Whatever else the process prints goes to stderr from here on."""

    def __init__(self, up: TextIO, down: TextIO):
        self._up, self._down = up, down

    @classmethod
    def of_this_process(cls) -> Line:
        up = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        return cls(up, sys.stdin)

    def say(self, event: str, note: str = "") -> None:
        try:
            print(json.dumps({"event": event, "note": note, "at": time.time()}), file=self._up, flush=True)
        except BrokenPipeError:  # nobody listens: go no further
            sys.exit(1)

    def wait(self, word: str) -> None:
        """Return when told ``word``; exit if the comparison is gone or says something else."""
        if self._down.readline().strip() != word:
            sys.exit(1)


class Worker:
    """A comparison's end: one running ``compare.worker``."""

    def __init__(self, job: Mapping[str, Any], folder: Path, environ: Mapping[str, str]):
        self.name, self._started, self._ready = job["framework"], time.time(), False
        self._out = folder / f"{self.name}.json"
        job_file, self._errors = folder / f"{self.name}.job.json", folder / f"{self.name}.stderr"
        job_file.write_text(json.dumps({**job, "out": str(self._out)}))
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "compare.worker", str(job_file)], env=dict(environ), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def hear(self, event: str) -> bool:
        """Wait for an event; what comes before it is logged. False if the worker ended instead."""
        for line in self._process.stdout:
            said = json.loads(line)
            log.info("%s: %s after %.1f s", self.name, said["note"] or said["event"], said["at"] - self._started)
            if said["event"] == event:
                return True
        return False

    def ready(self) -> None:
        """Wait until it is ready to be timed, or has ended."""
        if not self._ready:
            self._ready = True
            self.hear("ready")

    def tell(self, word: str) -> None:
        try:
            self._process.stdin.write(word + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:  # it has ended: result() says why
            pass

    def result(self) -> list[dict[str, Any]] | str:
        """Wait for the end: what it measured, or why it did not."""
        self.hear("end")  # which none says: whatever it still says is logged
        code = self._process.wait()
        self.close()
        if code == 0 and self._out.exists():
            return json.loads(self._out.read_text())
        lines = [line for line in self._errors.read_text(errors="replace").splitlines() if line.strip()]
        return f"the {self.name} worker ended with code {code}: {lines[-1] if lines else 'no message'}"

    def close(self) -> None:
        """End it if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        with suppress(BrokenPipeError):  # a word that it never read
            self._process.stdin.close()
        self._process.stdout.close()

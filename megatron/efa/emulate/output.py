"""Following logs: what some ranks write is shown as they write it."""

import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO


class LogFollower:
    """Shows new lines of several logs, each line as often as the log that has it most often.

    Most ranks print the same warnings; a line that one log has shown is not shown again for
    another.
    """

    def __init__(self, logs: Mapping[Path, str], out: TextIO | None = None) -> None:
        """`logs` maps each file (which need not exist yet) to a label for its lines."""
        self._labels = dict(logs)
        self.paths = frozenset(self._labels)
        self._out = sys.stdout if out is None else out
        self._position = dict.fromkeys(self._labels, 0)
        self._partial = dict.fromkeys(self._labels, b"")
        self._had = {path: Counter[int]() for path in self._labels}
        self._shown = Counter[int]()

    def poll(self, final: bool = False) -> None:
        """Show what came since the last call; with `final` also a last line without its end."""
        for path in self._labels:
            try:
                with open(path, "rb") as log:
                    log.seek(self._position[path])
                    fresh = log.read()
            except FileNotFoundError:
                continue
            self._position[path] += len(fresh)
            *lines, self._partial[path] = (self._partial[path] + fresh).split(b"\n")
            if final and self._partial[path]:
                lines.append(self._partial[path])
                self._partial[path] = b""
            for line in lines:
                self._show(path, line)
        self._out.flush()

    def _show(self, path: Path, line: bytes) -> None:
        key = hash(line)
        self._had[path][key] += 1
        if self._had[path][key] > self._shown[key] or self._labels[path]:
            self._shown[key] += 1
            print(self._labels[path] + line.decode(errors="replace"), file=self._out)


def tail(log: Path, lines: int = 20) -> str:
    """The last lines of a log, or nothing if it was never written."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - 200 * lines))
            return b"\n".join(file.read().splitlines()[-lines:]).decode(errors="replace")
    except FileNotFoundError:
        return ""

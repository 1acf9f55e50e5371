"""What a benchmark leaves behind: a table on the terminal, records as JSON, a figure as PNG.

out = report.Folder(args.out, "expert")     # refuses what cannot be written, before the run
...
print(report.table(["dispatcher", "ms"], rows))
out.write_records(records, rate="200mbit")
out.write_figure(draw)                      # draw(plt) makes a matplotlib figure, returns it
"""

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron.efa.errors import EfaError


def machine() -> dict[str, Any]:
    """Facts of this machine that a figure depends on; load is that of the last minute."""
    import torch

    return {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": _cpu_name(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpus": _gpu_names(),
    }


def _gpu_names() -> list[str]:
    """Names of the GPUs, from the driver's tool: a process that forks must not touch CUDA."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return answer.stdout.splitlines() if answer.returncode == 0 else []


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns of text: the first to the left, the others, which are figures, to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )


class Folder:
    """The folder of one run of a benchmark: `NAME.json`, `NAME.png` and the ranks' logs."""

    def __init__(self, path: Path | None, name: str) -> None:
        """`path` None: runs/bench/NAME-TIME. Raises EfaError if the folder cannot be written."""
        stamp = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self.path = Path("runs") / "bench" / stamp if path is None else path
        self.name = name
        self._machine = machine()
        self._start = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EfaError(f"--out {self.path} cannot be made: {error.strerror}") from error
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise EfaError(f"--out {self.path} is not writable: choose another folder")
        self.drawing = _matplotlib() is not None
        if not self.drawing:
            print(
                "megatron-efa: matplotlib is not installed, so no PNG will be drawn: "
                "pip install 'megatron-efa[bench]'",
                file=sys.stderr,
            )

    def write_records(self, records: Sequence[dict[str, Any]], **common: Any) -> Path:
        """Write `NAME.json`: when, how and on what it ran, `common`, and the records."""
        content = {
            "benchmark": self.name,
            "command": shlex.join(["megatron-efa", *sys.argv[1:]]),
            "start": self._start,
            "machine": self._machine,
            **common,
            "records": list(records),
        }
        path = self.path / f"{self.name}.json"
        self._aside(path, lambda aside: aside.write_text(json.dumps(content, indent=1) + "\n"))
        return path

    def write_figure(self, draw: Callable[[Any], Any]) -> Path | None:
        """Write `NAME.png` from the figure that `draw(pyplot)` returns; None without matplotlib."""
        pyplot = _matplotlib()
        if pyplot is None:
            return None
        figure = draw(pyplot)
        path = self.path / f"{self.name}.png"
        self._aside(path, lambda aside: figure.savefig(aside, dpi=130, format="png"))
        pyplot.close(figure)
        return path

    def _aside(self, path: Path, write: Callable[[Path], object]) -> None:
        """Write aside, then rename: whoever reads the file sees all of it."""
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            write(aside)
            aside.replace(path)
        except OSError as error:
            aside.unlink(missing_ok=True)
            raise EfaError(f"{path} cannot be written: {error.strerror}") from error


def _matplotlib() -> Any | None:
    try:
        import matplotlib
    except ModuleNotFoundError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot

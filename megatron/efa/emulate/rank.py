"""The process that torchrun starts for each rank: it runs the training script as its child.

It gives the rank its GPU, writes everything the rank prints to the rank's log, and records how the
rank ended at the moment it ended, which torchrun tells only after it has stopped the others.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from megatron.efa.emulate import kernel, placement


def main() -> None:
    """argv: directory of logs, directory of exit records, command line of the rank."""
    logs, records, command = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    kernel.die_with_parent()
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    for number in (signal.SIGTERM, signal.SIGINT):
        # torchrun signals the process group: the rank has it too, and this process outlives it.
        signal.signal(number, lambda *_: None)
    with open(log_file(logs, rank), "wb") as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=placement.of_rank(os.environ, rank, local_rank),
            preexec_fn=kernel.die_with_parent,  # no thread runs here
        )
    code = child.wait()
    record = {
        "rank": rank,
        "local_rank": local_rank,
        "node": int(os.environ["GROUP_RANK"]),
        "code": code,
        "time": time.monotonic(),  # one clock for all processes of a machine
    }
    aside = records / f".{rank}"
    aside.write_text(json.dumps(record))
    aside.rename(records / f"{rank}.json")
    sys.exit(code if code >= 0 else 128 - code)


def log_file(logs: Path, rank: int) -> Path:
    """Where a rank's output goes."""
    return logs / f"rank{rank}.log"

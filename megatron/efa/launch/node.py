"""The launcher of one node: python -m megatron.efa.launch.node RECORD [--out DIR] [--attempt K].

It finds the node's place among the hosts, starts torchrun with a static rendezvous, asks the ranks
to save when the end is announced, and ends them as soon as a rank anywhere has failed: torchrun
on one node knows nothing of the others.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from megatron.efa.cluster.current import VARIABLE, names_of_host
from megatron.efa.cluster.discover.slurm import expand
from megatron.efa.cluster.place_cli import read_hosts
from megatron.efa.emulate import processes
from megatron.efa.errors import EfaError
from megatron.efa.launch import record

_POLL_S = 0.5
_OTHERS_FAILED = 75  # EX_TEMPFAIL of sysexits.h
PERMANENT = (2, 3, 17)
"""Exit codes after which a restart would fail again: arguments, preflight, wrong results."""


@dataclass(frozen=True)
class Place:
    """Where this node stands in the job."""

    rank: int
    host: str
    address: str
    """Of the first node."""
    port: int


def find(launched: Mapping[str, Any], folder: Path, environ: Mapping[str, str]) -> Place:
    """This node's place: by the attempt's `hosts`, else Slurm's list, else an operator's variables.

    Raises EfaError if none of them has it.
    """
    names = names_of_host()
    port = int(environ.get("PET_MASTER_PORT") or launched["master_port"])
    hosts = read_hosts(folder / "hosts") if (folder / "hosts").is_file() else []
    listed = expand(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""))
    if listed and set(listed) != set(hosts):  # also after HyperPod has replaced a node
        hosts = listed
    if hosts:
        short = {host.split(".")[0]: i for i, host in enumerate(hosts)}
        found = [short[name.split(".")[0]] for name in names if name.split(".")[0] in short]
        if not found:
            raise EfaError(
                f"{names[0]} is not among the hosts of this job ({', '.join(hosts[:4])}, ...): see "
                f"{folder / 'hosts'}, or set MEGATRON_EFA_HOST to its name there"
            )
        address = environ.get("MEGATRON_EFA_MASTER_ADDR") or hosts[0]
        port = int(environ.get("MEGATRON_EFA_MASTER_PORT") or port)
        return Place(found[0], names[0], address, port)
    rank = environ.get("PET_NODE_RANK") or environ.get("RANK")
    address = environ.get("PET_MASTER_ADDR") or environ.get("MASTER_ADDR")
    if rank is None or address is None:
        if launched["nodes"] == 1:
            return Place(0, names[0], "127.0.0.1", port)
        raise EfaError(
            f"{names[0]} does not know its place in the job: start this by Slurm or an operator, "
            f"or put the hosts' names into {folder / 'hosts'}, in rank order"
        )
    return Place(int(rank), names[0], address, port)


class Node:
    """One attempt on this node."""

    def __init__(self, launched: dict[str, Any], config: Path, out: Path, attempt: int) -> None:
        self.launched, self.config, self.out = launched, config, out
        self.folder = out / "attempts" / str(attempt)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.place = find(launched, self.folder, os.environ)
        self.logs = self.folder / f"node-{self.place.rank}"
        self.logs.mkdir(exist_ok=True)
        self.started = _now(self.logs)
        self.asked = False

    def run(self) -> int:
        """Preflight if wanted, then the ranks; returns an exit code, 0 if all went well."""
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._ask)
        if self.launched["preflight"] and (code := self._preflight()):
            return self._fail(code, "preflight")
        report = self.logs / "failure.json"
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "megatron.efa.launch.elastic", str(report)]
        torchrun = subprocess.Popen(
            [*command, *self._arguments()],
            env=self._environment(),
            cwd=self.launched["workdir"],
            start_new_session=True,  # signals for this process are not for torchrun
        )
        code = self._watch(torchrun)
        if code in (0, _OTHERS_FAILED):
            return code
        if not report.is_file():
            return self._fail(code if code > 0 else 128 - code, "torchrun")
        told = json.loads(report.read_text())
        code = told["code"] if told["code"] > 0 else 128 - told["code"]
        return self._fail(code, f"rank-{told['rank']}")

    def _ask(self, number: int, _: object) -> None:
        self.asked = True

    def _arguments(self) -> list[str]:
        """torchrun's, and the training script's."""
        nodes, ranks, place = self.launched["nodes"], self.launched["ranks_per_node"], self.place
        shown = {0} if place.rank == 0 else set()  # where Megatron prints: first and last rank
        shown |= {ranks - 1} if place.rank == nodes - 1 else set()
        tee = ",".join(f"{i}:3" for i in sorted(shown)) or "0"
        script = Path(self.launched["workdir"]) / self.launched["script"]
        return [
            *("--nnodes", str(nodes), "--nproc-per-node", str(ranks)),
            *("--node-rank", str(place.rank), "--master-addr", place.address),
            *("--master-port", str(place.port), "--max-restarts", "0"),
            *("--log-dir", str(self.logs), "--redirects", "3", "--tee", tee),
            *(str(script), "--config", str(self.config)),
        ]

    def _environment(self) -> dict[str, str]:
        env = {**os.environ, **self.launched["environment"], "PYTHONUNBUFFERED": "1"}
        described = self.folder / "cluster.yaml"
        if described.is_file():
            env[VARIABLE] = str(described)
        for name in list(env):  # torchrun would take these for its own arguments
            if name.startswith("PET_"):
                del env[name]
        return env

    def _preflight(self) -> int:
        """`megatron-efa doctor` on this node: 0, or 3 where a check failed."""
        kind = ["--kind", self.launched["kind"]] if self.launched["kind"] else []
        command = [sys.executable, "-m", "megatron.efa", "doctor", "--config", str(self.config)]
        command += [*kind, "--nodes", str(self.launched["nodes"])]
        with open(self.logs / "preflight.log", "wb") as log:
            done = subprocess.run(
                command, env=self._environment(), cwd=self.launched["workdir"],
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        print((self.logs / "preflight.log").read_text(errors="replace"), end="", flush=True)
        return 0 if done.returncode in (0, 1) else done.returncode

    def _watch(self, torchrun: subprocess.Popen) -> int:
        """Wait for the end; returns torchrun's exit code, or that others have failed."""
        told = False
        while torchrun.poll() is None:
            if not told and (self.asked or (self.place.rank == 0 and self._stop())):
                told = True
                for pid in processes.children(torchrun.pid):  # the ranks share what one is told
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)
            if self._others_failed():
                _kill(torchrun)
                return _OTHERS_FAILED
            time.sleep(_POLL_S)
        return torchrun.returncode

    def _stop(self) -> bool:
        return _newer(self.out / "stop", self.started)

    def _others_failed(self) -> bool:
        return any(_newer(file, self.started) for file in self.folder.glob("failed-code-*"))

    def _fail(self, code: int, who: str) -> int:
        (self.folder / f"failed-code-{code}-{who}-on-{self.place.host}").touch()
        return code


def _now(folder: Path) -> float:
    """The time as the (shared) file system tells it: hosts' clocks differ."""
    mark = folder / ".started"
    mark.unlink(missing_ok=True)
    mark.touch()
    return mark.stat().st_mtime


def _newer(file: Path, when: float) -> bool:
    try:
        return file.stat().st_mtime >= when
    except FileNotFoundError:
        return False


def _kill(torchrun: subprocess.Popen) -> None:
    """End torchrun and its ranks at once: ranks that lost a peer can save nothing."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(torchrun.pid).children(recursive=True)
        for process in [*family, psutil.Process(torchrun.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    torchrun.wait()


def _next_attempt(out: Path) -> int:
    """Where no loop counts attempts, a pod counts its own starts."""
    done = [int(f.name) for f in (out / "attempts").glob("[0-9]*") if f.name.isdecimal()]
    mine = os.environ.get("PET_NODE_RANK") or os.environ.get("RANK") or "0"
    return max((k for k in done if (out / f"attempts/{k}/node-{mine}").exists()), default=0) + 1


def _adopt(source: Path, out: Path) -> None:
    """Keep what was launched beside what the job writes, for `status`."""
    out.mkdir(parents=True, exist_ok=True)
    for file in source.glob("*"):
        if file.is_file():
            aside = out / f".{file.name}.{os.getpid()}"
            shutil.copyfile(file, aside)
            aside.replace(out / file.name)


def main() -> int:
    """Run this node's part of an attempt. Exit codes that a restart may mend are above 127."""
    parser = argparse.ArgumentParser()
    parser.add_argument("record", type=Path)
    parser.add_argument("--attempt", type=int)
    args = parser.parse_args()
    try:
        launched = record.read(args.record)
        out = Path(launched["out"])
        alone = args.attempt is None
        if alone and out.resolve() != args.record.resolve():
            _adopt(args.record, out)
        attempt = _next_attempt(out) if alone else args.attempt
        node = Node(launched, args.record / "config.yaml", out, attempt)
        code = node.run()
        if alone and node.place.rank == 0:
            (out / "state").write_text(f"{'failed' if code else 'done'} {code}\n")
    except EfaError as error:
        print(f"megatron-efa: {error}", file=sys.stderr, flush=True)
        code = error.exit_code
    return code if code in (0, *PERMANENT) or code > 127 else min(128 + code, 255)


if __name__ == "__main__":
    sys.exit(main())

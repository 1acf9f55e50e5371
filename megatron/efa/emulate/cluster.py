"""EmulatedCluster: nodes that are namespaces, to run commands on and to disturb."""

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron.efa.emulate import claims, enter, network, processes
from megatron.efa.emulate.network import IsolationRefused, LinkCounters
from megatron.efa.emulate.rate import Rate
from megatron.efa.errors import EfaError

MOST_NODES = 250
_SETUP_S = 30.0


@dataclass(frozen=True)
class Node:
    """One node; `pid` is its first process as the host numbers it, None without namespaces."""

    index: int
    hostname: str
    address: str
    pid: int | None


def default_name() -> str:
    """A name that no other emulation of this machine has: time and process id."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


class EmulatedCluster:
    """`nodes` nodes on one machine, each behind a link of `rate` each way; a context manager.

    With `isolated` each node has network, PID, mount, IPC and host names of its own and `LINK`
    leads to a switch that joins the nodes and nothing else. Without, nodes are names only: commands
    run as plain local processes over loopback, and rates, links and counters do not exist.

    Whatever ends the process that made the cluster (also SIGKILL), every process on it is killed.
    """

    def __init__(
        self,
        nodes: int,
        rate: Rate | None = None,
        *,
        name: str | None = None,
        isolated: bool = True,
    ) -> None:
        if not 1 <= nodes <= MOST_NODES:
            raise EfaError(f"{nodes} nodes cannot be emulated: give from 1 to {MOST_NODES}")
        self.name = claims.checked_name(default_name() if name is None else name)
        self.isolated = isolated
        self.rate = rate if isolated else None
        self.nodes: list[Node] = []
        self._count = nodes
        self._claim: claims.Claim | None = None
        self._lifeline: tuple[int, int] | None = None
        self._helpers: list[subprocess.Popen] = []  # holders of the switch and nodes, then commands
        self._switch = 0

    @property
    def interface(self) -> str:
        """The interface over which nodes reach each other, by its name inside a node."""
        return network.LINK if self.isolated else "lo"

    @property
    def state(self) -> Path:
        """This cluster's own directory, removed with it; nodes see it at the same path."""
        if self._claim is None:
            raise EfaError(f"the emulated cluster {self.name} is not running")
        return self._claim.directory

    def __enter__(self) -> "EmulatedCluster":
        if self.isolated and os.geteuid() != 0:
            raise IsolationRefused("network namespaces need root")
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self) -> None:
        busy = network.host_addresses() if self.isolated else []
        self._claim = claims.claim(self.name, busy)
        self._lifeline = os.pipe()
        hostnames = [f"node{index}" for index in range(self._count)]
        if not self.isolated:
            self.nodes = [Node(i, name, "127.0.0.1", None) for i, name in enumerate(hostnames)]
            return
        subnet = self._claim.subnet
        addresses = [str(subnet[index + 1]) for index in range(self._count)]
        hosts = self.state / "hosts"
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        for address, name in zip(addresses, hostnames, strict=True):
            # The second is how a dual-stack socket sees its peer: PyTorch looks its name up.
            lines += [f"{address} {name}", f"::ffff:{address} {name}"]
        hosts.write_text("\n".join(lines) + "\n")
        holders = [self._hold(name, hosts) for name in ["switch", *hostnames]]
        pids = [self._held(holder) for holder in holders]
        self._switch = pids[0]
        network.build_switch(self._switch)
        for index, pid in enumerate(pids[1:]):
            network.connect(self._switch, index, pid, addresses[index], subnet.prefixlen)
            if self.rate is not None:
                network.shape(self._switch, index, pid, self.rate)
            self.nodes.append(Node(index, hostnames[index], addresses[index], pid))

    def _hold(self, hostname: str, hosts: Path) -> subprocess.Popen:
        read_end = self._lifeline[0]
        spec = {"hostname": hostname, "hosts": str(hosts), "lifeline": read_end}
        helper = subprocess.Popen(
            [*processes.helper_command("holder"), json.dumps(spec)],
            env={**os.environ, processes.TAG: self._claim.token},
            pass_fds=[read_end],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the emulator alone
        )
        self._helpers.append(helper)
        return helper

    def _held(self, holder: subprocess.Popen) -> int:
        ready, _, _ = select.select([holder.stdout], [], [], _SETUP_S)
        line = holder.stdout.readline() if ready else b""
        if not line:
            raise EfaError(f"a node of the emulated cluster {self.name} did not come up: try again")
        answer = json.loads(line)
        if "error" in answer:
            raise IsolationRefused(f"this machine refuses namespaces ({answer['error']})")
        return answer["pid"]

    def close(self) -> None:
        """End every process on the cluster and remove it; does nothing the second time."""
        if self._lifeline is not None:
            for descriptor in self._lifeline:
                os.close(descriptor)
            self._lifeline = None
        for helper in self._helpers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                helper.wait(timeout=10)
            if helper.stdout is not None:
                helper.stdout.close()
        self._helpers.clear()
        self.nodes = []
        if self._claim is not None:
            processes.kill_tagged(self._claim.token)
            self._claim.release()
            self._claim = None

    def popen(
        self,
        node: int,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike | None = None,
        **streams: Any,
    ) -> subprocess.Popen:
        """Start a command on a node; the result's signals and return code are the command's.

        `env` replaces the environment (default: this process's); `streams` are stdin, stdout,
        stderr and text as for subprocess.Popen.
        """
        if self._lifeline is None:
            raise EfaError(f"the emulated cluster {self.name} is not running")
        read_end = self._lifeline[0]
        spec = {
            "pid": self._living(node).pid,
            "cwd": os.path.abspath(cwd or os.getcwd()),
            "lifeline": read_end,
        }
        helper = subprocess.Popen(
            [*processes.helper_command("enter"), json.dumps(spec), *command],
            env={**(os.environ if env is None else env), processes.TAG: self._claim.token},
            pass_fds=[read_end],
            start_new_session=True,
            **streams,
        )
        self._helpers.append(helper)
        return helper

    def run(
        self,
        node: int,
        command: Sequence[str],
        *,
        timeout: float | None = None,
        **options: Any,
    ) -> subprocess.CompletedProcess:
        """Run a command on a node to its end, its output captured as text.

        Raises subprocess.TimeoutExpired after `timeout` seconds, with the command killed.
        """
        streams = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        }
        helper = self.popen(node, command, **{**streams, "text": True, **options})
        with helper:
            try:
                output, errors = helper.communicate(timeout=timeout)
            except BaseException:
                helper.kill()
                raise
        return subprocess.CompletedProcess(list(command), helper.returncode, output, errors)

    def move_into(self, node: int) -> None:
        """Move this process, a fork of the one that made the cluster, to a node.

        It keeps its pid: only its children are in the node's PID namespace, and end with the node.
        The cluster is no longer this process's to use or to keep alive.
        """
        pid = self.nodes[node].pid
        for descriptor in self._lifeline:
            os.close(descriptor)
        self._lifeline, self._claim = None, None
        self._helpers.clear()
        if pid is not None:
            enter.join(pid)

    def counters(self) -> list[LinkCounters]:
        """What crossed each node's link so far; traffic within a node is not in it."""
        self._need_links("counters")
        return [network.counters(self._living(node.index).pid) for node in self.nodes]

    def set_rate(self, node: int, rate: Rate | None) -> None:
        """Give one node's link another rate, in both directions; None takes the shaping away."""
        self._need_links("rates")
        network.shape(self._switch, node, self._living(node).pid, rate)

    def set_link(self, node: int, up: bool) -> None:
        """Pull (False) or plug (True) the cable of one node."""
        self._need_links("links")
        self._living(node)
        network.set_link(self._switch, node, up)

    def _living(self, node: int) -> Node:
        """The node, if it has not ended: a dead node's pid may by now be any other process's."""
        if self.isolated and any(self._helpers[i].poll() is not None for i in (0, node + 1)):
            raise EfaError(
                f"node{node} of the emulated cluster {self.name} has ended, killed by someone or "
                "for lack of memory: start the cluster again"
            )
        return self.nodes[node]

    def _need_links(self, what: str) -> None:
        if not self.isolated:
            raise EfaError(
                f"the emulated cluster {self.name} has no {what}: its nodes are plain local "
                "processes; run as root for nodes with links"
            )
        if not self.nodes:
            raise EfaError(f"the emulated cluster {self.name} is not running")

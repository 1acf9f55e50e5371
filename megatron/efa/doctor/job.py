"""The doctor on one node, or as the processes of a job: all report, the head prints.

Under torchrun, srun or Kubeflow every process runs the same; one of each node checks its node, and
rank 0 gathers what they find. Whatever a node does, this ends: each wait has a limit, and a last
resort ends the process itself.
"""

import argparse
import os
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.efa.cluster.discover.assemble import some
from megatron.efa.cluster.discover.slurm import expand
from megatron.efa.doctor import gather, registry, report
from megatron.efa.doctor.checks.storage import folders, nearest
from megatron.efa.doctor.checks.versions import versions
from megatron.efa.doctor.context import Context
from megatron.efa.doctor.gather import HeadLost, Meeting, Place
from megatron.efa.doctor.host import Host
from megatron.efa.doctor.network import run as network
from megatron.efa.doctor.registry import Finding, fail, ok

CHECKS = {
    "nodes": "every node of the job answers",
    "agreement": "kinds and versions are the same on all nodes",
    "shared-write": "what one node writes where the job writes, all read",
    **network.CHECKS,
}
PATIENCE_S = 5.0
"""For what another node wrote to be seen: NFS keeps a folder's old listing for some seconds."""
_NODE_S = 240.0
"""That all checks of one node may take: a few programs of 30 s at most each."""


@dataclass(frozen=True)
class Outcome:
    """What was found, and on how many nodes. `quiet`: the head prints it, not this process."""

    findings: list[Finding]
    title: str
    nodes: int = 1
    quiet: bool = False
    code: int | None = None
    """Exit code, where this process does not know all findings."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of several nodes."""
    parser.add_argument(
        "--login", action="store_true", help="this is a login node: look at job and cluster alone"
    )
    several = parser.add_argument_group(
        "several nodes", "started by torchrun, srun or Kubeflow, one process a node or one a GPU"
    )
    several.add_argument("--wait", type=float, default=60, metavar="S", help="for nodes to come")
    several.add_argument("--port", type=int, help="of rank 0 (default: MASTER_PORT + 1)")
    several.add_argument("--no-network", action="store_true", help="send no traffic between nodes")
    several.add_argument(
        "--rounds", type=int, default=16, help="peers that a node is measured with"
    )
    several.add_argument(
        "--megabytes", type=int, help="of a burst (default: 8 on CPUs, 512 on GPUs)"
    )
    several.add_argument("--limit", type=float, default=900, metavar="S", help="for all of it")


def examine(host: Host, context: Context, args: argparse.Namespace, only: Sequence[str]) -> Outcome:
    """All that is found. Raises EfaError for variables of a launcher that make no sense."""
    here = gather.place(host.environ)
    kind = host.kind or context.kind or "this machine"
    if here is None or here.world == 1:
        found = list(registry.examine(host, context, login=args.login, only=only))
        where = f"the cluster for {kind}, from a login node" if args.login else f"{kind}, one node"
        return Outcome(found, f"megatron-efa doctor: {where}")
    here = replace(here, port=args.port or here.port)
    context = replace(context, nodes=context.nodes or here.nodes)
    name = host.name
    resort = _last_resort(args.limit, f"{name}, rank {here.rank}")
    try:
        with Meeting(here, name, args.wait) as meeting:
            return _together(meeting, host, context, args, only, kind)
    except HeadLost as error:
        found = list(registry.examine(host, context, only=only)) if here.local == 0 else []
        lost = fail(str(error), why="without it the job cannot start", do="see rank 0's node first")
        found = [replace(lost, check="nodes", node=name), *found]
        return Outcome(found, f"megatron-efa doctor: {kind}, {name} alone")
    finally:
        resort.cancel()


def _together(
    meeting: Meeting,
    host: Host,
    context: Context,
    args: argparse.Namespace,
    only: Sequence[str],
    kind: str,
) -> Outcome:
    here = meeting.here
    leaders = {ranks[0] for ranks in meeting.nodes().values()}
    own: list[Finding] = []
    if here.rank in leaders:
        own = list(registry.examine(host, context, once=here.rank == 0, only=only))
    facts = {"kind": host.kind, **versions(host)} if here.rank in leaders else {}
    told = meeting.gather([[f.as_dict() for f in own], facts], _NODE_S)
    found = [
        replace(registry.from_dict(f), node=meeting.names[rank])
        for rank, (findings, _) in told.items()
        for f in findings
    ]
    found += _attendance(meeting, context, host.environ, args.wait)
    found += _agreement({meeting.names[r]: facts for r, (_, facts) in told.items() if facts})
    found += _shared(meeting, host, context, leaders)
    wanted = not args.no_network and (not only or set(only) & set(network.CHECKS))
    if wanted and len(meeting.nodes()) > 1:
        effort = network.Effort(rounds=args.rounds, megabytes=args.megabytes)
        found += network.Network(meeting, host, context, effort).examine()
        if meeting.missing:  # perhaps more than at first
            found = [f for f in found if f.check != "nodes"]
            found += _attendance(meeting, context, host.environ, args.wait)
    found = [f for f in found if not only or f.check in only]
    code = meeting.exchange(report.exit_code(found), 30)[0]
    up = len(meeting.nodes())
    title = f"megatron-efa doctor: {kind}, {up} of {here.nodes} nodes up"
    return Outcome(found, title, up, quiet=here.rank != 0, code=code)


def _attendance(
    meeting: Meeting, context: Context, environ: Mapping[str, str], wait_s: float
) -> list[Finding]:
    """Who did not come, or went."""
    here, missing = meeting.here, meeting.missing
    up = len(meeting.nodes())
    found = []
    if context.nodes != here.nodes:
        text = f"{here.nodes} nodes were started, the job is for {context.nodes}"
        do = "start as many as the config is planned for, or plan again"
        found = [
            replace(fail(text, "--nodes", why="the layout does not fit", do=do), check="nodes")
        ]
    if not missing:
        return found or [replace(ok(f"{up} nodes, {here.world} ranks"), check="nodes")]
    names = {
        rank: meeting.names.get(rank) or _name_of(rank, here, context, environ) for rank in missing
    }
    nodes = list(dict.fromkeys(names.values()))
    late = [name for rank, name in names.items() if rank in meeting.names]
    how = (
        "fell silent"
        if late and len(set(late)) == len(nodes)
        else f"did not answer within {wait_s:g} s"
    )
    return [
        *found,
        replace(
            fail(
                f"{up} of {here.nodes} nodes up: {some(nodes)} {how}",
                f"ranks {some([str(rank) for rank in missing], 8)}",
                why="the job waits for them in its rendezvous until its time is up",
                do=f"see whether {nodes[0]} runs, is in the job, and reaches {meeting.names[0]} "
                f"port {here.port}; leave it out until then",
            ),
            check="nodes",
        ),
    ]


def _name_of(rank: int, here: Place, context: Context, environ: Mapping[str, str]) -> str:
    """The name of a host that has not told it: the description's, Slurm's, or its number."""
    node = rank // here.locals
    if context.cluster and node < len(context.cluster.nodes):
        return context.cluster.nodes[node].name
    listed = expand(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""))
    return listed[node] if node < len(listed) else f"node {node}"


def _agreement(facts: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """Kinds and versions that differ between nodes, the odd nodes named."""
    found = []
    for what in sorted({key for said in facts.values() for key in said}):
        values = {node: said.get(what) or "none" for node, said in facts.items()}
        usual, _ = Counter(values.values()).most_common(1)[0]
        odd = {node: value for node, value in values.items() if value != usual}
        if odd:
            found.append(
                fail(
                    f"{what.replace('_', ' ')} {', '.join(sorted(set(odd.values())))} on "
                    f"{some(list(odd))}, {usual} on the others",
                    what,
                    why="peers with different releases or kinds may not understand each other, or "
                    "differ in speed",
                    do="use one image and one kind of node",
                )
            )
    found = found or [ok(f"{len(facts)} nodes agree")]
    return [replace(finding, check="agreement") for finding in found]


def _shared(meeting: Meeting, host: Host, context: Context, leaders: set[int]) -> list[Finding]:
    """Each node's leader writes a file into the job's shared folders, and all look for it."""
    told = {k: v for k, v in folders(context).items() if "://" not in v}
    nonce = meeting.exchange(secrets.token_hex(8), 30)[0]
    if not told:
        reason = "the config names no folder (save, load, data_cache_path)"
        return [Finding("skipped", reason, check="shared-write")]
    leads = meeting.here.rank in leaders
    marks = {key: host.at(nearest(host, folder)) for key, folder in told.items()}
    written: list[Path] = []
    try:
        failed = _write(marks, nonce, meeting.here.rank, written) if leads else {}
        meeting.gather(failed, 60)  # all have written
        lost = _read(marks, nonce, sorted(leaders & set(meeting.present))) if leads else {}
        saw = meeting.gather([failed, lost], 90)
    finally:
        for file in written:
            file.unlink(missing_ok=True)
    found = []
    for key, folder in told.items():
        blind = {meeting.names[r]: v[1][key] for r, v in saw.items() if v[1].get(key)}
        barred = {meeting.names[r]: v[0][key] for r, v in saw.items() if v[0].get(key)}
        if barred:
            why, do = "the first save or cache ends the job", f"make {folder} writable on all nodes"
            text = f"{key}: {some(list(barred))} cannot write: {next(iter(barred.values()))}"
            found.append(fail(text, folder, why=why, do=do))
        elif blind:
            found.append(
                fail(
                    f"{key}: {some(list(blind))} do not see what others wrote there",
                    folder,
                    why="the folder is not shared: other nodes do not find rank 0's index "
                    "cache, and checkpoints are scattered",
                    do="use a folder on a shared file system, mounted on all nodes",
                )
            )
    found = found or [ok(", ".join(told))]
    return [replace(finding, check="shared-write") for finding in found]


def _write(marks: Mapping[str, Path], nonce: str, rank: int, written: list[Path]) -> dict[str, str]:
    failed = {}
    for key, folder in marks.items():
        file = folder / f".megatron-efa-doctor-{nonce}-{rank}"
        try:
            file.write_text("")
            written.append(file)
        except OSError as error:
            failed[key] = error.strerror or str(error)
    return failed


def _read(marks: Mapping[str, Path], nonce: str, ranks: Sequence[int]) -> dict[str, list[int]]:
    """Ranks whose file is not seen, by folder."""
    lost = {}
    end = time.monotonic() + PATIENCE_S
    for key, folder in marks.items():
        left = list(ranks)
        while True:
            left = [r for r in left if not (folder / f".megatron-efa-doctor-{nonce}-{r}").exists()]
            if not left or time.monotonic() > end:
                break
            time.sleep(0.2)
        lost[key] = left
    return lost


def _last_resort(seconds: float, who: str) -> threading.Timer:
    """End this process after `seconds`, whatever a driver or library is stuck in."""

    def end() -> None:
        text = f"megatron-efa: the doctor did not end within {seconds:g} s on {who}: see that node"
        print(text, file=sys.stderr, flush=True)
        os._exit(report.CODES["fail"])

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    return timer

"""Where data, caches and checkpoints lie: shared where they must be, with room for what comes."""

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from megatron.efa.doctor.checks.limits import GIB, space
from megatron.efa.doctor.context import Context
from megatron.efa.doctor.host import Host
from megatron.efa.doctor.registry import Finding, Skip, check, fail, info, ok, warn

LOCAL = ("ext4", "ext3", "xfs", "overlay", "tmpfs", "btrfs", "squashfs", "zfs")
"""File systems of one node."""
SHARED = ("lustre", "nfs", "nfs4", "efs", "fuse.weka", "wekafs", "beegfs", "gpfs", "ceph")
KEPT = 2
"""Checkpoints that must fit: the last stays until the next is whole."""
_OBJECT = re.compile(r"^(s3|msc|gs|az)://")
EXTENSION = Path(__file__).resolve().parents[3] / "core/datasets"
"""Of the fork: where the index builder is compiled."""


def mount(host: Host, path: str) -> tuple[str, str]:
    """(mount point, file system type) that holds `path`; empty strings if /proc/mounts has none."""
    best = ("", "")
    for line in (host.text("/proc/mounts") or "").splitlines():
        words = line.split()
        if len(words) < 3:
            continue
        inside = PurePosixPath(path).is_relative_to(words[1])
        if inside and len(words[1]) >= len(best[0]):
            best = (words[1], words[2])
    return best


def nearest(host: Host, path: str) -> str:
    """`path`, or its nearest parent that exists."""
    whole = PurePosixPath(path)
    return next((str(p) for p in (whole, *whole.parents) if host.exists(str(p))), "/")


def folders(context: Context) -> dict[str, str]:
    """Absolute folders of the config that all nodes write to or read from, by key."""
    keys = ("save", "load", "data_cache_path", "non_persistent_global_ckpt_dir")
    found = {key: str(context.get(key)) for key in keys if context.get(key)}
    return {k: v if _OBJECT.match(v) else str(Path(v).absolute()) for k, v in found.items()}


@check(
    "shared-folders",
    "folders that nodes share lie on a file system that they share",
    ["F25"],
    login=True,
)
def shared_folders(host: Host, context: Context) -> Iterable[Finding]:
    if (context.nodes or 1) < 2:
        raise Skip("one node, or --nodes not given")
    told = {k: v for k, v in folders(context).items() if not _OBJECT.match(v)}
    if not told:
        raise Skip("the config names no folder (save, load, data_cache_path)")
    fine = []
    for key, path in told.items():
        point, kind = mount(host, path)
        if kind in LOCAL:
            yield fail(
                f"{key}: {path} is on {kind} ({point}), a file system of this node",
                key,
                why="rank 0 builds the index cache there and other nodes do not find it; a "
                "checkpoint is spread over disks that no one node can read",
                do="use a folder on FSx for Lustre, EFS or NFS (or build caches beforehand on each "
                "node)",
            )
        elif kind in SHARED:
            fine.append(f"{key} on {kind}")
        else:
            yield info(
                f"{key}: {path} is on {kind or 'a file system that /proc/mounts does not tell'}",
                key,
                "whether nodes share it is not known; shared-write finds out on the nodes of a job",
            )
    if fine:
        yield ok(", ".join(fine))


@check("checkpoint-space", "checkpoints fit where they are saved", ["F26", "F29"], once=True)
def checkpoint_space(host: Host, context: Context) -> Iterable[Finding]:
    path = folders(context).get("save")
    if not path:
        raise Skip("the config saves nothing (save)")
    if _OBJECT.match(path):
        yield warn(
            f"checkpoints go to {path}",
            "save",
            why="a save to an object store has no time limit: one that stalls holds up the job "
            "while all its ranks look alive",
            do="save to a file system and copy from there, or watch for missing iterations",
        )
        return
    place = nearest(host, path)
    if not host.writable(place):
        yield fail(
            f"{place} may not be written by this user",
            "save",
            why="the first save ends the job",
            do=f"make {path} writable for the job's user",
        )
        return
    _, free = space(host, place)
    size = context.checkpoint_bytes
    if size is None:
        raise Skip(
            f"{free / GIB:,.0f} GiB free at {place}; the config does not tell the model's size"
        )
    need = KEPT * size
    full = _fullest(host, place)
    if free < need:
        yield fail(
            f"{free / GIB:,.0f} GiB free at {place}, {KEPT} checkpoints take {need / GIB:,.0f}",
            "save",
            why="'[Errno 28] No space left on device' ends the job at a save",
            do="free space, or save elsewhere",
        )
    elif full and full[1] < need / full[2]:
        yield fail(
            f"{full[0]} has {full[1] / GIB:,.0f} GiB free, a checkpoint's share of it is "
            f"{need / full[2] / GIB:,.0f}",
            place,
            why="one full OST ends a save with '[Errno 28]' although the file system as a whole "
            "has space",
            do="rebalance (lfs migrate) or free the OST, or save elsewhere",
        )
    else:
        yield ok(f"{free / GIB:,.0f} GiB free at {place}, a checkpoint takes {size / GIB:,.0f}")


def _fullest(host: Host, path: str) -> tuple[str, int, int] | None:
    """(name, free bytes, number of OSTs) of the fullest OST; None off Lustre."""
    if mount(host, path)[1] != "lustre":
        return None
    said = host.run("lfs", "df", path)
    rows = re.findall(r"^(\S*OST\S*)\s+\d+\s+\d+\s+(\d+)\s", said.text, re.MULTILINE)
    if said.code or not rows:
        return None
    name, free = min(rows, key=lambda row: int(row[1]))
    return name, int(free) * 1024, len(rows)


@check("index-extension", "the dataset's C++ index builder is compiled", ["F25"])
def extension(host: Host, context: Context) -> Iterable[Finding]:
    names = host.names(str(EXTENSION))
    if not names:
        raise Skip(f"{EXTENSION} is not laid out: megatron-efa fork sync")
    built = [name for name in names if name.startswith("helpers_cpp") and name.endswith(".so")]
    if built:
        yield ok(built[0])
    else:
        yield fail(
            "helpers_cpp is not compiled",
            str(EXTENSION),
            why="rank 0 builds it when data is first read, and other nodes end with "
            "ModuleNotFoundError",
            do=f"make -C {EXTENSION} in the image",
        )

"""Lines of known failures in a job's logs (`--log FILE`): what they mean and what to do."""

from collections.abc import Iterable

from megatron.efa.doctor.context import Context
from megatron.efa.doctor.host import Host
from megatron.efa.doctor.registry import Finding, Skip, check, fail, ok

KNOWN: tuple[tuple[str, tuple[str, ...], str, str], ...] = (
    ("F04", ("EFA_1.2 not found",),
     "the plugin was built against another libfabric or rdma-core",
     "use the plugin of the installed EFA release"),
    ("F07", ("Unresponsive receiver", "Unable to insert remote address into address vector"),
     "a security group lacks the rule for all traffic to itself, or the peer is gone",
     "run megatron-efa doctor with the right ec2:DescribeSecurityGroups (security-group)"),
    ("F10", ("err: 5, message: Invalid address",),
     "libfabric failed and NCCL was not told: the job stands still",
     "end the job, replace the node that wrote it, use a newer plugin"),
    ("F12", ("Unable to register memory (type = 2)",),
     "NCCL asks for SYNC_MEMOPS and the EFA release cannot give it",
     "use EFA 1.29.1 or newer, or FI_EFA_SET_CUDA_SYNC_MEMOPS=0"),
    ("F13", ("OSError: [Errno 12] Cannot allocate memory", "OSError: Cannot allocate memory"),
     "a data loader forked beside the EFA provider's huge pages",
     "set FI_EFA_USE_HUGE_PAGE=0"),
    ("F14", ("Failure to post internal receive buffers", "Libfabric error: (-12)"),
     "locked memory is limited",
     "unlimited memlock for the daemon that starts ranks (memlock)"),
    ("F15", ("Invalid receiver QPN",),
     "this rank's peer has ended, often killed for lack of memory",
     "look at the peer: its cgroup's memory limit and oom_kill (memory-limit)"),
    ("F16", ("Attribute arch of node cpu not found",),
     "NCCL cannot read the topology in this container",
     "newer NCCL and plugin, or NCCL_TOPO_FILE (nccl-topology)"),
    ("F21", ("DeepEP timeout check failed", "ibv_reg_mr_iova2"),
     "the expert backend's build does not register GPU memory over EFA, or a rank fell behind",
     "rebuild it with DMABUF, set NCCL_MAX_NCHANNELS, or use another dispatcher"),
    ("F26", ("No space left on device", "unexpected pos"),
     "the file system, or one OST of it, is full",
     "see checkpoint-space"),
    ("F17", ("system not yet initialized",),
     "NVSwitch is not set up (error 802)",
     "restart nvidia-fabricmanager, or replace the node (fabric-manager)"),
)  # fmt: skip
"""(id, what the software prints, what it means, what to do)."""


@check(
    "known-lines",
    "no line of a known failure in the logs",
    dict.fromkeys(entry[0] for entry in KNOWN),
    once=True,
)
def known_lines(host: Host, context: Context) -> Iterable[Finding]:
    if not context.logs:
        raise Skip("no log: give --log FILE")
    clear = True
    for path in context.logs:
        with path.open(errors="replace") as lines:
            seen: set[str] = set()
            for number, line in enumerate(lines, 1):
                for name, tokens, why, do in KNOWN:
                    token = next((t for t in tokens if t in line), None)
                    if token and name not in seen:
                        seen.add(name)
                        clear = False
                        yield fail(f"'{token}'", f"{path}:{number}", why=why, do=do)
    if clear:
        yield ok(f"{len(context.logs)} logs")

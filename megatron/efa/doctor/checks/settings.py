"""Variables and config keys that do not go together, or that leave a hang without evidence."""

import re
from collections.abc import Iterable

from megatron.efa.doctor import software
from megatron.efa.doctor.context import Context
from megatron.efa.doctor.host import Host
from megatron.efa.doctor.registry import Finding, Skip, check, fail, ok, warn
from megatron.efa.fabric.versions import holds


@check("expandable-segments", "the allocator's expandable segments have no opponent", login=True)
def expandable_segments(host: Host, context: Context) -> Iterable[Finding]:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    name = next((n for n in names if "expandable_segments:true" in _env(host, n).lower()), "")
    if not name:
        yield ok("off")
        return
    opponents = {}
    torch = software.package(host, "torch")
    if context.get("nccl_ub") and not (torch and holds(">=2.11", torch)):
        opponents["nccl_ub"] = "use PyTorch 2.11 or newer, or leave nccl_ub or the segments off"
    graphs = context.get("cuda_graph_impl") == "transformer_engine"
    if graphs and host.environ.get("NCCL_GRAPH_REGISTER") != "0":
        opponents["cuda_graph_impl: transformer_engine"] = "set NCCL_GRAPH_REGISTER=0"
    for opponent, do in opponents.items():
        yield fail(
            f"{name} has expandable_segments:True, and the config uses {opponent}",
            name,
            why="memory that NCCL or another process has registered moves under it: Megatron "
            "refuses to start, or memory is read illegally",
            do=do,
        )
    if not opponents:
        yield ok("on, with nothing that registers memory")


@check("hang-evidence", "a hang ends, and leaves evidence", ["F10", "F29"], login=True)
def hang_evidence(host: Host, context: Context) -> Iterable[Finding]:
    if context.get("distributed_backend", "nccl") == "gloo":
        raise Skip("gloo has no flight recorder")
    if not context.settings:
        raise Skip("no config: give --config FILE")
    recorder = context.get("flight_recorder_dump_path") or next(
        (_env(host, n) for n in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
         if _env(host, n)), "")  # fmt: skip
    if recorder:
        yield ok(f"flight recorder to {recorder}")
        return
    yield warn(
        "NCCL's flight recorder is off",
        "flight_recorder_dump_path",
        why="a transport error may never reach NCCL ('err: 5, Invalid address' and then hours of "
        "nothing): without the recorder nobody knows which rank did not come",
        do="set flight_recorder_dump_path to a folder; megatron-efa launch does",
    )


@check(
    "expert-backend", "what the config's expert dispatcher needs on EFA", ["F21", "F22"], login=True
)
def expert_backend(host: Host, context: Context) -> Iterable[Finding]:
    if context.get("moe_token_dispatcher_type") != "flex":
        raise Skip("the config does not use the flex dispatcher")
    backend = context.get("moe_flex_dispatcher_backend", "deepep")
    ep = context.get("expert_model_parallel_size", 1) * context.get(
        "expert_tensor_parallel_size", 1
    )
    clear = True
    if backend == "deepep" and ep > 160:
        clear = False
        yield fail(
            f"{ep} expert ranks with DeepEP",
            "expert_model_parallel_size",
            why="on EFA it asserts at most 160 ranks (8 x 20 nodes); UCCL-EP stops between 64 "
            "and 128",
            do="use the alltoall or hierarchical dispatcher, or fewer expert ranks",
        )
    channels = host.environ.get("NCCL_MAX_NCHANNELS", "")
    if backend in ("deepep", "hybridep") and not re.fullmatch(r"[1-9]\d*", channels):
        clear = False
        yield warn(
            f"NCCL_MAX_NCHANNELS is not set beside {backend}",
            "NCCL_MAX_NCHANNELS",
            why="NCCL's channels crowd the expert transport out of the shared devices: on 4 "
            "p5en 79.8 TFLOPS became 188.0 with 32 channels",
            do="set NCCL_MAX_NCHANNELS to 16 or 32",
        )
    if backend == "ncclep" or "NCCL_GIN_TYPE" in host.environ:
        wanted = {"NCCL_GIN_TYPE": "5", "NCCL_SYM_GIN_KERNELS_ENABLE": "0"}
        wrong = [f"{n}={v}" for n, v in wanted.items() if host.environ.get(n) != v]
        if wrong:
            clear = False
            yield fail(
                f"{' and '.join(wrong)} missing for NCCL's device-initiated network",
                "NCCL_GIN_TYPE",
                why="with another type, or with symmetric kernels, its start hangs or crashes "
                "on EFA",
                do=f"set {' '.join(wrong)}",
            )
    if clear:
        yield ok(f"{backend} over {ep} ranks")


def _env(host: Host, name: str) -> str:
    return host.environ.get(name, "")

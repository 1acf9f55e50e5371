"""Each check of the doctor says so when all is well, and names the one thing that is spoilt."""

from dataclasses import replace

import boto3
import pytest
from botocore.stub import Stubber
from doctor_host import CONTEXT, KIND, PLUGIN, bare, fi_info, healthy

from megatron.efa.cluster.model import Cluster, Node
from megatron.efa.doctor.checks.storage import EXTENSION
from megatron.efa.doctor.context import Context
from megatron.efa.doctor.host import ABSENT, Answer
from megatron.efa.doctor.registry import checks, examine

FI_INFO = "/opt/amazon/efa/bin/fi_info -p efa"
NCCL_LOG = "NCCL INFO NET/OFI Selected provider is efa, fabric is efa-direct (found 8 nics)\n"
NODES = tuple(
    Node(f"ip-10-0-0-{i}", 8, ("a", "b", "c", f"d{i}"), KIND, instance=f"i-{i:017x}")
    for i in range(1, 5)
)
CLUSTER = Cluster(NODES, source="test")

SPOILT = {}


def spoilt(check, *words, level="fail", also=()):
    """Register a machine: what is spoilt, the check that must say so, words that it must use."""

    def register(spoil):
        name = f"{check}: {spoil.__name__.replace('_', ' ').strip()}"
        SPOILT[name] = (spoil, check, level, words, also)
        return spoil

    return register


def setting(**more):
    return replace(CONTEXT, settings={**CONTEXT.settings, **more})


def log(host, text):
    host.put("/run.log", text)
    return replace(CONTEXT, logs=(host.at("/run.log"),))


@spoilt("machine-kind", "p6-b200.48xlarge", "p5en.48xlarge", "--kind")
def another_kind(host):
    return replace(CONTEXT, kind="p5en.48xlarge")


@spoilt("machine-kind", "p99.48xlarge", "DescribeInstanceTypes", level="warn")
def unknown_kind(host):
    host.put("/sys/devices/virtual/dmi/id/product_name", "p99.48xlarge")


@spoilt("efa-devices", "7 EFA devices", "has 8", "vpc.amazonaws.com/efa: 8", also=("libfabric",))
def one_device_missing(host):
    (host.at("/sys/class/infiniband/rdmap7s0/device/driver")).unlink()


@spoilt("efa-devices", "9 EFA devices", "0.5.10", also=("libfabric",))
def one_device_too_many(host):
    host.efa(8)


@spoilt("efa-verbs", "not EFA", "mlx5_core", "hostPath")
def other_devices_exposed(host):
    host.device("ibp0", 90, "mlx5_core")


@spoilt("efa-verbs", "1 EFA devices have no /dev/infiniband")
def a_device_not_passed_in(host):
    host.at("/dev/infiniband/uverbs3").unlink()


@spoilt("efa-verbs", "uverbs3 may not be opened")
def a_device_closed_to_the_user(host):
    host.writable = lambda path: path != "/dev/infiniband/uverbs3"


@spoilt("efa-ports", "rdmap5s0")
def port_down(host):
    host.put("/sys/class/infiniband/rdmap5s0/ports/1/state", "1: DOWN")


@spoilt("ofed", "MLNX_OFED_LINUX-5.8", level="warn")
def ofed_installed(host):
    host.answers["ofed_info -s"] = "MLNX_OFED_LINUX-5.8-1.0.1.1:\n"


@spoilt("libfabric", "-61", "--disable-build-ngc")
def rdma_core_left_out(host):
    host.answers[FI_INFO] = Answer(61, "fi_getinfo: -61 (No data available)\n")


@spoilt("libfabric", "-61", "efa-verbs")
def no_provider_though_rdma_core_is_there(host):
    host.put("/usr/lib64/libibverbs/libefa-rdmav34.so")
    host.answers[FI_INFO] = Answer(61, "fi_getinfo: -61 (No data available)\n")


@spoilt("libfabric", "no fi_info", "installer")
def libfabric_absent(host):
    host.answers[FI_INFO] = Answer(ABSENT, "")


@spoilt("libfabric", "6 of 8")
def provider_on_fewer_devices(host):
    host.answers[FI_INFO] = fi_info(6)


@spoilt("libfabric-build", "2.6.0", "amzn")
def upstream_libfabric(host):
    host.answers["/opt/amazon/efa/bin/fi_info --version"] = "libfabric: 2.6.0\n"


@spoilt("plugin-found", "libnccl-net-spcx.so", "26.07", PLUGIN, "TCP")
def ngc_points_nccl_at_another_plugin(host):
    host.environ |= {"NCCL_NET_PLUGIN": "spcx", "NVIDIA_PYTORCH_VERSION": "26.07"}


@spoilt("plugin-found", "not the EFA plugin", "/opt/spcx")
def another_plugin_is_found(host):
    host.put("/opt/spcx/libnccl-net-spcx.so", "spcx")
    host.environ["NCCL_NET_PLUGIN"] = "spcx"
    host.environ["LD_LIBRARY_PATH"] += ":/opt/spcx"


@spoilt("plugin-found", "link to nothing", also=("plugin-environment", "plugin-loads"))
def dangling_link(host):
    host.at(PLUGIN).unlink()
    host.link("/opt/x/libnccl-net-ofi.so", PLUGIN)
    host.environ |= {"NCCL_NET_PLUGIN": "ofi", "LD_LIBRARY_PATH": "/opt/x"}


@spoilt("plugin-found", "libnccl-net-aws-ofi.so", PLUGIN)
def name_that_newer_nccl_asks_for(host):
    del host.environ["NCCL_NET_PLUGIN"]


@spoilt("plugin-found", "none of", "install it")
def plugin_missing(host):
    host.at(PLUGIN).unlink()


@spoilt("plugin-loads", "EFA_1.2", "another libfabric")
def plugin_of_another_release(host):
    host.answers["python -c import ctypes"] = Answer(
        1, "OSError: libefa.so.1: version `EFA_1.2' not found\n"
    )


@spoilt("plugin-environment", "LD_LIBRARY_PATH lacks /opt/amazon/ofi-nccl/lib", "launcher")
def launcher_drops_the_library_path(host):
    host.environ["LD_LIBRARY_PATH"] = ""


@spoilt("plugin-selected", "NET/Socket", "NCCL_NET_PLUGIN")
def sockets_selected(host):
    return log(host, "NCCL INFO Using network Socket\nNCCL INFO NET/Socket : Using [0]eth0\n")


@spoilt("plugin-selected", "no line 'NET/OFI")
def log_without_the_positive_line(host):
    return log(host, "NCCL INFO Bootstrap : Using eth0\n")


@spoilt("plugin-selected", "no line of NCCL", level="warn")
def log_of_something_else(host):
    return log(host, "iteration 1\n")


@spoilt("plugin-selected", "4 nics", "has 8", level="warn")
def fewer_nics_selected(host):
    return log(host, NCCL_LOG.replace("8", "4"))


@spoilt("plugin-selected", "selected tcp")
def another_provider_selected(host):
    return log(host, NCCL_LOG.replace("is efa,", "is tcp,"))


@spoilt("memlock", "8 MiB", "LimitMEMLOCK")
def memlock_limited(host):
    host.put("/proc/self/limits", "Max locked memory  8388608  8388608  bytes\n")


@spoilt("hugepages", "2560 huge pages", level="warn", also=("fork-safety",))
def huge_pages_exhausted(host):
    del host.environ["FI_EFA_USE_HUGE_PAGE"]
    host.put("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "0\n")


@spoilt("fork-safety", "2 data loader workers", "FI_EFA_USE_HUGE_PAGE=0", level="warn")
def loaders_fork_beside_huge_pages(host):
    del host.environ["FI_EFA_USE_HUGE_PAGE"]


@spoilt("fork-safety", "Linux 5.10")
def old_kernel(host):
    host.put("/proc/sys/kernel/osrelease", "5.10.0-aws\n")


@spoilt("shm", "64 MiB", "--shm-size")
def docker_default_shm(host):
    host.answers["df -B1 --output=size,avail /dev/shm"] = "Size Avail\n67108864 67108864\n"


@spoilt("shm", "ext4", "emptyDir", level="warn")
def shm_on_a_disk(host):
    mounts = host.text("/proc/mounts").replace("tmpfs /dev/shm tmpfs", "x /dev/shm ext4")
    host.put("/proc/mounts", mounts)


@spoilt("memory-limit", "8 GiB for 8 GPUs", "Invalid receiver QPN")
def pod_memory_limit(host):
    host.put("/sys/fs/cgroup/slurm/job/memory.max", str(8 * 2**30))


@spoilt("memory-limit", "2 processes were killed")
def ranks_killed_for_memory(host):
    host.put("/sys/fs/cgroup/slurm/job/memory.events", "oom 2\noom_kill 2\n")


@spoilt("gpus", "7 GPUs", "has 8")
def a_gpu_fell_off(host):
    host.answers["nvidia-smi --query-gpu=name "] = "NVIDIA B200\n" * 7


@spoilt("gpu-health", "GPU 1", "GPU 2")
def sick_gpus(host):
    host.answers["nvidia-smi --query-gpu=index,"] = (
        "0, 0, Not Active, Not Active\n1, 3, Not Active, Not Active\n2, 0, Not Active, Active\n"
    )


@spoilt("fabric-manager", "In Progress", "802")
def fabric_manager_in_progress(host):
    host.answers["nvidia-smi -q"] = "    Fabric\n        State          : In Progress\n" * 8


@spoilt("cuda-compat", "compat", "570.1", "580.95")
def compat_library_first(host):
    host.put("/usr/local/cuda/compat/lib/libcuda.so.570.1")
    host.link(
        "/usr/local/cuda/compat/lib/libcuda.so.1", "/usr/local/cuda/compat/lib/libcuda.so.570.1"
    )
    host.environ["LD_LIBRARY_PATH"] += ":/usr/local/cuda/compat/lib"


@spoilt("gpudirect", "peer memory", "modprobe", also=("fork-safety",))
def nothing_registers_gpu_memory(host):
    host.put("/proc/modules", "efa 100 1 - Live 0x0\n")
    host.put("/proc/sys/kernel/osrelease", "5.10.0\n")


def test_the_efa_drivers_own_word_on_gpu_memory_counts(tmp_path):
    host = healthy(tmp_path)
    host.put("/proc/modules", "efa 100 1 - Live 0x0\n")
    host.put("/sys/class/infiniband/rdmap0s0/device/p2p", "NVIDIA\n")
    assert [f.level for f in host.finds("gpudirect")] == ["ok"]


@spoilt("gdrcopy", "/dev/gdrdrv", also=("expert-backend",))
def deepep_without_gdrcopy(host):
    host.at("/dev/gdrdrv").unlink()
    return setting(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="deepep")


@spoilt("nccl-topology", "Attribute arch", level="warn")
def topology_hidden(host):
    host.at("/sys/devices/system/node/node0/cpumap").unlink()


@spoilt("nccl-topology", "NCCL_TOPO_FILE=/gone.xml")
def topology_file_gone(host):
    host.environ["NCCL_TOPO_FILE"] = "/gone.xml"


@spoilt("versions", "EFA installer 1.28.0", "SYNC_MEMOPS")
def sync_memops(host):
    host.put("/opt/amazon/efa_installed_packages", "# EFA installer version: 1.28.0\n")


@spoilt("versions", "EFA installer 1.43.0 with NVIDIA driver 580", "1.43.3", level="warn")
def peer_memory_of_an_older_installer(host):
    host.put("/opt/amazon/efa_installed_packages", "# EFA installer version: 1.43.0\n")


@spoilt("versions", "NCCL 2.28.7", "nvidia-resiliency-ext", level="warn")
def nccl_that_cannot_restart_in_process(host):
    host.at("/usr/lib64/libnccl.so.2").unlink()
    host.put("/usr/lib64/libnccl.so.2", b"NCCL version 2.28.7+cuda13.0")
    return setting(inprocess_restart=True)


@spoilt("versions", "plugin 1.17.0", "leaks", level="warn")
def leaking_plugin(host):
    host.put(PLUGIN, b"NET/OFI aws-ofi-nccl 1.17.0")


@spoilt("versions", "plugin 1.19.1", "hang")
def hanging_plugin(host):
    host.put(PLUGIN, b"NET/OFI aws-ofi-nccl 1.19.1")


@spoilt("versions", "plugin 1.12.0", "sorted")
def plugin_that_sorts_wrongly(host):
    host.put(PLUGIN, b"NET/OFI aws-ofi-nccl 1.12.0")


@spoilt("versions", "NCCL 2.28.9", "deadlocks", also=("libfabric-build",))
def nccl_that_deadlocks_with_upstream_libfabric(host):
    host.answers["/opt/amazon/efa/bin/fi_info --version"] = "libfabric: 2.6.0\n"
    host.at("/usr/lib64/libnccl.so.2").unlink()
    host.put("/usr/lib64/libnccl.so.2", b"NCCL version 2.28.9+cuda13.0")


@spoilt("versions", "NCCL 2.27.7 (under 2.28)", level="warn")
def nccl_below_the_floor(host):
    host.at("/usr/lib64/libnccl.so.2").unlink()
    host.put("/usr/lib64/libnccl.so.2", b"NCCL version 2.27.7+cuda13.0")


@spoilt("instance-mix", f"3 {KIND} and 1 p6-b300.48xlarge", "ip-10-0-0-4")
def kinds_mixed(host):
    nodes = (*NODES[:3], replace(NODES[3], kind="p6-b300.48xlarge"))
    return replace(CONTEXT, cluster=Cluster(nodes))


@spoilt("topology-labels", "ip-10-0-0-2", "DescribeInstanceTopology", level="warn")
def label_never_set(host):
    nodes = (NODES[0], replace(NODES[1], path=()), *NODES[2:])
    return replace(CONTEXT, cluster=Cluster(nodes))


@spoilt("topology-labels", "a layer is missing on ip-10-0-0-2", level="warn")
def a_layer_lost(host):
    nodes = (NODES[0], replace(NODES[1], path=("a", "b")), *NODES[2:])
    return replace(CONTEXT, cluster=Cluster(nodes))


@spoilt("slurm-blocks", "ip-10-0-0-4 in no block", "scontrol reconfigure")
def node_dropped_from_its_block(host):
    host.answers["scontrol show topology"] = "BlockName=b1 BlockIndex=0 Nodes=ip-10-0-0-[1-3]\n"


@spoilt("slurm-blocks", "ip-10-0-0-2, ip-10-0-0-3 in no block")
def nodes_dropped_seen_from_outside_a_job(host):
    del host.environ["SLURM_JOB_NODELIST"]
    host.answers["sinfo -h"] = "login (null)\nip-10-0-0-[1-3] gpu:8(S:0-1)\n"
    host.answers["scontrol show topology"] = "BlockName=b1 BlockIndex=0 Nodes=ip-10-0-0-1\n"


@spoilt("slurm-resume", "TaskPlugin=task/affinity and PrologFlags=Alloc", level="warn")
def auto_resume_impossible(host):
    host.answers["scontrol show config"] = "TaskPlugin = task/affinity\nPrologFlags = Alloc\n"


@spoilt("efa-device-plugin", "0.5.6", "0.5.10")
def old_device_plugin(host):
    key = "kubectl get daemonsets"
    host.answers[key] = host.answers[key].replace("v0.5.12", "v0.5.6")


@spoilt("efa-device-plugin", "3 of its pods", "affinity", level="warn")
def device_plugin_on_nodes_without_efa(host):
    key = "kubectl get daemonsets"
    answer = host.answers[key].replace('"nodeSelector": {"a": "b"}, ', "")
    host.answers[key] = answer.replace('"status": {}', '"status": {"numberUnavailable": 3}')


@spoilt("dns", "ip-10-0-0-3", "resolved")
def a_name_does_not_resolve(host):
    host.answers["getent ahosts ip-10-0-0-3"] = Answer(2, "")


@spoilt("dns", "ip-10-0-0-1", "127", level="warn")
def a_name_is_loopback(host):
    host.answers["getent ahosts ip-10-0-0-1"] = "127.0.1.1 STREAM\n"


@spoilt("clock", "450 ms", level="warn")
def clock_off(host):
    host.answers["chronyc -n tracking"] = "System time : 0.450000 seconds fast of NTP time\n"


@spoilt("clock", "not synchronized", level="warn")
def clock_not_synchronized(host):
    del host.answers["chronyc -n tracking"]
    host.answers["timedatectl show"] = "no\n"


@spoilt("head-network", "bw_out_allowance_exceeded 77", level="warn")
def network_allowance_exceeded(host):
    host.answers["ethtool -S"] = "     bw_out_allowance_exceeded: 77\n"


@spoilt("shared-folders", "save: /root/run is on overlay", "Lustre")
def checkpoints_on_a_local_disk(host):
    host.put("/root/run/x")
    return setting(save="/root/run")


@spoilt("checkpoint-space", "1 GiB free", "26,077")
def no_room_for_checkpoints(host):
    host.answers["df -B1 --output=size,avail /fsx/run"] = f"Size Avail\n{2**40} {2**30}\n"


@spoilt("checkpoint-space", "/fsx/run may not be written")
def checkpoints_may_not_be_written(host):
    host.writable = lambda path: path != "/fsx/run"


@spoilt("checkpoint-space", "OST0001", "1 GiB free", "13,039")
def one_ost_full(host):
    full = host.answers["lfs df"].replace(
        "OST0001_UUID 90000000000 1000 80000000000", "OST0001_UUID 90000000000 1000 1048576"
    )
    host.answers["lfs df"] = full


@spoilt("checkpoint-space", "s3://bucket/run", "no time limit", level="warn")
def checkpoints_to_an_object_store(host):
    return setting(save="s3://bucket/run")


@spoilt("index-extension", "helpers_cpp", "ModuleNotFoundError")
def index_builder_not_compiled(host):
    folder = host.at(str(EXTENSION))
    for file in folder.iterdir():
        file.unlink()
    host.put(f"{EXTENSION}/helpers.cpp")


@spoilt("expandable-segments", "nccl_ub", "2.11")
def expandable_segments_with_registered_buffers(host):
    host.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return setting(nccl_ub=True)


@spoilt("expandable-segments", "NCCL_GRAPH_REGISTER=0")
def expandable_segments_with_graphs(host):
    host.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    return setting(cuda_graph_impl="transformer_engine")


@spoilt("hang-evidence", "flight recorder", level="warn")
def no_flight_recorder(host):
    return setting(flight_recorder_dump_path=None)


@spoilt("environment", "TORCH_NCCL_ASYNC_ERROR_HANDLING=1", level="warn")
def recorder_defeated(host):
    host.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"


@spoilt("environment", "NCCL_BUFFSIZE=2097152", "plugin 1.21.1", level="warn")
def buffers_that_undo_the_plugins(host):
    host.environ["NCCL_BUFFSIZE"] = "2097152"


@spoilt("environment", "FI_PROVIDER=tcp")
def another_provider_forced(host):
    host.environ["FI_PROVIDER"] = "tcp"


@spoilt("environment", "FI_EFA_FORK_SAFE=1", level="info")
def a_variable_without_effect(host):
    host.environ["FI_EFA_FORK_SAFE"] = "1"


@spoilt("expert-backend", "192 expert ranks", also=("expert-backend",))
def deepep_over_too_many_ranks(host):
    host.environ["NCCL_MAX_NCHANNELS"] = "16"
    return setting(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="deepep",
                   expert_model_parallel_size=192)  # fmt: skip


@spoilt("expert-backend", "NCCL_MAX_NCHANNELS", "188.0", level="warn")
def channels_not_bounded(host):
    return setting(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="deepep")


@spoilt("expert-backend", "NCCL_SYM_GIN_KERNELS_ENABLE=0")
def device_initiated_network_of_the_wrong_type(host):
    host.environ["NCCL_GIN_TYPE"] = "5"
    return setting(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="ncclep")


@spoilt("known-lines", "Invalid receiver QPN", "run.log:2", "peer")
def a_known_line_in_the_log(host):
    return log(host, f"{NCCL_LOG}rank3: NET/OFI ... Invalid receiver QPN\n")


def at_least_warned(host, context):
    return {f.check for f in examine(host, context) if f.level in ("warn", "fail")}


@pytest.mark.parametrize("name", SPOILT)
def test_one_thing_spoilt_is_named_with_its_place_its_reason_and_what_to_do(name, tmp_path):
    spoil, check, level, words, also = SPOILT[name]
    host = healthy(tmp_path, ec2=Denied())
    context = spoil(host) or CONTEXT
    found = [f for f in host.finds(check, context) if f.level == level]
    assert found, host.finds(check, context)
    said = " ".join(f"{f.what} {f.where} {f.why} {f.do}" for f in found)
    assert all(word in said for word in words), said
    assert all(f.what and f.why and f.do for f in found), (
        "a finding says why it matters and what to do"
    )
    assert at_least_warned(host, context) - {check} <= set(also)


def test_a_check_of_a_healthy_node_says_so_or_why_it_cannot_look(tmp_path):
    blind = {
        "security-group", "efa-interfaces", "instance-mix", "topology-labels",  # nothing told
        "known-lines", "plugin-selected", "expert-backend",
    }  # fmt: skip
    host = healthy(tmp_path, ec2=Denied())
    said = {c.id: {f.level for f in host.finds(c.id)} for c in checks()}
    assert said == {c.id: {"skipped"} if c.id in blind else {"ok"} for c in checks()}


def test_every_check_has_a_machine_on_which_it_speaks_up():
    by_api = {"security-group", "efa-interfaces"}  # below, with stubbed answers
    assert {c.id for c in checks()} == {check for _, check, *_ in SPOILT.values()} | by_api


def test_the_positive_line_is_what_counts(tmp_path):
    host = healthy(tmp_path)
    (finding,) = host.finds("plugin-selected", log(host, NCCL_LOG))
    assert finding.level == "ok"
    assert "efa-direct" in finding.what


def test_a_described_cluster_of_one_kind_is_well(tmp_path):
    context = replace(CONTEXT, cluster=CLUSTER)
    host = healthy(tmp_path)
    for check in ("instance-mix", "topology-labels"):
        assert [f.level for f in host.finds(check, context)] == ["ok"]


def test_on_a_machine_with_nothing_no_check_passes_unseen(tmp_path):
    host = bare(tmp_path, ec2=Denied())
    said = {c.id: [f.level for f in host.finds(c.id, Context())] for c in checks()}
    off = {"expandable-segments": ["ok"]}  # what is not set cannot clash
    assert said == {c.id: off.get(c.id, ["skipped"]) for c in checks()}


def test_on_a_machine_that_should_have_efa_and_has_nothing_nothing_of_efa_is_well(tmp_path):
    host = bare(tmp_path, ec2=Denied())
    well = {f.check for c in checks() for f in host.finds(c.id) if f.level == "ok"}
    assert well <= {"ofed", "expandable-segments", "environment", "hang-evidence"}
    failed = {f.check for c in checks() for f in host.finds(c.id) if f.level == "fail"}
    assert {"efa-devices", "libfabric", "plugin-found"} <= failed


class Denied:
    """An EC2 client that may ask nothing."""

    def __getattr__(self, operation):
        from botocore.exceptions import ClientError

        def refuse(**_):
            raise ClientError({"Error": {"Code": "UnauthorizedOperation"}}, operation)

        return refuse


@pytest.fixture
def cloud():
    """(client, stubber): an EC2 client that answers what it is told, in the API's shape."""
    keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b"}
    client = boto3.client("ec2", region_name="us-east-1", **keys)
    with Stubber(client) as stubber:
        yield client, stubber


def instance(number, groups=("sg-1",), interfaces=8, zone="us-east-1a"):
    return {
        "InstanceId": f"i-{number:017x}",
        "InstanceType": KIND,
        "Placement": {"AvailabilityZone": zone},
        "NetworkInterfaces": [
            {"InterfaceType": "interface", "Groups": [{"GroupId": "sg-web"}]},
            *({"InterfaceType": "efa-only", "Groups": [{"GroupId": g} for g in groups]},)
            * interfaces,
        ],
    }


def described(stubber, *instances):
    stubber.add_response("describe_instances", {"Reservations": [{"Instances": [*instances]}]})


def rule(group, protocol="-1"):
    return {"IpProtocol": protocol, "UserIdGroupPairs": [{"GroupId": group}]}


EVERYWHERE = {"IpProtocol": "-1", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}


def groups(stubber, ingress, egress, name="sg-1"):
    said = {"GroupId": name, "IpPermissions": ingress, "IpPermissionsEgress": egress}
    stubber.add_response("describe_security_groups", {"SecurityGroups": [said]})


@pytest.mark.parametrize(
    ("ingress", "egress", "lacks"),
    [
        ([rule("sg-1")], [EVERYWHERE], "no egress rule"),
        ([EVERYWHERE], [rule("sg-1")], "no ingress rule"),
        ([rule("sg-2")], [rule("sg-1", "tcp")], "no ingress and no egress"),
    ],
)
def test_a_security_group_without_the_rule_for_itself_is_named(
    cloud, tmp_path, ingress, egress, lacks
):
    client, stubber = cloud
    described(stubber, instance(1))
    groups(stubber, ingress, egress)
    (finding,) = healthy(tmp_path, client).finds("security-group")
    assert finding.level == "fail"
    assert lacks in finding.what
    assert "sg-1" in finding.what
    assert "4126" in finding.why
    assert "sg-1" in finding.do


def test_a_security_group_with_both_rules_for_itself_is_well(cloud, tmp_path):
    client, stubber = cloud
    described(stubber, instance(1), instance(2))
    groups(stubber, [EVERYWHERE, rule("sg-1")], [rule("sg-1")])
    (finding,) = healthy(tmp_path, client).finds("security-group")
    assert finding.level == "ok"


def test_nodes_without_a_common_security_group_are_told(cloud, tmp_path):
    client, stubber = cloud
    described(stubber, instance(1, ["sg-1"]), instance(2, ["sg-2"]))
    both = [
        {"GroupId": g, "IpPermissions": [rule(g)], "IpPermissionsEgress": [rule(g)]}
        for g in ("sg-1", "sg-2")
    ]
    stubber.add_response("describe_security_groups", {"SecurityGroups": both})
    (finding,) = healthy(tmp_path, client).finds("security-group")
    assert finding.level == "fail"
    assert "no security group is on all nodes" in finding.what


def test_an_api_that_may_not_be_asked_is_skipped_with_the_right_to_allow(tmp_path):
    (finding,) = healthy(tmp_path, Denied()).finds("security-group")
    assert finding.level == "skipped"
    assert "ec2:DescribeInstances" in finding.what


def test_instances_of_another_account_are_skipped_with_what_ec2_says(cloud, tmp_path):
    client, stubber = cloud  # HyperPod's are
    message = "The instance ID 'i-00000000000000001' does not exist"
    stubber.add_client_error("describe_instances", "InvalidInstanceID.NotFound", message)
    (finding,) = healthy(tmp_path, client).finds("security-group")
    assert finding.level == "skipped"
    assert message in finding.what


def kinds(stubber, limit=8):
    entry = {
        "InstanceType": KIND,
        "NetworkInfo": {"EfaInfo": {"MaximumEfaInterfaces": limit}},
    }
    stubber.add_response("describe_instance_types", {"InstanceTypes": [entry]})


@pytest.mark.parametrize(
    ("second", "limit", "words"),
    [
        (instance(2, interfaces=7), 8, ["7 of 8", "i-00000000000000002"]),
        (instance(2, zone="us-east-1b"), 8, ["us-east-1a and us-east-1b"]),
        (instance(2), 4, ["4 EFA interfaces", "catalogue says 8"]),
    ],
)
def test_interfaces_that_are_missing_misplaced_or_miscounted(cloud, tmp_path, second, limit, words):
    client, stubber = cloud
    described(stubber, instance(1), second)
    kinds(stubber, limit)
    (finding,) = healthy(tmp_path, client).finds("efa-interfaces")
    assert finding.level == "fail"
    assert all(word in finding.what for word in words)


def test_all_interfaces_attached_in_one_zone_is_well(cloud, tmp_path):
    client, stubber = cloud
    described(stubber, instance(1), instance(2))
    kinds(stubber)
    (finding,) = healthy(tmp_path, client).finds("efa-interfaces")
    assert finding.level == "ok"

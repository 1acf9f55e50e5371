"""A machine made of a folder and a table: a healthy node, which each test spoils in one point."""

import sys
from pathlib import Path

from megatron.efa.cluster.catalogue import machine
from megatron.efa.doctor.checks.storage import EXTENSION
from megatron.efa.doctor.context import Context
from megatron.efa.doctor.host import ABSENT, Answer, Host
from megatron.efa.doctor.registry import checks, findings

KIND = "p6-b200.48xlarge"  # the fewest devices of all kinds with 8 GPUs
PLUGIN = "/opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so"
LUSTRE = """UUID 1K-blocks Used Available Use% Mounted on
fsx-MDT0000_UUID 1000000 1000 999000 1% /fsx[MDT:0]
fsx-OST0000_UUID 90000000000 1000 80000000000 1% /fsx[OST:0]
fsx-OST0001_UUID 90000000000 1000 80000000000 1% /fsx[OST:1]
"""


class FakeHost(Host):
    """Programs answer from `answers`: the longest key that a command begins with; else absent."""

    def __init__(self, root, environ, answers, ec2=None):
        super().__init__(root, environ, ec2)
        self.answers = answers

    def run(self, *command, seconds=30):
        line = " ".join(command).replace(sys.executable, "python")
        keys = [key for key in self.answers if line.startswith(key)]
        if not keys:
            return Answer(ABSENT, f"{command[0]}: No such file or directory")
        answer = self.answers[max(keys, key=len)]
        return answer if isinstance(answer, Answer) else Answer(0, answer)

    def put(self, path, text=""):
        """Write a file of the machine; bytes or text."""
        file = self.at(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_symlink():
            file.unlink()
        file.write_bytes(text if isinstance(text, bytes) else text.encode())

    def link(self, path, target):
        """A link at `path` to the machine's absolute path `target`."""
        file, aim = self.at(path), self.at(target)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.symlink_to(aim)

    def efa(self, number):
        """Add EFA device `number`, with its uverbs device and its counters."""
        self.device(f"rdmap{number}s0", number, "efa")

    def device(self, name, number, driver):
        """Add an RDMA device of some driver."""
        self.at(f"/sys/bus/pci/drivers/{driver}").mkdir(parents=True, exist_ok=True)
        for folder in (f"infiniband/{name}", f"infiniband_verbs/uverbs{number}"):
            self.link(f"/sys/class/{folder}/device/driver", f"/sys/bus/pci/drivers/{driver}")
        self.put(f"/sys/class/infiniband/{name}/ports/1/state", "4: ACTIVE\n")
        for counter in ("tx_bytes", "rx_bytes", "retrans_timeout_events"):
            self.put(f"/sys/class/infiniband/{name}/ports/1/hw_counters/{counter}", "0\n")
        self.put(f"/dev/infiniband/uverbs{number}")

    def finds(self, check, context=None):
        """Findings of one check here."""
        one = {c.id: c for c in checks()}[check]
        return findings(one, self, context or CONTEXT)


CONTEXT = Context(
    kind=KIND,
    nodes=4,
    settings={"save": "/fsx/run", "num_workers": 2, "flight_recorder_dump_path": "/fsx/fr"},
    checkpoint_bytes=14e12,
)


def fi_info(devices):
    return "".join(
        f"provider: {provider}\n    fabric: {provider}\n    domain: rdmap{i}s0-rdm\n"
        for i in range(devices)
        for provider in ("efa", "efa-direct")
    )


def bare(root: Path, ec2=None) -> FakeHost:
    """A machine that has nothing and tells nothing."""
    return FakeHost(root, {}, {}, ec2)


def healthy(root: Path, ec2=None, kind=KIND) -> FakeHost:
    """A node on which nothing is wrong."""
    devices = machine(kind).interfaces
    environ = {
        "LD_LIBRARY_PATH": "/opt/amazon/efa/lib:/opt/amazon/ofi-nccl/lib",
        "NCCL_NET_PLUGIN": PLUGIN,
        "FI_EFA_USE_HUGE_PAGE": "0",
        "NVIDIA_PYTORCH_VERSION": "26.02",
        "SLURM_JOB_NODELIST": "ip-10-0-0-[1-4]",
    }
    answers = {
        "/opt/amazon/efa/bin/fi_info -p efa": fi_info(devices),
        "/opt/amazon/efa/bin/fi_info --version": "fi_info: 2.6.0amzn1.0\nlibfabric: 2.6.0amzn1.0\n",
        "nvidia-smi --query-gpu=name ": "NVIDIA B200\n" * 8,
        "nvidia-smi --query-gpu=index,": "".join(
            f"{i}, 0, Not Active, Not Active\n" for i in range(8)
        ),
        "nvidia-smi -q": "    Fabric\n        State                 : Completed\n" * 8,
        "ldconfig -p": "\tlibcuda.so.1 (libc6,x86-64) => /usr/lib64/libcuda.so.1\n"
        "\tlibnccl.so.2 (libc6,x86-64) => /usr/lib64/libnccl.so.2\n",
        "python -c import ctypes": "",
        "python -c from importlib.metadata import version; print(version('torch'))": "2.10.0a0\n",
        "getent ahosts": "10.0.0.1 STREAM\n",
        "chronyc -n tracking": "System time     : 0.000021 seconds slow of NTP time\n"
        "Leap status     : Normal\n",
        "df -B1": "          Size         Avail\n900000000000000 800000000000000\n",
        "lfs df": LUSTRE,
        "ethtool -S": "NIC statistics:\n     bw_out_allowance_exceeded: 0\n",
        "scontrol show config": "TaskPlugin              = task/none\nPrologFlags = X11\n",
        "scontrol show topology": "BlockName=b1 BlockIndex=0 Nodes=ip-10-0-0-[1-4] BlockSize=4\n",
        "kubectl get daemonsets": '{"items": [{"metadata": {"name": "efa"}, "status": {}, "spec":'
        '{"template": {"spec": {"nodeSelector": {"a": "b"}, "containers": [{"image":'
        '"r/eks/aws-efa-k8s-device-plugin:v0.5.12"}]}}}}]}',
    }
    host = FakeHost(root, environ, answers, ec2)
    for number in range(devices):
        host.efa(number)
    for path, text in {
        "/sys/devices/virtual/dmi/id/sys_vendor": "Amazon EC2\n",
        "/sys/devices/virtual/dmi/id/product_name": f"{kind}\n",
        "/sys/devices/virtual/dmi/id/board_asset_tag": "i-00000000000000001\n",
        "/sys/module/efa/version": "3.3.0\n",
        "/opt/amazon/efa_installed_packages": "# EFA installer version: 1.50.0\n",
        "/opt/amazon/efa/bin/fi_info": "",
        PLUGIN: b"\x00NET/OFI\x00aws-ofi-nccl 1.21.1\x00",
        "/usr/lib64/libnccl.so.2.31.2": b"",
        "/usr/lib64/libcuda.so.580.95.05": b"",
        "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  "
        "580.95.05  Release Build\n",
        "/proc/self/limits": "Max locked memory         unlimited            unlimited   bytes\n",
        "/proc/self/cgroup": "0::/slurm/job\n",
        "/sys/fs/cgroup/slurm/job/memory.max": "max\n",
        "/sys/fs/cgroup/slurm/job/memory.events": "low 0\noom_kill 0\n",
        "/proc/sys/kernel/osrelease": "6.8.0-1031-aws\n",
        "/proc/modules": "efa_nv_peermem 16384 0 - Live 0x0\nefa 100 1 - Live 0x0\n",
        "/proc/mounts": "overlay / overlay rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0\n"
        "fs@tcp:/fsx /fsx lustre rw 0 0\n",
        "/proc/net/route": "Iface Destination Gateway\neth0 00000000 0100000A\n",
        "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "2560\n",
        "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "2560\n",
        "/sys/devices/system/node/node0/cpumap": "ff\n",
        "/opt/sagemaker_cluster/x": "",
        "/etc/megatron-efa/environment": f"LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib\n"
        f"NCCL_NET_PLUGIN={PLUGIN}\n",
        "/fsx/run/x": "",
        "/dev/gdrdrv": "",
    }.items():
        host.put(path, text)
    host.link("/usr/lib64/libnccl.so.2", "/usr/lib64/libnccl.so.2.31.2")
    host.link("/usr/lib64/libcuda.so.1", "/usr/lib64/libcuda.so.580.95.05")
    host.put(f"{EXTENSION}/helpers_cpp.cpython-312-x86_64-linux-gnu.so")
    return host

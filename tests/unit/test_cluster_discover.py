"""Clusters discovered from what APIs and tools answer, in their documented shapes."""

import http.server
import json
import subprocess
import sys
import threading

import boto3
import pytest
from botocore.stub import Stubber

from megatron.efa.cluster.discover import discover, ec2, imds, kubernetes, slurm
from megatron.efa.errors import EfaError


@pytest.fixture
def cloud():
    """(client, stubber): an EC2 client that answers what it is told, in the API's shape."""
    keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b"}
    client = boto3.client("ec2", region_name="us-east-1", **keys)
    with Stubber(client) as stubber:
        yield client, stubber


def instance(number, kind="p5.48xlarge", state="running", **more):
    return {
        "InstanceId": f"i-{number:017x}",
        "InstanceType": kind,
        "PrivateDnsName": f"ip-10-0-0-{number}.ec2.internal",
        "PrivateIpAddress": f"10.0.0.{number}",
        "State": {"Code": 16, "Name": state},
        "Placement": {"AvailabilityZone": "us-east-1a"},
        # An EFA-only interface, which has no address.
        "NetworkInterfaces": [{"InterfaceType": "efa-only", "NetworkInterfaceId": "eni-1"}],
        **more,
    }


def topology(number, *nodes, **more):
    return {
        "InstanceId": f"i-{number:017x}",
        "InstanceType": "p5.48xlarge",
        "NetworkNodes": [f"nn-{node}" for node in nodes],
        **more,
    }


def answers(stubber, instances, topologies, gpus=None, types=None, denied=()):
    """Queue the answers to one discovery; one page each but for what needs more."""
    kinds = sorted({entry["InstanceType"] for entry in instances})
    stubber.add_response("describe_instances", {"Reservations": [{"Instances": instances}]})
    if "types" in denied:
        stubber.add_client_error("describe_instance_types", "UnauthorizedOperation")
    else:
        counts = {"p5.48xlarge": 8, "p6-b200.48xlarge": 8, "m5.large": 0, **(gpus or {})}
        entries = [
            {"InstanceType": kind}
            | ({"GpuInfo": {"Gpus": [{"Count": counts[kind]}]}} if counts[kind] else {})
            for kind in kinds
        ]
        stubber.add_response("describe_instance_types", {"InstanceTypes": entries})
    if "topology" in denied:
        stubber.add_client_error("describe_instance_topology", "UnauthorizedOperation")
    else:
        stubber.add_response("describe_instance_topology", {"Instances": topologies})


def test_instances_hang_under_their_network_nodes(cloud):
    client, stubber = cloud
    instances = [instance(2), instance(1), instance(3, kind="m5.large")]
    answers(stubber, instances, [topology(2, "a", "b", "d"), topology(1, "a", "b", "c")])
    cluster = ec2.discover(client=client)
    assert [node.name for node in cluster.nodes] == ["ip-10-0-0-1", "ip-10-0-0-2"]
    assert cluster.nodes[0].path == ("nn-a", "nn-b", "nn-c")
    assert cluster.nodes[0].instance == "i-00000000000000001"
    assert cluster.far is not None
    assert cluster.distance(0, 1) == 2
    assert not cluster.notes


def test_given_instances_keep_their_order_and_must_all_run(cloud):
    client, stubber = cloud
    ids = [instance(i)["InstanceId"] for i in (3, 1)]
    answers(stubber, [instance(1), instance(3)], [topology(1, "a"), topology(3, "a")])
    assert [node.instance for node in ec2.discover(ids, client).nodes] == ids
    stopped = {"Reservations": [{"Instances": [instance(1, state="stopped"), instance(3)]}]}
    stubber.add_response("describe_instances", stopped)
    with pytest.raises(EfaError, match=f"no running instance {ids[1]}"):
        ec2.discover(ids, client)


def test_four_layers_mixed_kinds_and_a_node_without_topology_are_noted(cloud):
    client, stubber = cloud
    instances = [instance(1), instance(2, kind="p6-b200.48xlarge"), instance(3)]
    answers(stubber, instances, [topology(1, "a", "b", "c"), topology(2, "a", "x", "y", "z")])
    cluster = ec2.discover(client=client)
    assert {len(node.path) for node in cluster.nodes} == {0, 3, 4}
    notes = " ".join(cluster.notes)
    for said in ("leaves out i-00000000000000003", "3 and 4 layers", "kinds are mixed"):
        assert said in notes
    lonely = next(i for i, node in enumerate(cluster.nodes) if not node.path)
    other = next(i for i in range(3) if i != lonely)
    assert cluster.distance(lonely, other) == 5


def test_missing_rights_leave_what_can_be_known(cloud):
    client, stubber = cloud
    answers(stubber, [instance(1)], [], denied=("types", "topology"))
    cluster = ec2.discover(client=client)
    assert cluster.nodes[0].gpus == 8
    assert "ec2:DescribeInstanceTopology" in " ".join(cluster.notes)
    stubber.add_client_error("describe_instances", "UnauthorizedOperation")
    with pytest.raises(EfaError, match="allow ec2:DescribeInstances"):
        ec2.discover(client=client)


def test_more_than_a_hundred_instances_are_asked_in_batches_and_pages(cloud):
    client, stubber = cloud
    instances = [instance(i) for i in range(1, 151)]
    ids = [entry["InstanceId"] for entry in instances]
    for part in (instances[:100], instances[100:]):
        stubber.add_response(
            "describe_instances",
            {"Reservations": [{"Instances": part}]},
            {"InstanceIds": [entry["InstanceId"] for entry in part]},
        )
    entry = {"InstanceType": "p5.48xlarge", "GpuInfo": {"Gpus": [{"Count": 8}]}}
    stubber.add_response("describe_instance_types", {"InstanceTypes": [entry]})
    told = [topology(i, "a", f"leaf{i % 3}") for i in range(1, 151)]
    pages = [(ids[:100], told[:60], "more"), (ids[:100], told[60:100], None)]
    for asked, page, token in [*pages, (ids[100:], told[100:], None)]:
        expected = {"InstanceIds": asked}
        if page is told[60:100] or page == told[60:100]:
            expected["NextToken"] = "more"
        answer = {"Instances": page} | ({"NextToken": token} if token else {})
        stubber.add_response("describe_instance_topology", answer, expected)
    cluster = ec2.discover(ids, client)
    assert len(cluster.nodes) == 150
    assert all(node.path for node in cluster.nodes)
    stubber.assert_no_pending_responses()


def test_ultraservers_are_nvlink_domains_and_null_is_none(cloud):
    client, stubber = cloud
    kind = "p6e-gb200.36xlarge"
    instances = [instance(i, kind=kind) for i in (1, 2)]
    told = [topology(1, "a", CapacityBlockId="cb-1"), topology(2, "a", CapacityBlockId="null")]
    answers(stubber, instances, told, gpus={kind: 4})
    assert [node.domain for node in ec2.discover(client=client).nodes] == ["cb-1", ""]


def test_no_gpus_anywhere_is_said(cloud):
    client, stubber = cloud
    answers(stubber, [instance(1, kind="m5.large")], [])
    with pytest.raises(EfaError, match="no running instance with GPUs"):
        ec2.discover(client=client)


class Metadata(http.server.BaseHTTPRequestHandler):
    """The metadata service, version 2: a token first, then documents with it."""

    def do_PUT(self):
        asked = self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self.reply(200 if self.path == "/latest/api/token" and asked else 400, "secret")

    def do_GET(self):
        if self.headers["X-aws-ec2-metadata-token"] != "secret":
            self.reply(401, "")
        else:
            assert self.path == "/latest/dynamic/instance-identity/document"
            names = ("instanceId", "instanceType", "region", "availabilityZone")
            values = ("i-1", "p5.48xlarge", "us-east-1", "us-east-1a")
            self.reply(200, json.dumps(dict(zip(names, values, strict=True))))

    def reply(self, code, text):
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        pass


def test_an_instance_knows_itself(monkeypatch):
    with http.server.HTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", address)
        assert imds.identity() == imds.Identity("i-1", "p5.48xlarge", "us-east-1", "us-east-1a")
        server.shutdown()
    with pytest.raises(EfaError, match="does not tell which instance"):
        imds.identity()


def kubernetes_node(name, gpus=8, layers=(), labels=(), **spec):
    return {
        "metadata": {
            "name": name,
            "labels": {f"topology.k8s.aws/network-node-layer-{i}": nn for i, nn in layers}
            | {"node.kubernetes.io/instance-type": "p5.48xlarge"}
            | dict(labels),
        },
        "spec": {"providerID": f"aws:///us-east-1a/i-{name}"} | spec,
        "status": {
            "allocatable": {"nvidia.com/gpu": str(gpus)} if gpus else {"cpu": "2"},
            "addresses": [{"type": "InternalIP", "address": "10.0.0.1"}],
        },
    }


def of_kubernetes(tmp_path, *nodes):
    file = tmp_path / "nodes.json"
    file.write_text(json.dumps({"kind": "List", "items": list(nodes)}))
    return discover(f"kubernetes:{file}")


def test_labels_of_kubernetes_nodes_are_paths(tmp_path):
    layers = [(2, "nn-b"), (1, "nn-a"), (3, "nn-c")]
    domain = [("nvidia.com/gpu.clique", "clique.7")]
    cluster = of_kubernetes(
        tmp_path,
        kubernetes_node("z", layers=layers),
        kubernetes_node("a", layers=layers, labels=domain),
        kubernetes_node("login", gpus=0),
        kubernetes_node("cordoned", unschedulable=True),
    )
    assert [node.name for node in cluster.nodes] == ["a", "z"]
    assert cluster.nodes[0].path == ("nn-a", "nn-b", "nn-c")
    assert cluster.nodes[0].domain == "clique.7"
    assert cluster.nodes[1].instance == "i-z"


def test_labels_that_were_never_set_are_said(tmp_path):
    none = of_kubernetes(tmp_path, kubernetes_node("a"))
    assert "needs ec2:DescribeInstanceTopology" in " ".join(none.notes)
    some = of_kubernetes(tmp_path, kubernetes_node("a", layers=[(1, "x"), (3, "y")]))
    assert "a layer's label is missing on a" in " ".join(some.notes)
    with pytest.raises(EfaError, match=r"none has nvidia\.com/gpu"):
        of_kubernetes(tmp_path, kubernetes_node("a", gpus=0))


def test_kubectl_that_fails_or_is_not_there_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EfaError, match="there is no kubectl"):
        kubernetes.discover()
    tool(tmp_path / "kubectl", "print('Unable to connect', file=sys.stderr); sys.exit(1)")
    with pytest.raises(EfaError, match="Unable to connect"):
        kubernetes.discover()


def tool(path, code):
    path.write_text(f"#!{sys.executable}\nimport sys\n{code}\n")
    path.chmod(0o755)


SLURM = {"SLURM_JOB_NODELIST": "gpu[01-02,4],head", "SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "8"}
TREE = """\
SwitchName=leaf0 Level=0 LinkSpeed=1 Nodes=gpu[01-02]
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=gpu4,head
SwitchName=spine Level=1 LinkSpeed=1 Nodes=gpu[01-02,4],head Switches=leaf[0-1]
"""
BLOCK = """\
BlockName=b0 BlockIndex=0 Nodes=gpu[01-02] BlockSize=2
BlockName=b1 BlockIndex=1 Nodes=gpu4,head BlockSize=2
"""


def in_slurm(tmp_path, monkeypatch, printed, code=0):
    expected = "assert sys.argv[1:] == ['show', 'topology']"
    tool(tmp_path / "scontrol", f"{expected}; sys.stdout.write({printed!r}); sys.exit({code})")
    monkeypatch.setenv("PATH", str(tmp_path))
    return slurm.discover(environment=SLURM)


def test_slurms_tree_gives_paths(tmp_path, monkeypatch):
    cluster = in_slurm(tmp_path, monkeypatch, TREE)
    assert [node.name for node in cluster.nodes] == ["gpu01", "gpu02", "gpu4", "head"]
    assert cluster.nodes[0].path == ("spine", "leaf0")
    assert cluster.nodes[3].path == ("spine", "leaf1")
    assert {node.gpus for node in cluster.nodes} == {8}
    assert (cluster.distance(0, 1), cluster.distance(1, 2)) == (1, 2)


def test_slurms_blocks_are_nvlink_domains(tmp_path, monkeypatch):
    cluster = in_slurm(tmp_path, monkeypatch, BLOCK)
    assert [node.domain for node in cluster.nodes] == ["b0", "b0", "b1", "b1"]


def test_slurm_without_topology_is_said(tmp_path, monkeypatch):
    assert "paths not known" in " ".join(in_slurm(tmp_path, monkeypatch, "").notes)
    assert "paths not known" in " ".join(in_slurm(tmp_path, monkeypatch, TREE, code=1).notes)
    (tmp_path / "scontrol").unlink()
    assert "could not be run" in " ".join(slurm.discover(environment=SLURM).notes)
    with pytest.raises(EfaError, match="run this in a Slurm job"):
        slurm.discover(environment={})


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        ("a", ["a"]),
        ("a,b-1", ["a", "b-1"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("r[1-2]n[3,5]-x", ["r1n3-x", "r1n5-x", "r2n3-x", "r2n5-x"]),
        ("(null)", []),
    ],
)
def test_host_lists_expand_as_scontrols(listed, names):
    assert slurm.expand(listed) == names


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no host"),
        ("a slots=x", "line 1: slots=x is no number"),
        ("a slots=1\na slots=1", "line 2: host a stands twice"),
        ("a", "how many GPUs a has"),
    ],
)
def test_a_wrong_hostfile_is_said(tmp_path, text, said):
    (tmp_path / "h").write_text(text)
    with pytest.raises(EfaError, match=said):
        discover(f"hostfile:{tmp_path / 'h'}")


def test_a_hostfile_without_a_name_is_asked_for():
    with pytest.raises(EfaError, match="name the file"):
        discover("hostfile:")


def test_a_kind_says_gpus_and_an_unknown_one_is_refused(tmp_path):
    (tmp_path / "h").write_text("a\nb\n")
    cluster = discover(f"hostfile:{tmp_path / 'h'}", "p5en.48xlarge")
    assert cluster.world_size == 16
    assert cluster.far is not None


def test_discovery_needs_no_torch():
    code = "import sys, megatron.efa.cluster.cli; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

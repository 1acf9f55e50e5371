"""The traffic report beside the interfaces of emulated nodes: the same bytes."""

import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
import torch.distributed as dist

from megatron.efa import groups
from megatron.efa.cli import main
from megatron.efa.comm import collectives
from megatron.efa.emulate import network
from megatron.efa.emulate.cluster import EmulatedCluster
from megatron.efa.emulate.forked import run_forked
from megatron.efa.emulate.rate import parse_rate
from megatron.efa.traffic.cli import read

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

NUMBERS = 3 << 18
OVERHEAD = 1.03
"""Headers and acknowledgements."""


def calls_on(group):
    """By name a call of each kind, on tensors of 3 MiB or some multiple."""
    ranks, me = group.size(), group.rank()
    world = dist.get_process_group_ranks(group)
    one, all_ = torch.ones(NUMBERS), torch.ones(ranks, NUMBERS)
    uneven = [NUMBERS // (1 + (me + to) % 3) for to in range(ranks)]
    rows = torch.ones(sum(uneven)), torch.ones(sum(uneven))
    parts = list(all_.unbind())
    return {
        "all_reduce": lambda: dist.all_reduce(one, group=group),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(
            all_.view(-1), one, group=group
        ),
        "all_gather": lambda: dist.all_gather(parts, one, group=group),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(
            one, all_.view(-1), group=group
        ),
        "all_to_all_single": lambda: dist.all_to_all_single(*rows, uneven, uneven, group=group),
        "even all_to_all_single": lambda: dist.all_to_all_single(all_, all_.clone(), group=group),
        "broadcast": lambda: dist.broadcast(one, world[1], group=group),
        "gather": lambda: dist.gather(one, parts if me == 0 else None, world[0], group=group),
        "scatter": lambda: dist.scatter(one, parts if me == 2 else None, world[2], group=group),
        "send": lambda: (
            dist.send(one, world[-1], group)
            if me == 0
            else dist.recv(one, world[0], group)
            if me == ranks - 1
            else None
        ),
        "batch": lambda: [
            work.wait()
            for work in dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, one, world[(me + 1) % ranks], group),
                    dist.P2POp(dist.irecv, all_[0], world[me - 1], group),
                ]
            )
        ],
    }


def told(meet, order):
    """Of each collective: bytes that left each node by this rank's report and by the interface."""
    from megatron.efa.traffic import watch
    from megatron.efa.traffic.record import Recording
    from megatron.efa.traffic.times import rows_of

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.new_group([int(rank) for rank in order])
    seen, before_all = {}, dist.all_reduce
    installed = watch.install()
    for name, call in calls_on(group).items():
        meet.wait()
        before = network.counters(os.getpid()).sent_bytes
        meet.wait()
        watch.recording = recording = Recording()
        call()
        watch.recording = None
        meet.wait()
        sent = network.counters(os.getpid()).sent_bytes - before
        step = recording.finish(1)
        rows = rows_of(step)
        assert len(step.transfers) == (2 if name == "batch" else name != "send" or bool(rows)), name
        seen[name] = (sum(row.bytes for (_, t), row in rows.items() if t == "fabric"), sent)
    installed.undo()
    assert dist.all_reduce is before_all
    dist.destroy_process_group()
    return seen


@pytest.mark.parametrize("order", ["0123", "0213"], ids=["by node", "across nodes"])
def test_every_collective_sends_what_is_told(tmp_path, order):
    meet = multiprocessing.get_context("fork").Barrier(4, timeout=120)
    with EmulatedCluster(2, None) as cluster:
        ranks = run_forked(cluster, 2, lambda: told(meet, order), tmp_path)
    for name in ranks[0]:
        for node in ((0, 1), (2, 3)):
            told_, seen = sum(ranks[rank][name][0] for rank in node), ranks[node[0]][name][1]
            assert told_ <= seen <= OVERHEAD * told_ + 300_000, (name, node, told_, seen)


OURS = (
    "--efa-data-parallel on --efa-pipeline on --efa-tensor on "
    "--moe-token-dispatcher-type hierarchical"
)
# Dense layers without sequence parallelism: both tensor ranks hold what goes to the next stage.
PIPELINE = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --moe-layer-freq [0,0] "
    "--expert-tensor-parallel-size 1"
)
JOBS = {
    "upstream's pipeline": PIPELINE,
    "our pipeline": f"{PIPELINE} {OURS}",
    "experts over nodes": f"--expert-model-parallel-size 4 {OURS}",
    "tensors over nodes": "--tensor-model-parallel-size 4 --sequence-parallel "
    f"--expert-model-parallel-size 4 --expert-tensor-parallel-size 1 {OURS}",
}


def train_on_nodes(folder):
    """By job: what the ranks saw of their steps, on two nodes of two."""
    from megatron.efa.bench import step, step_rank

    step_rank.preload(gpu=False)
    seen = {}
    with EmulatedCluster(2, None) as cluster:
        for name, layout in JOBS.items():
            flags = [
                *(*step.MODEL, *step.MADE_UP_DATA, "--distributed-backend", "gloo"),
                *("--global-batch-size", "4", "--train-iters", "2", "--transformer-impl", "local"),
                *("--no-gradient-accumulation-fusion", "--no-masked-softmax-fusion"),
                *("--no-rope-fusion", "--no-persist-layer-norm", "--use-distributed-optimizer"),
                *("--moe-token-dispatcher-type", "alltoall", *layout.split()),
                *("--efa-traffic-interval", "1", "--efa-traffic-dir", str(folder / name)),
                *("--efa-traffic-trace", "2", "--tensorboard-dir", str(folder / name / "board")),
                *("--seq-length", "256", "--max-position-embeddings", "256"),
            ]
            seen[name] = run_forked(
                cluster,
                2,
                lambda flags=flags: step_rank.train(flags, True, False),
                folder / name / "logs",
            )
    return seen


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of `JOBS`, and what their ranks saw."""
    folder = tmp_path_factory.mktemp("traffic")
    # In a process that is redirected to CPUs, as this one, which runs other tests, must not be.
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return folder, pool.submit(train_on_nodes, folder).result()


@pytest.mark.parametrize("job", JOBS)
def test_bytes_of_training_steps_are_those_of_the_interfaces(trained, job):
    folder, seen = trained
    records = read(folder / job)
    assert [record["step"] for record in records] == [1, 2]
    for node in (0, 1):
        before, after = seen[job][2 * node].sent
        told_ = records[1]["sent_by_node"][node]
        print(job, node, (after - before) / told_)
        assert 0.98 < (after - before) / told_ < OVERHEAD


def test_what_tensor_ranks_hold_alike_crosses_between_stages_once(trained):
    folder, _ = trained
    sent = {}
    for job in ("upstream's pipeline", "our pipeline"):
        rows = read(folder / job)[1]["rows"]
        sent[job] = [row["bytes"] for row in rows if (row["axis"], row["tier"]) == ("pp", "fabric")]
    (theirs,), (ours,) = sent.values()
    assert ours == theirs / 2


def test_a_report_is_written_for_people_tensorboard_and_perfetto(trained):
    folder, _ = trained
    job = folder / "experts over nodes"
    assert "traffic of step 2" in (job / "logs" / "rank3.log").read_text()
    assert list((job / "board").iterdir())
    assert main(["traffic", str(job / "trace-step2")]) == 0
    events = json.loads((job / "trace-step2.json").read_text())["traceEvents"]
    moved = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in moved} == {0, 1, 2, 3}
    record = read(job)[1]
    in_trace = sum(event["args"]["fabric_bytes"] for event in moved)
    assert in_trace == pytest.approx(sum(record["sent_by_node"]))


def covered_and_not():
    """Seconds waited for a sum over the link, begun before work that takes longer, and alone."""
    from megatron.efa.traffic import watch
    from megatron.efa.traffic.record import Recording
    from megatron.efa.traffic.times import exposed, rows_of

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cluster_of_two = groups.two_level(None)
    installed, found = watch.install(), []
    calls = {
        "flat": lambda tensor: dist.all_reduce(tensor, async_op=True),
        "two levels": lambda tensor: collectives.all_reduce(
            tensor, cluster_of_two, async_op=True, mode="on"
        ),
    }
    for name, call in calls.items():
        for pause in (0.0, 1.0):
            dist.barrier()
            watch.recording = recording = Recording()
            work = call(torch.ones(SHAPED // 4))
            time.sleep(pause)
            work.wait()
            watch.recording = None
            step = recording.finish(1)
            in_flight = max(row.seconds for row in rows_of(step).values())
            found.append((name, pause, exposed(step), in_flight))
    installed.undo()
    dist.destroy_process_group()
    return found


SHAPED = 2 << 20
"""Bytes: 0.25 s and more at 100 Mbit/s for twice 1/2 to 3/4 of them."""


def test_what_runs_behind_work_is_in_flight_and_not_waited_for(tmp_path):
    with EmulatedCluster(2, parse_rate("100mbit")) as cluster:
        ranks = run_forked(cluster, 2, covered_and_not, tmp_path)
    for name, pause, waited, in_flight in (each for rank in ranks for each in rank):
        if pause:
            assert waited < 0.1 * in_flight, name
        else:
            assert waited > 0.8 * in_flight > 0.05, name

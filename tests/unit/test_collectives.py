"""Collectives on two levels give what torch.distributed gives on the flat group, over gloo."""

import pytest
import torch
import torch.distributed as dist

from megatron.efa import comm
from megatron.efa.cluster.current import use
from megatron.efa.cluster.model import Cluster, Link, Node
from megatron.efa.comm import algorithms, choose, drive
from megatron.efa.errors import EfaError
from megatron.efa.groups import two_level
from tests.unit.gloo_ranks import GlooRanks

RANKS = 8
SHAPES = [(2, 4), (4, 2)]
OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX}
CUTTING = Link(peak=1e6, latency=1e-6)
"""A far link on which messages of a few bytes are worth a piece of their own."""

each_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    pool = GlooRanks(RANKS, tmp_path_factory.mktemp("store"))
    yield pool
    pool.close()


def of(shape, group=None):
    """The world as nodes of equal size, cut finely; a purpose for each shape."""
    nodes, per_node = shape
    cluster = tuple(Node(f"node{i}", per_node) for i in range(nodes))
    use(Cluster(cluster, near=CUTTING, far=CUTTING))
    return two_level(group or dist.group.WORLD, f"{nodes}x{per_node}")


def values(rank, size, dtype, seed=0):
    """Small whole numbers: their sums are exact in every dtype, in every order."""
    made = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(0, 5, (size,), generator=made).to(dtype)


def noise(rank, size, dtype=torch.float32, seed=0):
    made = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(size, generator=made).to(dtype)


def on_each(rank, shape, case):
    two = of(shape)
    return CASES[case](rank, two)


def reductions(rank, two):
    for size in (1, 7, 8, 9, 1000, 4097):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.int8):
            for name, op in OPS.items():
                if name == "mean" and not dtype.is_floating_point:
                    continue
                ours = values(rank, size, dtype)
                flat = values(rank, size, torch.float32)
                dist.all_reduce(flat, op=op)
                assert comm.all_reduce(ours, two, op, mode="on") is None
                assert torch.equal(ours, flat.to(dtype)), (size, dtype, name)
    grid = values(rank, 6 * 5, torch.float64).view(6, 5)
    flat = grid.clone()
    dist.all_reduce(flat)
    comm.all_reduce(grid, two, mode="on")
    assert torch.equal(grid, flat)
    truth = torch.tensor([rank == 3, False, True])
    comm.all_reduce(truth, two, mode="on")
    assert truth.tolist() == [True, False, True]


def scattered(rank, two):
    for size in (1, 3, 1000):
        for dtype in (torch.float32, torch.bfloat16, torch.int32):
            whole = values(rank, RANKS * size, dtype)
            summed = whole.to(torch.float32, copy=True)
            dist.all_reduce(summed)
            mine = summed.view(RANKS, -1)[rank].to(dtype)
            output = torch.empty(size, dtype=dtype)
            kept = whole.clone()
            comm.reduce_scatter(output, whole, two, mode="on")
            assert torch.equal(output, mine), (size, dtype)
            assert torch.equal(whole, kept)
            slot = whole.view(RANKS, -1)[rank]
            comm.reduce_scatter(slot, whole, two, mode="on")  # as DDP does it
            assert torch.equal(slot, mine), (size, dtype)
            if dtype.is_floating_point:
                comm.reduce_scatter(output, kept, two, OPS["mean"], mode="on")
                assert torch.equal(output, (mine.float() / RANKS).to(dtype))


def gathered(rank, two):
    for size in (1, 3, 1000):
        for dtype in (torch.float32, torch.bfloat16, torch.bool):
            part = values(rank, size, dtype)
            expected = torch.cat([values(r, size, dtype) for r in range(RANKS)])
            output = torch.zeros(RANKS * size, dtype=dtype)
            comm.all_gather(output, part, two, mode="on")
            assert torch.equal(output, expected), (size, dtype)
            output.zero_()
            slot = output.view(RANKS, -1)[rank]
            slot.copy_(part)
            comm.all_gather(output, slot, two, mode="on")  # as DDP does it
            assert torch.equal(output, expected), (size, dtype)


def exchanged(rank, two):
    counts = torch.randint(0, 4, (RANKS, RANKS), generator=torch.Generator().manual_seed(3))
    counts[2] = 0  # a rank that sends nothing
    counts[:, 5] = 0  # and one that gets nothing
    for ins, outs in ((counts[rank], counts[:, rank]), (None, None)):
        send = 2 * RANKS if ins is None else int(ins.sum())
        receive = 2 * RANKS if ins is None else int(outs.sum())
        input = noise(rank, send * 3).view(send, 3)
        splits = (None, None) if ins is None else (outs.tolist(), ins.tolist())
        ours, flat = torch.zeros(receive, 3), torch.zeros(receive, 3)
        comm.all_to_all(ours, input, *splits, two, mode="on")
        dist.all_to_all_single(flat, input, *splits)
        assert torch.equal(ours, flat)


def broadcasted(rank, two):
    for src in (0, 3, 6):
        for size in (1, 5, 1000):
            tensor = noise(rank, size)
            comm.broadcast(tensor, src, two, mode="on")
            assert torch.equal(tensor, noise(src, size)), (src, size)


def of_nothing(rank, two):
    nothing = torch.empty(0)
    for collective in (comm.all_gather, comm.reduce_scatter):
        assert collective(nothing, nothing, two, mode="on") is None
    assert comm.all_reduce(nothing, two, async_op=True, mode="on").wait()
    assert comm.broadcast(nothing, 3, two, async_op=True, mode="on").is_completed()
    comm.all_to_all(nothing, nothing, [0] * RANKS, [0] * RANKS, two, mode="on")


def repeated(rank, two):
    """The same inputs give the same bits, on all ranks, whether cut or not; and as a scatter."""
    results = []
    for far in (CUTTING, Link(1e9, 1.0), CUTTING):
        use(Cluster(tuple(Node("", two.per_node) for _ in range(two.nodes)), far=far))
        tensor = noise(rank, 4096)
        comm.all_reduce(tensor, two, mode="on")
        results.append(tensor)
        output = torch.empty(4096 // RANKS)
        comm.reduce_scatter(output, noise(rank, 4096), two, mode="on")
        assert torch.equal(output, tensor.view(RANKS, -1)[rank])
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    return results[0].tolist()


def in_fp32(rank, two):
    """16-bit floats are rounded once, as upstream's fp32-accumulating reduce-scatter rounds."""
    size = 1024
    inputs = [noise(r, size, torch.bfloat16) for r in range(RANKS)]
    once = sum(part.double() for part in inputs).bfloat16()
    for mode in ("on", "off"):
        tensor = inputs[rank].clone()
        comm.all_reduce(tensor, two, fp32=True, mode=mode)
        assert torch.equal(tensor, once)
        output = torch.empty(size // RANKS, dtype=torch.bfloat16)
        comm.reduce_scatter(output, inputs[rank], two, fp32=True, mode=mode)
        assert torch.equal(output, once.view(RANKS, -1)[rank])
        comm.reduce_scatter(output, inputs[rank], two, OPS["mean"], fp32=True, mode=mode)
        mean = (sum(part.double() for part in inputs) / RANKS).bfloat16()
        assert torch.equal(output, mean.view(RANKS, -1)[rank])
    plain = inputs[rank].clone()
    comm.all_reduce(plain, two, mode="on")
    assert not torch.equal(plain, once)  # so that the above says something


def in_flight(rank, two):
    """Several collectives at once, and ones that wait among them, end as if alone."""
    tensors = [noise(rank, 4096, seed=i) for i in range(6)]
    alone = [tensor.clone() for tensor in tensors]
    for tensor in alone:
        comm.all_reduce(tensor, two, mode="on")
    handles = [comm.all_reduce(t, two, async_op=True, mode="on") for t in tensors[:5]]
    comm.all_reduce(tensors[5], two, mode="on")  # goes behind them
    assert all(handle.is_completed() for handle in handles)
    for handle in reversed(handles):
        assert handle.wait()
    assert all(torch.equal(a, b) for a, b in zip(tensors, alone, strict=True))


def refused(rank, two):
    with pytest.raises(EfaError, match="not contiguous"):
        comm.all_reduce(torch.zeros(4, 4).T, two)
    with pytest.raises(EfaError, match="8 times as many"):
        comm.reduce_scatter(torch.zeros(2), torch.zeros(15), two)
    with pytest.raises(EfaError, match=r"no mean of torch\.int32"):
        comm.all_reduce(torch.zeros(2, dtype=torch.int32), two, OPS["mean"])
    with pytest.raises(EfaError, match="do not add up"):
        comm.all_to_all(torch.zeros(8), torch.zeros(8), [1] * 8, [2] * 8, two)
    with pytest.raises(EfaError, match="differ"):
        comm.all_gather(torch.zeros(8), torch.zeros(1).double(), two)
    with pytest.raises(EfaError, match="rank 8 is not in the group"):
        comm.broadcast(torch.zeros(8), 8, two, mode="on")


def products(rank, two):
    tensor = torch.full((16,), 2.0)
    comm.all_reduce(tensor, two, dist.ReduceOp.PRODUCT, mode="on")
    assert torch.equal(tensor, torch.full((16,), 256.0))


def as_over_nccl(rank, two):
    """The branches for CUDA tensors, whose stages are the backend's own collectives."""
    for name, fp32, dtype in (
        ("sum", False, torch.float32),
        ("mean", False, torch.float32),
        ("max", False, torch.float32),
        ("sum", True, torch.bfloat16),
        ("mean", True, torch.bfloat16),
    ):
        op = OPS[name]
        whole = values(rank, RANKS * 6, dtype)
        how = algorithms.Reduction(op, two, whole, fp32)
        how.exchange = False
        if not how.wide:
            how.op, how.divisor = op, 1
        expected = whole.to(torch.float32, copy=True)
        dist.all_reduce(expected, op)
        expected = expected.to(dtype)
        output, tensor = torch.empty(6, dtype=dtype), whole.clone()
        columns = [slice(0, 4), slice(4, 6)]
        pieces = [algorithms.reduce_scatter(output, whole, part, two, how) for part in columns]
        drive.launch(two, pieces, [output], False)
        assert torch.equal(output, expected.view(RANKS, -1)[rank]), (name, fp32)
        drive.launch(two, [algorithms.all_reduce(tensor, two, how)], [tensor], False)
        assert torch.equal(tensor, expected), (name, fp32)


CASES = {
    case.__name__: case
    for case in (
        reductions,
        scattered,
        gathered,
        exchanged,
        broadcasted,
        of_nothing,
        repeated,
        in_fp32,
        in_flight,
        refused,
        products,
        as_over_nccl,
    )
}


@each_shape
@pytest.mark.parametrize("case", CASES)
def test_agrees_with_the_flat_group(ranks, shape, case):
    results = ranks(on_each, shape, case)
    assert all(result == results[0] for result in results)


def test_pieces_take_turns_in_one_order_whatever_the_timing():
    log = []

    class Work:
        def __init__(self, name):
            self.name = name

        def wait(self):
            log.append(f"wait {self.name}")

    def piece(name):
        for stage in ("node", "rail", "node again"):
            log.append(f"start {name} {stage}")
            yield Work(f"{name} {stage}")

    drive.rounds([piece("a"), piece("b")])
    # b is on the rail before a's turn on the rail is waited for.
    assert log.index("start b rail") < log.index("wait a rail")
    assert log.index("start a rail") < log.index("start b node")
    assert len(log) == 12


def raising(rank):
    two = of((2, 4))

    def piece():
        yield dist.barrier(async_op=True)
        raise ValueError(f"rank {rank}")

    handle = drive.launch(two, [piece()], [torch.zeros(1)], True)
    with pytest.raises(ValueError, match=f"rank {rank}"):
        handle.wait()
    tensor = torch.ones(8)
    comm.all_reduce(tensor, two, mode="on")
    assert tensor.tolist() == [8.0] * 8


def test_a_failure_is_raised_by_the_handle_and_ends_nothing_else(ranks):
    ranks(raising)


@pytest.mark.parametrize("unit", [1, 8, 24])
@pytest.mark.parametrize("count", [1, 7, 8, 100, 1001])
@pytest.mark.parametrize("pieces", [1, 3, 8])
def test_cuts_cover_a_message_in_multiples_of_the_unit(count, pieces, unit):
    cuts = choose.cut(count, pieces, unit)
    assert [i for part in cuts for i in range(part.start, part.stop)] == list(range(count))
    assert len(cuts) <= pieces
    assert all((part.stop - part.start) % unit == 0 for part in cuts[:-1])


def forgotten(rank):
    """A group that is gone takes its thread along."""
    two = of((2, 4))
    comm.all_reduce(torch.ones(8), two, async_op=True, mode="on").wait()
    thread = drive._lanes[two.rail]._thread
    lane = drive._lanes.pop(two.rail)
    assert thread.is_alive()
    del lane
    thread.join(60)
    assert not thread.is_alive()


def test_a_groups_thread_ends_with_it(ranks):
    ranks(forgotten)

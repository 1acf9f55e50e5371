"""DDP and tensor parallelism between emulated nodes: the fewest bytes, and behind other work.

Bytes are read off the nodes' interfaces.
"""

import multiprocessing
import os
import time
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
import torch.distributed as dist

from megatron.efa import cpu
from megatron.efa.emulate.cluster import EmulatedCluster
from megatron.efa.emulate.forked import run_forked
from megatron.efa.emulate.rate import parse_rate

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]

SIZE = 64 << 20
RATE = "1gbit"
OVERHEAD = 1.03
"""Headers and acknowledgements."""


def wrapped(distributed):
    """A weight of `SIZE` bytes, in one bucket of DDP."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    module = torch.nn.Linear(4096, SIZE // 4 // 4096, bias=False)
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed,
        overlap_grad_reduce=True,
        overlap_param_gather=distributed,
        bucket_size=SIZE,
    )
    transformer = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    (group,) = DistributedDataParallel(transformer, config, module).bucket_groups
    return group


def train(distributed, meet):
    """Bytes that left the node, upstream's way and on two levels, and how long a wait blocked."""
    from megatron.core import parallel_state
    from megatron.efa import data
    from megatron.efa.emulate import network

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    group = wrapped(distributed)
    grads = group.buckets[0].grad_data

    def sent(work):
        meet.wait()
        before = network.counters(os.getpid()).sent_bytes
        meet.wait()
        result = work()
        meet.wait()
        return network.counters(os.getpid()).sent_bytes - before, result

    def reduce(pause=0):
        grads.fill_(dist.get_rank())
        group.grad_reduce_finished = False
        start = time.perf_counter()
        group.start_grad_sync()
        time.sleep(pause)  # backward of other layers
        handle = group.grad_reduce_handle
        group.finish_grad_sync()
        # Upstream divides before it adds, by the number of ranks.
        shard = grads.view(dist.get_world_size(), -1)[dist.get_rank()]
        assert torch.equal(shard, torch.full_like(shard, 3.5))
        return getattr(handle, "exposed", None), time.perf_counter() - start - pause

    def gather():
        group.start_param_sync()
        group.finish_param_sync()

    results = {}
    for mode in ("off", "on"):
        data.configure(Namespace(efa_data_parallel=mode, num_distributed_optimizer_instances=1))
        results[mode, "reduce"], (exposed, seconds) = sent(reduce)
        if distributed:
            results[mode, "gather"], _ = sent(gather)
    if distributed:
        results |= tensor_parallel(sent)
    longest = torch.tensor(seconds)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    covered, _ = reduce(pause=3 * longest.item())
    dist.destroy_process_group()
    return results, exposed, covered


def tensor_parallel(sent):
    """Bytes of a layer's all-reduce with tensor parallelism over all ranks, both ways."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import mappings
    from megatron.efa import tensor

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    results = {}
    for mode in ("off", "on"):
        args = Namespace(efa_tensor=mode, tensor_model_parallel_size=dist.get_world_size(), rank=1)
        tensor.configure(args)
        partial = torch.full((SIZE // 4096 // 4, 1, 4096), float(dist.get_rank()))
        results[mode, "tensor"], whole = sent(
            lambda partial=partial: mappings.reduce_from_tensor_model_parallel_region(partial)
        )
        assert torch.equal(whole, torch.full_like(whole, 28.0))
    return results


def train_on_nodes(nodes, per_node, distributed, logs):
    """What `train` returns on each rank of a cluster."""
    cpu.enable()
    import megatron.core.distributed  # noqa: F401  (once, for all that are forked)

    meet = multiprocessing.get_context("fork").Barrier(nodes * per_node, timeout=120)
    with EmulatedCluster(nodes, parse_rate(RATE)) as cluster:
        return run_forked(cluster, per_node, lambda: train(distributed, meet), logs)


@pytest.fixture(scope="module")
def parent():
    """A process that is redirected to CPUs, as this one, which runs other tests, must not be."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        yield pool


@pytest.mark.parametrize(("nodes", "per_node", "distributed"), [(2, 4, True), (4, 2, False)])
def test_64_mib_leave_the_nodes_at_the_bound_and_behind_backward(
    parent, tmp_path, nodes, per_node, distributed
):
    seen = parent.submit(train_on_nodes, nodes, per_node, distributed, tmp_path).result()

    def crossed(*key):
        return sum(results[key] for results, _, _ in seen[::per_node])

    passes = 1 if distributed else 2
    bound = passes * (nodes - 1) * SIZE
    assert bound <= crossed("on", "reduce") <= OVERHEAD * bound
    assert crossed("off", "reduce") > 1.15 * bound
    if distributed:
        assert bound <= crossed("on", "gather") <= OVERHEAD * bound
        assert crossed("off", "gather") > 1.15 * bound
        # Of S bytes, 2 S (N - 1) / N leave a node of N; of a flat ring of 8 ranks 1.75 S.
        bound_of_sum = nodes * 2 * SIZE * (nodes - 1) / nodes
        assert bound_of_sum <= crossed("on", "tensor") <= OVERHEAD * bound_of_sum
        assert crossed("off", "tensor") > 1.7 * nodes * SIZE
    # Alone the wait lasts as long as the link must; behind other work most of it is hidden.
    ranks = nodes * per_node
    assert sum(exposed for _, exposed, _ in seen) / ranks > 0.8 * bound / nodes / 125e6
    assert sum(covered for *_, covered in seen) < 0.5 * sum(exposed for _, exposed, _ in seen)

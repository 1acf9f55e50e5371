"""Collectives that gloo lacks, against what their definition says, on three ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.efa import cpu

RANKS = 3
DTYPES = [torch.float32, torch.bfloat16, torch.int64]


def serve(rank, port, tasks, answers):
    torch.set_num_threads(1)
    cpu.enable()
    dist.init_process_group(
        "nccl",
        f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=RANKS,
        device_id=torch.device("cuda"),
    )
    for task, *arguments in iter(tasks.get, None):
        try:
            answers.put((rank, task(rank, *arguments)))
        except Exception as error:
            answers.put((rank, repr(error)))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks():
    from megatron.efa.emulate.job import free_port

    context, port = mp.get_context("fork"), free_port()
    tasks = [context.Queue() for _ in range(RANKS)]
    answers = context.Queue()
    processes = [
        context.Process(target=serve, args=(rank, port, tasks[rank], answers), daemon=True)
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()

    def ask(*task):
        for queue in tasks:
            queue.put(task)
        results = dict(answers.get(timeout=60) for _ in range(RANKS))
        return [results[rank] for rank in range(RANKS)]

    yield ask
    for queue in tasks:
        queue.put(None)
    for process in processes:
        process.join(30)
        process.kill()


def rows(rank, count, dtype):
    return (torch.arange(count * 2).reshape(count, 2) + 10 * rank).to(dtype)


def gather(rank, sizes, dtype, async_op):
    parts = [torch.empty(size, 2, dtype=dtype) for size in sizes]
    work = dist.all_gather(parts, rows(rank, sizes[rank], dtype), async_op=async_op)
    if async_op:
        work.wait()
    return [part.tolist() for part in parts]


def scatter(rank, sizes, dtype, async_op):
    output = torch.empty(sizes[rank], 2, dtype=dtype)
    inputs = [rows(rank, size, dtype) for size in sizes]
    work = dist.reduce_scatter(output, inputs, async_op=async_op)
    if async_op:
        work.wait()
    return output.tolist()


def exchange(rank, dtype):
    sent, received = torch.tensor([1, 0, 2]), torch.tensor([[1, 0, 2][rank]] * RANKS)
    output = torch.empty(int(received.sum()), 2, dtype=dtype)
    dist.all_to_all_single(output, rows(rank, 3, dtype), received, sent)
    return output.tolist()


def overlap(rank):
    """Whether an uneven gather returned on rank 0 although the others had not joined it yet."""
    store = dist.distributed_c10d._get_default_store()
    if rank != 0:
        store.wait(["rank 0 has called it"])
    parts = [torch.empty(size) for size in (1, 2, 3)]
    work = dist.all_gather(parts, torch.ones(rank + 1), async_op=True)
    pending = rank != 0 or not work.is_completed()
    if rank == 0:
        store.set("rank 0 has called it", "")
    work.wait()
    return pending and work.is_completed() and all(bool((part == 1).all()) for part in parts)


sizes = st.lists(st.integers(0, 5), min_size=RANKS, max_size=RANKS)
quick = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@quick
@given(sizes=sizes, dtype=st.sampled_from(DTYPES), async_op=st.booleans())
def test_all_gather_of_any_sizes(ranks, sizes, dtype, async_op):
    expected = [rows(rank, size, dtype).tolist() for rank, size in enumerate(sizes)]
    assert ranks(gather, sizes, dtype, async_op) == [expected] * RANKS


@quick
@given(sizes=sizes, dtype=st.sampled_from(DTYPES), async_op=st.booleans())
def test_reduce_scatter_of_any_sizes(ranks, sizes, dtype, async_op):
    expected = [sum(rows(r, size, dtype) for r in range(RANKS)).tolist() for size in sizes]
    assert ranks(scatter, sizes, dtype, async_op) == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_to_all_takes_splits_as_tensors(ranks, dtype):
    splits = [rows(rank, 3, dtype).split([1, 0, 2]) for rank in range(RANKS)]
    expected = [torch.cat([splits[r][rank] for r in range(RANKS)]).tolist() for rank in range(3)]
    assert ranks(exchange, dtype) == expected


def test_an_uneven_gather_stays_asynchronous(ranks):
    assert ranks(overlap) == [True] * RANKS

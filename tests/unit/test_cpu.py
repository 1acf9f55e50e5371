"""The CPU redirection: what it changes, that it restores it, and that results are right."""

import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.utils.cpp_extension
import torch.utils.data

from megatron.efa import cpu
from megatron.efa.errors import EfaError
from megatron.efa.redirect import Redirection


@pytest.fixture
def on():
    cpu.enable()
    yield
    cpu.disable()


def snapshot():
    owners = [torch, torch.Tensor, torch.cuda, torch.cuda.random, torch.cuda.nvtx]
    owners += [torch.distributed, torch.distributed.distributed_c10d, torch.accelerator]
    owners += [torch.utils.data.dataloader._BaseDataLoaderIter, torch.utils.cpp_extension]
    return {(str(owner), name): id(v) for owner in owners for name, v in vars(owner).items()}


def test_off_nothing_is_rebound_and_disabling_restores_everything():

    assert cpu.redirected() == []
    before = snapshot()
    environment = dict(os.environ)
    cpu.enable()
    changed = {name for (_, name), value in snapshot().items() if before.get((_, name)) != value}
    assert changed == {name.rpartition(".")[2] for name in cpu.redirected() if "[" not in name}
    cpu.disable()
    assert snapshot() == before
    assert dict(os.environ) == environment
    assert cpu.redirected() == []


def test_importing_the_module_does_not_import_torch():
    code = (
        "import sys; from megatron.efa import cpu; cpu.wanted([]); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_target_that_has_gone_is_named():
    with pytest.raises(EfaError, match=r"torch\.cuda\.no_such_function"):
        Redirection().set(torch.cuda, "no_such_function", None)


def test_a_failed_enable_leaves_nothing_behind(monkeypatch):
    before = snapshot()
    monkeypatch.setattr(cpu, "_NEW", ("new_no_such_thing",))
    with pytest.raises(EfaError, match="new_no_such_thing"):
        cpu.enable()
    assert not cpu.enabled()
    assert snapshot() == before


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], False),
        (["--distributed-backend", "nccl"], False),
        (["--distributed-backend", "gloo"], True),
        (["--distributed-backend=gloo"], True),
        (["--distributed-backend", "gloo", "--distributed-backend", "nccl"], False),
    ],
)
def test_gloo_without_a_gpu_asks_for_cpus(argv, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cpu.wanted(argv) is expected


def test_gloo_beside_a_gpu_does_not(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cpu.wanted(["--distributed-backend", "gloo"]) is False
    monkeypatch.setenv("MEGATRON_EFA_CPU", "1")
    assert cpu.wanted([]) is True


def test_context_parallelism_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setenv("MEGATRON_EFA_CPU", "1")
    with pytest.raises(EfaError, match=r"--context-parallel-size .* set it to 1") as refusal:
        cpu.wanted(["--context-parallel-size", "2"])
    assert "\n" not in str(refusal.value)
    assert cpu.wanted(["--context-parallel-size", "1"])


@pytest.mark.parametrize("flag", cpu._ONLY_ON_GPUS)
def test_what_needs_a_gpu_is_refused_in_one_sentence(monkeypatch, flag):
    monkeypatch.setenv("MEGATRON_EFA_CPU", "1")
    with pytest.raises(EfaError, match=f"{flag} .* leave it out") as refusal:
        cpu.wanted(["--num-layers", "2", flag])
    assert "\n" not in str(refusal.value)


def test_one_stream_context_serves_several_blocks(on):
    outer, inner = torch.cuda.Stream(), torch.cuda.Stream()
    context = torch.cuda.stream(inner)
    with torch.cuda.stream(outer):
        for _ in range(2):
            with context:
                assert torch.cuda.current_stream() is inner
                with context:
                    assert torch.cuda.current_stream() is inner
            assert torch.cuda.current_stream() is outer
    with torch.cuda.stream(None):
        assert torch.cuda.current_stream() is torch.cuda.default_stream()


@pytest.mark.parametrize("device", ["cuda", "cuda:1", 0, torch.device("cuda", 0)])
def test_tensors_for_a_gpu_land_on_the_cpu(on, device):
    made = [
        torch.zeros(2, device=device),
        torch.empty(2, device=device, pin_memory=True),
        torch.tensor([1.0, 2.0], device=device),
        torch.ones(2).to(device),
        torch.ones(2).to(device=device, dtype=torch.bfloat16),
        torch.ones(2).new_empty(2, device=device),
        torch.ones(2).cuda(),
        torch.nn.Linear(2, 2, device=device).weight,
        torch.nn.Linear(2, 2).to(device).weight,
        torch.cuda.FloatTensor([1.0]),
    ]
    assert {tensor.device.type for tensor in made} == {"cpu"}


def test_meta_tensors_stay_meta(on):
    with torch.device("meta"):
        assert torch.zeros(2).is_meta
        assert torch.nn.Linear(2, 2).weight.is_meta
    assert torch.zeros(2, device="meta").is_meta
    assert torch.ones(2).to("meta").is_meta


def test_types_are_spelt_as_on_a_gpu(on):
    assert torch.ones(1).type() == "torch.cuda.FloatTensor"
    assert torch.ones(1).bfloat16().type() == "torch.cuda.BFloat16Tensor"
    assert torch.ones(1).type("torch.cuda.HalfTensor").dtype is torch.float16
    assert isinstance(torch.ones(1), torch.cuda.FloatTensor)
    with torch.device("cpu"):
        assert torch.ones(1).type() == "torch.cuda.FloatTensor"


def test_events_measure_time_and_streams_nest(on):
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with pytest.raises(RuntimeError, match="recorded"):
        first.elapsed_time(last)
    first.record()
    threading.Event().wait(0.05)
    torch.cuda.current_stream().record_event(last)
    assert 50 <= first.elapsed_time(last) < 1000

    outer, inner = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(outer):
        with inner:
            assert torch.cuda.current_stream() is inner
        assert torch.cuda.current_stream() is outer
    assert torch.cuda.current_stream() is torch.cuda.default_stream()


def test_memory_figures_are_those_of_the_process(on):
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    held = torch.ones(64 << 20, dtype=torch.uint8)
    assert torch.cuda.memory_allocated() - before > 48 << 20
    assert torch.cuda.max_memory_allocated() >= torch.cuda.memory_allocated()
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] > held.numel()


def test_the_cuda_generator_is_the_one_that_operations_draw_from(on):
    torch.cuda.manual_seed(5)
    state, first = torch.cuda.get_rng_state(), torch.rand(4)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(4), first)
    assert torch.cuda.default_generators[torch.cuda.current_device()] is torch.default_generator


@pytest.mark.parametrize("workers", [0, 1])
def test_data_loaders_do_not_draw_from_the_models_generator(on, workers):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    loader = torch.utils.data.DataLoader(list(range(4)), num_workers=workers, pin_memory=True)
    assert [int(item) for item in loader] == [0, 1, 2, 3]
    assert torch.equal(torch.rand(3), expected)


def test_factories_work_in_backward_of_a_recomputed_block_and_in_its_threads(on):
    """A function mode would be off there."""

    class MakesTensorInBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * torch.full((1,), 2.0, device=torch.cuda.current_device())

    def block(x):
        return MakesTensorInBackward.apply(x + torch.zeros(1, device="cuda"))

    x = torch.ones(2, requires_grad=True)
    torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]

    failures = []

    def work():
        try:
            torch.zeros(1, device="cuda")
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures


def test_a_fake_group_on_the_meta_device_stands_in_for_a_large_job(on):
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=3, world_size=1024, store=FakeStore())
    try:
        group = dist.new_group(list(range(3, 1024, 8)))
        assert dist.get_backend() == "fake"
        assert dist.get_world_size(group) == 128
        dist.all_reduce(torch.ones(4, device="meta"))
    finally:
        dist.destroy_process_group()


def test_dynamo_can_be_imported_while_it_is_on():
    """Optimizers import it when first used; it refuses names that are one object."""
    code = "from megatron.efa import cpu; cpu.enable(); import torch._dynamo"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

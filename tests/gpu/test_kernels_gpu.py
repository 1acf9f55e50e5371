"""The row primitives of the expert path on a GPU: the bits of the PyTorch path, on any input."""

import pytest
import torch

from megatron.efa.expert import kernels, rows
from tests import row_cases
from tests.row_cases import SUMMED, Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module", autouse=True)
def _triton():
    pytest.importorskip("triton")


@pytest.fixture(params=SUMMED, ids=str)
def dtype(request):
    return request.param


def random_lengths(n, most, seed):
    return torch.randint(0, most + 1, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


SHAPES = {
    "no rows": {"lengths": [], "width": 64},
    "no entries": {"lengths": [0] * 70, "width": 64},
    "one value": {"lengths": [3, 0, 1], "width": 1},
    "odd width": {"lengths": random_lengths(50, 8, 1), "width": 777},
    "rows off 16 bytes": {"lengths": random_lengths(50, 8, 2), "width": 256, "extra": 6},
    "message rows": {"lengths": random_lengths(300, 8, 3), "width": 7168, "extra": 80, "spare": 9},
    "later chunk": {"lengths": random_lengths(90, 16, 4), "width": 2048, "skipped": 333},
    "widest": {"lengths": random_lengths(20, 16, 5), "width": 16384, "extra": 144},
    "one row to all": {"lengths": [0, 5000, 0], "width": 520},
    "short groups": {"lengths": random_lengths(60, 4, 6), "width": 136},
}


@pytest.fixture(params=SHAPES)
def shape(request):
    return {**SHAPES[request.param], "device": "cuda"}


def test_spread_writes_the_named_rows_and_no_other_byte(shape, dtype):
    row_cases.check_spread(Case(**shape, dtype=dtype), kernels)


@pytest.mark.parametrize("moved", [torch.uint8, torch.int64, torch.float8_e4m3fn], ids=str)
def test_spread_moves_any_type(moved):
    case = Case(random_lengths(40, 5, 8), 96, extra=16, device="cuda", dtype=torch.uint8)
    if moved == torch.float8_e4m3fn:  # torch itself cannot index it
        src = case.values(len(case.lengths))
        expected, out = case.buffer()[0], case.buffer()[0]
        rows.spread(src, case.offsets, case.index, expected)
        kernels.spread(src.view(moved), case.offsets, case.index, out.view(moved))
        assert torch.equal(out, expected)
    else:
        case.dtype = moved
        row_cases.check_spread(case, kernels)


@pytest.mark.parametrize("out_dtype", SUMMED, ids=str)
def test_collect_gives_the_bits_of_sums_in_the_order_of_the_list(shape, dtype, out_dtype):
    sums, expected = row_cases.check_collect(Case(**shape, dtype=dtype), kernels, out_dtype)
    assert torch.equal(row_cases.bits(sums), row_cases.bits(expected))


def test_collect_keeps_what_is_not_finite(dtype):
    case = Case([2, 1, 0], 16, device="cuda", dtype=dtype)
    src = torch.zeros(3, 16, dtype=dtype, device="cuda")
    src[case.index[0].long(), 0], src[case.index[1].long(), 0] = torch.inf, -torch.inf
    src[case.index[2].long(), 1] = torch.nan
    out = torch.empty_like(src)
    kernels.collect(src, case.offsets, case.index, out)
    assert out.isnan().nonzero().tolist() == [[0, 0], [1, 1]]


def test_quantized_rows_have_the_bits_of_the_reference(shape, dtype):
    case = Case(**shape, dtype=dtype)
    src = case.values(len(case.lengths))
    if len(src) > 2:
        src[1] = 0
        src[2] *= 2.0**-20 if dtype == torch.float16 else 2.0**-120
    codes, scales = row_cases.quantized(case, kernels, src)
    expected, expected_scales = row_cases.quantized(case, rows, src)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes, expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so_through_quantization(value, dtype):
    case = Case([1, 1], width=256, device="cuda", dtype=dtype)
    src = case.values(2)
    src[0, 3] = value
    codes, scales = row_cases.quantized(case, kernels, src)
    finite = (codes.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(128, 1)).isfinite()
    finite = finite[case.index.long()]
    assert not finite[0, :128].any()
    assert finite[0, 128:].all()
    assert finite[1].all()


def test_dequantized_rows_have_the_bits_of_the_reference(shape, dtype):
    whole = row_cases.dequantized(Case(**shape), kernels, dtype)
    expected = row_cases.dequantized(Case(**shape), rows, dtype)
    assert torch.equal(whole, expected)


@pytest.mark.parametrize(
    ("n", "destinations"),
    [(1, 1), (5, 200), (4096, 4), (29000, 8), (777, 32), (9000, 256), (99, 1024), (9, 2000)],
)
@pytest.mark.parametrize("density", [0.0, 0.3, 1.1])
def test_marks_are_numbered_by_destination_and_listed_by_row(n, destinations, density):
    mask = torch.rand(n, destinations, device="cuda") < density
    offsets, targets, counts = kernels.lists_of(mask, int(mask.sum()))
    by_destination = mask.t().nonzero()[:, 1]
    order = torch.argsort(by_destination, stable=True)
    assert torch.equal(targets, order.int())
    assert torch.equal(offsets[1:], mask.sum(1).cumsum(0).int())
    assert offsets[0] == 0
    assert torch.equal(counts, mask.sum(0).int())


def test_rows_beyond_two_to_the_31_values_are_reached():
    width, far = 16384, 2**31 // 16384 + 5
    buffer = torch.zeros(far + 1, width, dtype=torch.bfloat16, device="cuda")
    src = torch.rand(1, width, device="cuda").bfloat16()
    offsets = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    index = torch.tensor([far], dtype=torch.int32, device="cuda")
    kernels.spread(src, offsets, index, buffer)
    assert torch.equal(buffer[far], src[0])
    assert not buffer[:far].any()
    back = torch.empty_like(src)
    kernels.collect(buffer, offsets, index, back)
    assert torch.equal(back, src)


def test_nothing_waits_for_the_device():
    mask = torch.rand(64, 4, device="cuda") < 0.5
    src, out = torch.rand(64, 256, device="cuda"), torch.empty(256, 256, device="cuda")
    kernels.lists_of(mask, 256)  # compiled outside
    torch.cuda.set_sync_debug_mode("error")
    try:
        offsets, targets, _ = kernels.lists_of(mask, 256)
        kernels.spread(src, offsets, targets, out)
        kernels.collect(out, offsets, targets, src)
    finally:
        torch.cuda.set_sync_debug_mode("default")

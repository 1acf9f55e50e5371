"""The row primitives of the expert path: Triton's kernels, interpreted, against plain PyTorch."""

import importlib
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.efa import expert
from megatron.efa.errors import EfaError
from megatron.efa.expert import kernels, lists, rows
from tests import row_cases
from tests.row_cases import SUMMED, Case

few = settings(max_examples=10, deadline=None)


@pytest.fixture(scope="module")
def interpreted():
    """{name: module} of the kernels, imported while Triton interprets; for these tests alone."""
    pytest.importorskip("triton")
    names = {name: f"megatron.efa.expert.{name}" for name in ("triton_rows", "triton_lists")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for name in names.values():
            patch.delitem(sys.modules, name, raising=False)
        yield {name: importlib.import_module(full) for name, full in names.items()}
        for name, full in names.items():
            sys.modules.pop(full)
            delattr(expert, name)  # else `from megatron.efa.expert import` would still find it


@st.composite
def cases(draw):
    return Case(
        lengths=draw(st.lists(st.integers(0, 9), max_size=6)),
        width=draw(st.sampled_from([1, 3, 8, 24, 127, 128, 129, 200, 264])),
        dtype=draw(st.sampled_from(SUMMED)),
        extra=draw(st.sampled_from([0, 4, 16, 24])),
        skipped=draw(st.sampled_from([0, 1, 5])),
        spare=draw(st.sampled_from([0, 2])),
        seed=draw(st.integers(0, 2**20)),
    )


@few
@given(case=cases(), dtype=st.sampled_from([None, torch.uint8, torch.int64]))
def test_spread_writes_the_named_rows_and_no_other_byte(interpreted, case, dtype):
    case.dtype = dtype or case.dtype
    row_cases.check_spread(case, interpreted["triton_rows"])


@few
@given(case=cases(), out_dtype=st.sampled_from(SUMMED))
def test_collect_sums_in_fp32_in_the_order_of_the_list(interpreted, case, out_dtype):
    sums, expected = row_cases.check_collect(case, interpreted["triton_rows"], out_dtype)
    if out_dtype != torch.bfloat16:  # which the interpreter cuts off; GPUs round
        assert torch.equal(row_cases.bits(sums), row_cases.bits(expected))


@few
@given(case=cases(), out_dtype=st.sampled_from(SUMMED))
def test_the_reference_sums_as_exactly_as_its_types_allow(case, out_dtype):
    row_cases.check_collect(case, rows, out_dtype)


@few
@given(case=cases())
def test_quantized_rows_carry_the_scales_of_the_reference(interpreted, case):
    src = case.values(len(case.lengths))
    _, scales = row_cases.quantized(case, interpreted["triton_rows"], src)
    _, expected = row_cases.quantized(case, rows, src)
    assert torch.equal(scales, expected)


@few
@given(case=cases(), binade=st.integers(-8, 6))
def test_numbers_that_e4m3_holds_come_through_as_they_are(interpreted, case, binade):
    # How others round the interpreter does not show: it forgets carries. See tests/gpu.
    codes = row_cases.e4m3_codes(case)
    codes[:, :: rows.GROUP] = 0x7E  # 448: the scale becomes a power of two
    src = (codes.view(torch.float8_e4m3fn).float() * 2.0**binade).to(case.dtype)
    got, scales = row_cases.quantized(case, interpreted["triton_rows"], src)
    named = case.index[case.skipped :].long()
    owner = torch.repeat_interleave(torch.tensor(case.lengths, dtype=torch.int64))
    assert torch.equal(got[named] % 128, codes[owner] % 128)  # a zero may lose its sign
    assert (scales[named] == 2.0**binade).all()


@few
@given(case=cases())
def test_quantized_rows_keep_four_bits_of_each_value(case):
    src = case.values(len(case.lengths))
    quantized, scales = rows.quantize(src)
    back = quantized.float() * scales.repeat_interleave(rows.GROUP, 1)[:, : case.width]
    step = scales.repeat_interleave(rows.GROUP, 1)[:, : case.width] * 2.0**-9  # of subnormals
    error = (back - src.float()).abs()
    assert (error <= torch.maximum(src.float().abs() / 16, step / 2) * 1.001).all()


@few
@given(case=cases(), dtype=st.sampled_from([torch.float32, torch.float16]))
def test_dequantized_rows_are_those_of_the_reference(interpreted, case, dtype):
    whole = row_cases.dequantized(case, interpreted["triton_rows"], dtype)
    expected = row_cases.dequantized(case, rows, dtype)
    assert torch.equal(whole, expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so_through_quantization(interpreted, value):
    case = Case([1, 1], width=256)
    src = case.values(2)
    src[0, 3] = value
    for code in (interpreted["triton_rows"], rows):
        codes, scales = row_cases.quantized(case, code, src)
        back = codes.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(128, 1)
        finite = back[case.index.long()].isfinite()
        assert not finite[0, :128].any()
        assert finite[0, 128:].all()
        assert finite[1].all()


@few
@given(
    n=st.integers(0, 20),
    destinations=st.integers(0, 6),
    density=st.sampled_from([0.0, 0.2, 0.7, 1.1]),
    transposed=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_marks_are_numbered_by_destination_and_listed_by_row(
    interpreted, n, destinations, density, transposed, seed
):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(n, destinations, generator=generator) < density
    if transposed:
        mask = mask.t().contiguous().t()
    row_cases.check_lists(mask, lists)
    if mask.numel():
        code = interpreted["triton_lists"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(code, "MARKS", 16)  # so that a small mask takes several programs
            patch.setattr(code, "LEAST_ROWS", 2)
            row_cases.check_lists(mask, code)


def test_lists_lead_rows_there_and_back():
    mask = torch.rand(20, 4) < 0.5
    offsets, targets, counts = kernels.lists_of(mask, int(mask.sum()))
    src = torch.randn(20, 8)
    sent, back = torch.empty(int(mask.sum()), 8), torch.empty(20, 8)
    kernels.spread(src, offsets, targets, sent)
    assert torch.equal(sent, torch.cat([src[mask[:, node]] for node in range(4)]))
    assert counts.tolist() == mask.sum(0).tolist()
    kernels.collect(sent, offsets, targets, back)
    assert torch.allclose(back, src * mask.sum(1, keepdim=True))


OFFSETS, ENTRIES = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([1, 0]).int()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: kernels.spread(rand(2), OFFSETS.long(), ENTRIES, rand(2)), "offsets are contig"),
        (lambda: kernels.spread(rand(3), OFFSETS, ENTRIES, rand(2)), "3 rows need 4 offsets"),
        (lambda: kernels.spread(rand(2), OFFSETS, ENTRIES, rand(2).half()), "convert them first"),
        (lambda: kernels.collect(rand(2), OFFSETS, ENTRIES, rand(2, 7)), "do not match"),
        (lambda: kernels.collect(rand(8, 2).t(), OFFSETS, ENTRIES, rand(2)), "without gaps"),
        (lambda: kernels.collect(rand(2).double(), OFFSETS, ENTRIES, rand(2)), "not torch.float64"),
        (
            lambda: kernels.spread_quantized(rand(2), OFFSETS, ENTRIES, e4m3(2), rand(2, 2)),
            r"scales are fp32 \[2, 1\]",
        ),
        (lambda: kernels.lists_of(torch.ones(2, 2), 4), "a mask is bool"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_anything_is_written(call, sentence):
    with pytest.raises(EfaError, match=sentence):
        call()


def rand(n, width=8):
    return torch.rand(n, width)


def e4m3(n):
    return torch.zeros(n, 8).to(torch.float8_e4m3fn)


def test_cpus_do_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)  # as if not installed
    monkeypatch.setattr(expert, "kernels", kernels)  # put back afterwards
    for name in ("kernels", "triton_rows", "triton_lists"):
        monkeypatch.delitem(sys.modules, f"megatron.efa.expert.{name}", raising=False)
    fresh = importlib.import_module("megatron.efa.expert.kernels")
    offsets, index, _ = fresh.lists_of(torch.ones(3, 2, dtype=torch.bool), 6)
    out = torch.empty(3, 4)
    fresh.collect(torch.ones(6, 4), offsets, index, out)
    assert (out == 2).all()
    assert "megatron.efa.expert.triton_rows" not in sys.modules

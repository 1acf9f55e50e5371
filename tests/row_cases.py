"""Row lists and rows, on any device, for tests of the expert path's primitives; what must hold."""

import dataclasses

import torch

from megatron.efa.expert import rows

SUMMED = (torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass
class Case:
    """N rows of width H with lists of given lengths, and buffers whose rows are wider than that."""

    lengths: list[int]
    width: int
    dtype: torch.dtype = torch.float32
    extra: int = 0  # bytes of a row beside its values: expert ids and probabilities
    skipped: int = 0  # entries in front of the first list, as in a later chunk
    spare: int = 0  # rows of the buffer that no entry names
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self):
        self.generator = torch.Generator().manual_seed(self.seed)
        self.entries = sum(self.lengths)
        bounds = [0, *self.lengths]
        self.offsets = self.put(torch.tensor(bounds).cumsum(0).int() + self.skipped)
        order = torch.randperm(self.entries + self.spare, generator=self.generator)
        index = torch.cat([torch.full((self.skipped,), -(2**30)), order[: self.entries]])
        self.index = self.put(index.int())

    def put(self, tensor):
        return tensor.to(self.device)

    def values(self, n, dtype=None):
        """[n, H] of values over many binades, signed zeros among them; integers: any."""
        dtype = dtype or self.dtype
        shape = (n, self.width)
        if not dtype.is_floating_point:
            return self.put(torch.randint(0, 127, shape, generator=self.generator).to(dtype))
        scale = 2.0 ** torch.randint(-9, 9, shape, generator=self.generator)
        values = torch.randn(shape, generator=self.generator) * scale
        values[torch.rand(shape, generator=self.generator) < 0.1] = -0.0
        return self.put(values.to(dtype))

    def buffer(self, dtype=None):
        """(rows [entries + spare, H], whole): a slice of wider rows of bytes, all of them 0x5A."""
        dtype = dtype or self.dtype
        row = self.width * dtype.itemsize
        step = row + self.extra + -(row + self.extra) % dtype.itemsize
        whole = torch.full((self.entries + self.spare, step), 0x5A, dtype=torch.uint8)
        whole = self.put(whole)
        return whole.view(dtype)[:, : self.width], whole


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def check_spread(case, implementation):
    """Every byte that the reference writes is written so, and no other byte is touched."""
    src = case.values(len(case.lengths))
    (expected, whole_expected), (out, whole) = case.buffer(), case.buffer()
    rows.spread(src, case.offsets, case.index, expected)
    implementation.spread(src, case.offsets, case.index, out)
    assert torch.equal(whole, whole_expected)


def check_collect(case, implementation, out_dtype=torch.float32):
    """Sums are as exact as fp32 and one rounding allow; returns (sums, the reference's)."""
    src, _ = case.buffer()
    src.copy_(case.values(len(src)))
    out = case.put(torch.full((len(case.lengths), case.width), 7.0, dtype=out_dtype))
    implementation.collect(src, case.offsets, case.index, out)
    out, terms, offsets, index = (t.cpu() for t in (out, src, case.offsets, case.index))
    expected = torch.empty_like(out)
    rows.collect(terms, offsets, index, expected)  # in the lists' order: that is so on CPUs only

    terms = terms[index[case.skipped :].long()].double()
    owner = torch.repeat_interleave(torch.tensor(case.lengths, dtype=torch.int64))
    exact, magnitude = torch.zeros(2, *out.shape, dtype=torch.float64)
    exact.index_add_(0, owner, terms)
    magnitude.index_add_(0, owner, terms.abs())
    sum_error = torch.finfo(torch.float32).eps * max([*case.lengths, 1]) * magnitude
    rounding = torch.finfo(out_dtype).eps * magnitude.clamp(torch.finfo(out_dtype).smallest_normal)
    assert ((out.double() - exact).abs() <= sum_error + rounding).all()
    return out, expected


def check_lists(mask, implementation):
    """Marks are numbered by destination, then row, and nothing beyond the room is written."""
    n, destinations = mask.shape
    marks = int(mask.sum())
    for room in (marks, marks + 3, marks // 2):
        offsets, counts, padded = (
            torch.full((size,), -7, dtype=torch.int32, device=mask.device)
            for size in (n + 1, destinations, room + 4)
        )
        implementation.lists_of(mask, offsets, padded[:room], counts)
        by_destination = mask.t().nonzero()[:, 1].tolist()
        by_row = sorted((row, number) for number, row in enumerate(by_destination))
        expected = [number for _, number in by_row]
        assert padded[: min(room, marks)].tolist() == expected[:room]
        assert (padded[min(room, marks) :] == -7).all()
        assert offsets.tolist() == [0, *mask.sum(1).cumsum(0).tolist()]
        assert counts.tolist() == mask.sum(0).tolist()


def quantized(case, implementation, src):
    """(e4m3 bits, scales) of the buffer's rows as the implementation leaves them."""
    out, _ = case.buffer(torch.float8_e4m3fn)
    scales = case.put(torch.full((len(out), -(-case.width // rows.GROUP)), 7.0))
    implementation.spread_quantized(src, case.offsets, case.index, out, scales)
    return out.contiguous().view(torch.uint8), scales


def e4m3_codes(case):
    """uint8 [N, H]: e4m3 numbers of every code but the NaNs, whose bits are nobody's promise."""
    shape = (len(case.lengths), case.width)
    codes = torch.randint(0, 256, shape, generator=case.generator, dtype=torch.uint8)
    codes[codes % 128 == 127] = 0
    return codes


def dequantized(case, implementation, dtype):
    """The buffer whose rows e4m3 numbers went to: twice the same for the same seed."""
    case = dataclasses.replace(case)
    groups = -(-case.width // rows.GROUP)
    scales = case.put(torch.rand(len(case.lengths), groups, generator=case.generator) * 4)
    src = case.put(e4m3_codes(case)).view(torch.float8_e4m3fn)
    out, whole = case.buffer(dtype)
    implementation.spread_dequantized(src, scales, case.offsets, case.index, out)
    return whole

"""Rows that carry several things: how the columns of a message lie behind one another."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

ALIGNED = 16
"""Bytes that a column begins at a multiple of, so that kernels move it in vectors."""


@dataclass(frozen=True)
class Column:
    """`width` values of `dtype` in every row."""

    width: int
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return self.width * self.dtype.itemsize


@dataclass(frozen=True)
class Message:
    """Columns of a row; its rows are uint8 [n, size]."""

    columns: tuple[Column, ...]

    @property
    def size(self) -> int:
        """Bytes of a row: no more than needed if there is one column."""
        if len(self.columns) == 1:
            return self.columns[0].size
        return sum(_aligned(column.size) for column in self.columns)

    def empty(self, rows: int, device: torch.device) -> torch.Tensor:
        return torch.empty(rows, self.size, dtype=torch.uint8, device=device)

    def views(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """The columns of `rows` uint8 [n, size], each [n, width] of its dtype; they share memory.

        Not views to autograd, which forbids much of what is then done with them.
        """
        made, start = [], 0
        first = rows.storage_offset()
        for column in self.columns:
            itemsize = column.dtype.itemsize
            view = torch.empty(0, dtype=column.dtype, device=rows.device)
            view.set_(
                rows.untyped_storage(),
                (first + start) // itemsize,
                (len(rows), column.width),
                (self.size // itemsize, 1),
            )
            made.append(view)
            start += _aligned(column.size)
        return made

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """uint8 [n, size] with `parts` in its columns; without a copy where they are its views."""
        if len(parts) == 1:
            return _bytes(parts[0].contiguous())
        if (whole := self._whole(parts)) is not None:
            return whole
        rows = self.empty(len(parts[0]), parts[0].device)
        for view, part in zip(self.views(rows), parts, strict=True):
            view.copy_(part)
        return rows

    def _whole(self, parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The rows that `parts` are the views of, if they are."""
        rows, start = len(parts[0]), parts[0].data_ptr()
        if not rows:
            return None
        for column, part in zip(self.columns, parts, strict=True):
            strides = (self.size // column.dtype.itemsize, 1)
            here = part.data_ptr() == start and part.dtype == column.dtype
            if not here or (rows > 1 and part.stride() != strides):
                return None
            start += _aligned(column.size)
        offset = parts[0].storage_offset() * parts[0].element_size()
        whole = torch.empty(0, dtype=torch.uint8, device=parts[0].device)
        return whole.set_(parts[0].untyped_storage(), offset, (rows, self.size), (self.size, 1))


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    """Contiguous [n, w] as uint8 [n, w * itemsize]."""
    if not rows.numel():
        return rows.new_empty((len(rows), rows.shape[1] * rows.element_size()), dtype=torch.uint8)
    return rows.view(torch.uint8)

"""The differentiable steps of dispatch and combine. What a backward needs is kept in its context.

Shapes: T tokens of this rank, H values a token, k experts a token at most, R rows that come to this
rank, M rows of its experts. Nothing here keeps an input: the schedule that overlaps microbatches
frees them.
"""

from collections.abc import Callable
from typing import Any

import torch

from megatron.efa.expert import kernels
from megatron.efa.expert.local import Local
from megatron.efa.expert.message import Column, Message
from megatron.efa.expert.rows import GROUP
from megatron.efa.expert.transport import Fill, Lists, Way


class Dispatch(torch.autograd.Function):
    """Tokens [T, H] and their probabilities [T, k] to the ranks of their experts: [R, H], [R, k].

    The outputs are there once `trip.way.arriving` has been waited for. Backward: the sums of what
    comes back, at each level in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, probs: torch.Tensor, experts: torch.Tensor, trip: "Trip"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.way = trip.way
        ctx.message = Message(tuple(Column(part.shape[1], part.dtype) for part in (tokens, probs)))
        return trip.dispatch(tokens, probs, experts)

    @staticmethod
    def backward(
        ctx: Any, tokens: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        out = [
            tokens.new_empty(ctx.way.tokens, column.width, dtype=column.dtype)
            for column in ctx.message.columns
        ]
        ctx.way.homeward(ctx.message, ctx.message.joined([tokens, probs]), out).wait()
        return out[0], out[1], None, None


class Trip:
    """A way, and the message in which tokens travel it first: with their experts and weights."""

    def __init__(self, way: Way, find: Callable[[torch.Tensor], torch.Tensor], fp8: bool) -> None:
        """`find` bool [n, P] from experts int16 [n, k]: the ranks of this node that have them."""
        self.way, self._find, self.fp8 = way, find, fp8
        self.experts: torch.Tensor
        """int16 [R, k], once it has arrived."""

    def dispatch(
        self, tokens: torch.Tensor, probs: torch.Tensor, experts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width = tokens.shape[1]
        values = (Column(width, tokens.dtype),)
        if self.fp8:
            values = (
                Column(width, torch.float8_e4m3fn),
                Column(-(-width // GROUP), torch.float32),
            )
        # Experts last, where `find` looks for them.
        rest = (Column(probs.shape[1], probs.dtype), Column(experts.shape[1], experts.dtype))
        message = Message((*values, *rest))
        out = message.empty(self.way.rows, tokens.device)
        fill = self._fill(message, tokens, probs, experts)
        self.way.arriving = self.way.outward(
            message, fill, out, lambda rows: self._find(message.views(rows)[-1])
        )
        *values, probs, self.experts = message.views(out)
        if not self.fp8:
            return values[0], probs
        self.way.arriving.wait()
        return _dequantized(*values, tokens.dtype), probs

    def _fill(self, message: Message, tokens: torch.Tensor, *rest: torch.Tensor) -> Fill:
        def fill(chosen: slice, lists: Lists, rows: torch.Tensor) -> None:
            views = message.views(rows)
            if self.fp8:
                kernels.spread_quantized(tokens[chosen], *lists, *views[:2])
            else:
                kernels.spread(tokens[chosen], *lists, views[0])
            for source, target in zip(rest, views[-2:], strict=True):
                kernels.spread(source[chosen], *lists, target)

        return fill


class Combine(torch.autograd.Function):
    """Rows of experts [R, H] summed over the ranks and nodes of each token: [T, H].

    The output is there once `way.arriving` has been waited for.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, way: Way) -> torch.Tensor:
        ctx.way = way
        message = Message((Column(rows.shape[1], rows.dtype),))
        out = rows.new_empty(way.tokens, rows.shape[1])
        way.arriving = way.homeward(message, message.joined([rows]), [out])
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        message = Message((Column(grad.shape[1], grad.dtype),))
        out = grad.new_empty(ctx.way.rows, grad.shape[1])
        grad = grad.contiguous()

        def fill(chosen: slice, lists: Lists, rows: torch.Tensor) -> None:
            kernels.spread(grad[chosen], *lists, *message.views(rows))

        ctx.way.outward(message, fill, message.joined([out])).wait()
        return out, None


class Expand(torch.autograd.Function):
    """Rows [R, H] and probabilities [R, k] to the blocks of the local experts: [M, H], [M]."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, probs: torch.Tensor, local: Local
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.local = local
        ctx.message = Message(
            (Column(rows.shape[1], rows.dtype), Column(probs.shape[1], probs.dtype))
        )
        new = rows.new_zeros if local.filled else rows.new_empty
        out = new((local.total, rows.shape[1]))
        kernels.spread(rows, local.offsets, local.targets, out)
        weights = probs.new_zeros(local.total + 1)
        weights.scatter_(0, local.slots.view(-1), probs.reshape(-1))
        return out, weights[: local.total].clone()

    @staticmethod
    def backward(
        ctx: Any, out: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None]:
        # Written as the message that takes them home, which then need not be made.
        whole = ctx.message.empty(len(ctx.local.slots), out.device)
        rows, probs = ctx.message.views(whole)
        kernels.collect(out.contiguous(), ctx.local.offsets, ctx.local.targets, rows)
        padded = torch.cat([weights, weights.new_zeros(1)])
        probs.copy_(padded[ctx.local.slots])
        return rows, probs, None


class Reduce(torch.autograd.Function):
    """Rows of the local experts [M, H] summed for each row that came: [R, H] of `dtype`."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, local: Local, dtype: torch.dtype) -> torch.Tensor:
        ctx.local, ctx.like = local, out.dtype
        rows = torch.empty(len(local.slots), out.shape[1], dtype=dtype, device=out.device)
        kernels.collect(out.contiguous(), local.offsets, local.targets, rows)
        return rows

    @staticmethod
    def backward(ctx: Any, rows: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        local = ctx.local
        new = torch.zeros if local.filled else torch.empty
        out = new(local.total, rows.shape[1], dtype=ctx.like, device=rows.device)
        kernels.spread(rows.to(ctx.like).contiguous(), local.offsets, local.targets, out)
        return out, None, None


def _dequantized(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[R, H] of `dtype` from e4m3 with scales."""
    rows = len(values)
    each = torch.arange(rows + 1, dtype=torch.int32, device=values.device)
    out = torch.empty(values.shape, dtype=dtype, device=values.device)
    kernels.spread_dequantized(values, scales, each, each[:rows], out)
    return out

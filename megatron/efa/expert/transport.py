"""Rows on their way to the experts' ranks and back, in chunks over two levels.

Shapes: T tokens of this rank, in C chunks; N nodes of P ranks; k experts a token at most. Of one
chunk: S rows go to other nodes, O stay on this one, V come from other nodes; X = O + V rows are
forwarded as Y copies to the ranks of this node. R rows come to this rank, all chunks together.

Outward, a token's row is copied once for each node that has an expert of it (S + O rows), those for
other nodes go over the rail to the rank with this one's index there, and the X rows that are then
on this rank's part of the node are copied once for each rank that has an expert of them:

    [T, w] -> copy -> [S | O | V] <- rail: S goes, V comes
                          [X = O | V] -> copy -> [Y] -> node -> [R, w], chunk by chunk, rank by rank

Homeward is the same backwards, with sums where copies were made: the same lists, no new counts.
The work of a chunk is a stage for `comm.drive`, which lets the rail of one chunk, the node of
another and the copying of a third run at the same time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron.efa.comm import transfers
from megatron.efa.comm.drive import Handle, launch, rounds
from megatron.efa.comm.transfers import Stage
from megatron.efa.expert import kernels
from megatron.efa.expert.counts import Counts, chunk_rows
from megatron.efa.expert.message import Message
from megatron.efa.expert.place import Place

Lists = tuple[torch.Tensor, torch.Tensor]
"""Offsets and entries of rows, as `kernels` takes them."""
Fill = Callable[[slice, Lists, torch.Tensor], None]
"""Copies the tokens of a slice by lists into message rows uint8 [n, size]."""
Find = Callable[[torch.Tensor], torch.Tensor]
"""The ranks of this node, bool [n, P], that message rows uint8 [n, size] go to."""


@dataclass
class Chunk:
    """A part of the tokens, and the way of their rows."""

    tokens: slice
    rows: slice
    """Of the R rows of this rank, those of this chunk."""
    rail_send: list[int]
    rail_recv: list[int]
    """By node, this rank's node left at 0."""
    own: int
    intra_send: list[int]
    intra_recv: list[int]
    to_nodes: Lists
    to_ranks: Lists | None = None
    """Known once the rows of other nodes have come for the first time."""

    @property
    def sent(self) -> int:
        return sum(self.rail_send)

    @property
    def kept(self) -> int:
        """S + O rows: copies of this rank's own tokens."""
        return self.sent + self.own

    @property
    def held(self) -> int:
        """S + O + V rows."""
        return self.kept + sum(self.rail_recv)


class Way:
    """The way of one microbatch's tokens through one layer; every transfer of it follows this."""

    def __init__(self, place: Place, counts: Counts, nodes: torch.Tensor, chunks: int) -> None:
        """`nodes` bool [T, N]: the nodes that a token goes to; `chunks` is this rank's number."""
        self.place, self.tokens, self.rows = place, len(nodes), counts.rows
        self.arriving: Handle = Handle()
        """Of the transfer that was begun in forward and not waited for there."""
        me = place.node
        # This rank's own node last: what crosses the rail then lies in one piece.
        ordered = torch.cat([nodes[:, :me], nodes[:, me + 1 :], nodes[:, me : me + 1]], dim=1)
        step, start = chunk_rows(self.tokens, chunks), 0
        self.chunks = []
        for c in range(counts.chunks):
            tokens = slice(min(c * step, self.tokens), min((c + 1) * step, self.tokens))
            sent, received = list(counts.rail_send[c]), list(counts.rail_recv[c])
            own, sent[me], received[me] = sent[me], 0, 0
            end = start + sum(counts.intra_recv[c])
            offsets, targets, _ = kernels.lists_of(ordered[tokens], own + sum(sent))
            self.chunks.append(
                Chunk(
                    tokens,
                    slice(start, end),
                    sent,
                    received,
                    own,
                    counts.intra_send[c],
                    counts.intra_recv[c],
                    (offsets, targets),
                )
            )
            start = end

    def outward(
        self, message: Message, fill: Fill, out: torch.Tensor, find: Find | None = None
    ) -> Handle:
        """Bring tokens to the ranks of their experts: into `out` uint8 [R, size], not yet there.

        `find` tells where rows go, the first time. Returns what to wait for.
        """
        pieces = [self._outward(chunk, message, fill, out, find) for chunk in self.chunks]
        return self._launch(pieces, out, rail_first=True)

    def homeward(self, message: Message, rows: torch.Tensor, out: Sequence[torch.Tensor]) -> Handle:
        """Sum `rows` uint8 [R, size] over the ranks and nodes of each token, in fp32 at each level,
        into `out`, one [T, width] a column. Returns what to wait for."""
        pieces = [self._homeward(chunk, message, rows, out) for chunk in self.chunks]
        return self._launch(pieces, rows, rail_first=False)

    def _launch(self, pieces: list[Stage], tensor: torch.Tensor, rail_first: bool) -> Handle:
        if self.place.two is None:
            rounds(pieces)
            return Handle()
        return launch(self.place.two, pieces, [tensor], async_op=True, rail_first=rail_first)

    def _outward(
        self, chunk: Chunk, message: Message, fill: Fill, out: torch.Tensor, find: Find | None
    ) -> Stage:
        held = message.empty(chunk.held, out.device)
        fill(chunk.tokens, chunk.to_nodes, held[: chunk.kept])
        yield from self._rail(held, chunk, outward=True)
        here = held[chunk.sent :]
        if chunk.to_ranks is None:
            chunk.to_ranks = kernels.lists_of(find(here), sum(chunk.intra_send))[:2]
        if self.place.intra is None:
            kernels.spread(here, *chunk.to_ranks, out[chunk.rows])
            return
        copies = message.empty(sum(chunk.intra_send), out.device)
        kernels.spread(here, *chunk.to_ranks, copies)
        yield from transfers.exchange(
            out[chunk.rows], copies, self.place.intra, chunk.intra_recv, chunk.intra_send
        )

    def _homeward(
        self, chunk: Chunk, message: Message, rows: torch.Tensor, out: Sequence[torch.Tensor]
    ) -> Stage:
        copies = rows[chunk.rows]
        if self.place.intra is not None:
            copies = message.empty(sum(chunk.intra_send), rows.device)
            yield from transfers.exchange(
                copies, rows[chunk.rows], self.place.intra, chunk.intra_send, chunk.intra_recv
            )
        held = message.empty(chunk.held, rows.device)
        for source, target in zip(
            message.views(copies), message.views(held[chunk.sent :]), strict=True
        ):
            kernels.collect(source, *chunk.to_ranks, target)
        yield from self._rail(held, chunk, outward=False)
        for source, target in zip(message.views(held[: chunk.kept]), out, strict=True):
            kernels.collect(source, *chunk.to_nodes, target[chunk.tokens])

    def _rail(self, held: torch.Tensor, chunk: Chunk, outward: bool) -> Stage:
        """Between `held` [S | O | V]'s first and last rows, whichever way."""
        if self.place.rail is None:
            return
        mine, theirs = held[: chunk.sent], held[chunk.kept :]
        sent, received = chunk.rail_send, chunk.rail_recv
        if not outward:
            mine, theirs, sent, received = theirs, mine, received, sent
        yield from transfers.exchange(theirs, mine, self.place.rail, received, sent, by_pairs=True)

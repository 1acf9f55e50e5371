"""How many rows go where: counted from this rank's routing, exchanged once, read once.

What a rank must know of others is little: how many rows come to it over its rail, how many it
forwards to each rank of its node and gets from it, chunk by chunk, and how many tokens its experts
get. So counts go the way of the tokens: over the rail to the node they are for, where the rank
that will receive the rows adds them up, and from there to all ranks of that node. That is two
small messages on N - 1 + P - 1 links where a gather of everybody's counts would use N * P - 1.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from megatron.efa.comm import transfers
from megatron.efa.errors import EfaError
from megatron.efa.expert.place import Place


@dataclass(frozen=True)
class Counts:
    """Rows of this rank, on the host. C chunks, N nodes, P ranks a node, L local experts."""

    chunks: int
    """Of all ranks: the largest number that any of them has."""
    rail_send: list[list[int]]
    """[C][N]: this rank's tokens for each node, its own included."""
    rail_recv: list[list[int]]
    """[C][N]: tokens of each node's rank on this rail for this node, this rank's included."""
    intra_send: list[list[int]]
    """[C][P]: rows forwarded to each rank of this node."""
    intra_recv: list[list[int]]
    """[C][P]: rows that each rank of this node forwards to this one."""
    experts: torch.Tensor
    """Tokens of each local expert, int64 [L], of this rank's rows alone."""

    @property
    def rows(self) -> int:
        """Rows that come to this rank."""
        return sum(map(sum, self.intra_recv))


class Exchange:
    """Counts on their way: begun with `start`, on the host with `wait`."""

    def __init__(self, place: Place, local: int, width: int, topk: int) -> None:
        """`local` experts a rank, at most `width` chunks, at most `topk` experts a token."""
        self.place, self.local, self.width, self.topk = place, local, width, topk

    def start(self, ranks: torch.Tensor, routing: torch.Tensor, chunks: int) -> None:
        """Count and exchange. `ranks` bool [T, R]: the ranks that a token goes to; `routing` bool
        [T, E]; this rank cuts its tokens into `chunks`, of `chunk_rows` each."""
        place, width = self.place, self.width
        nodes, per_node = place.nodes, place.per_node
        step = chunk_rows(len(ranks), chunks)
        to_ranks = _by_chunk(ranks, step, width)  # [C, R]
        to_nodes = _by_chunk(ranks.view(-1, nodes, per_node).any(2), step, width)  # [C, N]
        experts = routing.sum(0, dtype=torch.int32)  # [E]
        most = routing.sum(1, dtype=torch.int32).amax() if len(routing) else experts.new_zeros(())
        said = torch.cat(
            [
                to_nodes.t(),  # [N, C]
                to_ranks.view(width, nodes, per_node).transpose(0, 1).reshape(nodes, -1),
                experts.view(nodes, -1),  # [N, P * L]
                torch.stack([torch.full_like(most, chunks), most]).expand(nodes, 2),
            ],
            dim=1,
        ).contiguous()
        heard = _all_to_all(said, place.rail)  # row n: what node n's rank on this rail has for us
        at = [width, width * per_node, per_node * self.local, 2]
        rail_recv, forwards, experts, extremes = heard.split(at, dim=1)
        summed = torch.cat([forwards.sum(0), experts.sum(0), extremes.amax(0)]).to(torch.int32)
        node = _all_gather(summed, place.intra)  # [P, C * P + P * L + 2]
        forwards, experts, extremes = node.split([at[1], at[2], 2], dim=1)
        forwards = forwards.view(per_node, width, per_node)  # of each rank, by chunk, to each rank
        answer = torch.cat(
            [
                to_nodes.reshape(-1),
                rail_recv.t().reshape(-1),
                forwards[place.index].reshape(-1),
                forwards[:, :, place.index].t().reshape(-1),
                experts.view(per_node, per_node, self.local)[:, place.index].sum(0),
                extremes.amax(0),
            ]
        )
        self._to_host(answer.to(torch.int32))

    def _to_host(self, answer: torch.Tensor) -> None:
        """The one copy from the device; nothing waits for it yet."""
        self._event = None
        if not answer.is_cuda:
            self._host = answer
            return
        self._host = torch.empty(answer.shape, dtype=answer.dtype, pin_memory=True)
        self._host.copy_(answer, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> Counts:
        """The counts, once they are here. Raises EfaError if a token has too many experts."""
        if self._event is not None:
            self._event.synchronize()
        width, nodes, per_node = self.width, self.place.nodes, self.place.per_node
        sizes = [width * nodes] * 2 + [width * per_node] * 2 + [self.local, 2]
        *tables, experts, extremes = self._host.split(sizes)
        chunks, most = extremes.tolist()
        if most > self.topk:
            raise EfaError(
                f"a token was routed to {most} experts where --moe-router-topk is {self.topk}: the "
                "hierarchical dispatcher has room for that many; use --moe-token-dispatcher-type "
                "alltoall with this router"
            )
        tables = [table.view(width, -1)[:chunks].tolist() for table in tables]
        return Counts(chunks, *tables, experts.long())


def chunk_rows(tokens: int, chunks: int) -> int:
    """Tokens in each of `chunks` chunks but the last, which may have fewer."""
    return -(-tokens // chunks)


def _by_chunk(mask: torch.Tensor, step: int, width: int) -> torch.Tensor:
    """int32 [width, D]: the marks in each chunk of `step` rows of mask [T, D]; zeros beyond."""
    if not len(mask):
        return mask.new_zeros(width, mask.shape[1], dtype=torch.int32)
    missing = width * step - len(mask)
    padded = F.pad(mask.to(torch.int32), (0, 0, 0, max(missing, 0)))
    return padded[: width * step].view(width, step, -1).sum(1, dtype=torch.int32)


def _all_to_all(said: torch.Tensor, group: Any | None) -> torch.Tensor:
    """Row i of `said` goes to member i of `group`."""
    if group is None:
        return said
    heard = torch.empty_like(said)
    transfers.all_to_all(heard, said, group).wait()
    return heard


def _all_gather(said: torch.Tensor, group: Any | None) -> torch.Tensor:
    """The [n] of every member, [k, n]."""
    if group is None:
        return said.unsqueeze(0)
    heard = said.new_empty(group.size(), said.numel())
    transfers.all_gather(heard.view(-1), said, group).wait()
    return heard

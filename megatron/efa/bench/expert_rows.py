"""The row work of one rank in a two-level dispatch: which rows go where, for a random routing.

Rank 0 of node 0 packs the rows of its own tokens for the other nodes, forwards what it holds (its
own tokens and what came over its rail) to the ranks of its node, and expands what it got by local
expert; the combine sums the same rows the other way round. The routing of every rank is drawn,
uniformly, so that as many and as different rows arrive as in a real job.
"""

from dataclasses import dataclass

import torch

from megatron.efa.expert import kernels


@dataclass(frozen=True)
class Layer:
    """An expert layer on nodes of equal size; experts are dealt out in order."""

    tokens: int  # of a rank
    hidden: int
    experts: int
    topk: int
    nodes: int
    ranks_per_node: int


@dataclass(frozen=True)
class Lists:
    """N rows and M copies of them."""

    mask: torch.Tensor  # bool [N, D], what the lists are made of
    offsets: torch.Tensor  # int32 [N + 1]
    index: torch.Tensor  # int32 [M]
    counts: torch.Tensor  # int32 [D]

    @property
    def rows(self) -> int:
        return self.mask.shape[0]

    @property
    def copies(self) -> int:
        return self.index.numel()

    def bytes_moved(self, row_bytes: int, copy_bytes: int) -> int:
        """What `spread` must move, each row read once and each copy written once, or `collect`."""
        lists = 4 * (self.rows + 1 + self.copies)
        return self.rows * row_bytes + self.copies * copy_bytes + lists


@dataclass(frozen=True)
class RankWork:
    """The lists of rank 0: by other node, by rank of the own node, by local expert, by any node."""

    pack: Lists
    forward: Lists
    expand: Lists
    sum_nodes: Lists
    chosen: torch.Tensor
    """bool [tokens, experts] of the rank's own tokens."""
    received: torch.Tensor
    """int64 [ranks, local experts]: rows that upstream's dispatcher would bring here."""


def lists_from(mask: torch.Tensor) -> Lists:
    """Lists of bool [N, D]; rows without a mark are dropped, since they are not held anywhere."""
    mask = mask[mask.any(1)]
    return Lists(mask, *kernels.lists_of(mask, int(mask.sum())))


def work_of_rank_0(layer: Layer, device: str, seed: int) -> RankWork:
    """Draw top-k experts of every token of every rank, and list what rank 0 has to do with them."""
    generator = torch.Generator(device).manual_seed(seed)
    ranks = layer.nodes * layer.ranks_per_node
    local = layer.experts // ranks
    own, at_node, at_rank, received = None, [], [], []
    for rank in range(ranks):
        scores = torch.rand(layer.tokens, layer.experts, device=device, generator=generator)
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        chosen.scatter_(1, scores.topk(layer.topk, dim=1).indices, True)
        own = chosen if own is None else own
        here = chosen[:, : layer.ranks_per_node * local]
        if rank % layer.ranks_per_node == 0:  # on our rail: we forward its tokens
            at_node.append(here.view(-1, layer.ranks_per_node, local).any(2))
        at_rank.append(here[:, :local])
        received.append(here[:, :local].sum(0))
    own_nodes = own.view(-1, layer.nodes, layer.ranks_per_node * local).any(2)
    return RankWork(
        pack=lists_from(own_nodes[:, 1:]),
        forward=lists_from(torch.cat(at_node)),
        expand=lists_from(torch.cat(at_rank)),
        sum_nodes=lists_from(own_nodes),
        chosen=own,
        received=torch.stack(received),
    )

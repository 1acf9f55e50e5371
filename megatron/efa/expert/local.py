"""From the rows that came to a rank to the blocks of its experts, and back.

Shapes: R rows of the rank, k experts a token at most, L local experts, M rows of all of them.
"""

from dataclasses import dataclass

import torch

from megatron.efa.expert import kernels


@dataclass(frozen=True)
class Local:
    """Which rows each local expert works on."""

    offsets: torch.Tensor
    targets: torch.Tensor
    """Lists of the R rows into the M."""
    slots: torch.Tensor
    """int64 [R, k]: the row of the M of each of a row's experts; M where it is not a local one."""
    counts: torch.Tensor
    """int64 [L] on the host: rows of each expert, filled up ones included; they sum to M."""
    filled: bool
    """Whether some of the M rows are nobody's."""

    @property
    def total(self) -> int:
        return int(self.counts.sum())


def local_of(
    experts: torch.Tensor, first: int, tokens: torch.Tensor, counts: torch.Tensor
) -> Local:
    """Sort rows by local expert, then by row.

    experts int16 [R, k]: of each row in rising order, -1 for none; `first` is the first local one;
    tokens int64 [L] on the host: rows that there are of each; counts int64 [L]: at least as many,
    what each is to be filled up to.
    """
    local, n = len(counts), int(tokens.sum())
    total = int(counts.sum())
    own = experts.long() - first
    inside = (own >= 0) & (own < local)
    mask = torch.zeros(len(own), local + 1, dtype=torch.bool, device=own.device)
    mask.scatter_(1, torch.where(inside, own, local), True)
    offsets, targets, _ = kernels.lists_of(mask[:, :local], n)
    filled = total != n
    if filled:
        ends = tokens.cumsum(0).to(targets.device)
        expert = torch.bucketize(targets.long(), ends, right=True)
        moved = ((counts.cumsum(0) - counts) - (tokens.cumsum(0) - tokens)).to(targets.device)
        targets = (targets + moved[expert]).to(torch.int32)
    # Experts of a row rise, so that its marks and its local experts are in the same order.
    number = inside.view(-1).cumsum(0).view(inside.shape) - 1
    nobody = targets.new_full((1,), total)
    slots = torch.cat([targets, nobody]).long()[torch.where(inside, number, n)]
    return Local(offsets, targets, slots, counts, filled)

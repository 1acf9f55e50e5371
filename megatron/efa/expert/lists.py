"""Row lists from a mask, in plain PyTorch: the reference for the kernel, and what serves CPUs."""

import torch


def lists_of(
    mask: torch.Tensor, offsets: torch.Tensor, targets: torch.Tensor, counts: torch.Tensor
) -> None:
    """Number the marks of mask [N, D] by destination, then row, and list them by row.

    Writes offsets [N + 1], targets [M] and counts [D], int32: mark j of row i, counted from
    offsets[i] in the order of destinations, has number targets[j]; counts are the marks of each
    destination. With room for fewer than the marks, targets beyond it are left out; with more, the
    rest stays as it is. Nothing waits for the device.
    """
    n, destinations = mask.shape
    numbers = mask.t().reshape(-1).cumsum(0).view(destinations, n).t() - 1
    entries = mask.reshape(-1).cumsum(0)
    offsets[0] = 0
    offsets[1:] = entries.view(n, destinations)[:, -1] if destinations else 0
    counts.copy_(mask.sum(0))
    room = targets.numel()
    # Unmarked places, and marks without room, all write to one place behind the last.
    place = torch.where(mask.reshape(-1), entries - 1, room).clamp(max=room)
    padded = torch.cat([targets, targets.new_empty(1)])
    padded.scatter_(0, place, numbers.reshape(-1).to(torch.int32))
    targets.copy_(padded[:room])

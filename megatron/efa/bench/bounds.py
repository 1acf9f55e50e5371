"""How many rows must cross between nodes, and how many do without a second level.

One pass of an expert layer's training step moves rows four times: dispatch, combine, and the mirror
of each in backward. Row = one token's hidden vector.
"""

import torch

PASSES = 4
"""Times that a row crosses a link for one (token, remote node) pair: two ways, two directions."""


def rows_to_nodes(chosen: torch.Tensor, experts: int, nodes: int) -> tuple[list[int], list[int]]:
    """Rows that the tokens of one rank send to each of N nodes, once a node and once an expert.

    `chosen` is int64 [T, k], distinct in a row; node n holds experts n E/N to (n+1) E/N - 1, as
    Megatron places them when the expert group runs over all ranks.
    """
    node = chosen * nodes // experts
    copies = torch.bincount(node.flatten(), minlength=nodes)
    reached = torch.zeros(len(chosen), nodes, dtype=torch.bool)
    reached.scatter_(1, node, True)
    return reached.sum(dim=0).tolist(), copies.tolist()


def leaving(matrix: list[list[int]]) -> int:
    """Rows that leave their node; `matrix[a][b]` are those that node a sends to node b."""
    return sum(rows for a, line in enumerate(matrix) for b, rows in enumerate(line) if a != b)


def busiest(matrix: list[list[int]]) -> int:
    """Rows through the busiest direction of the busiest node's link in one dispatch or combine."""
    nodes = range(len(matrix))
    out = [sum(matrix[a][b] for b in nodes if a != b) for a in nodes]
    into = [sum(matrix[a][b] for a in nodes if a != b) for b in nodes]
    return max(*out, *into)


def bound_bytes(matrix: list[list[int]], row_bytes: int) -> int:
    """Bytes that must leave nodes in forward and backward: a row a token and remote node, each way.

    `matrix` counts every token once a node it is sent to.
    """
    return PASSES * leaving(matrix) * row_bytes


def bound_seconds(matrix: list[list[int]], row_bytes: int, bytes_per_second: float) -> float:
    """Least time for the same over full-duplex links of a rate, each of the passes after another.

    Combine and backward move the same rows over the same links in the other direction.
    """
    return PASSES * busiest(matrix) * row_bytes / bytes_per_second

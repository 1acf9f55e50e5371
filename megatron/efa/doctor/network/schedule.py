"""Which nodes are measured against which, when: all pairs, none twice, no node in two at once."""


def rounds(nodes: int, most: int | None = None) -> list[list[tuple[int, int]]]:
    """Pairs of each round, by the circle method: n - 1 rounds for an even n, n for an odd one.

    One node stays, the others move round it by one place a round; with an odd number, the partner
    of a node that does not exist rests. With `most`, that many rounds spread over all: every node
    then meets that many others, at all distances.
    """
    if nodes < 2:
        return []
    size = nodes + nodes % 2
    circle = list(range(size))
    made = []
    for _ in range(size - 1):
        pairs = [(circle[i], circle[size - 1 - i]) for i in range(size // 2)]
        made.append([(min(p), max(p)) for p in pairs if max(p) < nodes])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    if most is not None and most < len(made):
        made = [made[i * len(made) // most] for i in range(most)]
    return made


def partner(pairs: list[tuple[int, int]], node: int) -> int | None:
    """Whom `node` meets in a round; None if it rests."""
    for a, b in pairs:
        if node in (a, b):
            return b if node == a else a
    return None

"""Orders of hosts in which nodes that exchange much are near: starts from structure, then swaps.

The problem: given W (bytes between places) and D (distance between hosts), give each place a host
so that sum W[i, j] D[host i, host j] is least. It is a quadratic assignment; both sides have
structure. D is a tree's, so hosts are carved from the bottom of the tree up into units (an EP
group's nodes, a pipeline of those), what is left over in a switch joining others' under the next
one. W is made of cliques and chains, so places form the same units. Units are matched, then
hosts are swapped while it pays. All steps are counted, none timed: the result is the same anywhere.
"""

import random
from collections.abc import Callable, Sequence

import numpy as np

Path = tuple[str | int, ...]


def distances(paths: Sequence[Path]) -> np.ndarray:
    """(hosts, hosts) float64 of `Cluster.distance`: 0 for itself, 1 under one bottom switch, ..."""
    depth = max(map(len, paths))
    shared = np.zeros((len(paths), len(paths)))
    for layer in range(depth):
        ids: dict[Path, int] = {}
        # A path that ends above this layer shares nothing here: a negative id of its own.
        mark = [
            ids.setdefault(path[: layer + 1], len(ids)) if len(path) > layer else -1 - i
            for i, path in enumerate(paths)
        ]
        shared += np.equal.outer(mark, mark)
    found = 1 + depth - shared
    np.fill_diagonal(found, 0)
    return found


def cost(weight: np.ndarray, distance: np.ndarray, order: np.ndarray) -> float:
    """Bytes x distance when place i is given host `order[i]`."""
    return float((weight * distance[np.ix_(order, order)]).sum() / 2)


def tree_order(paths: Sequence[Path], hosts: Sequence[int]) -> list[int]:
    """Return `hosts` as one meets them walking the tree, larger subtrees first."""
    return [host for unit in carve(paths, hosts, 1) for host in unit]


def carve(paths: Sequence[Path], hosts: Sequence[int], size: int, layer: int = 0) -> list[list]:
    """Split `hosts` into units of `size`, each under as low a switch as can be had.

    Those of one switch stand together. The last unit is shorter if `size` does not divide.
    """
    units, rest = _carve(paths, list(hosts), size, layer)
    return [*units, *([rest] if rest else [])]


def _carve(paths: Sequence[Path], hosts: list, size: int, layer: int) -> tuple[list, list]:
    below: dict[object, list] = {}
    for host in hosts:
        ends = len(paths[host]) <= layer
        below.setdefault((1, host) if ends else (0, paths[host][layer]), []).append(host)
    if all(kind for kind, _ in below):  # hosts under one bottom switch
        whole = len(hosts) // size * size
        return [hosts[i : i + size] for i in range(0, whole, size)], hosts[whole:]
    units, rests = [], []
    for key in sorted(below, key=lambda key: (-len(below[key]), below[key][0])):
        inner, rest = _carve(paths, below[key], size, layer + 1)
        units += inner
        rests.append(rest)
    # Longest first, so that few units are made of many remainders.
    left = [host for rest in sorted(rests, key=len, reverse=True) for host in rest]
    whole = len(left) // size * size
    return [*units, *(left[i : i + size] for i in range(0, whole, size))], left[whole:]


def nested(paths: Sequence[Path], hosts: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Carve `hosts` into units of `sizes[0]`, each of them into units of `sizes[1]`, and so on."""
    if not sizes:
        return list(hosts)
    units = carve(paths, hosts, sizes[0])
    return [host for unit in units for host in nested(paths, unit, sizes[1:])]


def grow(weight: np.ndarray, distance: np.ndarray, hosts: Sequence[int]) -> np.ndarray:
    """Give `hosts`, one after another, the place that has most to do with the hosts near it."""
    near = distance.max() - distance
    order = np.full(len(hosts), -1)
    places = np.empty(len(hosts), dtype=np.int64)
    free = np.ones(len(hosts), dtype=bool)
    for step, host in enumerate(hosts):
        if step:
            pull = weight[:, places[:step]] @ near[host, list(hosts[:step])]
            place = int(np.argmax(np.where(free, pull, -1)))
        else:
            place = 0
        order[place], places[step], free[place] = host, place, False
    return order


def improve(
    weight: np.ndarray,
    distance: np.ndarray,
    order: np.ndarray,
    swaps: int,
    movable: np.ndarray | None = None,
) -> np.ndarray:
    """Swap the two hosts that save most until none saves, or `swaps` were made.

    The saving of all swaps comes from one product M = W D, which a swap changes in two rows and
    two columns: O(n^2) a swap. `movable` (bool, one a place) keeps the others where they are.
    """
    order = np.array(order)
    here = distance[np.ix_(order, order)]
    product = weight @ here
    scale = max(float((weight * here).sum()), 1e-300)
    fixed = None if movable is None else ~movable
    for _ in range(swaps):
        own = np.diag(product)
        change = product + product.T - own[:, None] - own[None, :] + 2 * weight * here
        if fixed is not None:
            change[fixed] = change[:, fixed] = np.inf
        a, b = divmod(int(np.argmin(change)), len(order))
        if not change[a, b] < -1e-12 * scale:
            break
        order[[a, b]] = order[[b, a]]
        old = here[[a, b]]
        here[[a, b]] = here[[b, a]]
        here[:, [a, b]] = here[:, [b, a]]
        product += weight[:, [a, b]] @ (here[[a, b]] - old)
        product[:, [a, b]] = weight @ here[:, [a, b]]
    return order


def by_units(
    weight: np.ndarray, distance: np.ndarray, order: np.ndarray, units: np.ndarray, swaps: int
) -> np.ndarray:
    """Swap whole units of places (rows of `units`) as `improve` does hosts, on their averages."""
    belongs = np.zeros((len(units), len(order)))
    for unit, places in enumerate(units):
        belongs[unit, places] = 1
    between = belongs @ weight @ belongs.T
    far = belongs @ distance[np.ix_(order, order)] @ belongs.T / units.shape[1] ** 2
    for square in (between, far):
        np.fill_diagonal(square, 0)
    better = np.empty_like(order)
    for unit, other in enumerate(improve(between, far, np.arange(len(units)), swaps)):
        better[units[unit]] = order[units[other]]
    return better


def search(
    weight: np.ndarray,
    distance: np.ndarray,
    paths: Sequence[Path],
    starts: Sequence[np.ndarray],
    units: Sequence[np.ndarray],
) -> np.ndarray:
    """Return the best order found: never worse than any of `starts`.

    `units` are ways to divide the places: (number of units, places of a unit) each, places of a
    larger unit in the order in which smaller ones divide it.
    """
    count = len(paths)
    hosts = tree_order(paths, range(count))
    tried = [np.array(start) for start in starts]
    tried += [grow(weight, distance, hosts)]
    for division in units:
        smaller = [len(u[0]) for u in units if len(u[0]) < len(division[0])]
        sizes = [len(division[0]), *sorted((s for s in smaller), reverse=True)]
        sizes = [size for i, size in enumerate(sizes) if i == 0 or sizes[i - 1] % size == 0]
        chosen = np.empty(count, dtype=np.int64)
        chosen[division.reshape(-1)] = nested(paths, hosts, sizes)
        tried.append(chosen)
        tried.append(by_units(weight, distance, chosen, division, swaps=2 * len(division)))

    def price(order: np.ndarray) -> float:
        return cost(weight, distance, order)

    return _polish(weight, distance, tried, units, price)


def _polish(
    weight: np.ndarray,
    distance: np.ndarray,
    tried: list[np.ndarray],
    units: Sequence[np.ndarray],
    price: Callable[[np.ndarray], float],
) -> np.ndarray:
    """Improve the most promising of `tried`, and where that is cheap, shaken copies of the best."""
    count = len(tried[0])
    effort = 30_000_000 // count**3  # how many searches from a near start fit in a second or so
    ranked = sorted(tried, key=price)
    best = ranked[0]
    for order in _distinct(ranked)[: 1 + effort]:
        best = min(best, improve(weight, distance, order, count), key=price)
    for division in units:
        shifted = by_units(weight, distance, best, division, swaps=len(division))
        best = min(best, improve(weight, distance, shifted, count), key=price)
    dice = random.Random(count)
    for _ in range(min(effort, 40)):
        shaken = best.copy()
        for _ in range(2 + dice.randrange(max(count // 4, 1))):
            a, b = dice.randrange(count), dice.randrange(count)
            shaken[[a, b]] = shaken[[b, a]]
        best = min(best, improve(weight, distance, shaken, count), key=price)
    return best


def _distinct(orders: Sequence[np.ndarray]) -> list[np.ndarray]:
    return list({order.tobytes(): order for order in orders}.values())

"""Match an edited file with the lines it was made of, so that every line gets an owner again."""

from collections.abc import Collection
from difflib import SequenceMatcher

from megatron.efa.fork.lines import Lines

NEW = -1  # owner of a line that belongs to no patch yet


class BaseLineLost(Exception):
    """Line `number` (from 1) of the base is changed or gone; `text` is that line."""

    def __init__(self, number: int, text: bytes) -> None:
        super().__init__(number, text)
        self.number = number
        self.text = text


def own(old: Lines, new: list[bytes], prefer: Collection[tuple[bytes, ...]] = ()) -> Lines:
    """Give each line of `new` the owner of the line of `old` it continues or replaces, or `NEW`.

    Every base line (owner 0) of `old` must be in `new`, in order. Where equal lines allow several
    places for an insertion, the one whose lines are in `prefer` is taken.

    Raises:
        BaseLineLost: the first base line of `old` that is not.
    """
    texts = [text for text, _ in old]
    matches = _matches(texts, new)
    if any(owner == 0 and at not in matches for at, (_, owner) in enumerate(old)):
        _check_base_kept(old, new, matches)
        matches = _matches_keeping_base(old, new)
    result = list(zip(new, _owners(old, matches, len(new)), strict=True))
    return _slide(result, prefer) if prefer else result


def _owners(old: Lines, matches: dict[int, int], count: int) -> list[int]:
    owners = [NEW] * count
    at = to = 0
    for next_at, next_to in [*sorted(matches.items()), (len(old), count)]:
        if at < next_at:  # these lines are gone, so new ones in their place are of the same patch
            owners[to:next_to] = [old[at][1]] * (next_to - to)
        if next_at < len(old):
            owners[next_to] = old[next_at][1]
        at, to = next_at + 1, next_to + 1
    return owners


def _matches(old: list[bytes], new: list[bytes]) -> dict[int, int]:
    """Index in `old` -> index in `new` of the lines that a common diff keeps."""
    # Common ends first: they are most of the file, and leave no choice to the matcher.
    head = 0
    while head < min(len(old), len(new)) and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < min(len(old), len(new)) - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    kept = {at: at for at in range(head)}
    middle = SequenceMatcher(
        None, old[head : len(old) - tail], new[head : len(new) - tail], autojunk=False
    )
    for block in middle.get_matching_blocks():
        for at in range(block.size):
            kept[head + block.a + at] = head + block.b + at
    kept.update({len(old) - 1 - at: len(new) - 1 - at for at in range(tail)})
    return kept


def _check_base_kept(old: Lines, new: list[bytes], matches: dict[int, int]) -> None:
    """Raise unless the base lines are a subsequence of `new`; blame the line that the diff lost."""
    rest = iter(new)
    if all(text in rest for text, owner in old if owner == 0):
        return
    number = 0
    for at, (text, owner) in enumerate(old):
        number += owner == 0
        if owner == 0 and at not in matches:
            raise BaseLineLost(number, text)


def _matches_keeping_base(old: Lines, new: list[bytes]) -> dict[int, int]:
    """Matches that keep every base line, and with that as many patch lines as there can be.

    The longest common subsequence with a base line worth more than all patch lines together.
    Quadratic, and needed only when a diff took a base line for a removed one though an equal one is
    there.
    """
    # A base line at either end must be kept anyway, so equal ones there leave no choice. Patch
    # lines do: an equal base line behind may need the place.
    head = 0
    while head < min(len(old), len(new)) and old[head] == (new[head], 0):
        head += 1
    tail = 0
    while tail < min(len(old), len(new)) - head and old[-1 - tail] == (new[-1 - tail], 0):
        tail += 1
    kept = {at: at for at in range(head)}
    kept.update({len(old) - 1 - at: len(new) - 1 - at for at in range(tail)})
    middle = _heaviest_matches(old[head : len(old) - tail], new[head : len(new) - tail])
    kept.update({head + at: head + to for at, to in middle.items()})
    return kept


def _heaviest_matches(old: Lines, new: list[bytes]) -> dict[int, int]:
    heavy = len(old) + 1
    weight = [heavy if owner == 0 else 1 for _, owner in old]
    best = [[0] * (len(new) + 1) for _ in range(len(old) + 1)]
    for at in range(len(old) - 1, -1, -1):
        row, below, text = best[at], best[at + 1], old[at][0]
        for to in range(len(new) - 1, -1, -1):
            value = max(below[to], row[to + 1])
            if text == new[to]:
                value = max(value, below[to + 1] + weight[at])
            row[to] = value
    kept: dict[int, int] = {}
    at = to = 0
    while at < len(old) and to < len(new):
        if old[at][0] == new[to] and best[at][to] == best[at + 1][to + 1] + weight[at]:
            kept[at] = to
            at, to = at + 1, to + 1
        elif best[at][to] == best[at + 1][to]:
            at += 1
        else:
            to += 1
    return kept


def _slide(lines: Lines, prefer: Collection[tuple[bytes, ...]]) -> Lines:
    """Move each run of `NEW` lines over equal lines until it reads as one of `prefer`."""
    lines = list(lines)
    at = 0
    while at < len(lines):
        end = at
        while end < len(lines) and lines[end][1] == NEW:
            end += 1
        if end > at:
            _slide_run(lines, at, end, prefer)
        at = max(end, at + 1)
    return lines


def _slide_run(lines: Lines, at: int, end: int, prefer: Collection[tuple[bytes, ...]]) -> None:
    for step in (-1, 1):
        first, last = at, end
        while tuple(text for text, _ in lines[first:last]) not in prefer:
            # Up: the line above is equal to the last one of the run, so they may change roles.
            out, into = (first - 1, last - 1) if step < 0 else (last, first)
            if not 0 <= out < len(lines) or lines[out][1] == NEW or lines[out][0] != lines[into][0]:
                break
            first, last = first + step, last + step
        else:
            begin = min(at, first)
            passed = [owner for _, owner in lines[begin : max(end, last)] if owner != NEW]
            run = [NEW] * (last - first)
            owners = run + passed if step < 0 else passed + run
            for place, owner in enumerate(owners, start=begin):
                lines[place] = (lines[place][0], owner)
            return

"""Link rates as people write them, and the token bucket that holds a link to one."""

import re
from dataclasses import dataclass
from fractions import Fraction

from megatron.efa.errors import EfaError

_UNITS = {"tbit": 10**12, "gbit": 10**9, "mbit": 10**6, "kbit": 10**3, "bit": 1}
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?bit)", re.IGNORECASE)
_LOWEST = 10**6
_HIGHEST = 34 * 10**9  # tbf's parameters hold bytes/s in 32 bits


@dataclass(frozen=True, order=True)
class Rate:
    """The rate of a link in each direction."""

    bits_per_second: int

    def __post_init__(self) -> None:
        if not _LOWEST <= self.bits_per_second <= _HIGHEST:
            raise EfaError(
                f"a link cannot be shaped to {self}: give a rate from 1mbit to 34gbit, or none"
            )

    @property
    def bytes_per_second(self) -> float:
        return self.bits_per_second / 8

    def __str__(self) -> str:
        for unit, factor in _UNITS.items():
            if self.bits_per_second % factor == 0 and self.bits_per_second >= factor:
                return f"{self.bits_per_second // factor}{unit}"
        return f"{self.bits_per_second}bit"


def parse_rate(text: str) -> Rate | None:
    """'500mbit', '2.5gbit' (decimal units, as `tc` has them) to a Rate; 'none' to None (unshaped).

    Raises EfaError on anything else, also on `gbps`, which means bytes to `tc` and bits to others.
    """
    text = text.strip()
    if text.lower() == "none":
        return None
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise EfaError(f"'{text}' is no link rate: write it like 500mbit, 2.5gbit or none")
    bits = Fraction(match[1]) * _UNITS[match[2].lower()]
    if bits.denominator != 1:
        raise EfaError(f"the link rate '{text}' is no whole number of bits per second")
    return Rate(int(bits))


@dataclass(frozen=True)
class TokenBucket:
    """Parameters of a `tbf` queue, in bytes and bytes per second."""

    rate: int
    burst: int
    limit: int


def token_bucket(rate: Rate) -> TokenBucket:
    """The bucket that holds a link to `rate`.

    The burst is what may leave at once after a pause: at least one 64 KiB segment with its headers,
    as the kernel would otherwise cut it up at great cost, and at most 1 ms of the rate beyond that,
    so that short messages are held to the rate as well. The queue takes 50 ms and 4 MiB more before
    it drops: what a few ranks have in flight, so that TCP repeats (and counts) next to nothing.
    """
    per_second = round(rate.bytes_per_second)
    burst = max(72 * 1024, per_second // 1000)
    return TokenBucket(rate=per_second, burst=burst, limit=burst + per_second // 20 + (4 << 20))

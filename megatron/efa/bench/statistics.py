"""Figures of interleaved rounds: the middle one, how far they scatter, ratios round by round."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    """The middle half of some measurements, in their unit."""

    median: float
    low: float
    """First quartile."""
    high: float
    """Third quartile."""
    rounds: int

    def __str__(self) -> str:
        return f"{self.median:.4g} ({self.low:.4g} to {self.high:.4g})"

    def scaled(self, factor: float) -> "Summary":
        """The same in another unit."""
        return Summary(self.median * factor, self.low * factor, self.high * factor, self.rounds)


def summary(values: Sequence[float]) -> Summary:
    """Median and quartiles of `values`. Raises ValueError if there are none."""
    if not values:
        raise ValueError("no measurements")
    if len(values) == 1:
        return Summary(values[0], values[0], values[0], 1)
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Summary(middle, low, high, len(values))


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Summary:
    """Ratios of what was measured in the same rounds.

    What disturbs the machine for a while disturbs both of a round, so the ratio scatters less than
    either. Raises ValueError if the two have not as many rounds.
    """
    return summary([a / b for a, b in zip(numerators, denominators, strict=True)])

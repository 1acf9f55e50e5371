"""Which experts each token goes to: made-up routings, and those that a real router chose.

Shapes: T tokens of a rank, E experts, k experts a token, N nodes.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.efa.errors import EfaError

KINDS = ("uniform", "balanced", "skewed", "node-limited")
SKEW = 1.0
"""Exponent of Zipf's law in `skewed`: the i-th expert is chosen in proportion to i^-SKEW."""


@dataclass(frozen=True)
class Layer:
    """An expert layer as its router sees it."""

    name: str
    experts: int
    topk: int


# Experts and top-k of the published configurations (config.json of DeepSeek-V3 and of Kimi-K2); the
# hidden size, 7168 in both, is what a machine scales.
LAYERS = {
    "deepseek-v3": Layer("deepseek-v3", 256, 8),
    "kimi-k2": Layer("kimi-k2", 384, 8),
}


def choose(
    kind: str, layer: Layer, tokens: int, nodes: int, generator: torch.Generator
) -> torch.Tensor:
    """Experts of each token, int64 [T, k], distinct in a row; all ranks use one `kind`.

    uniform       every set of k experts is as likely
    balanced      every expert gets as many tokens (up to one deck of cards), sets at random
    skewed        experts by Zipf's law, the popular ones at places that all ranks agree on
    node-limited  each token draws half of the nodes, then k experts there
    """
    count, k = layer.experts, layer.topk
    if kind == "balanced":
        hands = count // k
        decks = [
            torch.randperm(count, generator=generator)[: hands * k].view(hands, k)
            for _ in range(-(-tokens // hands))
        ]
        return torch.cat(decks)[:tokens]
    weights = torch.zeros(tokens, count)  # logarithms
    if kind == "skewed":
        places = torch.randperm(count, generator=torch.Generator().manual_seed(count))
        weights -= SKEW * torch.log(places + 1.0)
    elif kind == "node-limited":
        if count % nodes:
            raise EfaError(f"{count} experts do not divide among {nodes} nodes")
        kept = max(1, nodes // 2, -(-k * nodes // count))
        order = torch.rand(tokens, nodes, generator=generator).argsort(dim=1)
        outside = (order >= kept).repeat_interleave(count // nodes, dim=1)
        weights = weights.masked_fill(outside, -torch.inf)
    elif kind != "uniform":
        raise EfaError(f"there is no routing '{kind}': give {', '.join(KINDS)} or a file")
    # The k largest of weight + Gumbel noise are k draws without replacement (Kool et al. 2019).
    noise = -torch.log(-torch.log(torch.rand(tokens, count, generator=generator).clamp(1e-20)))
    return (weights + noise).topk(k, dim=1).indices


@dataclass(frozen=True)
class Recorded:
    """Choices of a real router over `experts` experts: int16 or int64 [tokens, k]."""

    name: str
    experts: int
    chosen: torch.Tensor

    @property
    def layer(self) -> Layer:
        return Layer(self.name, self.experts, self.chosen.shape[1])

    def of_rank(self, rank: int, tokens: int) -> torch.Tensor:
        """Experts of rank's `tokens` tokens: its part of the record, which repeats if need be."""
        rows = (torch.arange(tokens) + rank * tokens) % len(self.chosen)
        return self.chosen[rows].long()


def save(path: Path, experts: int, chosen: torch.Tensor) -> None:
    """Write a record that `load` reads (torch.save), aside and then renamed."""
    aside = path.with_name(f".{path.name}.aside")
    torch.save({"experts": experts, "chosen": chosen.to(torch.int16)}, aside)
    aside.replace(path)


def load(path: Path) -> Recorded:
    """Read a record. Raises EfaError if it is none."""
    try:
        content = torch.load(path, weights_only=True)
        experts, chosen = int(content["experts"]), content["chosen"]
        good = chosen.dim() == 2 and len(chosen) > 0 and 0 <= chosen.min() <= chosen.max() < experts
    except OSError as error:
        raise EfaError(f"--routing {path} cannot be read: {error.strerror}") from error
    except Exception as error:  # whatever unpickling raises
        raise EfaError(
            f"--routing {path} is no record of a router: `bench step --record-routing` writes them"
        ) from error
    distinct = chosen.sort(dim=1).values.diff(dim=1).ne(0).all()
    if not (good and distinct):
        raise EfaError(f"--routing {path}: a row is no set of experts from 0 to {experts - 1}")
    return Recorded(path.stem, experts, chosen)

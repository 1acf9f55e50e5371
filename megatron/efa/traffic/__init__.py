"""What a training step sends, by parallel axis and tier, and how long it waits for it.

    routes   bytes and messages of a call    watch   who calls, and who waits
    record   a step on one clock             times   overlap counted once
    report   all ranks' steps, to log and files

`begin` and `end` are what the patched training loop calls around each step. They do nothing unless
`--efa-traffic-interval` is given.
"""

from megatron.efa.traffic.settings import begin, configure, end

__all__ = ["begin", "configure", "end"]

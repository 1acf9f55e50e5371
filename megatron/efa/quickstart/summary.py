"""What the quickstart says at the end, to a person and as JSON."""

import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron.efa.quickstart.figures import Learning, Traffic


@dataclass(frozen=True)
class Summary:
    """The figures of a run; losses and entropies in nats a token."""

    learning: Learning
    entropy: float  # unigram, of the held-out tokens
    tokens_a_step: int
    seconds_a_step: float | None
    traffic: Traffic
    seconds: float  # of all stages
    folder: Path
    resume: str
    tensorboard: str


def record(s: Summary, gpu: bool) -> dict[str, Any]:
    """Return the figures and what they were measured on, for JSON."""
    figures = {key: value for key, value in asdict(s).items() if key not in _FOR_A_PERSON}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _gpu() if gpu else f"{platform.machine()} CPU",
        "versions": {"python": platform.python_version(), "torch": metadata.version("torch")},
        **figures,
    }


_FOR_A_PERSON = ("folder", "resume", "tensorboard")


def _gpu() -> dict[str, Any]:
    import torch  # only here: the ranks have imported it, this process has not

    return {
        "gpu": torch.cuda.get_device_name(),
        "gpus": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def render(s: Summary) -> str:
    """Return the summary as text."""
    return "\n".join(["", *_learned(s), *_speed(s), *_next(s), ""])


def _learned(s: Summary) -> list[str]:
    learning = s.learning
    lines = [
        f"training loss    {learning.first:.3f} at the first step, {learning.last:.3f} "
        f"over the last {learning.averaged} of {learning.steps}"
    ]
    if not learning.validation:
        return [*lines, "validation loss  none was computed: see eval_interval and eval_iters"]
    loss = learning.validation[-1][1]
    verdict = f"{s.entropy - loss:.2f} below" if loss < s.entropy else "NOT below"
    return [
        *lines,
        f"validation loss  {loss:.3f} nats a token, on documents held out",
        f"unigram entropy  {s.entropy:.3f} nats a token, of the same documents: the least that a "
        "model without",
        f"                 context can reach; this one is {verdict}",
    ]


def _speed(s: Summary) -> list[str]:
    speed = "speed            not measured: the run was too short"
    if s.seconds_a_step:
        speed = (
            f"speed            {s.tokens_a_step / s.seconds_a_step:.0f} tokens/s "
            f"({s.seconds_a_step * 1e3:.0f} ms a step of {s.tokens_a_step} tokens)"
        )
    if s.traffic.sent_bytes is None:
        between = (
            f"not counted, since the ranks ran as plain local processes: {s.folder / 'train.log'} "
            "says why\n                 (nodes need root and network namespaces)"
        )
    else:
        steps = s.learning.steps
        between = (
            f"{s.traffic.sent_bytes / steps / 1e6:.2f} MB a step ({s.traffic.sent_bytes / 1e6:.0f} "
            f"MB sent in {steps} steps, start-up and validation included)"
        )
    return [speed, f"between nodes    {between}", f"whole time       {s.seconds:.0f} s"]


def _next(s: Summary) -> list[str]:
    return [
        f"checkpoint       {s.folder / 'checkpoints'}",
        f"logs             {s.folder / 'train.log'}, {s.folder / 'tensorboard'}",
        f"these figures    {s.folder / 'summary.json'}",
        "",
        "To see the curves (all commands from the root of the repository):",
        f"  {s.tensorboard}",
        "To train on from the checkpoint:",
        f"  {s.resume}",
    ]

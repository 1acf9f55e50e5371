"""A published run (a row of the steps' CSV) as a model, a layout and a machine, or why it is not
one.

The rules here take the place of deleting rows: what a source is known to do differently becomes a
field of the job (release, natural routing, dropped tokens, sharded parameters, dispatcher).
"""

import csv
import re
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.efa.errors import EfaError
from megatron.efa.planner import machines, shape
from megatron.efa.planner.layout import Job
from megatron.efa.planner.machines import Machine
from megatron.efa.planner.shape import Shape

COLUMNS = ("source", "model", "gpu", "num_gpus", "precision", "seq_len", "gbs", "step_time_s")


@dataclass(frozen=True)
class Run:
    """One published step."""

    row: dict[str, str]
    shape: Shape
    job: Job
    machine: Machine
    seconds: float
    """Measured."""

    @property
    def group(self) -> tuple[str, str]:
        """What cross-validation holds out together."""
        return self.shape.name, self.machine.name


def read(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV with the published steps' columns. Raises EfaError naming what is missing."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as lines:
            reader = csv.DictReader(lines)
            rows = [{k: (v or "").strip() for k, v in row.items() if k} for row in reader]
            names = reader.fieldnames or []
    except (OSError, UnicodeDecodeError) as error:
        raise EfaError(f"{path}: cannot be read: {error}") from error
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        raise EfaError(f"{path}: no column {', '.join(missing)}; the first line names the columns")
    return rows


def parse(row: dict[str, str]) -> Run:
    """Raises EfaError saying why the planner cannot predict this row."""
    notes = f"{row.get('notes', '')} {row.get('interconnect', '')}"
    model = _model(row["model"], notes)
    machine = machines.of_gpu(row["gpu"], row.get("interconnect", ""))
    job = Job(
        gpus=_number(row, "num_gpus"),
        seq=_number(row, "seq_len"),
        gbs=_number(row, "gbs"),
        mbs=_number(row, "mbs", 1),
        tp=_number(row, "tp", 1),
        pp=_number(row, "pp", 1),
        vp=_number(row, "vp", 1),
        cp=_number(row, "cp", 1),
        ep=_number(row, "ep", 1),
        etp=_number(row, "etp", 1),
        precision=_precision(row["precision"]),
        recompute=_recompute(row.get("recompute", "")),
    )
    job = _sharded(_software(job, row, machine), row)
    job.check()
    layers = re.search(r"\b(\d+) layers \(\d+ rounded up", notes)
    if layers:
        model = replace(model, layers=int(layers.group(1)))
    return Run(row, model, job, machine, _seconds(row))


def _seconds(row: dict[str, str]) -> float:
    """Measured time of a step; from tokens/s where only that is given. NaN if neither is."""
    try:
        seconds = float(row["step_time_s"])
        return seconds if seconds > 0 else float("nan")
    except ValueError:
        pass
    try:
        rate = float(row.get("tokens_per_s_per_gpu", ""))
        return float(row["gbs"]) * float(row["seq_len"]) / (rate * float(row["num_gpus"]))
    except (ValueError, ZeroDivisionError):
        return float("nan")


def _number(row: dict[str, str], name: str, default: int | None = None) -> int:
    text = row.get(name, "")
    if not text and default is not None:
        return default
    try:
        value = int(float(text.replace(",", "")))
    except (ValueError, OverflowError):
        raise EfaError(f"{name}={text!r}: not a number") from None
    if value < 1:
        raise EfaError(f"{name}={text!r}: must be at least 1")
    return value


def _model(name: str, notes: str) -> Shape:
    found = shape.find(name)
    fewer = re.search(r"(\d+)-layer(?: \((\d+) dense\))?", name)
    if fewer:
        return shape.shortened(found, int(fewer.group(1)), int(fewer.group(2) or found.dense))
    if re.search(r"w/o MTP|no MTP", name, re.I) or "Automodel" in notes:
        found = replace(found, mtp=0)
    return found


def _precision(text: str) -> str:
    key = text.upper()
    if "FP4" in key:
        return "fp4"
    if "FP8" in key:
        return "fp8"
    if key.startswith(("BF16", "FP16")):
        return "bf16"
    raise EfaError(f"precision={text!r}: known are BF16, FP16, FP8 (any recipe) and NVFP4")


def _recompute(text: str) -> frozenset[str]:
    key = text.lower()
    if not key or key == "none":
        return frozenset()
    if key.startswith("full"):
        return frozenset({"full"})
    if key.startswith("selective"):
        return frozenset({"core_attn"})
    spelled = {"norm": "layernorm", "act": "moe_act"}
    return frozenset(spelled.get(word, word) for word in re.split(r"[+,; ]+", key) if word)


def _software(job: Job, row: dict[str, str], machine: Machine) -> Job:
    """Dispatcher, overlap, routing and release, from the source and the notes."""
    source, notes = row["source"], row.get("notes", "")
    text = f"{source} {notes} {row['model']}".lower()
    natural = "natural routing" in text or "real data" in text
    overlap = bool(re.search(r"overlap=on|ep(?: comm)? overlap(?! off)", text))
    stated = re.search(r"overlap=|(?:ep|comm|1f1b) overlap|alltoall|all-to-all|automodel", text)
    overlap = overlap or (
        not stated and not natural and job.vp > 1 and job.ep * job.etp > machine.domain
    )
    overlap = overlap and not re.search(r"no (?:1f1b )?ep overlap|overlap=off", text)
    return replace(
        job,
        dispatcher=_dispatcher(text, machine),
        ep_overlap=overlap and job.ep > 1,
        natural=natural,
        drop="token-drop" in text or "tokendrop" in text,
        release=_release(text, natural),
        fsdp="fsdp" in text,
        grad_bytes=2 if source.startswith("Megatron-Bridge") else 4,
    )


def _dispatcher(text: str, machine: Machine) -> str:
    said = re.search(r"dispatcher=([^;]*)", text)
    text = said.group(1) if said else text
    if re.search(r"uccl|nvshmem", text):
        return "proxy" if machine.fabric == "efa" else "library"
    if re.search(r"nccl alltoall|alltoall|all-to-all", text):
        return "alltoall"
    return "library"


def _release(text: str, natural: bool) -> str:
    """The class of software: see RELEASES in `time`."""
    if "automodel" in text:
        return "automodel"
    if "awsome" in text or "overlap=o" in text:
        return "plain"
    if "simumax" in text:
        return "proxy"
    if "functional" in text:
        return "functional"
    number = re.search(r"\((2[5-9])\.(\d\d)|nemo:? ?(2[5-9])\.(\d\d)", text)
    if number:
        year, month = (int(part) for part in number.groups() if part)
        if year == 25:
            return "2025"
        return (
            "2026.02"
            if month < 4 and year == 26
            else "2026.04"
            if month < 6 and year == 26
            else "2026.06"
        )
    if "modelzoo" in text or "arxiv" in text:
        return "2025"
    return "2026.06"


def _sharded(job: Job, row: dict[str, str]) -> Job:
    """PyTorch's FSDP runs name a local batch, which their microbatches divide."""
    if job.fsdp and job.pp > 1 and job.release != "automodel":
        return replace(job, fsdp=False)
    return job

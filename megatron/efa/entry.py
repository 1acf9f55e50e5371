"""What every entry point does around Megatron: take the command line, verify, and fail readably.

`run` calls `configure` (whose errors are about arguments, the same on every rank) and then `train`
(whose errors are not, and keep their traceback, unless upstream refused its set-up; with
MEGATRON_EFA_TRACEBACK=1 those do too).
"""

import json
import os
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron.efa import cpu, refusal
from megatron.efa.config.compose import Setting, compose
from megatron.efa.config.words import Words, split
from megatron.efa.errors import EfaError
from megatron.efa.fork import verify_at_start

_GRACE_S = 20.0
"""How long a rank waits for rank 0 to tell an error: imports differ by seconds between ranks."""


def run(configure: Callable[[], Any], train: Callable[[Any], None], argv: Sequence[str]) -> int:
    """Train with Megatron's flags, YAML and overrides in `argv`; return the exit code.

    `configure()` reads Megatron's flags from `sys.argv`; what it returns goes to `train`. A bad
    argument is one line on rank 0's stderr and exit code 2 on every rank.
    """
    rank = int(os.environ.get("RANK", "0"))
    try:
        with warnings_after():
            flags = prepare(argv, rank)
            if flags is None:
                return 0
            _be_one_rank_alone()
            sys.argv[1:] = flags
            with refusal.as_sentences():
                job = configure()
    except EfaError as error:
        _tell_once(str(error), rank)
        return error.exit_code
    rank = int(os.environ.get("RANK", "0"))  # placement may have given it another
    try:
        train(job)
    except EfaError as error:
        _tell(str(error), f"rank {rank} on {socket.gethostname()}")
        return error.exit_code
    except (AssertionError, ValueError, RuntimeError) as error:
        if os.environ.get("MEGATRON_EFA_TRACEBACK") == "1" or not refusal.of_setup(error):
            raise
        _tell_once(refusal.sentence(error), rank, traceback.format_exc())
        return EfaError.exit_code
    return 0


def prepare(argv: Sequence[str], rank: int = 0) -> list[str] | None:
    """Return the Megatron flags that `argv` comes to, or None if it only asked to be shown.

    Checks the fork and turns the CPU redirection on before anything of Megatron's is imported.
    Raises EfaError for a word or a YAML line that Megatron's parser would not take.
    """
    # Else Megatron asks git for the commit of its folder, and takes our repository's for its own.
    os.environ.setdefault("NO_VCS_VERSION", "1")
    if rank != 0:
        warnings.filterwarnings("ignore", category=UserWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
    words = split(argv)
    verify_at_start()
    settings = compose(words.config, words.overrides)
    backend = [str(s.value) for s in settings if s.key == "distributed_backend"]
    if cpu.wanted([*words.flags, *(w for b in backend for w in ("--distributed-backend", b))]):
        cpu.enable()
    flags = _megatron_flags(words, settings, rank)
    if flags is not None:
        _check_device()
    return flags


def _megatron_flags(words: Words, settings: list[Setting], rank: int) -> list[str] | None:
    from megatron.efa.arguments import NOT_IN_YAML, build_parser
    from megatron.efa.config.flags import Flags
    from megatron.efa.config.show import show

    parser = build_parser()
    if {"-h", "--help"} & set(words.flags):
        print(parser.format_help() if rank == 0 else "", end="")
        return None
    arguments = Flags(parser, hidden=NOT_IN_YAML)
    from_settings = [arguments.of(setting) for setting in settings]
    given = arguments.given(words.flags)
    for setting in settings:
        if setting.key in given:
            raise EfaError(
                f"{setting.key} is set twice, by {given[setting.key]} on the command line and by "
                f"{setting.name} ({setting.where}): leave one out, or override {setting.name}=..."
            )
    flags = [*(word for part in from_settings for word in part), *words.flags]
    if cpu.enabled():
        cpu.check(flags)  # now with what the YAML file asks for
    parsed = parser.parse_args(flags)
    if parsed.yaml_cfg is not None:
        raise EfaError("--yaml-cfg no longer works in Megatron; give the file with --config")
    if words.print_config:
        print(show(settings, from_settings, words.flags) if rank == 0 else "", end="")
        return None
    return flags


@contextmanager
def warnings_after() -> Iterator[None]:
    """Hold warnings back; show them if all goes well, so that an error does not drown in them."""
    show, held = warnings.showwarning, []
    warnings.showwarning = lambda *words, **more: held.append((words, more))
    try:
        yield
    finally:
        warnings.showwarning = show
    for words, more in held:
        show(*words, **more)


def _check_device() -> None:
    """Raise EfaError, before upstream asserts it, if there is no GPU and CPUs are not asked for."""
    import torch

    if not cpu.enabled() and not torch.cuda.is_available():
        raise EfaError(
            f"PyTorch {torch.__version__} finds no GPU on {socket.gethostname()}: add "
            "--distributed-backend gloo to train on CPUs (docs/cpu.md), or see what `nvidia-smi` "
            "says of the driver"
        )


def _be_one_rank_alone() -> None:
    """Let `python pretrain_gpt.py` be a job of one rank, where torchrun has not said otherwise.

    Raises EfaError in a job step of several tasks: each would train a model of its own.
    """
    if "MASTER_ADDR" in os.environ:
        return
    for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if os.environ.get(name, "1") != "1":
            raise EfaError(
                f"{name}={os.environ[name]} but MASTER_ADDR is not set, so the ranks cannot find "
                "one another: start one `torchrun ... pretrain_gpt.py ...` on each node"
            )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (alone | {"MASTER_PORT": str(port)}).items():
        os.environ.setdefault(name, value)


def _tell_once(sentence: str, rank: int, stack: str = "") -> None:
    """Print `sentence` on rank 0; elsewhere wait for rank 0 to do so, and print if it does not.

    An error of one node's own (a file that is not there) is thus told by that node, once, and one
    of a single rank's (its pipeline stage) by that rank. `stack` is for torchrun's error file.
    """
    if rank == 0:
        return _tell(sentence, stack=stack)
    _leave_for_torchrun(sentence, stack)
    # A node's first rank ends the others of its node, by torchrun, before they speak.
    time.sleep(_GRACE_S if os.environ.get("LOCAL_RANK", "0") == "0" else 1.5 * _GRACE_S)
    return _tell(sentence, f"rank {rank} on {socket.gethostname()}", stack)


def _tell(sentence: str, who: str = "", stack: str = "") -> None:
    _leave_for_torchrun(sentence, stack)
    print(
        f"{Path(sys.argv[0]).name}: {f'{who}: ' if who else ''}{sentence}",
        file=sys.stderr,
        flush=True,
    )


def _leave_for_torchrun(sentence: str, stack: str = "") -> None:
    """Let torchrun's closing report name the error, as its own error files do."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": stack or sentence, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(path).write_text(
                json.dumps({"message": {"message": sentence, "extraInfo": extra}})
            )

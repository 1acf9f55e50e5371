"""What every entry point does around Megatron: take the command line, verify, and fail readably.

`run` calls `configure` (whose errors are about arguments, the same on every rank) and then `train`
(whose errors are not, and keep their traceback).
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

from megatron.efa import cpu
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
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        # One process without torchrun: it meets nobody, at any free port.
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")
    try:
        flags = prepare(argv, rank)
        if flags is None:
            return 0
        sys.argv[1:] = flags
        with _as_sentences():
            job = configure()
    except EfaError as error:
        _tell_once(str(error), rank)
        return error.exit_code
    try:
        train(job)
    except EfaError as error:
        _tell(str(error), f"rank {rank} on {socket.gethostname()}")
        return error.exit_code
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
    return _megatron_flags(words, settings, rank)


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
def _as_sentences() -> Iterator[None]:
    """Turn what upstream raises while it checks arguments into EfaError."""
    try:
        yield
    except EfaError:
        raise
    except SystemExit as stop:
        if stop.code in (None, 0):  # upstream refuses some flags with a message and a bare exit()
            raise EfaError("Megatron refuses these arguments; its reason stands above") from stop
        raise
    except (AssertionError, ValueError, RuntimeError, OSError, ImportError) as error:
        raise EfaError(_sentence(error)) from error


def _sentence(error: Exception) -> str:
    """One line for an exception of upstream's argument checks: its message, and where it stands."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    file = Path(frame.filename)
    place = f"{file.name}:{frame.lineno}"
    message = " ".join(str(error).split())
    if not message:
        message = f"this does not hold: {(frame.line or '').removeprefix('assert ').rstrip(', ')}"
    if not isinstance(error, AssertionError | ValueError):
        message = f"{type(error).__name__}: {message}"
    return f"{message} (Megatron's check at {place})"


def _tell_once(sentence: str, rank: int) -> None:
    """Print `sentence` on rank 0; elsewhere wait for rank 0 to do so, and print if it does not.

    An error of one node's own (a file that is not there) is thus told by that node, once.
    """
    if rank == 0:
        return _tell(sentence)
    _leave_for_torchrun(sentence)
    time.sleep(_GRACE_S)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        _tell(sentence, f"rank {rank} on {socket.gethostname()}")
    return None


def _tell(sentence: str, who: str = "") -> None:
    _leave_for_torchrun(sentence)
    print(
        f"{Path(sys.argv[0]).name}: {f'{who}: ' if who else ''}{sentence}",
        file=sys.stderr,
        flush=True,
    )


def _leave_for_torchrun(sentence: str) -> None:
    """Let torchrun's closing report name the error, as its own error files do."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": sentence, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(path).write_text(
                json.dumps({"message": {"message": sentence, "extraInfo": extra}})
            )

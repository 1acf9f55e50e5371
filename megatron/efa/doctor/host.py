"""`Host`: the one way in which a check reads the machine, so that a test can be any machine.

Files are read under a root, programs run through `run`, and clouds asked through `ec2`; a test puts
a folder, a table of answers and a stubbed client in their places. Nothing here writes.
"""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.efa.doctor.registry import Skip

ABSENT = 127
TIMED_OUT = 124


@dataclass(frozen=True)
class Answer:
    """What a program printed (both streams) and its exit code; ABSENT if it is not installed."""

    code: int
    text: str


class Host:
    """The machine that this runs on, or what a test says of one."""

    def __init__(
        self, root: str | Path = "/", environ: Mapping[str, str] | None = None, ec2: Any = None
    ) -> None:
        self.root = Path(root)
        self.environ = dict(os.environ if environ is None else environ)
        self._ec2 = ec2

    def at(self, path: str) -> Path:
        """Where `path`, absolute on the machine, lies under the root."""
        return self.root / path.lstrip("/")

    def exists(self, path: str) -> bool:
        """Whether `path` is there; a link to nothing is not."""
        return self.at(path).exists()

    def dangles(self, path: str) -> bool:
        """Whether `path` is a link to nothing."""
        return self.at(path).is_symlink() and not self.exists(path)

    def names(self, folder: str) -> list[str]:
        """Names in a folder, sorted; none where there is no such folder."""
        try:
            return sorted(os.listdir(self.at(folder)))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise Skip(f"{folder} cannot be read: {error.strerror}") from error

    def text(self, path: str) -> str | None:
        """A file's text, stripped; None where there is none. Raises Skip if it may not be read."""
        try:
            return self.at(path).read_text(errors="replace").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise Skip(f"{path} cannot be read: {error.strerror}") from error

    def bytes(self, path: str) -> bytes:
        """A file's bytes; none where it cannot be read."""
        try:
            return self.at(path).read_bytes()
        except OSError:
            return b""

    def real(self, path: str) -> str:
        """`path` with its links followed."""
        return "/" + os.path.relpath(os.path.realpath(self.at(path)), os.path.realpath(self.root))

    def writable(self, path: str) -> bool:
        """Whether this process may read and write `path`."""
        return os.access(self.at(path), os.R_OK | os.W_OK)

    def run(self, *command: str, seconds: float = 30) -> Answer:
        """Run a program to its end; never raises."""
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                env=self.environ,
            )
        except subprocess.TimeoutExpired:
            return Answer(TIMED_OUT, f"{command[0]} did not end within {seconds:g} s")
        except OSError as error:
            return Answer(ABSENT, f"{command[0]}: {error.strerror}")
        return Answer(done.returncode, done.stdout.decode(errors="replace"))

    def printed(self, *command: str) -> str:
        """What a program printed. Raises Skip if it is absent or fails."""
        answer = self.run(*command)
        if answer.code == ABSENT:
            raise Skip(f"{command[0]} is not installed")
        if answer.code:
            last = (answer.text.strip().splitlines() or ["it printed nothing"])[-1]
            raise Skip(f"{' '.join(command)} failed ({answer.code}): {last}")
        return answer.text

    @property
    def ec2(self) -> Any:
        """A boto3 client of EC2. Raises EfaError or a botocore error where there is none."""
        if self._ec2 is None:
            from megatron.efa.cluster.discover import ec2

            self._ec2 = ec2.connect()
        return self._ec2

    @cached_property
    def name(self) -> str:
        """What others call this host (as `cluster.current.names_of_host`)."""
        told = (self.environ.get(name) for name in ("MEGATRON_EFA_HOST", "SLURMD_NODENAME"))
        kernel = self.text("/proc/sys/kernel/hostname") or ""
        return next((name for name in told if name), kernel or "this host")

    @cached_property
    def on_ec2(self) -> bool:
        """Whether the firmware says that this is an EC2 instance."""
        return (self.text("/sys/devices/virtual/dmi/id/sys_vendor") or "") == "Amazon EC2"

    @cached_property
    def kind(self) -> str:
        """Instance type by the firmware (Nitro tells it); empty if it does not say."""
        return self.text("/sys/devices/virtual/dmi/id/product_name") or "" if self.on_ec2 else ""

    @cached_property
    def instance(self) -> str:
        """Instance id by the firmware (`board_asset_tag` on Nitro); empty if it does not say."""
        tag = self.text("/sys/devices/virtual/dmi/id/board_asset_tag") or ""
        return tag if tag.startswith("i-") else ""

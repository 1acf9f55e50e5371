"""Git in a scratch repository, deaf to the user's configuration and to the repository around it."""

import os
import subprocess
from pathlib import Path

from megatron.efa.errors import EfaError

_SETTINGS = {
    "user.name": "megatron-efa fork",
    "user.email": "fork@localhost",
    "core.autocrlf": "false",
    "core.hooksPath": os.devnull,
    "core.excludesFile": os.devnull,
    "core.attributesFile": os.devnull,
    "commit.gpgSign": "false",
    "gc.auto": "0",
    "merge.conflictStyle": "diff3",
    "advice.detachedHead": "false",
    "rebase.autoStash": "false",
}


def git(
    repository: Path, *arguments: str, check: bool = True
) -> subprocess.CompletedProcess[bytes]:
    """Run git in `repository`.

    Raises:
        EfaError: there is no git, or it fails and `check` is set.
    """
    environment = {name: v for name, v in os.environ.items() if not name.startswith("GIT_")}
    environment |= {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        # A scratch repository that is damaged must not make git take the project's own one.
        "GIT_CEILING_DIRECTORIES": str(repository.resolve().parent),
        "GIT_EDITOR": "true",
        "LC_ALL": "C",
    }
    settings = [word for item in _SETTINGS.items() for word in ("-c", "=".join(item))]
    try:
        done = subprocess.run(
            ["git", *settings, *arguments], cwd=repository, env=environment, capture_output=True
        )
    except FileNotFoundError:
        raise EfaError(
            "`megatron-efa fork rebase` needs git, which is not here: install it"
        ) from None
    if check and done.returncode:
        reason = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        raise EfaError(
            f"git {arguments[0]} failed in {repository} ({' '.join(reason[-1:]) or 'no reason'}): "
            "start again after `megatron-efa fork rebase --abort`"
        )
    return done


def names(repository: Path, *arguments: str) -> list[str]:
    """The NUL-separated names that a git command prints with `-z`."""
    out = git(repository, *arguments).stdout.decode()
    return [name for name in out.split("\0") if name]

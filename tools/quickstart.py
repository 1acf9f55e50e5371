"""Train a small mixture of experts on two emulated nodes, on text that comes with Python.

    tools/quickstart.py [group.key=value ...]

makes runs/quickstart-N: checkpoint, TensorBoard files, logs. Prepared data (runs/quickstart-data)
is used again while its inputs stay the same. Words like train.train_iters=400 override
examples/quickstart.yaml.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.efa.errors import EfaError  # noqa: E402


def main(argv: Sequence[str] | None = None) -> int:
    """Run the quickstart; an error is one line on stderr, exit code 2."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=ROOT / "runs", help="folder of the runs")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--rate", default="1gbit", help="of the links between nodes")
    parser.add_argument("--gpu", action="store_true", help="share this machine's GPUs, over NCCL")
    parser.add_argument("overrides", nargs="*", metavar="group.key=value")
    try:
        from megatron.efa.quickstart.run import run

        return run(parser.parse_args(argv))
    except EfaError as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:  # a full disk, a folder that cannot be written
        place = error.filename or "the disk"
        print(f"quickstart: {place}: {error.strerror or error}", file=sys.stderr)
        return EfaError.exit_code
    except KeyboardInterrupt:
        print("quickstart: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    # An interruption must unwind, so that the emulated cluster is taken down.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main())

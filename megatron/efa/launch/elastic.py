"""torchrun, which tells how a rank failed: python -m megatron.efa.launch.elastic REPORT ARGUMENTS.

torchrun itself ends with 1 whatever the rank's exit code was, and the codes mean something.
"""

import json
import sys
from pathlib import Path

from megatron.efa.emulate import kernel


def main() -> int:
    """Run torchrun with ARGUMENTS; write the first failure to file REPORT, and return 1."""
    kernel.die_with_parent()
    report, arguments = Path(sys.argv[1]), sys.argv[2:]
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.main(arguments)
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        told = {"rank": rank, "local_rank": first.local_rank, "code": first.exitcode}
        aside = report.with_name(f".{report.name}")
        aside.write_text(json.dumps(told | {"message": str(first.message)[:2000]}))
        aside.rename(report)
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m megatron.efa` is `megatron-efa`."""

import sys

from megatron.efa.cli import main

sys.exit(main())

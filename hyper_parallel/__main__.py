# SPDX-License-Identifier: Apache-2.0
"""python -m hyper_parallel: the command line."""

import sys

from hyper_parallel.cli import main

if __name__ == "__main__":
    sys.exit(main())

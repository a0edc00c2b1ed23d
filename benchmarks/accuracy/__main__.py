"""`python -m benchmarks.accuracy`."""

import sys

from benchmarks.accuracy.cli import main

sys.exit(main())

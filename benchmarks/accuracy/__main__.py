"""`python -m accuracy`."""

import sys

from accuracy.cli import main

sys.exit(main())

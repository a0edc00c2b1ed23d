"""``python -m sparse_kvcm.cli``."""

from sparse_kvcm.cli import main

main()

"""``python -m linalg_dsl``: the command line."""

from linalg_dsl.cli import main

main()

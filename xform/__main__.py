"""`python -m xform` is the command line."""

from xform.cli import main

main()

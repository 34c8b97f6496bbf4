"""`python -m hiddenq.cli`: how the supervisor starts its children."""

from hiddenq.cli import main

main()

"""`python -m octavo` runs the command `octavo`."""

from octavo.cli import main

main()

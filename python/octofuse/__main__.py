"""`python -m octofuse` and `torchrun -m octofuse`: the same commands."""

from octofuse.cli import main

main()

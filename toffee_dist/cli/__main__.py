"""`python -m toffee_dist.cli`: the command line where its script is not on the path."""

from toffee_dist.cli import main

main()

"""`python -m tl_posgen`: the command, where no script was installed."""

from tl_posgen.cli import main

main()

"""`python -m mlakit` is the `mlakit` command."""

from mlakit.tools.cli import main

if __name__ == "__main__":
    main()

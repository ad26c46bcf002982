"""`python -m ddnf` is the `ddnf` command."""

from ddnf.cli import main

if __name__ == "__main__":
    main()

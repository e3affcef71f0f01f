"""`python -m quantdiff`."""

from quantdiff.cli import main

if __name__ == "__main__":
    main()

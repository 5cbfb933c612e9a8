"""`python -m headway`: the command line, where its script is not on the PATH."""

from headway.cli import main

if __name__ == "__main__":
    main()

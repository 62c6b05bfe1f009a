"""`python -m hpcpar`: the same as the command `hpcpar`."""

from hpcpar.cli import main

if __name__ == "__main__":
    main()

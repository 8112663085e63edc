"""`python -m dsa_verify`: the same as the command `dsa-verify`, for where that is not on the path."""

from dsa_verify.cli.main import main

if __name__ == "__main__":
    main()

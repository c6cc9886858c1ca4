"""Entry point of `python -m fullshard`, which `fullshard launch -m fullshard train ...` starts."""

from fullshard.cli.main import main

if __name__ == "__main__":
    main()

"""`python -m fullshard` is `fullshard`: what `fullshard launch -m fullshard train ...` starts."""

from fullshard.cli.main import main

if __name__ == "__main__":
    main()

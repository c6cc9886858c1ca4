"""Entry point of `python -m fullshard`, which `fullshard launch -m fullshard train ...` starts."""

from fullshard.cli import start

if __name__ == "__main__":
    start()

"""The version of fullshard, which must equal the one in `pyproject.toml` and `CITATION.cff`."""

__version__ = "0.1.0"

"""The version of fullshard; `pyproject.toml` and `CITATION.cff` say the same."""

__version__ = "0.1.0"

"""The `fullshard` command line, with one module per subcommand.

No module in this package imports torch before a subcommand runs.
"""

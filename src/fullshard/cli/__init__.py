"""The command `fullshard`. One file per subcommand; nothing here imports torch before a subcommand runs."""

"""One schema for every setting, and the readers that turn other dialects into it. Nothing here imports torch."""

"""Plain arithmetic and vocabulary that every layer shares. Nothing here imports torch."""

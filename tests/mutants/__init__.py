"""Changes lines of critical code, one at a time, and looks whether the default tests notice."""

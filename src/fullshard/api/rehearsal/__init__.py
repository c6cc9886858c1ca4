"""Rehearsal of one rank of a job on one device: messages of the others carry nothing, but take time."""

"""Rehearsal of one rank of a job on one device. Messages carry no data of other ranks, but take time."""

"""Collectives behind one small interface, and the mesh of process groups they run on."""

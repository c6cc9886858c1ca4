"""CPU-specific communication: the ranks of a host share memory, and new pages of it are expensive."""

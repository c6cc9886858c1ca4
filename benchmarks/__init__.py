"""Step time, memory and losses of fullshard and its peers, measured interleaved in one run."""

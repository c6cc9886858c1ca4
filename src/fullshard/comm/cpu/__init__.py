"""What CPUs do differently: their ranks share memory, and new pages of it are dear."""

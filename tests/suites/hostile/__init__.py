"""What strangers and clients may send to engines that run."""

"""Groups of workers that share memory."""

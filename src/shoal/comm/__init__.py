"""Groups of workers that sum and gather tensors, and the buckets in which gradients travel."""

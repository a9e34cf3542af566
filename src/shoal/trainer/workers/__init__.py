"""What a worker starts from, its part in the membership, and how a function runs on all of them."""

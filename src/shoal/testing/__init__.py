"""What tests of distributed code need. Only tests import it: Shoal's own and those of its users."""

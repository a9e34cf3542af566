"""Who takes part in a run, and how one term follows another: pure logic."""

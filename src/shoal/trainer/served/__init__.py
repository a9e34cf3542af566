"""Workers and processes of runs with servers."""

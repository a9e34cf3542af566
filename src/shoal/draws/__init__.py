"""Random numbers by position: what a model or loss draws is a function of (seed, step, draw, position, element)."""

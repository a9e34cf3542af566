"""The `shoal` command. It wires everything together, and nothing imports it."""

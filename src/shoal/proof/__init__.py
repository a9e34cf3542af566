"""One proof on the first batch: some of its samples computed whole and in two unequal parts, before anything counts."""

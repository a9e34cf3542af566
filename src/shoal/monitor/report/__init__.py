"""What a run came to: collected while it runs or read from the store, told in a terminal and on a page."""

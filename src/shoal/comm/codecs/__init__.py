"""Codecs: how tensors travel in fewer bytes. `contract` says what holds of each of them."""

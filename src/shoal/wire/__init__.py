"""Framed messages between the processes of one run: no pickle, limits before allocation."""

"""What shows a run to people and other programs: progress, reports, listeners. All of it listens to events."""

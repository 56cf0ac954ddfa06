"""What is on disk of a run: the names of its files, their types, locks, finding and deleting. Loads no torch."""

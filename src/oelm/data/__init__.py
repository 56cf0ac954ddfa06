"""Data: text to token files, token files to batches, each a pure function of its inputs."""

"""The method: how queries and keys start, which of them never learn, and the proof that they did not."""

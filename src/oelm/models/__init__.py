"""Models: our own GPT, whole and readable in one sitting."""

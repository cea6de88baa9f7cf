"""The page of a study: its data, its charts and its text."""

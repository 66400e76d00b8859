"""Records as tables: in the terminal and in Markdown."""

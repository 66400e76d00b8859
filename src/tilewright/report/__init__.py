"""Reports from records and results: terminal tables, Markdown pages and the HTML site."""

"""The tools, one folder each. A tool uses an Op through `spec`, and never imports one by name."""

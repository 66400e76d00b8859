"""Tools for coding agents: the workbench as typed calls, a server that offers them, and a loop that calls a model."""

"""One folder a tool. Tools know Ops by what `spec` says of them, never by name."""

"""A service that judges submitted kernels in isolation, ranks the right ones and publishes them.

`server` answers people (`pages`) and programs (`api`) from the database in `store`. `worker` pulls jobs over HTTP and
runs `judge` in a process of its own, which confines the code it was sent. `board` ranks, `archive` searches,
`exchange` exports and imports. Neither the server nor the supervising worker imports torch.
"""

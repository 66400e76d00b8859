"""One file per operation, in its family's folder: mathematics, cost, cases, kernels and the public function."""
